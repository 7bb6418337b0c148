"""The tensors inside any value, the memory that they live in, and the autograd nodes behind them."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial, partialmethod
from itertools import islice
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.support.private import BELOW, StorageWeakRef, pytree, values_of, version_of

T = TypeVar("T")


class ByTensor(Generic[T]):
    """A dict from tensors, by identity, to values. It does not keep the tensors alive."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, t: Tensor) -> T | None:
        entry = self.entries.get(id(t))
        return entry[1] if entry is not None and entry[0]() is t else None

    def __setitem__(self, t: Tensor, value: T) -> None:
        self.entries[id(t)] = weakref.ref(t), value

    def items(self) -> Iterator[tuple[Tensor, T]]:
        """The tensors that are alive, with their values."""
        return ((t, value) for ref, value in list(self.entries.values()) if (t := ref()) is not None)


class Memory(StorageWeakRef):
    """A weak reference to a storage, which holds the number of it: a copy by attributes would free it twice."""

    def __eq__(self, other: object) -> bool:  # torch's own takes anything for one of its kind
        return isinstance(other, Memory) and bool(super().__eq__(other))

    __hash__ = StorageWeakRef.__hash__

    def __deepcopy__(self, memo: Any) -> Memory:
        return self

    __copy__ = partialmethod(__deepcopy__, None)


def memory(t: Tensor) -> Memory:
    """The storage of a tensor: tensors with equal storages share memory."""
    with torch._C.DisableTorchFunction():
        try:
            return Memory(t.untyped_storage())
        except NotImplementedError:  # sparse
            return Memory((values_of(t) if t.layout == torch.sparse_coo else t.values()).untyped_storage())


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors that share a storage have an element in common. Two chunks of one dim have none."""
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _addresses(t: Tensor) -> Any:
    """A numpy array with the places of a tensor in its storage, as addresses. Its bytes must not be read."""
    with torch._C.DisableTorchFunction():
        size = t.element_size()
        address = 4096 + t.storage_offset() * size
        strides = *(s * size for s in t.stride()), 1
        place = {"shape": (*t.shape, size), "strides": strides, "typestr": "|u1", "data": (address, True), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=place))


Edge = tuple[Any, int]  # an autograd node and the number of one of its results


def edge(t: Tensor) -> Edge | None:
    """The autograd edge to which the gradient of this tensor goes; None if it has no gradient."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        if not t.requires_grad or t.grad_fn is not None:
            return (t.grad_fn, t.output_nr) if t.grad_fn is not None else None
        with BELOW():  # no operation of a forward that is recorded
            viewed = t.view_as(t).grad_fn  # leads to a leaf's node; a view made under no_grad has none
        return known(viewed and viewed.next_functions[0])


def known(e: Any) -> Edge | None:
    return e if e is not None and e[0] is not None else None


def leading_to(ends: Iterable[Edge | None]) -> set[Edge]:
    """The edges through which a gradient that enters at `ends` passes on its way to a leaf."""
    reached, waiting = set[Edge](), [e for e in ends if e is not None]
    before: dict[Any, list[Any]] = {}  # by node, the nodes that hand it a gradient
    while waiting:
        e = waiting.pop()
        if e not in reached:
            reached.add(e)
            for node, k in e[0].next_functions:
                if node is not None:
                    before.setdefault(node, []).append(e[0])
                    waiting.append((node, k))
    leading, ahead = set[Any](), [node for node, _ in reached if not node.next_functions]
    while ahead:
        node = ahead.pop()
        if node not in leading:
            leading.add(node)
            ahead += before.get(node, [])
    return {e for e in reached if e[0] in leading}


def version(t: Tensor) -> int:
    """The number of writes into a tensor's memory; 0 under inference_mode, which does not count them."""
    if type(t) is Tensor:
        return 0 if t.is_inference() else version_of(t)
    with NO():
        return 0 if t.is_inference() else version_of(t)


def _plain_dataclass(value: Any) -> bool:
    """Tell whether a value is a dataclass, which pytree would take for a leaf."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


FLAT = frozenset({list, tuple})  # pytree takes ten times as long for one of tensors alone


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, in order: inside lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) in FLAT and len(tensors := [t for t in value if isinstance(t, Tensor)]) == len(value):
        return tensors
    tensors = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _plain_dataclass(leaf):
            tensors += tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return tensors


def constants_in(value: Any) -> list[Any]:
    """The numbers in a value that are in no tensor, such as sizes that a forward returns."""
    if isinstance(value, Tensor):
        return []
    if _plain_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float, tuple))]


def map_tensors(value: Any, new: Iterable[Any]) -> Any:
    """The value with its tensors replaced, in order."""
    if isinstance(value, Tensor):
        return next(iter(new))
    if type(value) in FLAT and len([t for t in value if isinstance(t, Tensor)]) == len(value):
        return type(value)(islice(new, len(value)))
    return pytree.tree_map(partial(_replaced, iter(new)), value)


def _replaced(new: Iterator[Any], v: Any) -> Any:
    # a nested function would hold itself, and so the tensors, until the garbage collector runs
    if isinstance(v, Tensor):
        return next(new)
    if _plain_dataclass(v):
        clone = copy.copy(v)
        for f in dataclasses.fields(v):
            object.__setattr__(clone, f.name, pytree.tree_map(partial(_replaced, new), getattr(v, f.name)))
        return clone
    return v


class _Copies(TorchFunctionMode):
    """A mode in which `copy.deepcopy` uses `new(t)` as the copy of a tensor t."""

    def __init__(self, new: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.new = new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        t, memo = args
        return memo.setdefault(id(t), self.new(t))


def remade(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """The arguments with `new(t)` in place of every tensor t, also inside objects, which are copied.

    A call may write into an object, such as a cache of keys, and the next call must find it unchanged. Modules, and
    objects that cannot be copied, are passed as they are.
    """
    memo: dict[int, Any] = {}

    def leaf(v: Any) -> Any:
        if isinstance(v, Tensor):
            return new(v)
        if isinstance(v, nn.Module):
            return v
        try:
            with _Copies(new):
                return copy.deepcopy(v, memo)
        except Exception:
            return v

    return pytree.tree_map(leaf, value)


NO = torch._C.DisableTorchFunctionSubclass


def is_shard(t: Any) -> bool:
    """Tell whether a tensor between stages is one rank's part of a larger one."""
    return getattr(t, "cut", None) is not None


def as_dtensor(t: Any) -> Any:
    """The DTensor for which a tensor between stages stands, or the tensor if it is replicated; other values as they
    are."""
    convert = getattr(t, "as_dtensor", None)
    return t if convert is None else convert()
