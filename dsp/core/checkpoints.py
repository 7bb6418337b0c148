"""The regions of checkpoints, as they were when they began: a recomputation starts from the same.

Arguments that were saved inside another checkpoint come back as plain tensors, and get back what they carried; of nodes
with one key, the one is next that was next. A recomputation has the observer of collectives that its forward had, in
whichever thread it runs, and torch.compile is off in it as it was in the forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from dsp.comm.observers import OBSERVER, observing
from dsp.core.carrier import Carrier, carry, plain
from dsp.support.private import CompileOff, Recompute, checkpoint_arguments, checkpoint_frame, checkpoint_frames

RECOMPUTED: ContextVar[CheckpointRegion | None] = ContextVar("dsp_recomputed", default=None)


def keep_regions(compiled: bool) -> None:
    """Keep how the checkpoints begin in which the caller runs.

    compiled: torch.compile is off in the forward, which calls compiled functions.
    Those around the innermost one may have nothing else in them: nobody would ask for theirs.
    """
    last = checkpoint_frame()
    if last is None or region_of(last) is not None:
        return
    for frame in checkpoint_frames():
        if region_of(frame) is None:
            CheckpointRegion(frame, compiled)


def note_turns(t: Any) -> None:
    """Keep the turns of a tensor, or a watch, that checkpoints read for the first time, as from a closure."""
    last = checkpoint_frame()
    region = None if last is None else region_of(last)
    if region is None or region.read(t):
        return
    for frame in checkpoint_frames():
        if (region := region_of(frame)) is not None and not region.read(t):
            region.turns[id(t)] = weakref.ref(t), {**t.turns}


class CheckpointRegion:
    """The region of a checkpoint, as it was when it began. turns: by the id of a tensor."""

    def __init__(self, frame: Any, compiled: bool) -> None:
        arguments = checkpoint_arguments(frame)
        self.carried = [(a.record, a.ref, a.cut) if isinstance(a, Carrier) else None for a in arguments]
        self.turns_of_arguments = [{**a.turns} if isinstance(a, Carrier) and a.turns else {} for a in arguments]
        self.turns = dict[int, tuple[weakref.ref[Any], dict[Any, Any]]]()
        self.observer, self.compiled = OBSERVER.get(), compiled
        Recompute(frame, self, self.recomputing, plain, self.arguments)

    def read(self, t: Any) -> bool:
        """Tell whether it has read a tensor. Another one may have had its id."""
        entry = self.turns.get(id(t))
        return entry is not None and entry[0]() is t

    def turns_of(self, t: Any) -> dict[Any, Any]:
        """The turns that a tensor had when the region first read it."""
        return self.turns[id(t)][1] if self.read(t) else {}

    def arguments(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments of a recomputation, from those that were saved."""
        first = len(args) - len(self.carried)
        pairs = zip(args[first:], self.carried)
        restored = [a if c is None or type(a) is not Tensor else carry(c[0], a, c[1], c[2]) for a, c in pairs]
        for a, turns in zip(restored, self.turns_of_arguments):
            if isinstance(a, Carrier):
                a.turns = {**turns, "run": None}
        return *args[:first], *restored

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """The context of a recomputation."""
        token = RECOMPUTED.set(self)
        try:
            with observing(self.observer), CompileOff() if self.compiled else nullcontext():
                yield
        finally:
            RECOMPUTED.reset(token)


def region_of(frame: Any) -> CheckpointRegion | None:
    """The region of a checkpoint, if it is kept."""
    return next((key for key in Recompute.keys(frame) if isinstance(key, CheckpointRegion)), None)
