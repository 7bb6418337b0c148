"""The tensors inside any value, the memory that they live in, and the autograd nodes behind them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsp.private import StorageWeakRef, pytree


def memory(t: Tensor) -> StorageWeakRef:
    """Whose storage a tensor lives in: tensors that share it are views of each other."""
    with torch._C.DisableTorchFunction():
        try:
            return StorageWeakRef(t.untyped_storage())
        except NotImplementedError:  # sparse
            return StorageWeakRef((t._values() if t.layout == torch.sparse_coo else t.values()).untyped_storage())


def node(t: Tensor) -> Any:
    """Where autograd takes a gradient of this tensor; None if it takes none."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        if not t.requires_grad or t.grad_fn is not None:
            return t.grad_fn
        viewed = t.view_as(t).grad_fn  # a leaf's own node is behind it; views made under no_grad have none
        return viewed and viewed.next_functions[0][0]


def overwritten(t: Tensor) -> Any:
    """Where a gradient came to a view before it was written in place just now: its own node is nobody's any more."""
    with torch._C.DisableTorchFunction():
        write = None if t._base is None else t._base.grad_fn
        return write.next_functions[0][0] if write is not None and write.name().endswith("CopySlices") else None


def leading_to(ends: Iterable[Any]) -> set[Any]:
    """All nodes of autograd that a gradient at some of them comes to."""
    found, waiting = set[Any](), [n for n in ends if n is not None]
    while waiting:
        n = waiting.pop()
        if n not in found:
            found.add(n)
            waiting += [n for n, _ in n.next_functions if n is not None]
    return found


def version(t: Tensor) -> int:
    """Counts the writes into a tensor's memory; under inference_mode nothing does."""
    with NO():
        return 0 if t.is_inference() else t._version


def _plain_dataclass(value: Any) -> bool:
    """A dataclass that pytree takes for a leaf."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a forward's output, in order: in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _plain_dataclass(leaf):
            found += tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return found


def constants_in(value: Any) -> list[Any]:
    """The numbers among a forward's output: sizes, say."""
    if isinstance(value, Tensor):
        return []
    if _plain_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float, tuple))]


def map_tensors(value: Any, new: Iterable[Any]) -> Any:
    """The same output with its tensors replaced in order."""
    return pytree.tree_map(partial(_replaced, iter(new)), value)


def _replaced(new: Iterator[Any], v: Any) -> Any:
    # no function within one: it would hold itself, and the tensors until the garbage is collected
    if isinstance(v, Tensor):
        return next(new)
    if _plain_dataclass(v):
        clone = copy.copy(v)
        for f in dataclasses.fields(v):
            object.__setattr__(clone, f.name, pytree.tree_map(partial(_replaced, new), getattr(v, f.name)))
        return clone
    return v


NO = torch._C.DisableTorchFunctionSubclass
