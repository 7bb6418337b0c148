"""A model's module tree again, on fake parameters: what a forward without data runs on."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def skeleton(
    module: nn.Module,
    fake: Callable[[Tensor], Tensor],
    memo: dict[int, nn.Module],
    twins: Mapping[int, nn.Module],
    staged: Collection[int],
) -> nn.Module:
    """The same module tree on fake parameters: without the hooks and compiled forwards of a set-up run.

    A checkpoint round a forward stays, but for the ids of modules `staged`, which are stages or inside of them.
    `twins`: for the id of a module an earlier one like it, whose insides will do for both.
    """
    if id(module) in memo:
        return memo[id(module)]
    inner = module._modules.get("_orig_mod")
    if inner is not None:
        memo[id(module)] = skeleton(inner, fake, memo, twins, staged)
        return memo[id(module)]
    clone = object.__new__(type(module))
    if id(module) in twins:
        clone.__dict__.update(skeleton(twins[id(module)], fake, memo, twins, staged).__dict__)
        clone.__dict__.update({k: OrderedDict() for k in ("_forward_hooks", "_forward_pre_hooks")})
        memo[id(module)] = clone
        return clone
    memo[id(module)] = clone
    state = dict(module.__dict__)
    forward = state.pop("forward", None)
    if checkpointed(forward) and id(module) not in staged:
        plain = MethodType(type(module).forward, clone)
        state["forward"] = functools.partial(forward.func, plain, **forward.keywords)
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        kept = OrderedDict((k, h) for k, h in state[name].items() if not foreign(h))
        state[name] = kept
    for name in ("_backward_hooks", "_backward_pre_hooks"):
        state[name] = OrderedDict()
    state["_parameters"] = {k: None if p is None else fake(p) for k, p in module._parameters.items()}
    state["_buffers"] = {k: None if b is None else fake(b) for k, b in module._buffers.items()}
    clone.__dict__.update({k: own_containers(v) for k, v in state.items()})
    clone.__dict__["_modules"] = {
        k: None if m is None else skeleton(m, fake, memo, twins, staged) for k, m in module._modules.items()
    }
    return clone


def own_containers(value: Any) -> Any:
    """Lists and dicts anew: what a forward without data puts into a cache is not for the model to find there."""
    if type(value) in (dict, OrderedDict):
        return type(value)((k, own_containers(v)) for k, v in value.items())
    return [own_containers(v) for v in value] if type(value) is list else value


def checkpointed(forward: Any) -> bool:
    """Whether a module's forward was wrapped: ``module.forward = partial(checkpoint, module.forward, ...)``."""
    return isinstance(forward, functools.partial) and forward.func is checkpoint


def foreign(hook: Any) -> bool:
    """Hooks that act on a distributed run, not on the function the model computes."""
    target = getattr(hook, "func", hook)
    owner = getattr(target, "__self__", None)
    origin = type(owner).__module__ if owner is not None else getattr(target, "__module__", "") or ""
    return origin.startswith(("torch.distributed", "dsp."))
