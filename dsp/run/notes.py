"""A note on errors that a model's own code raises between its stages, where tensors are sharded."""

from __future__ import annotations

import os
import traceback
from types import FrameType

from torch import nn

from dsp.notation import NotationError
from dsp.plan.reads import INSIDE
from dsp.rules import GlueError
from dsp.sharded import Sharded
from dsp.tensors import tensors_in


def add_note(model: nn.Module, error: Exception) -> None:
    """Say of an error that a model raised with a sharded tensor at hand what that is, and what to make a stage.

    Nothing is said of dsp's own errors, which say it, nor by Python 3.10, which has no notes.
    """
    if isinstance(error, (GlueError, NotationError)) or not hasattr(error, "add_note"):
        return
    frames = [at for at in traceback.walk_tb(error.__traceback__) if not _inside(at[0])]
    if not frames or not (held := _sharded(frames[-1][0])):
        return
    (frame, line), (module, path) = frames[-1], _module(model, frames)
    where = f"{os.path.basename(frame.f_code.co_filename)}:{line}, in {module}"
    way = f"{path!r}, is named in stages" if path else "of its own does this, and is named in stages"
    error.add_note(
        f"dsp: at {where}, {held} is sharded: a {Sharded.__module__}.{Sharded.__qualname__}, a torch.Tensor with the "
        "shape of the whole, of which each rank holds a part. Code that asks for the exact type, or for memory, may "
        f"stumble over it. In a stage tensors are plain: it works where a submodule{',' * bool(path)} {way}"
    )


def _inside(frame: FrameType) -> bool:
    return os.path.abspath(frame.f_code.co_filename).startswith((*INSIDE, _HERE))


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _sharded(frame: FrameType) -> str:
    """The name of a variable that holds a sharded tensor, if there is one."""
    held = (name for name, value in frame.f_locals.items() if any(isinstance(t, Sharded) for t in tensors_in(value)))
    return next(held, "")


def _module(model: nn.Module, frames: list[tuple[FrameType, int]]) -> tuple[str, str]:
    """The class of the module whose code runs, and its path in the model."""
    paths = {id(module): path for path, module in model.named_modules()}
    for frame, _ in reversed(frames):
        for value in frame.f_locals.values():
            if isinstance(value, nn.Module) and id(value) in paths and frame.f_code.co_name != "__call__":
                return type(value).__name__, paths[id(value)]
    return type(model).__name__, ""
