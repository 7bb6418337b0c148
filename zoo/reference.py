"""Loading weights that were published under other names.

A model's module has ``from_reference(state, **overrides)``: it reads a Config off the shapes of the tensors, builds the
model and fills it with ``load_renamed``. What shapes do not determine, such as the number of heads, comes from the
published size with these shapes, or from ``overrides``.
"""

import functools
import logging
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.files import fits, read_table, regular

log = logging.getLogger(__name__)

Names = Callable[[str], str | list[str]]


@torch.no_grad()
def load_renamed(model: nn.Module, state: Mapping[str, Tensor], names: Names, ignore: Iterable[str] = ()) -> None:
    """Copy a state dict into a model, in place; every name and every shape must match, else nothing is copied.

    A model on the meta device takes the tensors themselves, with their dtype.

    ``names`` turns the name of a parameter or buffer of the model into its name in ``state``, or into several names:
    those tensors are concatenated along dim 0 (fused projections). A tensor may have another shape with as many
    elements and rows, a first dim of 1 not counted: the kernel of a convolution that is a linear layer here, or a
    table. ``ignore`` names tensors of ``state`` that are not used, such as tables of positions.

    Raises ValueError with the names that are missing, unknown, or of another shape.
    """
    ours = model.state_dict()
    theirs = {name: [named] if isinstance(named := names(name), str) else named for name in ours}
    known, state_names = {name for group in theirs.values() for name in group}, set(state) - set(ignore)
    problems = [f"missing: {_few(known - state_names)}"] if known - state_names else []
    problems += [f"unknown: {_few(state_names - known)}"] if state_names - known else []
    values: dict[str, Tensor] = {}
    for name, sources in theirs.items():
        if set(sources) <= state_names:
            value = torch.cat([state[source] for source in sources]) if len(sources) > 1 else state[sources[0]]
            if value.numel() == ours[name].numel() and value.squeeze(0).shape[:1] == ours[name].squeeze(0).shape[:1]:
                values[name] = value.reshape(ours[name].shape)
            else:
                shapes = f"{tuple(value.shape)}, the model's {tuple(ours[name].shape)}"
                problems.append(f"of another shape: {' + '.join(sources)} is {shapes}")
    if problems:
        raise ValueError(f"these weights are of another model; {'; '.join(problems)}")
    model.load_state_dict(values, assign=any(value.is_meta for value in ours.values()))


@torch.no_grad()
def write_renamed(model: nn.Module, theirs: nn.Module, names: Names) -> None:
    """Copy a model's weights into one that has them under other names, in place: the reverse of ``load_renamed``."""
    state = theirs.state_dict()
    for name, value in model.state_dict().items():
        sources = [named] if isinstance(named := names(name), str) else named
        state |= {n: part.reshape(state[n].shape) for n, part in zip(sources, value.chunk(len(sources)))}
    theirs.load_state_dict(state)


def described(kind: str, settings: Any) -> Callable[[Callable[..., Any]], Callable[..., dict[str, Any]]]:
    """Decorate the reading of the config of `kind`, a model of another library, into values of the Config `settings`.

    What the config lacks or has of another type becomes a ValueError.
    """

    def decorate(read: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
        @functools.wraps(read)
        def checked(config: Mapping[str, Any], pipeline: Mapping[str, Any] | None = None) -> dict[str, Any]:
            try:
                values = read(config, pipeline or {})
            except KeyError as error:
                raise ValueError(f"the config.json of a {kind} has no {error}") from None
            except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
                raise ValueError(f"the config.json of a {kind} has a value of another type: {error}") from None
            hints = typing.get_type_hints(settings)
            for name, value in values.items():
                if not fits(value, hints[name]):
                    raise ValueError(f"the config.json of a {kind} has a value of another type: {name} is {value!r}")
            return values

        return checked

    return decorate


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """The number of layers in a state dict: ``count(state, "blocks.{}.")`` counts the numbers in the braces' place."""
    before, after = pattern.split("{}")
    tails = (name.removeprefix(before) for name in state if name.startswith(before))
    return len({number for number, dot, _ in (name.partition(after) for name in tails) if dot and number.isdigit()})


def read_safetensors(path: str | Path, variant: str | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of an index with its shards, or of a folder (`weight_files`).

    Raises ValueError if weights are missing, an index disagrees with its shards, or a folder is ambiguous.
    """
    from safetensors.torch import load_file  # an extra, which only loading weights needs

    path = Path(path)
    first, *_ = weight_files(path, variant) if path.is_dir() else [path]
    if first.suffix != ".json":
        return load_file(regular(first))
    file_of, state = _index(first), dict[str, Tensor]()
    for name in sorted(set(file_of.values())):
        shard = load_file(regular(first.with_name(name)))
        keys = [key for key, file in file_of.items() if file == name]
        if absent := [key for key in keys if key not in shard]:
            raise ValueError(f"{first} places {absent[0]} in {name}, which lacks it: is the file of another copy?")
        state |= {key: shard[key] for key in keys}
    return state


# by the library that writes them: the stem of the names, and the suffixes in the order in which it looks for them
_ONE, _INDEX = "{stem}{variant}.safetensors", "{stem}.safetensors.index{variant}.json"
STEMS = {"diffusion_pytorch_model": (_INDEX, _ONE), "model": (_ONE, _INDEX)}


def weight_files(folder: Path, variant: str | None = None, stems: Sequence[str] = ()) -> list[Path]:
    """The files of a folder's weights as diffusers and transformers choose them: one, or an index and its shards.

    `stems`: the names to look for, by default those of both libraries, that of the folder's config.json first. A lone
    file of another name counts, too. `variant`: the weights saved as this variant, such as fp16. Safetensors that are
    not read are logged. Raises ValueError if there are no such weights, or shards are missing.
    """
    safetensors = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    candidates = _candidates(folder, f".{variant}" if variant else "", stems)
    first = next((path for path in candidates if path.is_file()), None)
    if first is None and not (stems or variant) and [bool(_PART.match(path.name)) for path in safetensors] == [False]:
        first = safetensors[0]
    if first is None:
        raise ValueError(_no_weights(folder, candidates))
    files = [first]
    if first.suffix == ".json":
        files += [folder / name for name in sorted(set(_index(first).values()))]
    if surplus := [path.name for path in safetensors if path not in files]:
        log.warning("%s: weights are read from %s; not read: %s", folder, first.name, ", ".join(surplus))
    return files


def _candidates(folder: Path, tag: str, stems: Sequence[str]) -> list[Path]:
    """The files that may be the weights or their index, the first choice first."""
    config = folder / "config.json"
    diffusers = config.is_file() and "_class_name" in read_table(config)
    ordered = stems or sorted(STEMS, reverse=not diffusers)
    return [folder / pattern.format(stem=stem, variant=tag) for stem in ordered for pattern in STEMS[stem]]


def _no_weights(folder: Path, wanted: Iterable[Path]) -> str:
    """The message for a folder that has none of the files `wanted`."""
    weights = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".ckpt", ".safetensors"))
    return (
        f"{folder} has no {' or '.join(path.name for path in wanted)}"
        + (f", only {', '.join(weights)}" if weights else "")
        + ": only safetensors are read; save_pretrained(folder) of a loaded model writes them. Name the file or the "
        "index itself if it is another"
    )


_PART = re.compile(rf"({'|'.join(STEMS)})\..+\.|.*-\d+-of-(?!0*1\b)\d+")  # a variant, or one shard of several


def _index(path: Path) -> dict[str, str]:
    """The file of each tensor by an index of shards, which lie beside it."""
    try:
        file_of = read_table(path)["weight_map"]
        names = sorted(set(file_of.values()))
        absent = [name for name in names if Path(name).name != name or not path.with_name(name).is_file()]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: damaged: {error!r}") from None
    if absent:
        raise ValueError(f"{path} names {absent[0]}, which is not in this folder")
    return file_of


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:20]) + (f" and {len(ordered) - 20} more" if len(ordered) > 20 else "")
