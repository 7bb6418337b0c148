"""Mixed precision of `fully_shard`: a plan counts bytes in the dtypes in which a run computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dsp.support.private import fsdp_precision, pytree


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
                parameters, given, returned = fsdp_precision(module)
                self.parameters |= parameters
                if module is not model:
                    self.modules.append((module, given, returned, id(module) in staged))

    def hooks(self, copies: Mapping[int, nn.Module]) -> list[Any]:
        """Register hooks on the copies of modules that cast as `fully_shard` does, inside of hooks registered before.

        The hook of a module between stages raises `Casts` if there is a tensor to cast.
        """
        handles = []
        for module, given, returned, within in self.modules:
            copy, change = copies.get(id(module)), cast if within else refuse
            if copy is not None and given is not None:
                hook = partial(_before, change=partial(change, dtype=given))
                handles.append(copy.register_forward_pre_hook(hook, with_kwargs=True))
            if copy is not None and returned is not None:
                hook = partial(_after, change=partial(change, dtype=returned))
                handles.append(copy.register_forward_hook(hook, prepend=True))
        return handles


def _before(module: nn.Module, args: Any, kwargs: Any, change: Any) -> Any:
    return change((args, kwargs))


def _after(module: nn.Module, args: Any, out: Any, change: Any) -> Any:
    return change(out)


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map(lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x, tree)


def refuse(tree: Any, dtype: torch.dtype) -> None:
    for x in pytree.tree_leaves(tree):
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != dtype:
            raise Casts
