"""Loading weights that were published under other names.

A model's module has ``from_reference(state, **overrides)``: it reads a Config off the shapes of the tensors, builds the
model and fills it with ``load``. What shapes do not determine, such as the number of heads, comes from the published
size with these shapes, or from ``overrides``.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

Names = Callable[[str], str | list[str]]


@torch.no_grad()
def load(model: nn.Module, state: Mapping[str, Tensor], names: Names, ignore: Iterable[str] = ()) -> None:
    """Copy a state dict into a model, in place; every name and every shape must match, else nothing is copied.

    A model on the meta device takes the tensors themselves, with their dtype.

    ``names`` turns the name of a parameter or buffer of the model into its name in ``state``, or into several names:
    those tensors are concatenated along dim 0 (fused projections). A tensor may have another shape with as many
    elements and rows, a first dim of 1 not counted: the kernel of a convolution that is a linear layer here, or a
    table. ``ignore`` names tensors of ``state`` that are not used, such as tables of positions.

    Raises ValueError with the names that are missing, unknown, or of another shape.
    """
    ours = model.state_dict()
    theirs = {name: [found] if isinstance(found := names(name), str) else found for name in ours}
    known, given = {name for group in theirs.values() for name in group}, set(state) - set(ignore)
    problems = [f"missing: {_few(known - given)}"] if known - given else []
    problems += [f"unknown: {_few(given - known)}"] if given - known else []
    values: dict[str, Tensor] = {}
    for name, sources in theirs.items():
        if set(sources) <= given:
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
def give(model: nn.Module, theirs: nn.Module, names: Names) -> None:
    """Copy a model's weights into one that has them under other names, in place: the reverse of ``load``."""
    state = theirs.state_dict()
    for name, value in model.state_dict().items():
        sources = [found] if isinstance(found := names(name), str) else found
        state |= {n: part.reshape(state[n].shape) for n, part in zip(sources, value.chunk(len(sources)))}
    theirs.load_state_dict(state)


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """The number of layers in a state dict: ``count(state, "blocks.{}.")`` counts the numbers in the braces' place."""
    before, after = pattern.split("{}")
    rest = (name.removeprefix(before) for name in state if name.startswith(before))
    return len({number for number, found, _ in (name.partition(after) for name in rest) if found and number.isdigit()})


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, or of all those in a directory."""
    from safetensors.torch import load_file  # an extra, which only loading weights needs

    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no .safetensors file")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:20]) + (f" and {len(ordered) - 20} more" if len(ordered) > 20 else "")
