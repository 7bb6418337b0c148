"""Arguments of functions between stages as rules read them, and what is refused there."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsp.core.torch_calls import GlueError, instead_of
from dsp.core.torch_traits import UNRUNNABLE, Traits

INDEXED = frozenset({"getitem", "setitem"})
ITEMS = frozenset({int, slice, type(None), type(...), list, bool})  # the usual items of an index, beside tensors
DIFFERENT = (
    "{} between stages would leave each rank a different tensor, where the ranks of one sequence share every tensor; "
    "call it in a stage, a submodule with a pattern, or use all_reduce(), all_gather() or broadcast()"
)


def unrunnable(traits: Traits) -> GlueError:
    if traits.name.startswith("distributed."):
        return GlueError(DIFFERENT.format(UNRUNNABLE[traits.name]))
    instead = instead_of(traits.name)
    name = UNRUNNABLE.get(traits.name, f"{traits.name}() under torch.vmap or another transform of torch.func")
    return GlueError(
        f"{name} between stages would work on this rank's shard as if it were the full tensor; do it in a "
        f"stage, a submodule with a pattern, where tensors are local{instead and '. ' + instead}"
    )


def numbered(args: Any, mode: Any) -> Any:
    """The arguments of an index, with numbers in the place of tensors that bound a slice, and with numbers, lists and
    tensors in the place of those of other libraries. mode: in which the tensors are read."""
    index, bounded = args[1], False
    for i in index if type(index) is tuple else (index,):
        if type(i) is slice:
            bounded |= isinstance(i.start, Tensor) or isinstance(i.stop, Tensor) or isinstance(i.step, Tensor)
        elif type(i) not in ITEMS and not isinstance(i, Tensor):
            index = tuple(map(usual, args[1])) if type(index) is tuple else usual(index)
    if bounded:
        with mode:
            index = by_number(index)
    return args if index is args[1] else (args[0], index, *args[2:])


def usual(item: Any) -> Any:
    """An item of an index as rules read it: a number of NumPy's as an int, its array as a tensor, a range as a list."""
    if isinstance(item, np.ndarray):
        return torch.as_tensor(item) if item.ndim else item.item()
    if isinstance(item, (range, tuple)):
        return list(item)
    return item if type(item) in ITEMS or isinstance(item, Tensor) else operator.index(item)


def by_number(index: Any) -> Any:
    """An index whose slices have numbers in the place of tensors."""
    if type(index) is tuple:
        return tuple(map(by_number, index))
    if type(index) is not slice:
        return index
    return slice(*(k if k is None else operator.index(k) for k in (index.start, index.stop, index.step)))


def without_data_of(args: Any, at: int) -> Any:
    """The arguments with an empty tensor in place of the one of which only the type and device are read."""
    if len(args) <= at or not isinstance(args[at], Tensor):
        return args
    return *args[:at], torch.empty(0, dtype=args[at].dtype, device=args[at].device), *args[at + 1 :]
