"""An autograd.Function of the model between stages: its backward runs between stages, too.

Left alone it would get this rank's shards as plain tensors, N times a single process's gradient, and what it saved in
other layouts (docs/numerics.md). So what is applied in its place is a subclass, whose backward hands on gradients as
glue holds tensors and brings what comes back to where the arguments lay.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from dsp.layout import At, Axis
from dsp.observers import OBSERVER, Observer, observing
from dsp.private import APPLIES
from dsp.run.forward import Run
from dsp.run.whole import Again
from dsp.sharded import ACTIVE, Sharded, carry, plain


def at_of(t: Any) -> At | None:
    return t.at if isinstance(t, Sharded) else None


class Applied:
    """One application of a function between stages: where its tensors lie, and how its backward runs.

    given, made, kept: of its arguments, of its results and of what it saved for backward.
    """

    def __init__(self, axis: Axis, again: Again) -> None:
        self.axis, self.again = axis, again
        self.given: list[At | None] = []
        self.made: list[At | None] = []
        self.kept: list[At | None] = []
        observer = OBSERVER.get()
        self.observer: Observer | None = None if observer is None else observer.for_backward()

    def note(self, ctx: Any, given: Sequence[Any], made: Any) -> None:
        self.given, self.kept = list(map(at_of, given)), list(map(at_of, ctx.to_save or ()))
        self.made = [at_of(t) for t in (made if isinstance(made, tuple) else (made,))]

    def backward(self, function: type[Function], ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
        with observing(self.observer):
            own = list(map(self.of_one_process, gradients, self.made))
            with self.again() as run:
                run.in_function = not torch.is_grad_enabled()
                seen = [t if t is None or at is None else carry(t, at, run.first - 1) for t, at in zip(own, self.made)]
                found = backward_of(function)(ctx, *seen)
                several = isinstance(found, tuple)
                wanted = [(t, at) for t, at in zip(found if several else (found,), self.given)]
                returned = [self.returned(run, t, at) for t, at in wanted]
        return (*returned, *found[len(wanted) :]) if several else returned[0]

    def saved(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The saved tensors as they lay: autograd, or hooks of a checkpoint, may bring them back as plain tensors."""
        lay = zip(tensors, self.kept, strict=True)
        return tuple(carry(t, at) if at and type(t) is Tensor and t.shape == at.local else t for t, at in lay)

    def of_one_process(self, gradient: Tensor | None, at: At | None) -> Tensor | None:
        """The gradient of a single process, or this rank's shard of it."""
        if gradient is None:
            return None
        whole = gradient if at is not None else torch.ops.dsp.all_reduce(gradient, self.axis.group)
        return whole / self.axis.size

    def returned(self, run: Run, t: Any, at: At | None) -> Any:
        """The gradient that goes on: N times this rank's shard of a single process's, or one of N equal summands."""
        if not isinstance(t, Tensor):
            return t
        (local,) = run.views.bring([t], [run.open(t)], [None if at is None else at.cut], [])
        return plain(local) if at is None else plain(local) * self.axis.size


APPLIED: ContextVar[Applied] = ContextVar("dsp_applied")  # whose forward begins


def backward_of(function: Any) -> Any:
    """Its backward, by whichever of the two names it has."""
    return function.vjp if function.vjp is not Function.vjp else function.backward


def followed(function: Any) -> Any:
    """The function with its backward between stages, for the application that `APPLIED` has; made once for each."""
    if (known := function.__dict__.get("_dsp_followed")) is not None:
        return known

    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.dsp_applied.backward(function, ctx, gradients)

    def forward(ctx: Any, *args: Any) -> Any:
        ctx.dsp_applied = APPLIED.get()
        made = function.forward(ctx, *args)
        ctx.dsp_applied.note(ctx, args, made)
        return made

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dsp_applied = APPLIED.get()
        function.setup_context(ctx, inputs, output)
        ctx.dsp_applied.note(ctx, inputs, output)

    apart = function.setup_context is not Function.setup_context
    own = {"setup_context": setup_context} if apart else {"forward": forward}
    name = "vjp" if function.vjp is not Function.vjp else "backward"
    made = {name: staticmethod(method) for name, method in (own | {name: backward}).items()}
    found: Any = type(function.__name__, (function,), made)
    kind = found._backward_cls
    kind.saved_tensors = property(lambda ctx: ctx.dsp_applied.saved(super(kind, ctx).saved_tensors))
    function._dsp_followed = found
    return found


def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`Function.apply` while a forward runs: between stages it is that of `followed`."""
    current = ACTIVE.get()
    run = None if current is None else current[1]
    own = function.__module__.startswith(("torch.", "dsp."))
    if run is None or own or run.by_graph or run.mode.asleep or not any(isinstance(a, Tensor) for a in args):
        return super(APPLIES, function).apply(*args, **kwargs)
    token = APPLIED.set(Applied(run.axis, run.mode.again()))
    try:
        return super(APPLIES, followed(function)).apply(*args, **kwargs)
    finally:
        APPLIED.reset(token)


class Intercepting:
    """While forwards run, in one thread or several, the functions that their models apply come to `apply`."""

    def __init__(self) -> None:
        self.inside, self.lock = 0, threading.Lock()

    def begin(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                APPLIES.apply = classmethod(apply)

    def end(self) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                del APPLIES.apply
