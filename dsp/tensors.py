"""The tensors inside any value, the memory that they live in, and the autograd nodes behind them."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.private import StorageWeakRef, base_of, is_view, pytree, values_of, version_of

T = TypeVar("T")


class ByTensor(Generic[T]):
    """A value for each of some tensors, found by the tensor itself; it keeps none of them alive."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def get(self, t: Tensor) -> T | None:
        found = self.held.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def __setitem__(self, t: Tensor, value: T) -> None:
        self.held[id(t)] = weakref.ref(t), value


def memory(t: Tensor) -> StorageWeakRef:
    """Whose storage a tensor lives in: tensors that share it are views of each other."""
    with torch._C.DisableTorchFunction():
        try:
            return StorageWeakRef(t.untyped_storage())
        except NotImplementedError:  # sparse
            return StorageWeakRef((values_of(t) if t.layout == torch.sparse_coo else t.values()).untyped_storage())


def overlap(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors of one memory have an element in common, as chunks of one dim have none."""
    try:
        return np.shares_memory(_addresses(a), _addresses(b), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _addresses(t: Tensor) -> Any:
    """An array of bytes in the place of a tensor, on any device; nobody may read it."""
    with torch._C.DisableTorchFunction():
        size, address = t.element_size(), t.data_ptr()
        strides = *(s * size for s in t.stride()), 1
        place = {"shape": (*t.shape, size), "strides": strides, "typestr": "|u1", "data": (address, True), "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=place))


Edge = tuple[Any, int]  # a node of autograd, and which of its results


def edge(t: Tensor) -> Edge | None:
    """Where autograd takes a gradient of this tensor; None if it takes none."""
    with torch._C.DisableTorchFunction(), torch.enable_grad():
        if not t.requires_grad or t.grad_fn is not None:
            return (t.grad_fn, t.output_nr) if t.grad_fn is not None else None
        viewed = t.view_as(t).grad_fn  # a leaf's own node is behind it; views made under no_grad have none
        return known(viewed and viewed.next_functions[0])


def overwritten(t: Tensor) -> Edge | None:
    """Where a gradient came to a view before it was written in place just now: its own node is nobody's any more."""
    with torch._C.DisableTorchFunction():
        write = None if base_of(t) is None else base_of(t).grad_fn
        return known(write.next_functions[0]) if write is not None and write.name().endswith("CopySlices") else None


def known(e: Any) -> Edge | None:
    return e if e is not None and e[0] is not None else None


def leading_to(ends: Iterable[Edge | None]) -> set[Edge]:
    """All that a gradient at some of them comes to on its way to a leaf."""
    reached, waiting = set[Edge](), [e for e in ends if e is not None]
    before: dict[Any, list[Any]] = {}  # of a node those that hand it a gradient
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
    """Counts the writes into a tensor's memory; under inference_mode nothing does."""
    if type(t) is Tensor:
        return 0 if t.is_inference() else version_of(t)
    with NO():
        return 0 if t.is_inference() else version_of(t)


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


def plainly(out: Any) -> Any:
    """Drop the gradient that torch gives to views made under no_grad: it leads nowhere."""
    if torch.is_grad_enabled() or (type(out) is Tensor and not out.requires_grad):
        return out
    if type(out) is tuple or type(out) is list:  # as of chunk; without the pytree, for it is called often
        for t in out:
            if not isinstance(t, Tensor) or t.requires_grad:
                break
        else:
            return out
    own = [t.detach() if t.requires_grad and t.grad_fn is None and is_view(t) else t for t in tensors_in(out)]
    return map_tensors(out, own)


def constants_in(value: Any) -> list[Any]:
    """The numbers among a forward's output: sizes, say."""
    if isinstance(value, Tensor):
        return []
    if _plain_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float, tuple))]


def map_tensors(value: Any, new: Iterable[Any]) -> Any:
    """The same output with its tensors replaced in order."""
    if isinstance(value, Tensor):
        return next(iter(new))
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


class _Copies(TorchFunctionMode):
    """Within it `copy.deepcopy` takes `new(t)` for a copy of a tensor t."""

    def __init__(self, new: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.new = new

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        t, memo = args
        return memo.setdefault(id(t), self.new(t))


def remade(value: Any, new: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with `new(t)` for every tensor t, also of those that objects hold, which are copied for that.

    A call may write into an object, such as a cache of keys, and the next one must find it as it was. Modules, and what
    cannot be copied, stay what they are.
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
