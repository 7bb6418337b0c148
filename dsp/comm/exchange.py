"""A switch on one rank: pack what each rank gets, exchange with exact sizes, unpack.

Sizes follow `torch.chunk`, or are given part by part. `group` is the name of a process group, behind which the ways of
its switches over several nodes may stand (`dsp.comm.node_routes.ways_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsp.planner import chunk_sizes
from dsp.support.private import _resolve_process_group, all_to_all, arrives_by, is_view

if TYPE_CHECKING:
    from dsp.comm.formats import Format


# a tag of ops: results have the memory order of the arguments, which a compiler may not change
EXACT = torch.Tag.needs_exact_strides
IN_LEGS: dict[str, Callable[..., Any]] = {}  # exchanges over several nodes, which `dsp.comm.node_routes` puts here


@lru_cache(maxsize=4096)
def name_of(group: str) -> str:
    """Only the name of the process group, without the ways behind it."""
    return group.partition("|")[0]


def ranks(group: str) -> tuple[int, int]:
    """(size, rank) of a process group by name."""
    pg = _resolve_process_group(name_of(group))  # type: ignore[arg-type]
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


class Dealt(Protocol):
    """The counts of elements that ranks send each other: in `total`, and from one rank to each."""

    @property
    def total(self) -> int: ...
    def to_each(self, rank: int) -> list[int]: ...


class InUnits(NamedTuple):
    """The counts of several exchanges in one, in units such as bytes; each has a function from elements to units."""

    parts: Sequence[tuple[Dealt, Callable[[int], int]]]

    @property
    def total(self) -> int:
        return sum(units(dealing.total) for dealing, units in self.parts)

    def to_each(self, rank: int) -> list[int]:
        return [*map(sum, zip(*(map(units, dealing.to_each(rank)) for dealing, units in self.parts)))]


def exchanged(
    send: Tensor, out_splits: list[int], in_splits: list[int], group: str, form: Format | None = None,
    dealing: Dealt | None = None, *, later: bool = False,
) -> Tensor:  # fmt: skip
    """Send each rank its part of a flat tensor, and return what arrives. If `later`, the result must be waited for, and
    is still packed in `form`. `dealing` says what all ranks send: an exchange in legs needs it, a large one gains."""
    if not later:  # half the host time
        return launched(send, out_splits, in_splits, group, form, dealing)()
    if form is not None:
        raw = packed(form, send, out_splits, in_splits, group)
        return exchanged(*raw, group, None, dealing and InUnits([(dealing, form.nbytes)]), later=True)
    flat, width = as_sent(send)
    splits = [s * width for s in out_splits], [s * width for s in in_splits]
    out = IN_LEGS["later"](flat, splits[0], width, group, dealing) if "|" in group else None
    if out is None:
        recorded = type(flat) is not Tensor or torch.compiler.is_compiling()  # a compiler knows torch's own op
        if recorded:
            out = torch.ops._c10d_functional.all_to_all_single.default(flat, *splits, name_of(group))
        else:
            out = torch.ops.dsp.start(flat, *splits, name_of(group), 0 if dealing is None else width * dealing.total)
    return out if flat.dtype == send.dtype else out.view(send.dtype)


def begun(send: Tensor, out_splits: list[int], in_splits: list[int], group: str, total: int) -> Tensor:
    """Begin the exchange of a flat tensor; the received one must be waited for. total: the elements of all ranks."""
    flat, width = as_sent(send)
    out, pg = flat.new_empty(width * sum(out_splits)), _resolve_process_group(name_of(group))  # type: ignore[arg-type]
    comes, goes = ([width * s for s in own] for own in (out_splits, in_splits))
    arrives_by(out, all_to_all(out, flat, comes, goes, pg, width * total))
    return out if flat.dtype == send.dtype else out.view(send.dtype)


def packed(
    form: Format, send: Tensor, out_splits: list[int], in_splits: list[int], group: str
) -> tuple[Tensor, list[int], list[int]]:
    """A flat tensor packed in a format, and the bytes that come from and go to each rank."""
    seed = (torch.initial_seed() + (ranks(group)[1] << 32)) % 2**62
    return form.pack(send, in_splits, seed), [*map(form.nbytes, out_splits)], [*map(form.nbytes, in_splits)]


@dataclass(frozen=True)
class Unpacked:
    """An exchange under way, and a function that unpacks the received tensor; a call returns the unpacked one."""

    raw: Callable[[], Tensor]
    unpack: Callable[[Tensor], Tensor]

    def __call__(self) -> Tensor:
        return self.unpack(self.raw())

    def go_on(self) -> None:
        go_on([self.raw])


def go_on(under_way: Sequence[Callable[[], Tensor]]) -> None:
    """Begin the next leg of each exchange that has another one."""
    for one in under_way:
        if (next_leg := getattr(one, "go_on", None)) is not None:
            next_leg()


def launched(
    send: Tensor, out_splits: list[int], in_splits: list[int], group: str, form: Format | None = None,
    dealing: Dealt | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """Launch `exchanged`; the returned function waits for the result. Call it once, in the kernel that launched it."""
    if form is not None:
        sent = packed(form, send, out_splits, in_splits, group)
        raw = launched(*sent, group, None, dealing and InUnits([(dealing, form.nbytes)]))
        return Unpacked(raw, lambda came: form.unpack(came, out_splits, send.new_empty(sum(out_splits))))
    flat, width = as_sent(send)
    if width > 1:
        out_splits, in_splits = [s * width for s in out_splits], [s * width for s in in_splits]
    if "|" in group and (under_way := IN_LEGS["launched"](flat, out_splits, width, group, dealing)) is not None:
        return Unpacked(under_way, lambda came: came.view(send.dtype))
    out, pg = flat.new_empty(sum(out_splits)), _resolve_process_group(name_of(group))  # type: ignore[arg-type]
    works = all_to_all(out, flat, out_splits, in_splits, pg, 0 if dealing is None else width * dealing.total)

    def arrived() -> Tensor:
        for work in works:
            work.wait()
        return out if flat.dtype == send.dtype else out.view(send.dtype)

    return arrived


def wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor.default(x)


class SwitchPlan:
    """Sizes and block order of one switch on one rank: pack, exchange, unpack.

    A block is what one rank sends to another: its own part of `src`, the other's part of `dst`, all of the rest. If
    `dst` is the outermost dim, the blocks already lie in order, and sending copies nothing. Otherwise blocks are packed
    with `src` first, so that received blocks join without a copy. With batch 1 a switch costs one copy either way. The
    order depends only on global sizes, since strides may differ from rank to rank. The result has its dims in memory
    in the order `kept` (see `order_of`). A part of a joined dim is a part of each of its pieces.
    """

    def __init__(
        self, shape: tuple[int, ...], src: int, dst: int, src_parts: Sequence[int], dst_parts: Sequence[int], rank: int,
        kept: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.src, self.dst, self.dst_parts, self.kept = shape, src, dst, list(dst_parts), kept
        self.came: list[tuple[int, ...]] = []  # for each piece of src, the part of each rank, if src is joined
        self.gone: list[tuple[int, ...]] = []  # the same of dst
        n, src_size = len(src_parts), sum(src_parts)
        own_src, own_dst = src_parts[rank], dst_parts[rank]
        if (shape[src], shape[dst]) != (own_src, sum(dst_parts)):
            raise RuntimeError(
                f"on rank {rank} the tensor has length {shape[src]} along dim {src} and {shape[dst]} along dim {dst}; "
                f"expected {own_src} along dim {src} (this rank's part of {src_size}) and {sum(dst_parts)} along dim "
                f"{dst} (all of it)"
            )
        rest = math.prod(s for d, s in enumerate(shape) if d not in (src, dst))
        self.total, self.rows = src_size * shape[dst] * rest, [own * rest for own in src_parts]
        self.in_splits = [own_src * d * rest for d in self.dst_parts]
        self.out_splits = [s * own_dst * rest for s in src_parts]

        def out(src_size: int) -> list[int]:
            return [src_size if d == src else own_dst if d == dst else s for d, s in enumerate(shape)]

        self.dst_leads = all(s == 1 for s in out(src_size)[:dst])
        self.received = [out(s) for s in src_parts]
        self.joined = [src_size, *(s for d, s in enumerate(out(src_size)) if d != src)]
        self.shapes = self.received if self.dst_leads else [[s, *self.joined[1:]] for s in src_parts]  # as received
        # equal parts of dst: a view (n, own_dst) of it, and the order that puts n and src first
        self.even = len(set(self.dst_parts)) == 1
        self.counted = [*shape[:dst], n, own_dst, *shape[dst + 1 :]]
        front = (dst,) if self.dst_leads else (dst, src + (src > dst))
        self.order = (*front, *(d for d in range(len(shape) + 1) if d not in front))

    def to_each(self, rank: int) -> list[int]:
        """The number of elements that a rank sends to each; those of all ranks are `total`."""
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
        if self.gone:
            return self.pack_pieces(x)
        blocks = x if self.dst_leads else self.blocks(x)
        if isinstance(blocks, Tensor):
            return blocks.reshape(-1).contiguous()  # the flat view may have a stride
        send = x.new_empty(x.numel())
        place(send.split(self.in_splits), blocks)
        return send

    def pack_pieces(self, x: Tensor) -> Tensor:
        lead, dim = self.leading(x), self.block_dim
        parts, send = lead.split([own for piece in self.gone for own in piece], dim), x.new_empty(x.numel())
        for rank, room in enumerate(send.split(self.in_splits)):
            shape = [*lead.shape[:dim], self.dst_parts[rank], *lead.shape[dim + 1 :]]
            torch.cat(parts[rank :: len(self.dst_parts)], dim, out=room.view(shape))
        return send

    def exchange(self, send: Tensor, group: str, form: Format | None = None, *, later: bool = False) -> Tensor:
        return exchanged(send, self.out_splits, self.in_splits, group, form, self, later=later)

    def exchange_among(self, send: Tensor, among: Sequence[int], group: str) -> Tensor:
        """The exchange among some ranks of a group; the other ranks exchange among themselves in the same call."""
        n, _ = ranks(group)
        if any(a >= b for a, b in pairwise(among)):
            raise ValueError(f"expected ranks in ascending order, as their blocks arrive, got {list(among)}")
        splits = [0] * n, [0] * n
        for i, peer in enumerate(among):
            splits[0][peer], splits[1][peer] = self.out_splits[i], self.in_splits[i]
        return exchanged(send, *splits, group)

    def unpack(self, received: Tensor) -> Tensor:
        if self.dst_leads or self.came:
            return self.join(received.split(self.out_splits))
        joined = received.view(self.joined).movedim(0, self.src)
        return joined.contiguous() if self.kept is None else dense(joined, self.kept)

    def room(self, received: Tensor) -> Tensor:
        """The tensor into which `fill` will unpack one under way; the latter itself, if no copy will be needed."""
        if not (self.dst_leads or self.came):
            joined = received.view(self.joined).movedim(0, self.src)
            if (joined if self.kept is None else joined.permute(self.kept)).is_contiguous():
                return joined
        shape = list(self.received[0])
        shape[self.src] = self.joined[0]
        return empty(received, shape, self.kept)

    def fill(self, room: Tensor, received: Tensor) -> None:
        """Unpack a tensor that has arrived into the `room` made for it."""
        if self.dst_leads or self.came:
            self.join(received.split(self.out_splits), room)
        elif room.data_ptr() != received.data_ptr():
            room.copy_(received.view(self.joined).movedim(0, self.src))

    def join(self, received: Sequence[Tensor], room: Tensor | None = None, parts: list[Tensor] | None = None) -> Tensor:
        """The result, joined in one copy from each rank's flat tensor, or from `parts`; into `room`, if given."""
        if parts is None:
            parts = [part.view(shape) for part, shape in zip(received, self.shapes)]
            if not self.dst_leads:
                parts = [part.movedim(0, self.src) for part in parts]
        if self.came:  # each rank sent its part of every piece
            own = [part.split(sizes, self.src) for part, sizes in zip(parts, zip(*self.came))]
            parts = [of_rank[k] for k in range(len(self.came)) for of_rank in own]
        if self.kept is None:
            return torch.cat(parts, self.src, out=room).contiguous()
        parts = [part.permute(self.kept) for part in parts]
        room = None if room is None else room.permute(self.kept)
        return torch.cat(parts, self.kept.index(self.src), out=room).contiguous().permute(inverse(self.kept))


class JointPlan:
    """Several switches in one exchange: each rank gets its blocks of all tensors, one after the other."""

    def __init__(self, plans: list[SwitchPlan]) -> None:
        self.plans = plans
        ins, outs = ([*zip(*splits)] for splits in zip(*((p.in_splits, p.out_splits) for p in plans)))
        self.in_splits, self.out_splits = list(map(sum, ins)), list(map(sum, outs))
        self.even, self.total = all(p.even for p in plans), sum(p.total for p in plans)
        self.rooms, self.parts = [s for sizes in ins for s in sizes], [s for sizes in outs for s in sizes]

    def to_each(self, rank: int) -> list[int]:
        return [*map(sum, zip(*(p.to_each(rank) for p in self.plans)))]

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

    def unpack(self, received: Tensor) -> list[Tensor]:
        parts, count = received.split(self.parts), len(self.plans)
        return [plan.join(parts[i::count]) for i, plan in enumerate(self.plans)]


def place(rooms: Sequence[Tensor], blocks: Iterable[Tensor]) -> None:
    """Copy blocks into tensors of as many elements."""
    for room, block in zip(rooms, blocks):
        room.view(block.shape).copy_(block)


Form = tuple[tuple[int, ...], tuple[int, ...] | None]  # shape, and the order of dims in memory


@lru_cache(maxsize=4096)
def _switch_plan(
    form: Form, where: tuple[int, int, int], n: int, rank: int, came: tuple[int, ...] = (), gone: tuple[int, ...] = ()
) -> SwitchPlan:
    (shape, kept), (src, dst, src_size) = form, where
    parts = chunk_sizes(came or src_size, n), chunk_sizes(gone or shape[dst], n)
    plan = SwitchPlan(shape, src, dst, *parts, rank, kept)
    plan.came, plan.gone = ([chunk_sizes(piece, n) for piece in pieces] for pieces in (came, gone))
    return plan


@lru_cache(maxsize=4096)
def _joint_plan(forms: tuple[Form, ...], where: tuple[tuple[int, int, int], ...], n: int, rank: int) -> JointPlan:
    return JointPlan([_switch_plan(form, each, n, rank) for form, each in zip(forms, where)])


switch_plan_of_parts = lru_cache(maxsize=4096)(SwitchPlan)


def switch_plan(x: Tensor, src: int, dst: int, src_size: int, group: str, *pieces: Sequence[int]) -> SwitchPlan:
    order = None if x.is_contiguous() else order_of(x)  # without a call for most
    return _switch_plan((tuple(x.shape), order), (src, dst, src_size), *ranks(group), *map(tuple, pieces))


def joint_plan(
    xs: Sequence[Tensor], src: Sequence[int], dst: Sequence[int], src_size: Sequence[int], group: str
) -> JointPlan:
    forms = tuple([(tuple(x.shape), order_of(x)) for x in xs])
    return _joint_plan(forms, tuple(zip(src, dst, src_size)), *ranks(group))
