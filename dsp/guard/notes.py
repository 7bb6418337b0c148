"""Notes on errors from a model's own code: between stages, where tensors are sharded, and inside a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NamedTuple

from torch import nn

from dsp.comm.layout import Axis, Cut
from dsp.comm.observers import RUNNING
from dsp.core.carrier import Carrier
from dsp.core.observed import Events, Observed
from dsp.core.parallel import COMPILE
from dsp.core.record import BoundStage
from dsp.core.run import InStage
from dsp.core.torch_calls import GlueError
from dsp.stages.notation import NotationError, TensorPattern
from dsp.stages.signature import Slot
from dsp.stages.stage import Stage
from dsp.support.private import COMPILERS_OWN
from dsp.support.source_lines import Line, lines_of
from dsp.support.tensors import tensors_in

MISFITS = (RuntimeError, ValueError, IndexError, AssertionError)  # errors of a stage that gets unexpected shapes


def explain_errors(parallel: Observed, events: Events) -> None:
    """Say what the cause of an error may be, in the user's terms: the pattern of a stage, a compiled function, or a
    sharded tensor."""

    def fail(error: BaseException) -> None:
        if not isinstance(error, Exception):
            return
        if type(error).__module__ == COMPILERS_OWN:
            raise RuntimeError(f"{COMPILE}. torch.compile says: {error}") from error
        running = RUNNING.get()
        if not isinstance(running, InStage):
            add_note(parallel.model, error)
        elif type(error) in MISFITS and not of_a_collective(error) and (shard := shard_of(running, parallel.axis)):
            raise NotationError(misread(shard, error)) from error

    events.fail.append(fail)


class Argument(NamedTuple):
    """A tensor argument of a stage call: its place, its pattern (None: none mentions it), and its shape on a rank."""

    slot: Slot
    pattern: TensorPattern | None
    shape: tuple[int, ...]


class StageShard(NamedTuple):
    """A stage call on `length` of `size` along the dim `name`, with the sizes of all dims and its arguments."""

    stage: Stage
    name: str
    length: int
    size: int
    sizes: Mapping[str, int]
    arguments: Sequence[Argument]


def shard_of(running: InStage, axis: Axis) -> StageShard | None:
    """The shard on which a stage runs; None if it runs replicated, or was not recorded before: it may raise on full
    tensors, too."""
    call, option, record = running.node.call, running.offer.option, running.record
    if not isinstance(call, BoundStage) or option is None or option.name is None:
        return None
    if not record.planned or record.replans:
        return None
    _, bound = call.stage.signature.bind(running.args, running.kwargs)
    arguments = [Argument(b.slot, b.pattern, tuple(b.tensor.shape)) for b in bound]
    length = Cut(0).local_size(option.size, axis.size, axis.rank)
    return StageShard(call.stage, option.name, length, option.size, call.sizes, arguments)


def add_note(model: nn.Module, error: Exception) -> None:
    """Add a note to an error raised where a sharded tensor was in use: what that is, and what to make a stage.

    The library's own errors get no note: they explain themselves.
    """
    if isinstance(error, (GlueError, NotationError)):
        return
    lines = lines_of(error)
    for at in range(len(lines) - 1, -1, -1):
        if sharded := _sharded(lines[at].frame):
            break
    else:
        return
    module, path = _module(model, lines[: at + 1])
    way = f"if {path!r} is named in stages" if path else "in a submodule that is named in stages"
    error.add_note(
        f"dsp: at {lines[at].short}, in {module}, {sharded} is sharded: a dsp.core.carrier.Carrier, "
        "a torch.Tensor with the shape of the whole, of which each rank holds a part. Code that asks for the exact "
        f"type, or for memory, may stumble over it. Inside a stage tensors are plain, so the code works {way}"
    )


def _sharded(frame: FrameType) -> str | None:
    """The name of a variable that holds a tensor between stages; None if there is none."""
    for name, value in frame.f_locals.items():
        with suppress(Exception):  # an object that holds itself, or one whose attributes raise
            if any(isinstance(t, Carrier) for t in tensors_in(value)):
                return name
    return None


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


def misread(shard: StageShard, error: BaseException) -> str:
    """A message for a stage that raised `error` on a shard but not on full tensors: what its pattern may lack."""
    stage, name, length, size, sizes, arguments = shard
    text = f"{stage.label} ran on the whole, but on {length} of {size} along {name!r} it raised: {error}. "
    lengths = {size: name, 1: "1"}
    for dim, extent in sizes.items():
        lengths.setdefault(extent, dim)
    for slot, pattern, shape in arguments:
        if pattern is None and size in shape:
            positional = stage.signature.positional
            param = positional[slot] if isinstance(slot, int) and slot < len(positional) else slot
            letters = (f"[{letter}]" for letter in "uvwxyz" if letter not in sizes)
            dims = " ".join(lengths.get(extent) or next(letters) for extent in shape)
            before, arrow, after = stage.pattern.text.partition(" ->")
            return text + (
                f"Its pattern does not mention {param!r}, of shape {shape}, so the stage got all of it and "
                f"not a shard. If {param!r} has the dim {name!r} too, write '{before}, {param}={dims}{arrow}{after}'"
            )
    return text + f"If it computes over {name!r}, write [{name}] in '{stage.pattern.text}'"
