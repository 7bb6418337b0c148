"""Exchanges among ranks: what each sends to each, how that is packed, and the one way in which all of them run.

An `ExchangePlan` says how many elements of a flat tensor a rank sends to each rank, and how many come from each; it
packs tensors into the one and unpacks the other. Every collective of DSP with sizes of its own is one: `SwitchPlan`
here, gathers and sums in `collectives`, rows of neighbours in `halo`, dealt rows in `balanced_rows`. A plan may be made
of others: `Packed` sends one in a format, `Together` several in one call. `run` runs it, by the way of its group
(`dsp.comm.node_routes`); the bytes that it sends follow from its counts (`dsp.comm.traffic_formulas`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.node_routes import DIRECT, legs_of, ways_of
from dsp.comm.observers import notify
from dsp.comm.wire import SAME, format_of
from dsp.planner import chunk_sizes
from dsp.support.private import _resolve_process_group, all_to_all, is_view

if TYPE_CHECKING:
    from dsp.comm.formats import Format


def ranks(group: str) -> tuple[int, int]:
    """(size, rank) of a process group by name."""
    pg = _resolve_process_group(ways_of(group)[0])  # type: ignore[arg-type]
    return pg.size(), pg.rank()


# the dtypes that every backend can send; others (bool, complex, float8) travel as bytes
CARRIED = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
})  # fmt: skip


def as_sent(x: Tensor) -> tuple[Tensor, int]:
    """A dense tensor in a dtype that a backend can send, and how many of its elements make one element of x."""
    if x.dtype in CARRIED:
        return x.resolve_neg(), 1
    return x.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8), x.element_size()


def order_of(x: Tensor) -> tuple[int, ...] | None:
    """The dims of a tensor from the outermost in memory to the innermost; None if that is their own order."""
    stride, dims = list(x.stride()), range(x.ndim)
    if x.is_contiguous():
        return None
    for d in reversed(dims):
        if x.shape[d] == 1 and stride[d] == 0:  # strides as attention returns them: the dim may stand anywhere
            stride[d] = stride[d + 1] * x.shape[d + 1] if d + 1 < x.ndim else 1
    if 0 in stride:
        return None
    order = tuple(sorted(dims, key=stride.__getitem__, reverse=True))
    return None if order == tuple(dims) else order


@lru_cache(maxsize=4096)
def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


def dense(x: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """The tensor, dense in memory with its dims in this order: a view that one device can take of the result is then a
    view here too."""
    if order is None:
        return x.contiguous()
    return x.permute(order).contiguous().permute(inverse(order))


def empty(x: Tensor, shape: Sequence[int], order: tuple[int, ...] | None) -> Tensor:
    """A new tensor of this shape, in the dtype of x, with its dims in memory in this order."""
    return x.new_empty(shape) if order is None else x.new_empty([shape[d] for d in order]).permute(inverse(order))


def like(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A new tensor of this shape, with its dims in memory in the order of those of x."""
    return empty(x, shape, order_of(x))


def alone(out: Tensor) -> Tensor:
    """A result of an op, not as a view: a view made inside an op may not be written in place outside.

    Dims of size 1 get the strides of a new contiguous tensor: with other valid ones some of torch's kernels are wrong
    (the backward of batch norm).
    """
    if not is_view(out):
        return out
    stride = () if out.is_contiguous() else out.stride()
    return out.new_empty(0).set_(out.untyped_storage(), out.storage_offset(), out.shape, stride)


class ExchangePlan:
    """The counts of what a rank sends to each rank of a group, and of what comes: elements of two flat tensors.

    group: the name of a process group, behind which the ways of its exchanges may stand. If it has some, `total` is
    what all ranks send, and `to_each` knows what every rank of this node does; a large exchange gains by `total`, too.
    rows: what the ranks of a node send to each, one rank after the other, for an exchange that is nothing but counts.
    """

    itemsize = 0  # bytes of an element as sent, if that is not one of the tensor

    def __init__(
        self, group: str, in_splits: Sequence[int], out_splits: Sequence[int], total: int = 0, rows: Sequence[int] = ()
    ) -> None:
        self.group, self.in_splits, self.out_splits = group, list(in_splits), list(out_splits)
        self.total, self.rows = total, rows

    def to_each(self, rank: int) -> list[int]:
        """The number of elements that a rank sends to each; those of all ranks are `total`."""
        n = len(self.in_splits)
        return [*self.rows[rank % (len(self.rows) // n) * n :][:n]]

    def way(self, itemsize: int) -> str:
        """The way that the exchange goes, with elements of so many bytes."""
        ways = ways_of(self.group)[1]
        return DIRECT if ways is None else ways.way(self.total * itemsize)

    def pack(self, x: Any) -> Tensor:
        """The flat tensor to send."""
        raise NotImplementedError

    def unpack(self, received: Tensor) -> Any:
        """The result, of the flat tensor that arrived."""
        raise NotImplementedError

    def from_each(self, parts: Sequence[Tensor]) -> Any:
        """The result, of the flat tensors from each rank."""
        return self.unpack(torch.cat([*parts]))

    # a format between the numbers and what is sent: none, here

    def closed(self, flat: Tensor) -> Tensor:
        """A flat tensor of numbers as it is sent."""
        return flat

    def empty(self, received: Tensor) -> Tensor:
        """The flat tensor for the numbers that arrive: the received one, if it holds them as they are."""
        return received

    def read(self, received: Tensor, into: Tensor) -> Tensor:
        """The numbers that arrived, in the flat tensor that is for them."""
        return received


class InUnits(ExchangePlan):
    """An exchange in other units, such as bytes; `units` makes them of a count of elements."""

    def __init__(self, plan: ExchangePlan, units: Callable[[int], int]) -> None:
        super().__init__(plan.group, map(units, plan.in_splits), map(units, plan.out_splits), units(plan.total))  # type: ignore[arg-type]
        self.plan, self.units = plan, units

    def to_each(self, rank: int) -> list[int]:
        return [*map(self.units, self.plan.to_each(rank))]


class Bytes(InUnits):
    """An exchange of which the bytes are sent, together with those of other dtypes."""

    itemsize = 1

    def __init__(self, plan: ExchangePlan, dtype: torch.dtype) -> None:
        super().__init__(plan, dtype.itemsize.__mul__)
        self.dtype = dtype

    def pack(self, x: Any) -> Tensor:
        return self.plan.pack(x).resolve_conj().resolve_neg().view(torch.uint8)

    def unpack(self, received: Tensor) -> Any:
        return self.plan.unpack(received.view(self.dtype))


class Packed(InUnits):
    """An exchange that travels in a format."""

    itemsize = 1

    def __init__(self, plan: ExchangePlan, form: Format, dtype: torch.dtype) -> None:
        super().__init__(plan, form.nbytes)
        self.form, self.dtype = form, dtype

    def closed(self, flat: Tensor) -> Tensor:
        seed = (torch.initial_seed() + (ranks(self.group)[1] << 32)) % 2**62
        return self.form.pack(flat, self.plan.in_splits, seed)

    def empty(self, received: Tensor) -> Tensor:
        return received.new_empty(sum(self.plan.out_splits), dtype=self.dtype)

    def read(self, received: Tensor, into: Tensor) -> Tensor:
        return self.form.unpack(received, self.plan.out_splits, into)

    def pack(self, x: Any) -> Tensor:
        return self.closed(self.plan.pack(x))

    def unpack(self, received: Tensor) -> Any:
        return self.plan.unpack(self.read(received, self.empty(received)))


def in_format(plan: ExchangePlan, wire: str, dtype: torch.dtype) -> ExchangePlan:
    """The exchange as it travels in the format of this name, which may be none for the dtype."""
    form = None if wire == SAME else format_of(wire, dtype)
    return plan if form is None else Packed(plan, form, dtype)


class Together(ExchangePlan):
    """Several exchanges in one: each rank gets its blocks of all, one after the other."""

    def __init__(self, plans: Sequence[Any]) -> None:
        self.plans = plans
        ins, outs = ([*zip(*splits)] for splits in zip(*((p.in_splits, p.out_splits) for p in plans)))
        super().__init__(plans[0].group, [*map(sum, ins)], [*map(sum, outs)], sum(p.total for p in plans))
        self.rooms, self.parts = [s for sizes in ins for s in sizes], [s for sizes in outs for s in sizes]
        self.itemsize = plans[0].itemsize

    def to_each(self, rank: int) -> list[int]:
        return [*map(sum, zip(*(p.to_each(rank) for p in self.plans)))]

    def pack(self, xs: Sequence[Any]) -> Tensor:
        blocks = [plan.pack(x).split(plan.in_splits) for plan, x in zip(self.plans, xs)]
        return torch.cat([block for to_rank in zip(*blocks) for block in to_rank])

    def unpack(self, received: Tensor) -> list[Any]:
        parts, count = received.split(self.parts), len(self.plans)
        return [plan.from_each(parts[i::count]) for i, plan in enumerate(self.plans)]


class Among(ExchangePlan):
    """An exchange among some ranks of a group; the other ranks exchange among themselves in the same call."""

    def __init__(self, plan: ExchangePlan, among: Sequence[int]) -> None:
        n, _ = ranks(plan.group)
        if any(a >= b for a, b in pairwise(among)):
            raise ValueError(f"expected ranks in ascending order, as their blocks arrive, got {list(among)}")
        super().__init__(plan.group, [0] * n, [0] * n)
        self.pack, self.unpack = plan.pack, plan.unpack  # type: ignore[method-assign]
        for i, peer in enumerate(among):
            self.in_splits[peer], self.out_splits[peer] = plan.in_splits[i], plan.out_splits[i]


# ------------------------------------------------------------------------------------------------------------- to run


@dataclass(slots=True)
class Launched:
    """An exchange under way: works of its current leg, and `pending` legs, each to begin when that before arrived."""

    out: Tensor
    dtype: torch.dtype
    works: list[Any]
    pending: int = 1
    legs: Any = None  # an iterator of works

    def go_on(self) -> None:
        """Begin the next leg, if there is one."""
        if self.pending > 1:
            for work in self.works:
                work.wait()
            self.pending, self.works = self.pending - 1, next(self.legs)

    def arrived(self) -> Tensor:
        """Wait for all legs, and return the flat tensor that arrived."""
        while self.pending > 1:
            self.go_on()
        for work in self.works:
            work.wait()
        return self.out if self.out.dtype == self.dtype else self.out.view(self.dtype)


def launched(send: Tensor, plan: ExchangePlan) -> Launched:
    """Begin an exchange. Wait for it in the kernel that began it."""
    flat, width = as_sent(send)
    if width > 1:
        plan = InUnits(plan, width.__mul__)
    name, ways = ways_of(plan.group)
    out, pg = flat.new_empty(sum(plan.out_splits)), _resolve_process_group(name)  # type: ignore[arg-type]
    if ways is None or (way := plan.way(flat.element_size())) == DIRECT:
        return Launched(out, send.dtype, all_to_all(out, flat, plan.out_splits, plan.in_splits, pg, plan.total))
    count, legs = legs_of(way, flat, out, plan.out_splits, plan.to_each, pg, ways.node)
    return Launched(out, send.dtype, next(legs), count, legs)


def run(plan: ExchangePlan, x: Any) -> Any:
    """The result of an exchange."""
    return plan.unpack(launched(plan.pack(x), plan).arrived())


class UnderWay(NamedTuple):
    """An exchange whose received tensor, made already, must be waited for."""

    plan: ExchangePlan
    received: Tensor

    @classmethod
    def start(cls, plan: ExchangePlan, send: Tensor) -> UnderWay:
        flat, width = as_sent(send)
        counts = plan if width == 1 else InUnits(plan, width.__mul__)
        splits, (name, ways) = (counts.out_splits, counts.in_splits), ways_of(plan.group)
        in_legs = ways is not None and counts.way(flat.element_size()) != DIRECT
        if not in_legs and (type(flat) is not Tensor or torch.compiler.is_compiling()):  # compilers know torch's own op
            notify("start", flat, *splits, name, 0, ())
            out = torch.ops._c10d_functional.all_to_all_single.default(flat, *splits, name)
        else:
            mates = ways.mates(ranks(name)[1]) if ways is not None and in_legs else ()
            rows = [size for mate in mates for size in counts.to_each(mate)]
            out = torch.ops.dsp.start(flat, *splits, plan.group if in_legs else name, counts.total, rows)
        return cls(plan, out if flat.dtype == send.dtype else out.view(send.dtype))

    def arrived(self) -> Tensor:
        """Wait for the received tensor, and return it."""
        return wait(self.received)


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)


# --------------------------------------------------------------------------------------------------------- the switch


class SwitchPlan(ExchangePlan):
    """Sizes and block order of one switch on one rank: pack, exchange, unpack.

    A block is what one rank sends to another: its own part of `src`, the other's part of `dst`, all of the rest. If
    `dst` is the outermost dim, the blocks already lie in order, and sending copies nothing. Otherwise blocks are packed
    with `src` first, so that received blocks join without a copy. With batch 1 a switch costs one copy either way. The
    order depends only on global sizes, since strides may differ from rank to rank. The result has its dims in memory
    in `dim_order` (see `order_of`). A part of a joined dim is a part of each of its pieces.
    """

    def __init__(
        self, shape: tuple[int, ...], src: int, dst: int, src_parts: Sequence[int], dst_parts: Sequence[int], rank: int,
        dim_order: tuple[int, ...] | None = None, group: str = "",
    ) -> None:  # fmt: skip
        self.shape, self.src, self.dst, self.dst_parts, self.dim_order = shape, src, dst, list(dst_parts), dim_order
        self.src_pieces: list[tuple[int, ...]] = []  # for each piece of src, the part of each rank, if src is joined
        self.dst_pieces: list[tuple[int, ...]] = []  # the same of dst
        n, src_size = len(src_parts), sum(src_parts)
        src_part, dst_part = src_parts[rank], dst_parts[rank]
        if (shape[src], shape[dst]) != (src_part, sum(dst_parts)):
            raise RuntimeError(
                f"on rank {rank} the tensor has length {shape[src]} along dim {src} and {shape[dst]} along dim {dst}; "
                f"expected {src_part} along dim {src} (this rank's part of {src_size}) and {sum(dst_parts)} along dim "
                f"{dst} (all of it)"
            )
        unit = math.prod(s for d, s in enumerate(shape) if d not in (src, dst))
        goes, comes = [src_part * d * unit for d in self.dst_parts], [s * dst_part * unit for s in src_parts]
        super().__init__(group, goes, comes, src_size * shape[dst] * unit, [part * unit for part in src_parts])

        def out(src_size: int) -> list[int]:
            return [src_size if d == src else dst_part if d == dst else s for d, s in enumerate(shape)]

        self.dst_leads = all(s == 1 for s in out(src_size)[:dst])
        self.received = [out(s) for s in src_parts]
        self.joined = [src_size, *(s for d, s in enumerate(out(src_size)) if d != src)]
        self.shapes = self.received if self.dst_leads else [[s, *self.joined[1:]] for s in src_parts]  # as received
        # equal parts of dst: a view (n, dst_part) of it, and the order that puts n and src first
        self.even = len(set(self.dst_parts)) == 1
        self.counted = [*shape[:dst], n, dst_part, *shape[dst + 1 :]]
        front = (dst,) if self.dst_leads else (dst, src + (src > dst))
        self.order = (*front, *(d for d in range(len(shape) + 1) if d not in front))

    def to_each(self, rank: int) -> list[int]:
        return [self.rows[rank] * part for part in self.dst_parts]

    def blocks(self, x: Tensor) -> Any:
        """Views of the blocks for each rank, in the order of sending; equal blocks in one tensor, ranks first."""
        if self.even:
            return x.view(self.counted).permute(self.order)
        return self.leading(x).split(self.dst_parts, self.block_dim)

    def leading(self, x: Tensor) -> Tensor:
        """A view of a tensor with its dims in the order of a block."""
        return x if self.dst_leads else x.movedim(self.src, 0)

    @property
    def block_dim(self) -> int:
        """The place of `dst` in the order of a block."""
        return self.dst if self.dst_leads else self.dst + (self.dst < self.src)

    def pack(self, x: Tensor) -> Tensor:
        if self.dst_pieces:
            return self.pack_pieces(x)
        blocks = x if self.dst_leads else self.blocks(x)
        if isinstance(blocks, Tensor):
            return blocks.reshape(-1).contiguous()  # the flat view may have a stride
        send = x.new_empty(x.numel())
        place(send.split(self.in_splits), blocks)
        return send

    def pack_pieces(self, x: Tensor) -> Tensor:
        lead, dim = self.leading(x), self.block_dim
        parts, send = lead.split([length for piece in self.dst_pieces for length in piece], dim), x.new_empty(x.numel())
        for rank, room in enumerate(send.split(self.in_splits)):
            shape = [*lead.shape[:dim], self.dst_parts[rank], *lead.shape[dim + 1 :]]
            torch.cat(parts[rank :: len(self.dst_parts)], dim, out=room.view(shape))
        return send

    def unpack(self, received: Tensor) -> Tensor:
        if self.dst_leads or self.src_pieces:
            return self.from_each(received.split(self.out_splits))
        joined = received.view(self.joined).movedim(0, self.src)
        return joined.contiguous() if self.dim_order is None else dense(joined, self.dim_order)

    def room(self, received: Tensor) -> Tensor:
        """The tensor into which `fill` will unpack one under way; the latter itself, if no copy will be needed."""
        if not (self.dst_leads or self.src_pieces):
            joined = received.view(self.joined).movedim(0, self.src)
            if (joined if self.dim_order is None else joined.permute(self.dim_order)).is_contiguous():
                return joined
        shape = list(self.received[0])
        shape[self.src] = self.joined[0]
        return empty(received, shape, self.dim_order)

    def fill(self, room: Tensor, received: Tensor) -> None:
        """Unpack a tensor that has arrived into the `room` made for it."""
        if self.dst_leads or self.src_pieces:
            self.join(self.of_ranks(received.split(self.out_splits)), room)
        elif room.data_ptr() != received.data_ptr():
            room.copy_(received.view(self.joined).movedim(0, self.src))

    def from_each(self, parts: Sequence[Tensor]) -> Tensor:
        return self.join(self.of_ranks(parts))

    def of_ranks(self, received: Sequence[Tensor]) -> list[Tensor]:
        """The part of the result from each rank, of the flat tensor from each."""
        parts = [part.view(shape) for part, shape in zip(received, self.shapes)]
        return parts if self.dst_leads else [part.movedim(0, self.src) for part in parts]

    def join(self, parts: list[Tensor], room: Tensor | None = None) -> Tensor:
        """The result, joined in one copy from the parts of all ranks; into `room`, if given."""
        if self.src_pieces:  # each rank sent its part of every piece
            pieces = [part.split(sizes, self.src) for part, sizes in zip(parts, zip(*self.src_pieces))]
            parts = [of_rank[k] for k in range(len(self.src_pieces)) for of_rank in pieces]
        if self.dim_order is None:
            return torch.cat(parts, self.src, out=room).contiguous()
        parts = [part.permute(self.dim_order) for part in parts]
        room = None if room is None else room.permute(self.dim_order)
        return torch.cat(parts, self.dim_order.index(self.src), out=room).contiguous().permute(inverse(self.dim_order))


class JointPlan(Together):
    """Several switches in one exchange, whose blocks are packed in one copy."""

    def __init__(self, plans: Sequence[SwitchPlan]) -> None:
        super().__init__(plans)
        self.even = all(p.even for p in plans)

    def pack(self, xs: Sequence[Tensor]) -> Tensor:
        send, count = xs[0].new_empty(sum(self.in_splits)), len(xs)
        if self.even:
            rooms = send.view(len(self.in_splits), self.in_splits[0]).split(self.rooms[:count], 1)
            place(rooms, [plan.blocks(x) for plan, x in zip(self.plans, xs)])
        else:
            rooms = send.split(self.rooms)
            for i, (plan, x) in enumerate(zip(self.plans, xs)):
                place(rooms[i::count], plan.blocks(x))
        return send


def place(rooms: Sequence[Tensor], blocks: Iterable[Tensor]) -> None:
    """Copy blocks into tensors of as many elements."""
    for room, block in zip(rooms, blocks):
        room.view(block.shape).copy_(block)


Form = tuple[tuple[int, ...], tuple[int, ...] | None]  # shape, and the order of dims in memory


@lru_cache(maxsize=4096)
def _switch_plan(
    form: Form, ends: tuple[int, int, int], n: int, rank: int, group: str, src_pieces: tuple[int, ...] = (),
    dst_pieces: tuple[int, ...] = (),
) -> SwitchPlan:  # fmt: skip
    (shape, dim_order), (src, dst, src_size) = form, ends
    parts = chunk_sizes(src_pieces or src_size, n), chunk_sizes(dst_pieces or shape[dst], n)
    plan = SwitchPlan(shape, src, dst, *parts, rank, dim_order, group)
    plan.src_pieces = [chunk_sizes(piece, n) for piece in src_pieces]
    plan.dst_pieces = [chunk_sizes(piece, n) for piece in dst_pieces]
    return plan


@lru_cache(maxsize=4096)
def _joint_plan(
    forms: tuple[Form, ...], ends: tuple[tuple[int, int, int], ...], n: int, rank: int, group: str
) -> JointPlan:
    return JointPlan([_switch_plan(form, each, n, rank, group) for form, each in zip(forms, ends)])


switch_plan_of_parts = lru_cache(maxsize=4096)(SwitchPlan)


def switch_plan(x: Tensor, src: int, dst: int, src_size: int, group: str, *pieces: Sequence[int]) -> SwitchPlan:
    order = None if x.is_contiguous() else order_of(x)  # without a call for most
    return _switch_plan((tuple(x.shape), order), (src, dst, src_size), *ranks(group), group, *map(tuple, pieces))


def joint_plan(xs: Sequence[Tensor], ends: Sequence[tuple[int, int, int]], group: str) -> JointPlan:
    return _joint_plan(tuple([(tuple(x.shape), order_of(x)) for x in xs]), tuple(ends), *ranks(group), group)
