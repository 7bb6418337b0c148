"""Notes on errors from a model's own code: between stages, where tensors are sharded, and inside a stage."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

from torch import Tensor, nn

from dsp.calls import GlueError
from dsp.lines import Line, lines_of
from dsp.methods import RankPart
from dsp.notation import NotationError
from dsp.run.stage_calls import StageDecision
from dsp.sharded import Sharded
from dsp.stages import Stage
from dsp.tensors import tensors_in


def add_note(model: nn.Module, error: Exception) -> None:
    """Add a note to an error raised where a sharded tensor was in use: what that is, and what to make a stage.

    The library's own errors get no note: they explain themselves.
    """
    if isinstance(error, (GlueError, NotationError)):
        return
    lines = lines_of(error)
    for at in range(len(lines) - 1, -1, -1):
        if held := _sharded(lines[at].frame):
            break
    else:
        return
    module, path = _module(model, lines[: at + 1])
    way = f"if {path!r} is named in stages" if path else "in a submodule that is named in stages"
    error.add_note(
        f"dsp: at {lines[at].short}, in {module}, {held} is sharded: a {Sharded.__module__}.{Sharded.__qualname__}, a "
        "torch.Tensor with the shape of the whole, of which each rank holds a part. Code that asks for the exact type, "
        "or for memory, may stumble over it. Inside a stage tensors are plain, so the code works "
        f"{way}"
    )


def _sharded(frame: FrameType) -> str:
    """The name of a variable that holds a sharded tensor; "" if there is none."""
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


def of_a_collective(error: BaseException) -> bool:
    """Tell whether torch.distributed raised this error, as when the connection to another rank breaks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("torch.distributed.")


def misread(
    stage: Stage, decision: StageDecision, place: RankPart, tensors: Sequence[Tensor], error: BaseException
) -> str:
    """A message for a stage that raised `error` on a shard but not on full tensors: what its pattern may lack."""
    name = decision.option.name
    assert name is not None
    said = f"{stage.where} ran on the whole, but on {place.own} of {place.size} along {name!r} it raised: {error}. "
    lengths = {place.size: name, 1: "1"}
    for dim, size in decision.sizes.items():
        lengths.setdefault(size, dim)
    for slot, pattern, t in zip(decision.slots, decision.patterns, tensors):
        if pattern is None and place.size in t.shape:
            positional = stage.signature.positional
            param = positional[slot] if isinstance(slot, int) and slot < len(positional) else slot
            others = (f"[{letter}]" for letter in "uvwxyz" if letter not in decision.sizes)
            dims = " ".join(lengths.get(size) or next(others) for size in t.shape)
            before, arrow, after = stage.pattern.text.partition(" ->")
            return said + (
                f"Its pattern does not mention {param!r}, of shape {tuple(t.shape)}, so the stage got all of it and "
                f"not a shard. If {param!r} has the dim {name!r} too, write '{before}, {param}={dims}{arrow}{after}'"
            )
    return said + f"If it computes over {name!r}, write [{name}] in '{stage.pattern.text}'"
