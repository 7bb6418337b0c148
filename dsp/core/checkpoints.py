"""The arguments of a checkpoint that runs again: those inside another one come back as plain tensors, and get back
what they carried; of nodes with one key, the one is next that was when the checkpoint began.

A recomputation has the observer of collectives that its forward had, in whichever thread it runs, and torch.compile is
off in it as it was in the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor

from dsp.comm.observers import OBSERVER, observing
from dsp.core.carrier import Carrier, carry, plain
from dsp.support.compile_off import CompileOff
from dsp.support.private import Recompute, backward_pass, checkpoint_arguments, checkpoint_frame, checkpoint_frames


def keep_arguments(compiled: bool) -> None:
    """Let the checkpoints in which the caller runs restore their arguments when they run again.

    compiled: torch.compile is off in the forward, which calls compiled functions.
    Those around the innermost one may have nothing else in them: nobody would ask for theirs.
    """
    last = checkpoint_frame()
    if last is None or Recompute.known(last, keep_arguments):
        return
    for frame in checkpoint_frames():
        if not Recompute.known(frame, keep_arguments):
            restore_arguments(frame, compiled)


def restore_arguments(frame: Any, compiled: bool) -> None:
    """Let a checkpoint in which the caller runs give its arguments what they carried."""
    arguments = checkpoint_arguments(frame)
    carried = [(a.record, a.ref, a.cut) if isinstance(a, Carrier) else None for a in arguments]
    turns = [{**a.turns} if isinstance(a, Carrier) and a.turns else {} for a in arguments]

    def restore(args: Sequence[Any]) -> Sequence[Any]:
        first = len(args) - len(carried)
        pairs = zip(args[first:], carried)
        restored = [a if c is None or type(a) is not Tensor else carry(c[0], a, c[1], c[2]) for a, c in pairs]
        for a, before in zip(restored, turns):
            if isinstance(a, Carrier):
                a.turns = {**before, "pass": backward_pass()}
        return *args[:first], *restored

    Recompute(frame, keep_arguments, partial(as_in_forward, OBSERVER.get(), compiled), plain, restore)


@contextmanager
def as_in_forward(observer: Any, compiled: bool) -> Iterator[None]:
    """The context of a recomputation."""
    with observing(observer), CompileOff() if compiled else nullcontext():
        yield
