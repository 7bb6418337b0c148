"""The bytes that a rank sends in each collective: a table by op, to which any package may add its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.collectives import added_in
from dsp.comm.exchange import Dealt, InUnits, joint_plan, ranks, switch_plan
from dsp.comm.node_routes import DIRECT, Listed, ways_of
from dsp.comm.packed import by_value
from dsp.comm.wire import SAME, format_of
from dsp.planner import chunk_sizes


class Collective(NamedTuple):
    kind: str  # the name under which it is counted
    sent: Callable[..., int]  # from the op's arguments to bytes
    calls: Callable[..., int] | None = None  # from the arguments to the number of calls; None: one
    dealt: Callable[..., Sequence[Dealt]] | None = None  # the bytes of each call, for ops that may go in legs

    def counted(self, *args: Any) -> Sequence[tuple[str, int, int]]:
        """The calls and bytes of one call of the op, by kind."""
        if self.dealt is None or (ways := ways_of(args[4])[1]) is None:  # args[4] is the group of a switch
            return ((self.kind, 1 if self.calls is None else self.calls(*args), self.sent(*args)),)
        found, rank = list[tuple[str, int, int]](), ranks(args[4])[1]
        for dealing in self.dealt(*args):
            way = ways.way(dealing.total)
            legs = ways.legs(way, dealing.to_each, rank)
            if way == DIRECT:
                legs = {self.kind: (sum(nbytes for nbytes, _ in legs.values()), 1)}
            found += [(kind, calls, nbytes) for kind, (nbytes, calls) in legs.items()]
        return found


COLLECTIVES: dict[str, Collective] = {}


def counts(
    kind: str,
    *names: str,
    calls: Callable[..., int] | None = None,
    dealt: Callable[..., Sequence[Dealt]] | None = None,
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Put ops into the table. The decorated function returns the bytes of one call from the op's arguments."""

    def register(sent: Callable[..., int]) -> Callable[..., int]:
        COLLECTIVES.update({name: Collective(kind, sent, calls, dealt) for name in names})
        return sent

    return register


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def to_each(x: Tensor, dst: int, group: str, pieces: Sequence[int] = ()) -> list[int]:
    """The elements of a tensor, switched to `dst`, that go to each other rank; 0 for this one."""
    n, rank = ranks(group)
    size = x.shape[dst]
    parts = chunk_sizes(tuple(pieces) or size, n)
    return [x.numel() * part // max(size, 1) * (r != rank) for r, part in enumerate(parts)]


def in_format(wire: str, dtype: torch.dtype, numbers: Sequence[int]) -> int:
    """The bytes of `numbers` elements for each rank."""
    form = format_of(wire, dtype)
    return sum(numbers) * dtype.itemsize if form is None else sum(map(form.nbytes, numbers))


def dealt(
    x: Tensor, src: int, dst: int, src_size: int, group: str, src_pieces: Sequence[int] = (),
    dst_pieces: Sequence[int] = (), wire: str = SAME, back: str = SAME,
) -> list[Dealt]:  # fmt: skip
    """The bytes that ranks send each other in a switch."""
    form = format_of(wire, x.dtype)
    nbytes = x.element_size().__mul__ if form is None else form.nbytes
    return [InUnits([(switch_plan(x, src, dst, src_size, group, src_pieces, dst_pieces), nbytes)])]


def dealt_each(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, *pieces: Any
) -> list[Dealt]:
    return [one for where in zip(xs, src, dst, src_size) for one in dealt(*where, group, *pieces)]


def dealt_many(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, of: Sequence[int] = (),
    wire: str = SAME, back: str = SAME,
) -> list[Dealt]:  # fmt: skip
    parts = []
    for own in by_value(len(xs), of):
        form = format_of(wire, xs[own[0]].dtype)
        where = [[v[i] for i in own] for v in (src, dst, src_size)]
        plan = joint_plan([xs[i] for i in own], where[0], where[1], where[2], group)
        parts.append((plan, xs[own[0]].element_size().__mul__ if form is None else form.nbytes))
    return [InUnits(parts)]


@counts("switch", "switch", dealt=dealt)
def switch(
    x: Tensor, src: int, dst: int, src_size: int, group: str, src_pieces: Any = (), dst_pieces: Sequence[int] = (),
    wire: str = SAME, back: str = SAME,
) -> int:  # fmt: skip
    if wire != SAME:
        return in_format(wire, x.dtype, to_each(x, dst, group, dst_pieces))
    n, rank = ranks(group)
    size = x.shape[dst]
    return nbytes(x) * (size - chunk_sizes(tuple(dst_pieces) or size, n)[rank]) // max(size, 1)


@counts("switch", "switch_each", calls=lambda xs, *_: len(xs), dealt=dealt_each)
def switch_each(xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, *pieces: Any) -> int:
    return sum(switch(*one, group, *pieces) for one in zip(xs, src, dst, src_size))


@counts("switch", "switch_many", dealt=dealt_many)
def switch_many(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, of: Sequence[int] = (),
    wire: str = SAME, back: str = SAME,
) -> int:  # fmt: skip
    each = [to_each(x, d, group) for x, d in zip(xs, dst)]
    values = [(xs[own[0]].dtype, [sum(k) for k in zip(*[each[i] for i in own])]) for own in by_value(len(xs), of)]
    return sum(in_format(wire, dtype, numbers) for dtype, numbers in values)


@counts("switch", "switch_among")
def switch_among(x: Tensor, src: int, dst: int, src_parts: Any, dst_parts: list[int], among: Any, group: str) -> int:
    size = sum(dst_parts)
    return nbytes(x) * (size - dst_parts[among.index(ranks(group)[1])]) // max(size, 1)


def dealt_in_legs(x: Tensor, total: int, comes: Any, rows: Sequence[int], group: str) -> list[Dealt]:
    return [InUnits([(Listed.of(total, rows, group), x.element_size().__mul__)])]


@counts("switch", "in_legs", dealt=dealt_in_legs)
def in_legs(x: Tensor, *where: Any) -> int:
    raise AssertionError("the bytes of an exchange in legs are counted leg by leg, by dealt_in_legs")


@counts("switch", "all_to_all_single", "start")
def all_to_all_single(x: Tensor, out_splits: list[int], in_splits: list[int], group: str, *total: int) -> int:
    return (sum(in_splits) - in_splits[ranks(group)[1]]) * x.element_size()


@counts("gather", "gather")
def gather(x: Tensor, dim: int, size: int, group: str, pieces: Sequence[int] = ()) -> int:
    return everywhere(x, group)


@counts("all_gather_into_tensor", "all_gather_into_tensor")
@counts("broadcast", "broadcast")
def everywhere(x: Tensor, *where: Any) -> int:
    return nbytes(x) * (ranks(where[-1])[0] - 1)


@counts("shard_dim_alltoall", "shard_dim_alltoall")
def shard_dim_alltoall(x: Tensor, *where: Any) -> int:
    n, _ = ranks(where[-1])
    return nbytes(x) * (n - 1) // n


@counts("reduce_scatter", "reduce_scatter")
def reduce_scatter(x: Tensor, dim: int, group: str, pieces: Sequence[int] = ()) -> int:
    n, rank = ranks(group)
    size = x.shape[dim]
    return nbytes(x) // max(size, 1) * (size - chunk_sizes(tuple(pieces) or size, n)[rank])


@counts("reduce_scatter_tensor", "reduce_scatter_tensor")
def reduce_scatter_tensor(x: Tensor, *where: Any) -> int:
    return reduce_scatter(x, 0, where[-1])


@counts("all_reduce", "all_reduce")
def all_reduce(x: Tensor, *where: Any) -> int:
    n, _ = ranks(where[-1])
    return -(-2 * x.numel() * added_in(x.dtype).itemsize * (n - 1) // n)  # a ring: reduce-scatter, then all-gather
