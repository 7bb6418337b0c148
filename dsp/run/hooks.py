"""Hooks of distributed runs, such as fully_shard's, on modules between stages: they are no glue of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dsp.calls import GlueError
from dsp.plan.skeleton import foreign
from dsp.private import compiled_call, hooks_of, pytree, set_compiled_call
from dsp.run.stage_calls import StageCalls
from dsp.sharded import ACTIVE, Sharded, plain


def settle(
    own: Iterable[tuple[nn.Module, int, int]], between: Iterable[dict[int, Any]], backward: Iterable[dict[int, Any]]
) -> None:
    """Put our hooks, of which `own` has module and keys, outside of those that came later (fully_shard's).

    Those must see local tensors: ours go first in and last out. And in hooks `between` stages no plan counted what
    others do, and those for `backward` of stages and modules between them see parts of gradients.
    """
    for module, pre, post in own:
        before, after = hooks_of(module)
        if next(iter(before)) != pre:
            before.move_to_end(pre, last=False)
        if next(reversed(after)) != post:
            after.move_to_end(post)
    for hooks in filter(None, between):
        for key, hook in hooks.items():
            if not isinstance(hook, Aside) and foreign(hook) and not of_another(hook):
                hooks[key] = Aside(hook)
    for hooks in filter(None, backward):
        for key, hook in hooks.items():
            if not isinstance(hook, Looking):
                hooks[key] = Looking(hook)


def of_another(hook: Any) -> bool:
    """Tell whether a hook is that of a stage of another parallelized model: in a run of ours it does nothing."""
    return isinstance(getattr(getattr(hook, "func", None), "__self__", None), StageCalls)


class Looking:
    """A hook on the backward of a module: it may look at gradients and change none, for it sees a rank's parts."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *gradients: Any) -> None:
        if self.hook(module, *gradients) is not None:
            raise RuntimeError(
                f"a backward hook on {type(module).__name__} returned gradients in place of those that it was given, "
                "which are this rank's shards, times the number of ranks: expected None. To change a gradient, call "
                "y.register_hook(hook) in the forward, on a tensor between stages: it gets that of a single process"
            )


class Compiled:
    """The compiled call of a stage, as its compile() made it, between our hooks `pre` and `post`."""

    def __init__(self, module: nn.Module, call: Any, pre: int, post: int) -> None:
        self.module, self.call, self.pre, self.post = module, call, pre, post

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, after = hooks_of(self.module)
        enter, leave = before.pop(self.pre), after.pop(self.post)
        try:
            if (given := enter(self.module, args, kwargs)) is not None:
                args, kwargs = given
            try:
                out = self.call(*args, **kwargs)
            except BaseException:
                leave(self.module, args, kwargs, None)  # which cleans up
                raise
            made = leave(self.module, args, kwargs, out)
        finally:
            before[self.pre], after[self.post] = enter, leave
        return out if made is None else made


def keep_compiled(own: Iterable[tuple[nn.Module, int, int]]) -> None:
    """Take our hooks out of what the compile() of a stage compiled."""
    for module, pre, post in own:
        call = compiled_call(module)
        if call is not None and not isinstance(call, Compiled):
            set_compiled_call(module, Compiled(module, call, pre, post))


class Aside:
    """A hook of a distributed run, such as fully_shard's, on a module between stages: it is no glue of the model."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        current = ACTIVE.get()
        if current is None or current[1].mode.asleep:
            return self.hook(*args)
        mode = current[1].mode
        mode.suspend()
        try:
            # it sees local parts: through an autograd.Function a tensor comes back without its type
            # and what it hangs on one must not be on a view of another
            leaves, spec = pytree.tree_flatten(args)
            result = self.hook(*pytree.tree_unflatten([_own(x) for x in leaves], spec))
            made, spec = pytree.tree_flatten(result)
            return pytree.tree_unflatten(list(map(_as_before, made, leaves[len(leaves) - len(made) :])), spec)
        finally:
            mode.resume()


class Own(torch.autograd.Function):
    """The same tensor and memory, as no view of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _as_before(new: Any, old: Any) -> Any:
    if isinstance(old, Sharded) and type(new) is old.part:
        if tuple(new.shape) != old.at.local:
            raise GlueError(
                f"a hook between stages, such as tensor parallelism's, changed a shard of shape {old.at.local} to "
                f"{tuple(new.shape)}. The hook's module must be a stage or inside of one: name it in stages"
            )
        new.__class__, new.at, new.number = type(old), old.at, old.number  # type: ignore[attr-defined]
    return new


def _own(x: Any) -> Any:
    return Own.apply(plain(x)) if isinstance(x, Sharded) else x
