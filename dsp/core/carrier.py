"""The tensor between stages: this rank's part, which carries its place in the record of the forward.

All that a run needs to go on is on the tensors, so a forward can be left and entered anywhere: an activation checkpoint
that runs a part of it again, in whichever thread, finds the same decisions without any code for it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from dsp.comm.gradients import covered_exit
from dsp.comm.moves import gather_local
from dsp.comm.observers import RUNNING
from dsp.core.arguments import INDEXED, numbered, without_data_of
from dsp.core.record import Layout, Record, Ref
from dsp.core.torch_calls import NUMPY_NAMES, TENSORLESS, GlueError, usual_call
from dsp.core.torch_traits import TELLING, traits_of
from dsp.support.private import GRAD_SWITCH, FakeTensor, OpOverload, below_autograd, storage_id
from dsp.support.tensors import memory, tensors_in, version

LOCAL = torch._C.DisableTorchFunctionSubclass
INLINE = nullcontext()  # functions that are written out in others: their operations come here one by one


class Carrier(Tensor):
    """This rank's part of a tensor, or all of it.

    record: of the forward; ref: this tensor in the record; cut: how it is sharded (None: replicated); base: the carrier
    of which it is a view (None: it is no view); copies: of a base, the same numbers in other layouts, each made once;
    version: of the base when its copies were made; origin: of a detached tensor, the base whose copies it reads too;
    turns: of nodes with one key, which is next; family, siblings: the tensors that share memory on one device, and of
    these those that have no element in common; index: of `x[index]`, which may be written back by
    ``x[index] = value``; now: the tensor since it was written in another layout (`dsp.core.writes`).
    """

    record: Record
    ref: Ref
    cut: Layout
    base: Carrier | None = None
    copies: dict[Layout, Tensor] | None = None
    version: int = 0
    origin: weakref.ref[Carrier] | None = None
    turns: dict[Any, Any] | None = None
    family: list[weakref.ref[Carrier]] | None = None
    siblings: Any = None
    index: Any = None
    now: Carrier | None = None
    __module__ = "torch"  # by which opt_einsum and others choose the library that computes on a tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and below_autograd():  # where dispatch modes see parts
            arrive_all(args, kwargs)
            with LOCAL():
                return func(*args, **kwargs)
        traits = traits_of(func)
        if traits.metadata:
            if traits.name in TELLING:
                arrive_all(args, kwargs)
            read = READERS.get(func)
            if read is not None and isinstance(args[0], Carrier):
                return read(*args, **kwargs)
            with LOCAL():
                return func(*args, **kwargs)
        if traits.name == "detach":  # a checkpoint detaches what it saves, in backward too
            return detach(args[0])
        if kwargs and not (NUMPY_NAMES.keys().isdisjoint(kwargs) and TENSORLESS.issuperset(map(type, kwargs.values()))):
            args, kwargs = usual_call(func, args, kwargs)
        if traits.decomposition is not None and (out := traits.written_out(INLINE, args, kwargs)) is not None:
            return out
        if traits.dtype_arg is not None:
            args = without_data_of(args, traits.dtype_arg)
        if traits.name in INDEXED:
            args = numbered(args, INLINE)
        first = first_carrier((*args, *kwargs.values()))
        if first is None:  # only its type was read
            return func(*args, **kwargs)
        return first.record.driver.operation(func, traits, args, kwargs)

    # --- to code that is not a forward: the DTensor for which it stands ---

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.record.driver.axis.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (Replicate() if self.cut is None else self.cut.placement(),)

    def as_dtensor(self) -> Tensor:
        """The DTensor, or the tensor if it is replicated."""
        RUNNING.set(None)  # what the caller does with it is of no node
        if self.cut is None:
            return numbers(self)
        return self.record.driver.axis.wrap(numbers(self), self.cut, self.ref.shape, guard=True)

    def to_local(self, **kwargs: Any) -> Tensor:
        return self.as_dtensor().to_local(**kwargs) if kwargs else numbers(self)  # type: ignore[attr-defined]

    def full_tensor(self, **kwargs: Any) -> Tensor:
        if self.cut is None:
            return numbers(self)
        if kwargs:
            return self.as_dtensor().full_tensor(**kwargs)  # type: ignore[attr-defined]
        return covered_exit(gather_local(numbers(self), self.cut, self.ref.shape, self.record.driver.axis))

    def redistribute(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.as_dtensor().redistribute(*args, **kwargs)  # type: ignore[attr-defined]


def first_carrier(values: Any) -> Carrier | None:
    """The first carrier among values and in lists of them."""
    for v in values:
        if isinstance(v, Carrier):
            return v
        if type(v) in (list, tuple) and (t := first_carrier(v)) is not None:
            return t
    return None


def carry(record: Record, local: Tensor, ref: Ref, cut: Layout, base: Carrier | None = None) -> Carrier:
    """A carrier of a local tensor, which stays what it is."""
    with torch._C.DisableTorchFunction():
        if type(local) is Tensor or isinstance(local, nn.Parameter):
            t = local.as_subclass(Carrier)
        else:  # a tensor without data
            t = local.view_as(local)  # type: ignore[assignment]
            t.__class__ = carrier_of(type(t))
    t.record, t.ref, t.cut, t.base = record, ref, cut, base
    return t


def carry_writable(record: Record, local: Tensor, ref: Ref, cut: Layout, base: Carrier | None = None) -> Carrier:
    """The same for a result of a stage in no_grad. It may be an argument of the stage, whose gradient it keeps; and
    torch allows no later write of something with a gradient into a view that was made in no_grad."""
    grad = torch.is_grad_enabled()
    GRAD_SWITCH(True)
    try:
        return carry(record, local, ref, cut, base)
    finally:
        GRAD_SWITCH(grad)


def claim(record: Record, local: Tensor, ref: Ref, cut: Layout, base: Carrier | None = None) -> Carrier:
    """The same for a new tensor, to which nothing else refers: in place."""
    if type(local) is Tensor:
        local.__class__ = Carrier
    elif type(local) is FakeTensor and cut is None:  # of a part torch would read the global shape
        local.__class__ = carrier_of(FakeTensor)
    else:
        return carry(record, local, ref, cut, base)
    local.record, local.ref, local.cut, local.base = record, ref, cut, base  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def one_for_each(tensors: Sequence[Tensor], carriers: Sequence[Tensor]) -> list[Tensor]:
    """The carriers of tensors; of one that was returned twice the first."""
    first: dict[int, Tensor] = {}
    return [first.setdefault(id(t), c) for t, c in zip(tensors, carriers)]


@cache
def carrier_of(part: type) -> type:
    """The class of carriers of tensors of another class, such as fake tensors."""
    return type(f"Carrier{part.__name__}", (Carrier, part), {"__module__": "torch"})


def plain(t: Tensor) -> Tensor:
    """The local part as a plain tensor, connected by autograd."""
    if not isinstance(t, Carrier):
        return t
    with torch._C.DisableTorchFunction():
        if type(t) is Carrier:
            return t.as_subclass(Tensor)
        return t.view_as(t) if t.now is None else plain(t.now)


def numbers(t: Carrier) -> Tensor:
    """The same, once its numbers have arrived."""
    if t.record.in_flight:
        arrive(t.record, [t])
    return plain(t)


def arrive(record: Record, tensors: Iterable[Tensor] | None = None) -> None:
    """Wait for the numbers of these tensors, or of all, if they are in flight."""
    for place in [*record.in_flight] if tensors is None else map(memory, tensors):
        wait = record.in_flight.pop(place, None)
        if wait is not None:
            with torch._C.DisableTorchFunction():  # waiting is not an operation of the model
                wait()


def arrive_all(args: Any, kwargs: Any) -> None:
    """Wait for the numbers of all carriers among the arguments of a function."""
    for t in tensors_in((args, kwargs)):
        if isinstance(t, Carrier) and t.record.in_flight:
            arrive(t.record, [t])


def base_of(t: Carrier) -> Carrier:
    return t if t.base is None else t.base


def detach(t: Carrier) -> Carrier:
    """The same numbers without gradient. The two are one tensor in a plan, so they share turns and copies."""
    base, t.turns = shared_base(t), t.turns or {"run": None}
    with LOCAL():
        detached = carry(t.record, plain(t).detach(), t.ref, t.cut)
        if base.ref is t.ref and base.copies:  # the base may be gone when they are read
            detached.copies = {cut: copy.detach() for cut, copy in base.copies.items()}
            detached.version = base.version
    detached.origin, detached.turns = weakref.ref(base), t.turns
    link(t, detached)
    t.ref.detached = True
    return detached


def shared_base(t: Carrier) -> Carrier:
    """The base whose copies a tensor reads: of one detached from a base that still exists, that base.

    A detached tensor that asks for a gradient has copies through which it gets one.
    """
    base = t if t.base is None else t.base
    origin = None if base.origin is None else base.origin()
    if origin is None or origin.record is not base.record or origin.ref.base is not base.ref.base:
        return base
    with LOCAL():
        return base if base.requires_grad else origin


def link(source: Carrier, result: Carrier, siblings: Any = None) -> None:
    """Note that two tensors share memory on one device. siblings: identifies results that have no element in common."""
    if source.family is None:
        source.family = [weakref.ref(source)]
    if result.family is None:
        result.family, result.siblings = source.family, siblings
        source.family.append(weakref.ref(result))


def copies_of(base: Carrier) -> dict[Layout, Tensor]:
    """The copies of a base that are up to date."""
    now = version(base)
    if base.copies is None or base.version != now:
        base.copies, base.version = {}, now
    return base.copies


def described(t: Carrier, *_: Any, **__: Any) -> str:
    if t.cut is None:
        return repr(numbers(t))
    rank = t.record.driver.axis.rank
    return f"{numbers(t)!r}, the part of rank {rank} of {[*t.ref.shape]} sharded along dim {t.cut.dim}"


def formatted(t: Carrier, spec: str) -> str:
    """``f"{x:.2f}"``: the number, if the tensor is one."""
    return described(t) if t.ref.shape or t.cut is not None else format(plain(t), spec)


def address(t: Carrier) -> int:
    """The address of this rank's part. An empty part has none of its own: its storage's identity takes the place."""
    part = plain(t)
    return part.data_ptr() or storage_id(part.untyped_storage())


def new_tensor(t: Carrier, *args: Any, **kwargs: Any) -> Tensor:
    """Raises GlueError for numbers of a sharded tensor."""
    source = first_carrier((*args, *kwargs.values()))
    if source is not None and source.cut is not None:
        raise GlueError("new_tensor() would copy only this rank's part; write y.detach().clone()")
    with LOCAL():
        return plain(t).new_tensor(*args, **kwargs)


def on_full_shape(t: Carrier, name: str, *args: Any, **kwargs: Any) -> Any:
    """The result of a method on a contiguous tensor of the global shape."""
    return getattr(torch.empty(t.ref.shape, device="meta"), name)(*args, **kwargs)


def refuse_backward(*_: Any, **__: Any) -> None:
    """Raise GlueError for a backward pass in a forward: it would start on this rank's part of a tensor."""
    raise GlueError("backward() inside a parallelized forward does not work; call it on the loss outside")


READERS: dict[Any, Any] = {
    Tensor.backward: refuse_backward,
    Tensor.shape.__get__: lambda t: t.ref.shape,  # type: ignore[attr-defined]
    Tensor.size: lambda t, dim=None: t.ref.shape if dim is None else t.ref.shape[dim],
    Tensor.ndim.__get__: lambda t: len(t.ref.shape),  # type: ignore[attr-defined]
    Tensor.dim: lambda t: len(t.ref.shape),
    Tensor.ndimension: lambda t: len(t.ref.shape),
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), lambda t: math.prod(t.ref.shape)),
    Tensor.nbytes.__get__: lambda t: t.ref.nbytes,  # type: ignore[attr-defined]
    Tensor.is_same_size: lambda t, other: t.ref.shape == other.shape,
    Tensor.data_ptr: address,
    Tensor.new_tensor: new_tensor,
    Tensor.__len__: lambda t: t.ref.shape[0],
    Tensor.stride: lambda t, *a, **k: on_full_shape(t, "stride", *a, **k),
    Tensor.is_contiguous: lambda t, *a, **k: on_full_shape(t, "is_contiguous", *a, **k),
    Tensor.__repr__: described,
    Tensor.__format__: formatted,
}
