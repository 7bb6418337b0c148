"""Hooks of others, such as fully_shard's, beside the library's own; those on modules between stages are not glue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from dsp.calls import GlueError
from dsp.core.skeleton import foreign
from dsp.gradients import NoView
from dsp.private import compiled_call, hooks_of, pytree, set_compiled_call
from dsp.run.stage_calls import StageCalls
from dsp.sharded import ACTIVE, Sharded, plain


def settle(
    own: Iterable[tuple[nn.Module, int, int]], between: Iterable[dict[int, Any]], backward: Iterable[dict[int, Any]]
) -> None:
    """Put the library's hooks around those registered later, such as fully_shard's, which must see local tensors.

    own: module and hook keys of the library's hooks; they run first on the way in and last on the way out. between:
    hooks on modules between stages; no plan covers what distributed hooks do there, so they run aside. backward: hooks
    on the backward of stages and of modules between them; they see shards of gradients and may not change them.
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
    """A hook on a module's backward: it sees this rank's shards of gradients, and must not replace them."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *gradients: Any) -> None:
        if self.hook(module, *gradients) is not None:
            raise RuntimeError(
                f"a backward hook on {type(module).__name__} returned gradients: expected None. The hook gets this "
                "rank's shards of gradients, multiplied by the number of ranks. To change a gradient, call "
                "y.register_hook(hook) in the forward, on a tensor between stages: that hook gets the gradient of a "
                "single process"
            )


class Compiled:
    """The call of a stage that its own compile() compiled, between the library's hooks `pre` and `post`."""

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
                leave(self.module, args, kwargs, None)  # cleans up
                raise
            made = leave(self.module, args, kwargs, out)
        finally:
            before[self.pre], after[self.post] = enter, leave
        return out if made is None else made


def keep_compiled(own: Iterable[tuple[nn.Module, int, int]]) -> None:
    """Take the library's hooks out of the calls that stages' own compile() compiled."""
    for module, pre, post in own:
        call = compiled_call(module)
        if call is not None and not isinstance(call, Compiled):
            set_compiled_call(module, Compiled(module, call, pre, post))


class Aside:
    """A distributed hook, such as fully_shard's, on a module between stages: it runs aside, not as glue."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        current = ACTIVE.get()
        if current is None or current[1].mode.asleep:
            return self.hook(*args)
        mode = current[1].mode
        mode.suspend()
        try:
            # the hook gets local tensors, because an autograd.Function returns tensors without their subclass; they are
            # not views, because an attribute or hook set on one must not end up on a view of another tensor
            leaves, spec = pytree.tree_flatten(args)
            result = self.hook(*pytree.tree_unflatten([_own(x) for x in leaves], spec))
            made, spec = pytree.tree_flatten(result)
            return pytree.tree_unflatten(list(map(_as_before, made, leaves[len(leaves) - len(made) :])), spec)
        finally:
            mode.resume()


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
    return NoView.apply(plain(x)) if isinstance(x, Sharded) else x
