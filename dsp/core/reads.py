"""Reads of numbers in a forward that is recorded, of tensors that were made of inputs or parameters alone.

Masks, lengths and timesteps are so, and every rank has them. What takes more than they do, such as an activation, is
not computed for a plan: the forward then runs without one, for a reason in the user's terms.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from dsp.core.torch_calls import replaced, tensor_args
from dsp.core.torch_traits import op_name
from dsp.support.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    OpOverload,
    pytree,
    schema_of,
)
from dsp.support.source_lines import lines_of
from dsp.support.tensors import ByTensor, Memory, memory

UNKNOWN = object()  # in the place of a tensor of which nobody knows how it was made
UNSET = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class Origin(NamedTuple):
    """The call that made a tensor without data, with such calls, or tensors with data, in the place of tensors."""

    func: OpOverload
    args: Any
    kwargs: Any
    place: int  # among the results of the call


class Unread(Exception):
    """Raised for a tensor whose numbers take more than inputs and parameters."""


class Reads:
    """The numbers that a forward without data reads. longest: elements of the longest input: none that is longer is
    made."""

    def __init__(self) -> None:
        self.origins: ByTensor[Any] = ByTensor()
        self.written: set[Memory] = set()
        self.longest = 1

    def add(self, fake: Tensor, t: Tensor) -> None:
        """Add the tensor for which one without data stands."""
        if type(t) in (Tensor, torch.nn.Parameter) and not t.is_meta and fake.dtype == t.dtype:
            self.origins[fake] = t.detach()
            self.longest = max(self.longest, t.numel())

    def note(self, func: OpOverload, args: Any, kwargs: Any, out: Any) -> None:
        """Note the call that made tensors, and what it wrote into."""
        if schema_of(func).is_mutable:
            marked = [a.alias_info is not None and a.alias_info.is_write for a in schema_of(func).arguments]
            self.written |= {memory(t) for t, write in zip(args, marked) if write and isinstance(t, Tensor)}
            return
        args, kwargs = self.sources(args, kwargs)
        for place, t in enumerate([out] if isinstance(out, Tensor) else pytree.tree_leaves(out)):
            if isinstance(t, FakeTensor):
                self.origins[t] = Origin(func, args, kwargs, place)

    def sources(self, args: Any, kwargs: Any) -> Any:
        """Arguments with sources in the place of tensors."""
        return replaced(args, kwargs, map(self.source, tensor_args(args, kwargs)))

    def source(self, t: Tensor) -> Any:
        """The tensor with data, or the call that makes it."""
        if not isinstance(t, FakeTensor):
            return t.detach() if type(t) is Tensor else UNKNOWN
        origin = self.origins.get(t)
        return UNKNOWN if origin is None or memory(t) in self.written else origin

    def result(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """The result of a call that reads numbers. Raises `Unread` if they are not those of inputs or parameters."""
        args, kwargs = self.sources(args, kwargs)
        with torch.no_grad():
            return self.computed(Origin(func, args, kwargs, 0), {}, whole=True)

    def computed(self, source: Any, known: dict[int, Any], whole: bool = False) -> Any:
        if source is UNKNOWN:
            raise Unread
        if not isinstance(source, Origin):
            return source
        if id(source) not in known:
            func = source.func
            random = torch.Tag.nondeterministic_seeded in func.tags or func.overloadpacket.__name__ in UNSET
            if random or func.overloadpacket in flop_registry:
                raise Unread

            def value(v: Any) -> Any:
                return self.computed(v, known) if v is UNKNOWN or isinstance(v, Origin) else v

            leaf = lambda v: isinstance(v, Origin)  # noqa: E731 (a named tuple is a tree, too)
            leaves, spec = pytree.tree_flatten((source.args, source.kwargs), is_leaf=leaf)
            args, kwargs = pytree.tree_unflatten([*map(value, leaves)], spec)
            known[id(source)] = func(*args, **kwargs)
        out = known[id(source)]
        if whole:
            return out
        t = pytree.tree_leaves(out)[source.place]
        if t.numel() > self.longest:
            raise Unread
        return t


# --- why a forward cannot be recorded ---------------------------------------------------------------------------------

DATA_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)
SAYING = ("FakeTensor", "tensor subclasses", "Can't pickle local object")  # in errors of numpy(), format() and pickle


def reason_of(error: Exception) -> str:
    """The reason, as what the forward does or needs."""
    if place := place_of_read(error):
        return f"reads its data: {place}"
    lines = lines_of(error)
    return f"needs tensors with data: {type(error).__name__}" + (f" at {lines[-1]}" if lines else "")


def place_of_read(error: Exception) -> str:
    """The operation that asked for data, and the line of the model; "" for any other error."""
    return place_of(error) if isinstance(error, DATA_ERRORS) or any(x in str(error) for x in SAYING) else ""


def place_of(error: Exception) -> str:
    """The operation that raised an error, and the line of the model."""
    op, trace, lines = "an operation", error.__traceback__, lines_of(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__torch_function__" and "func" in trace.tb_frame.f_locals:
            op = op_name(trace.tb_frame.f_locals["func"])[0].strip("_") + "()"
        trace = trace.tb_next
    return op + (f" at {lines[-1]}" if lines else "")
