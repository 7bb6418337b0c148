"""A copy of a model's module tree on tensors without data, on which a forward is recorded, with fully_shard's casts."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from dsp.core.reads import Reads
from dsp.core.torch_calls import GlueError
from dsp.support.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UncompiledMode,
    children_of,
    forget_fakes,
    fsdp_precision,
    pytree,
    schema_of,
)

STRAY = (
    "got a tensor without data. dsp plans on fake tensors, and the model stored one of them where dsp cannot find it "
    "again: no attribute, closure, global name or functools cache of the model's own code leads there. Call the bare "
    "model once before dsp plans it, so that it keeps real tensors"
)


class Fakes(UncompiledMode, FakeTensorMode):
    """The fake tensors of one forward; once that is over, every operation on them raises.

    It calls `dispatch`, which torch's own `__torch_dispatch__` calls behind the guard against its compiler.
    """

    over = False
    reads: Reads | None = None  # answers what is read of inputs and parameters
    collective: Callable[[str, Any], None] | None = None  # gets the name and the arguments of each collective

    def end(self) -> None:
        """Let every later operation on these tensors raise."""
        self.over, self.collective, self.reads = True, None, None
        forget_fakes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise GlueError(f"{schema_of(func).name.partition('::')[2].strip('_')}() {STRAY}")
        if func.namespace == "c10d" and self.collective is not None:
            self.collective(func.__name__.partition("_.")[0], args)
        if self.reads is None:
            return self.dispatch(func, types, args, kwargs or {})
        try:
            out = self.dispatch(func, types, args, kwargs or {})
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            return self.answered(error, func, args, kwargs or {})
        self.reads.note(func, args, kwargs or {}, out)
        return out

    def answered(self, error: Exception, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a function that depends on numbers, if they are those of inputs or parameters; else raises."""
        assert self.reads is not None
        try:
            out = self.reads.result(func, args, kwargs)
        except Exception:
            raise error from None
        return pytree.tree_map_only(Tensor, self.double, out)

    def double(self, t: Tensor) -> Tensor:
        """A tensor without data for one with data."""
        fake = self.from_tensor(t)
        if self.reads is not None:
            self.reads.add(fake, t)
        return fake


class Skeleton:
    """A copy of a model's module tree on fake parameters, without the hooks and compiled forwards of a distributed run.

    A checkpoint around a forward is kept, except for modules in `staged` (ids), which are stages or inside stages.
    `twins`: the id of a module -> an earlier, equal one, whose submodules serve both. `memo`: the id of a module -> its
    copy.
    """

    def __init__(
        self, fake: Callable[[Tensor], Tensor], twins: Mapping[int, nn.Module], staged: Collection[int]
    ) -> None:
        self.fake, self.twins, self.staged = fake, twins, staged
        self.memo: dict[int, nn.Module] = {}

    def of(self, module: nn.Module) -> nn.Module:
        if id(module) not in self.memo:
            inner = children_of(module).get("_orig_mod")
            if inner is not None:
                self.memo[id(module)] = self.of(inner)
            elif id(module) in self.twins:
                clone = object.__new__(type(module))
                clone.__dict__.update(self.of(self.twins[id(module)]).__dict__)
                clone.__dict__.update({k: OrderedDict() for k in ("_forward_hooks", "_forward_pre_hooks")})
                self.memo[id(module)] = clone
            else:
                clone = self.memo[id(module)] = object.__new__(type(module))
                clone.__dict__.update(self.state(module, clone))
                children = {k: None if m is None else self.of(m) for k, m in children_of(module).items()}
                clone.__dict__["_modules"] = children
        return self.memo[id(module)]

    def state(self, module: nn.Module, clone: nn.Module) -> dict[str, Any]:
        """The attributes of a copy, without its submodules."""
        state = dict(module.__dict__)
        forward = state.pop("forward", None)
        if checkpointed(forward) and id(module) not in self.staged:
            plain = MethodType(type(module).forward, clone)
            state["forward"] = functools.partial(forward.func, plain, **forward.keywords)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            state[name] = OrderedDict((k, h) for k, h in state[name].items() if not foreign(h))
        state["_compiled_call_impl"] = None
        for name in ("_backward_hooks", "_backward_pre_hooks"):
            state[name] = OrderedDict()
        for name in ("_parameters", "_buffers"):
            state[name] = {k: None if t is None else self.fake(t) for k, t in state[name].items()}
        return {k: copy_containers(v) for k, v in state.items()}


def copy_containers(value: Any) -> Any:
    """Copies of containers: the model must not find in its caches what a forward without data puts there."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, copy_containers(v)) for k, v in value.items())
    if type(value) in (set, deque, defaultdict):
        return copy.copy(value)
    return [copy_containers(v) for v in value] if type(value) is list else value


def checkpointed(forward: Any) -> bool:
    """Tell whether a module's forward was wrapped: ``module.forward = partial(checkpoint, module.forward, ...)``."""
    return isinstance(forward, functools.partial) and forward.func is checkpoint


def foreign(hook: Any) -> bool:
    """Tell whether a hook acts on a distributed run, not on the function that the model computes."""
    target = getattr(hook, "func", hook)
    owner = getattr(target, "__self__", None)
    origin = type(owner).__module__ if owner is not None else getattr(target, "__module__", "") or ""
    return origin.startswith(("torch.distributed", "dsp."))


class Casts(Exception):
    """A module between stages casts its inputs: that is not an operation of the model, so no plan can contain it."""


class Precision:
    """dtypes of a model's sharded parameters after they are gathered, by id, and casts of modules' inputs and results.

    staged: ids of stages and of modules inside of them, where casts are part of the stage.
    """

    def __init__(self, model: nn.Module, staged: Collection[int]) -> None:
        self.parameters: dict[int, torch.dtype] = {}
        self.modules: list[tuple[nn.Module, torch.dtype | None, torch.dtype | None, bool]] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                parameters, inputs, outputs = fsdp_precision(module)
                self.parameters |= parameters
                if module is not model:
                    self.modules.append((module, inputs, outputs, id(module) in staged))

    def hooks(self, copies: Mapping[int, nn.Module]) -> list[Any]:
        """Register hooks on the copies of modules that cast as `fully_shard` does, inside of hooks registered before.

        The hook of a module between stages raises `Casts` if there is a tensor to cast.
        """
        handles = []
        for module, inputs, outputs, within in self.modules:
            copy, change = copies.get(id(module)), cast if within else refuse_cast
            if copy is not None and inputs is not None:
                hook = partial(_before, change=partial(change, dtype=inputs))
                handles.append(copy.register_forward_pre_hook(hook, with_kwargs=True))
            if copy is not None and outputs is not None:
                hook = partial(_after, change=partial(change, dtype=outputs))
                handles.append(copy.register_forward_hook(hook, prepend=True))
        return handles


def _before(module: nn.Module, args: Any, kwargs: Any, change: Any) -> Any:
    return change((args, kwargs))


def _after(module: nn.Module, args: Any, out: Any, change: Any) -> Any:
    return change(out)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def refuse_cast(tree: Any, dtype: torch.dtype) -> None:
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype:
            raise Casts
