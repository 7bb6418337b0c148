"""The model's own autograd.Functions between stages: their backward runs between stages, too.

A plain backward would get this rank's shards as plain tensors, gradients N times those of a single process, and saved
tensors in other layouts (docs/numerics.md). So while a forward runs, the `ctx` of a function gets another class. Its
backward passes sharded tensors to the model's code, and brings returned gradients into the layouts of the arguments.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from dsp.between import DIFFERENT
from dsp.calls import GlueError
from dsp.layout import At
from dsp.private import CONTEXT, context_of, function_of
from dsp.run.gradient_hooks import InBackward, at_of
from dsp.sharded import ACTIVE, carry

COLLECTIVES = "torch.distributed.nn.functional"  # autograd.Functions whose backward communicates, too


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
        function = function_of(ctx).__base__
        differs = function.__module__ == COLLECTIVES and function.__name__ != "_AllReduce"
        if differs and any(ctx.needs_input_grad) and any(at is not None for at in self.given):
            raise GlueError(DIFFERENT.format(f"the backward of {COLLECTIVES}'s {function.__name__.strip('_')}"))
        self.made = [at_of(t) for t in (made if isinstance(made, tuple) else (made,))]

    def saved(self, tensors: Sequence[Any]) -> tuple[Any, ...]:
        """The saved tensors in their layouts: autograd, or hooks of a checkpoint, may return them as plain tensors."""
        lay = zip(tensors, self.kept, strict=True)
        return tuple(carry(t, at) if at and type(t) is Tensor and t.shape == at.local else t for t, at in lay)


def between_stages(function: Any) -> Any:
    """The class of a function's `ctx` when the function is applied between stages; made once a function."""
    if (known := function.__dict__.get("_dsp_ctx")) is not None:
        return known
    name = "vjp" if function.vjp is not Function.vjp else "backward"
    boxed = getattr(function, "boxed_grads_call", False)  # backward takes its gradients as one list

    def backward(ctx: Any, *gradients: Any) -> Any:
        def its_own(*grads: Any) -> Any:
            return getattr(function, name)(ctx, *([[*grads]] if boxed else grads))

        grads, applied = gradients[0] if boxed else gradients, ctx.dsp_applied
        return applied.called(its_own, grads, applied.made, applied.given)

    found: Any = context_of(type(function.__name__, (function,), {name: staticmethod(backward)}))
    found.saved_tensors = property(lambda ctx: ctx.dsp_applied.saved(super(found, ctx).saved_tensors))
    function._dsp_ctx = found
    return found


def begun(ctx: Any) -> None:
    """Note that a function is applied; called for its new `ctx`."""
    current, function = ACTIVE.get(), function_of(ctx)
    run = None if current is None else current[1]
    own = function.__module__.startswith(("torch.", "dsp.")) and function.__module__ != COLLECTIVES
    if run is not None and not (own or run.by_graph or run.mode.asleep):
        FUNCTIONS.follow(function)
        ctx.__class__ = between_stages(function)
        ctx.dsp_applied = Applied(run.axis, run.mode.again())


def noting(method: Any, apart: bool) -> Any:
    """A forward, or where that has no `ctx` a setup_context (`apart`), that notes arguments and results."""

    @functools.wraps(method)
    def noted(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        made = method(ctx, *args, **kwargs)
        if (applied := getattr(ctx, "dsp_applied", None)) is not None:
            applied.note(ctx, *(args if apart else ((*args, *kwargs.values()), made)))
        return made

    return noted


class Functions:
    """The autograd.Functions that models apply between stages, while forwards run, in one thread or several.

    Torch makes a `ctx` for each application, however the function was bound: `f = F.apply` may be older than the model.
    """

    def __init__(self) -> None:
        self.inside, self.lock = 0, threading.Lock()
        self.replaced: dict[Any, tuple[str, Any]] = {}  # the name of a method, and its own one, if any

    def begin(self) -> None:
        with self.lock:
            self.inside += 1
            if CONTEXT.__init__ is not begun:  # it stays: to set it empties the method caches of all functions
                CONTEXT.__init__ = begun

    def end(self) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside:
                return
            for function, (name, own) in self.replaced.items():
                delattr(function, name) if own is None else setattr(function, name, own)
            self.replaced.clear()

    def follow(self, function: Any) -> None:
        """Replace, until the forwards end, the method of a function that gets its `ctx` in forward."""
        with self.lock:
            if function not in self.replaced:
                apart = function.setup_context is not Function.setup_context
                name = "setup_context" if apart else "forward"
                self.replaced[function] = name, function.__dict__.get(name)
                setattr(function, name, staticmethod(noting(getattr(function, name), apart)))


FUNCTIONS = Functions()
