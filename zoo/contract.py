"""Contracts: that of a model of the zoo, what a video model is conditioned on, and a check of any value.

    check(model).stages
    Conditions.of(model).text

A model is single-device code and inherits nothing from here. Patterns are paths of submodules in which `*` stands for
one component: "blocks.*.spatial".

What the forward of a video model may want besides a clip x (b c t h w) and its timestep (b), where the training data
and the sampler of published weights get it, and what the second prediction of guidance has in its place:

    argument              shape           in training                     in sampling         second prediction
    label                 (b)             class of the clip               --label             class `classes`, for none
    context               (b l e)         embedding of its caption        --prompt            that of no caption
    context_mask          (b l)           the tokens of the caption       --prompt            its own tokens
    pooled                (b e)           second embedding of the caption --prompt            that of no caption
    image                 (b j e)         tokens of the clip's first frame  --first-frame     the same
    further channels of x (b k t h w)     latent of the first frame, mask   --first-frame     the same
    guidance              (b)             1000 objective.guidance         1000 --guidance     there is none
    num_frames, height, width, ar, fps (b)  those of the clip             --frames ...        the same
    x_mask                (b t)           objective.first_frame, ...      --first-frame       the same
    timestep              (b t)           objective.first_frame, ...      --first-frame       the same

"no caption" is the empty one in training; in sampling it is the negative prompt, or what the weights have for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from inspect import getdoc
from types import FunctionType, UnionType
from typing import Annotated, Any, Protocol, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


class Model(Protocol):
    """The contract of a model. Its dicts may be empty."""

    config: Annotated[Any, "the dataclass that it was made from"]
    stages: Annotated[Mapping[str, str], "a dict of pattern to what the stage computes over"]
    cores: Annotated[
        Mapping[str, str], "a dict of pattern to what the attention computes over, for Ulysses and rings; {} for none"
    ]
    tensor_parallel: Annotated[
        Mapping[str, str], "a dict of a linear layer's pattern to 'columns' or 'rows', for Megatron; {} for none"
    ]

    def example_inputs(self, batch: int = 1, **lengths: int) -> dict[str, Tensor]:
        """A method (batch=1, **lengths) that returns the forward's keyword arguments, on the default device."""


def check(model: Any) -> Model:
    """Return the model, typed as one of the zoo. A TypeError names and describes every member that it lacks."""
    wanted, missing = members(Model), lacks(model, Model)
    if "config" not in missing and not is_dataclass(model.config):
        missing.append("config")
    if missing:
        lines = [
            f"{type(model).__name__} does not meet the contract of a model of the zoo; missing, or of another type:"
        ]
        raise TypeError("\n".join(lines + [f"  {name}: {wanted[name]}" for name in wanted if name in missing]))
    return cast(Model, model)


def members(contract: type) -> dict[str, str]:
    """The members of a protocol with their descriptions: an attribute's annotation, a method's docstring."""
    hints = get_type_hints(contract, include_extras=True)
    methods = {name: value for name, value in vars(contract).items() if isinstance(value, FunctionType)}
    public = {name: method for name, method in methods.items() if name in ("__len__", name.lstrip("_"))}
    described = {name: getdoc(method) or "" for name, method in public.items()}
    return {name: hint.__metadata__[0] for name, hint in hints.items()} | described


def lacks(value: Any, contract: type) -> list[str]:
    """The members of a protocol that a value lacks, or has with another type."""
    hints = get_type_hints(contract)

    def fits(name: str) -> bool:
        if name not in hints:
            return callable(getattr(value, name, None))
        kind = hints[name]
        kinds = tuple(get_origin(one) or one for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,)))
        return hasattr(value, name) and (kind is Any or isinstance(getattr(value, name), kinds))

    return [name for name in members(contract) if not fits(name)]


SIZES = ("num_frames", "height", "width", "ar", "fps")  # of a clip: frames and pixels, their ratio, frames a second


@dataclass(frozen=True)
class Conditions:
    """The wants of a forward besides the clip, or what data offers: numbers of channels, 0 for nothing.

    `first`: what the channels after the clip's are, in order. "mask" is 1 in the first frame. "frame" is the latent of
    the first frame, and 0 in the others; "frames" the latent of the first frame with empty (grey) frames after it.
    `clean`: how a forward hears which frames are given without noise, by `x_mask` or by a `timestep` of 0; "" not.
    """

    channels: int  # of the clip itself
    classes: int | None = None  # of ``label``
    text: int = 0  # of ``context``
    pooled: int = 0
    image: int = 0
    start: int = 0  # of x, after the clip's
    first: tuple[str, ...] = ()
    guidance: bool = False
    sizes: tuple[str, ...] = ()
    clean: str = ""
    names: frozenset[str] = frozenset()  # of all arguments of the forward

    @classmethod
    def of(cls, model: Any, **lengths: int) -> "Conditions":
        """The conditions of a model, by its `example_inputs` of these lengths and its `config`."""
        with torch.device("meta"):
            inputs: Mapping[str, Tensor] = model.example_inputs(1, **lengths)
        width = {name: value.shape[-1] if value.ndim else 0 for name, value in inputs.items()}
        start = getattr(model.config, "condition_channels", 0)
        return cls(
            channels=inputs["x"].shape[1] - start,
            classes=getattr(model.config, "num_classes", None) if "label" in inputs else None,
            text=width.get("context", 0),
            pooled=width.get("pooled", 0),
            image=width.get("image", 0),
            start=start,
            first=getattr(model, "first_frame", ()) if start else (),
            guidance="guidance" in inputs,
            sizes=tuple(name for name in SIZES if name in inputs),
            clean="x_mask" if "x_mask" in inputs else "timestep" if frame_times(model) else "",
            names=frozenset(inputs),
        )

    @property
    def wanted(self) -> set[str]:
        """The conditions by the names that `predict` takes them under."""
        names = set(self.names - {"x", "timestep", "guidance"})
        names |= {"start"} if self.start else set()
        names |= {"strength"} if self.guidance else set()
        return names | ({"x_mask"} if self.clean else set())

    @property
    def unknown(self) -> list[str]:
        """Arguments of the forward that this contract does not have."""
        return sorted(
            self.names
            - {"x", "timestep", "label", "context", "context_mask", "pooled", "image", "guidance", "x_mask", *SIZES}
        )

    def start_of(self, latent: Tensor, frames: range) -> Tensor:
        """The channels after the clip's (k t h w), for these frames of it.

        latent: (c t h w) of these frames, as `first` says; for "frame" frames after the first count as 0.
        """
        begins = first_of(frames).to(latent.dtype)
        mask = begins.expand(self.start - len(latent), len(frames), *latent.shape[2:])
        parts = {"mask": mask, "frame": latent * begins, "frames": latent}
        return torch.cat([parts[part] for part in self.first])


def first_of(frames: range) -> Tensor:
    """1 at the first frame of a clip, 0 at the others, for these frames of it (1 t 1 1)."""
    return torch.tensor([float(frame == 0) for frame in frames])[None, :, None, None]


def frame_times(model: Any) -> bool:
    """Tell whether a model takes a timestep for every frame, which is 0 for frames that are given clean."""
    return bool(getattr(getattr(model, "config", None), "frame_times", False))


def predict(
    model: Callable[..., Tensor],
    x: Tensor,
    timestep: Tensor,
    *,
    start: Tensor | None = None,
    x_mask: Tensor | None = None,
    strength: Tensor | None = None,
    **conditions: Any,
) -> Tensor:
    """Call a video model on clips x (b c t h w) at timesteps (b), each condition in its place.

    start: channels after those of x (b k t h w); x_mask: (b t), False for frames that x has without noise; strength:
    the argument ``guidance`` of the forward (b), which for a sampler is another number.
    """
    if strength is not None:
        conditions["guidance"] = strength
    if start is not None:
        x = torch.cat([x, start.to(x.dtype)], dim=1)
    if x_mask is not None and frame_times(model):
        timestep = timestep[:, None] * x_mask
    elif x_mask is not None:
        conditions["x_mask"] = x_mask
    return model(x, timestep, **conditions)


def sizes_of(names: Sequence[str], frames: int, height: int, width: int, fps: float) -> dict[str, float]:
    """The sizes of these names, for a clip of frames and rows and columns of pixels."""
    known = {"num_frames": frames, "height": height, "width": width, "ar": height / width, "fps": fps}
    return {name: float(known[name]) for name in names}
