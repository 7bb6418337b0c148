"""The mode that sees the operations between stages; runs, plans and `discover` use subclasses of it.

It classifies each torch function: whether it reads elements at all, is refused, is written out in other functions, or
takes an argument only for its type. The rest are operations, which a subclass handles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsp.core.torch_calls import NUMBERS, GlueError, by_position, instead_of, tensor_args
from dsp.core.torch_traits import UNRUNNABLE, Traits, traits
from dsp.support.private import get_unwrapped, is_functorch_wrapped_tensor, maybe_current_level

INDEXED = frozenset({"getitem", "setitem"})
ITEMS = frozenset({int, slice, type(None), type(...), list, bool})  # the usual items of an index, beside tensors
DIFFERENT = (
    "{} between stages would leave each rank a different tensor, where the ranks of one sequence share every tensor; "
    "call it in a stage, a submodule with a pattern, or use all_reduce(), all_gather() or broadcast()"
)


class Between(TorchFunctionMode):
    """Hands every operation between stages, with its traits, to `operation`. Inside a stage it is `asleep`."""

    asleep = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.asleep:
            return self.in_stage(func, args, kwargs)
        what = traits(func)
        if what.name in UNRUNNABLE or maybe_current_level() is not None:
            self.refuse_unrunnable(what, args, kwargs)
            if maybe_current_level() is not None:
                return self.transformed(func, args, kwargs)
        if what.metadata:
            return self.metadata(func, what, args, kwargs)
        if what.decomposition is not None and (out := what.written_out(self, args, kwargs)) is not None:
            return out
        if what.dtype_arg is not None:
            args = without_data_of(args, what.dtype_arg)
        if what.name in INDEXED:
            args = numbered(args, self)  # a tensor between stages may be sharded
        if kwargs and not NUMBERS.issuperset(map(type, kwargs.values())):
            args, kwargs = by_position(func, args, kwargs)
        return self.operation(func, what, args, kwargs, types)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        """The result of one operation; `types` as `__torch_function__` has them."""
        raise NotImplementedError

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        """The result of a function that reads no elements."""
        return func(*args, **kwargs)

    def in_stage(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call inside a stage, where tensors are local."""
        return func(*args, **kwargs)

    def transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result under a transform of torch.func, where tensors are whole, as in `create_block_mask`."""
        return func(*args, **kwargs)

    def sharded(self, t: Tensor) -> bool:
        """Tell whether a tensor is sharded, or may be in a plan."""
        return False

    def refuse_unrunnable(self, what: Traits, args: Any, kwargs: Any) -> None:
        """Raise GlueError if a function that neither a rule nor a gather can make right gets a sharded tensor."""
        if any(map(self.sharded, suspects(what, args, kwargs))):
            raise unrunnable(what)


def suspects(what: Traits, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensor arguments that may not be sharded, of a function in `UNRUNNABLE` or under a transform of torch.func.

    Under a transform a tensor wraps another one, of another shape.
    """
    for t in tensor_args(args, kwargs):
        hidden = is_functorch_wrapped_tensor(t)
        if hidden or not what.metadata or what.name in UNRUNNABLE:
            yield t
        while is_functorch_wrapped_tensor(t):
            t = get_unwrapped(t)
            yield t


def unrunnable(what: Traits) -> GlueError:
    if what.name.startswith("distributed."):
        return GlueError(DIFFERENT.format(UNRUNNABLE[what.name]))
    instead = instead_of(what.name)
    name = UNRUNNABLE.get(what.name, f"{what.name}() under torch.vmap or another transform of torch.func")
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
