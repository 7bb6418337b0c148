"""The model's own autograd.Functions between stages: their backward runs between stages, too.

A plain backward would get this rank's shards as plain tensors, gradients N times those of a single process, and saved
tensors in other layouts (docs/numerics.md). So a subclass is applied instead: its backward passes sharded tensors to
the model's code, and brings the returned gradients into the layouts of the arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd import Function

from dsp.layout import At
from dsp.private import APPLIES
from dsp.run.gradient_hooks import InBackward, at_of
from dsp.sharded import ACTIVE, carry


class Applied(InBackward):
    """One application of a function between stages, with the layouts of its tensors.

    given, made, kept: the layouts of arguments, results and tensors saved for backward.
    """

    in_function = True
    given: Sequence[At | None] = ()
    made: Sequence[At | None] = ()
    kept: Sequence[At | None] = ()

    def note(self, ctx: Any, given: Sequence[Any], made: Any) -> None:
        self.given, self.kept = list(map(at_of, given)), list(map(at_of, ctx.to_save or ()))
        self.made = [at_of(t) for t in (made if isinstance(made, tuple) else (made,))]

    def saved(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The saved tensors in their layouts: autograd or a checkpoint's hooks may have made them plain tensors."""
        lay = zip(tensors, self.kept, strict=True)
        return tuple(carry(t, at) if at and type(t) is Tensor and t.shape == at.local else t for t, at in lay)


APPLIED: ContextVar[Applied] = ContextVar("dsp_applied")  # the application whose forward begins


def followed(function: Any) -> Any:
    """The subclass of a function whose backward runs between stages, for the application in `APPLIED`; made once."""
    if (known := function.__dict__.get("_dsp_followed")) is not None:
        return known
    name = "vjp" if function.vjp is not Function.vjp else "backward"
    boxed = getattr(function, "boxed_grads_call", False)  # backward takes its gradients as one list

    def backward(ctx: Any, *gradients: Any) -> Any:
        def its_own(*grads: Any) -> Any:
            return getattr(function, name)(ctx, *([[*grads]] if boxed else grads))

        return ctx.dsp_applied.called(its_own, gradients, ctx.dsp_applied.made, ctx.dsp_applied.given)

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
    methods = {key: staticmethod(method) for key, method in (own | {name: backward}).items()}
    found: Any = type(function.__name__, (function,), {**methods, "boxed_grads_call": False})
    kind = found._backward_cls
    kind.saved_tensors = property(lambda ctx: ctx.dsp_applied.saved(super(kind, ctx).saved_tensors))
    function._dsp_followed = found
    return found


def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    """The `Function.apply` of a running forward: between stages it applies the subclass that `followed` makes."""
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
    """Replace `Function.apply` with `apply` while forwards run, in any number of threads."""

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
