"""The calls of a model's modules: of a stage, outside of all hooks on it; between stages, with the hooks of others.

Hooks, such as fully_shard's, see parts; the forward sees carriers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm.gradients import NoView
from dsp.core.carrier import Carrier, carry, first_carrier, numbers, plain
from dsp.core.record import Record
from dsp.core.torch_calls import GlueError
from dsp.core.watch import unwatched, watching
from dsp.stages.stage import Stage
from dsp.support.private import backward_hooks_of, compiled_call, hooks_of, pytree, set_compiled_call
from dsp.support.tensors import ByTensor

UNCHANGED = nullcontext()


class StageCall:
    """Takes the place of a module's call; the record that its first carrier, or else a watch, belongs to leads it."""

    def __init__(self, stage: Stage, module: nn.Module) -> None:
        self.stage, self.call = stage, compiled_call(module) or module._call_impl
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first: Any = first_carrier((*args, *kwargs.values()))
        if first is None:
            first = watching(self.stage)
        if first is not None:
            record = first.record
            if self.stage not in record.stages:  # a stage of a parallel model inside the one that runs
                return self.call(*args, **kwargs)
            with inside(record) if record.sources or record.compiled or not record.planned else UNCHANGED:
                return record.driver.stage(self.stage, self.call, args, kwargs, first)
        with unwatched():
            return self.call(*args, **kwargs)  # not in a forward of ours, or inside another stage


@contextmanager
def inside(record: Record) -> Iterator[None]:
    """A stage: no watch is on, and torch.compile is."""
    with unwatched(), torch.compiler.set_stance("default") if record.compiled else UNCHANGED:
        yield


def keep_compiled(model: nn.Module, calls: Iterable[StageCall], between: Iterable[nn.Module]) -> bool:
    """Take in what a stage's compile() compiled since the last forward, and tell whether there is any.

    Raises RuntimeError if it compiled a module between stages.
    """
    new = False
    for call in calls:
        module = call.stage.module
        if (compiled := compiled_call(module)) is not call and not isinstance(compiled, StageCall):
            call.call, new = compiled, True
            set_compiled_call(module, call)
    for module in (model, *between):
        if isinstance(compiled_call(module), FunctionType):
            raise RuntimeError(compiled_between(model, module, [call.stage for call in calls]))
    return new


def compiled_between(model: nn.Module, module: nn.Module, stages: list[Stage]) -> str:
    path = next(name for name, m in model.named_modules() if m is module)
    inside = [stage.name for stage in stages if any(stage.module is m for m in module.modules())]
    way = f"compile its stages instead ({', '.join(inside[:3])}{' and more' * (len(inside) > 3)})"
    if not inside:
        way = f"name it in stages, if it is independent along some dim ({path!r})"
    return (
        f"{path!r} was compiled by its compile(). It runs operations between stages, which dsp has to see one by one: "
        f"{way}, or give dsp.parallelize compile=True, for the whole forward as one graph"
    )


KEPT_BY_HOOK = (
    "{what} is made of this rank's part of a tensor, which a hook kept: hooks on modules between stages see parts. A "
    "forward may return what its hooks kept, as it is; to compute with it, let the module return it, or name the "
    "module in stages"
)


def unwrap(value: Any) -> tuple[Any, list[Any]]:
    """A value with the parts of its carriers, and the carriers in the place of leaves.

    The parts are no views: an attribute or hook set on one must not end up on a view of another tensor. They are noted,
    as a hook may keep them for the output of the forward.
    """
    leaves, spec = pytree.tree_flatten(value)
    carried = [t if isinstance(t, Carrier) else None for t in leaves]
    parts = [t if c is None else NoView.apply(numbers(c)) for t, c in zip(leaves, carried)]
    for part, c in zip(parts, carried):
        if c is not None and c.cut is not None:
            c.record.hook_parts = c.record.hook_parts or ByTensor()
            c.record.hook_parts[part] = c.ref, c.cut
    return pytree.tree_unflatten(parts, spec), carried


def wrap(value: Any, carried: list[Any]) -> Any:
    """A value with carriers in the place of parts. Raises GlueError for a part that a hook changed to another shape."""
    leaves, spec = pytree.tree_flatten(value)
    wrapped = [t if c is None or not isinstance(t, Tensor) else rewrapped(t, c) for t, c in zip(leaves, carried)]
    return pytree.tree_unflatten(wrapped, spec)


def rewrapped(part: Tensor, before: Carrier) -> Carrier:
    """A part that a hook returned, as a carrier like the one before."""
    shape = tuple(plain(before).shape)
    if tuple(part.shape) != shape:
        raise GlueError(
            f"a hook between stages, such as tensor parallelism's, changed a shard of shape {shape} to "
            f"{tuple(part.shape)}. The hook's module must be a stage or inside of one: name it in stages"
        )
    return carry(before.record, part, before.ref, before.cut, before.base)


class HookedCall:
    """The call of a module between stages that has hooks: around them parts, inside of them carriers."""

    def __init__(self, module: nn.Module) -> None:
        self.call, self.forward = module._call_impl, module.forward
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        set_compiled_call(module, self)
        module.forward = self.inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        (args, kwargs), carried = unwrap((args, kwargs))
        self.inputs.append(carried)
        try:
            out = self.call(*args, **kwargs)
            return wrap(out, self.outputs.pop())
        finally:
            del self.inputs[-1]

    def inside(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = wrap((args, kwargs), self.inputs[-1])
        out, carried = unwrap(self.forward(*args, **kwargs))
        self.outputs.append(carried)
        return out


class LookOnly:
    """A hook on a module's backward: it sees this rank's part of gradients, and must not replace them."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *gradients: Any) -> None:
        if self.hook(module, *gradients) is not None:
            raise RuntimeError(
                f"a backward hook on {type(module).__name__} returned gradients: expected None. The hook gets this "
                "rank's part of gradients, multiplied by the number of ranks. To change a gradient, call "
                "y.register_hook(hook) in the forward, on a tensor between stages: that hook gets the gradient of a "
                "single process"
            )


def order_hooks(between: Iterable[nn.Module], staged: Iterable[nn.Module]) -> None:
    """Let hooks on modules between stages see parts, and hooks on the backward of these and of stages change nothing;
    they may have been registered since the last forward."""
    for module in between:
        if any(hooks_of(module)) and not isinstance(compiled_call(module), HookedCall):
            HookedCall(module)
    for module in (*between, *staged):
        for hooks in backward_hooks_of(module):
            for key, hook in hooks.items() if hooks else ():
                if not isinstance(hook, LookOnly):
                    hooks[key] = LookOnly(hook)
