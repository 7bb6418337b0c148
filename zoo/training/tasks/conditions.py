"""The conditions that a model of video wants, compared with those that the data has: an error says what to change."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zoo.contract import Conditions
from zoo.training import UserError


def refuse_lacking(name: str, wants: Conditions, has: Conditions) -> None:
    """Raise a UserError if a model wants what the data does not have, with what to change."""
    if wants.unknown:
        raise UserError(f"model {name} needs {', '.join(wants.unknown)}, which this data does not have")
    if wants.channels != has.channels:
        c, mask = has.channels, wants.start - wants.channels  # an image's latent has the channels of the clip
        fix = f"in_channels={c}"
        if wants.start:
            fix = f"in_channels={2 * c + mask} and model.overrides.condition_channels={c + mask}"
        raise UserError(f"the data has {c} channels and the model takes {wants.channels}: set model.overrides.{fix}")
    if wants.start and not (has.start and wants.first and wants.start > has.channels):
        raise UserError(
            f"model {name} begins clips with an image: {wants.start} of its channels are a mask and the "
            "image's latent, which this data does not have. Encode the clips with --image FOLDER, the folder of the "
            "model's pipeline"
        )
    lacking = [key for key in ("pooled", "image") if getattr(wants, key) and not getattr(has, key)]
    lacking += [key for key in wants.sizes if key not in has.sizes]
    lacking += sorted(wants.names & {"context", "context_mask"}) if wants.text and not has.text else []
    if lacking:
        raise UserError(
            f"model {name} needs {', '.join(sorted(lacking))}, which this data does not have"
            + (". zoo.video.encode writes it, with --text or --image of the model's pipeline" if has.text else "")
        )
    for key, subject, option_name in (
        ("text", "captions have", "caption_channels"),
        ("pooled", "pooled captions have", "pooled_channels"),
        ("image", "first frames have tokens of", "image_channels"),
    ):
        if getattr(wants, key) and getattr(wants, key) != getattr(has, key):
            raise UserError(
                f"the data's {subject} {getattr(has, key)} channels and the model takes {getattr(wants, key)}: "
                f"set model.overrides.{option_name}={getattr(has, key)}"
            )


class Lookups(TorchFunctionMode):
    """Records the tables in which a forward looks labels up, by their number of rows."""

    def __init__(self, label: Tensor) -> None:
        super().__init__()
        self.labels, self.rows = [label], list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(x is label for x in args for label in self.labels):
            table = args[func is F.embedding] if func in (F.embedding, Tensor.__getitem__) else None
            if table is not None and all(table is not label for label in self.labels):
                self.rows.append(table.shape[0])
            elif isinstance(out, Tensor) and out.dtype == self.labels[0].dtype:  # a view or a copy of the labels
                self.labels.append(out)
        return out


def refuse_short_table(config: Any, model: nn.Module, inputs: Mapping[str, Tensor], classes: int) -> None:
    """Raise UserError if the model looks labels up in too short a table. On meta tensors a lookup never raises."""
    if any(p.device.type != "meta" for p in model.parameters()):
        return
    objective, sample = config.objective, config.sample
    none = objective.label_dropout > 0 or sample.guidance != 1  # whether `classes`, for no class, is a label
    with torch.no_grad(), Lookups(inputs["label"]) as lookups, suppress(Exception):
        model(**inputs)  # a forward that fails without data is planned, and refused, by a real run
    if lookups.rows and min(lookups.rows) < classes + none:
        last = (
            f"; label {classes} stands for no class (objective.label_dropout={objective.label_dropout:g}, "
            f"sample.guidance={sample.guidance:g})"
        )
        raise UserError(
            f"model {config.model.name} looks labels up in a table of {min(lookups.rows)} rows: expected "
            f"{classes + none}, for labels 0 to {classes + none - 1}{last if none else ''}"
        )
