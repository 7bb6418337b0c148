"""A note on errors that a model's own code raises between its stages, where tensors are sharded."""

from __future__ import annotations

from types import FrameType

from torch import nn

from dsp.calls import GlueError
from dsp.lines import Line, lines_of
from dsp.notation import NotationError
from dsp.sharded import Sharded
from dsp.tensors import tensors_in


def add_note(model: nn.Module, error: Exception) -> None:
    """Say of an error that a model raised with a sharded tensor at hand what that is, and what to make a stage.

    Nothing is said of dsp's own errors, which say it, nor by Python 3.10, which has no notes.
    """
    if isinstance(error, (GlueError, NotationError)) or not hasattr(error, "add_note"):
        return
    lines = lines_of(error)
    for at in range(len(lines) - 1, -1, -1):
        if held := _sharded(lines[at].frame):
            break
    else:
        return
    module, path = _module(model, lines[: at + 1])
    way = f"{path!r}, is named in stages" if path else "of its own does this, and is named in stages"
    error.add_note(
        f"dsp: at {lines[at].short}, in {module}, {held} is sharded: a {Sharded.__module__}.{Sharded.__qualname__}, a "
        "torch.Tensor with the shape of the whole, of which each rank holds a part. Code that asks for the exact type, "
        "or for memory, may stumble over it. In a stage tensors are plain: it works where a submodule"
        f"{',' * bool(path)} {way}"
    )


def _sharded(frame: FrameType) -> str:
    """The name of a variable that holds a sharded tensor, if there is one."""
    held = (name for name, value in frame.f_locals.items() if any(isinstance(t, Sharded) for t in tensors_in(value)))
    return next(held, "")


def _module(model: nn.Module, lines: list[Line]) -> tuple[str, str]:
    """The class of the module whose code runs, and its path in the model."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame, _ in reversed(lines):
        for value in frame.f_locals.values():
            if isinstance(value, nn.Module) and id(value) in paths and frame.f_code.co_name != "__call__":
                return type(value).__name__, paths[id(value)]
    return type(model).__name__, ""
