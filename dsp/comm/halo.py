"""Rows of a sharded dim that other ranks hold, for operations along the dim: windows, joins, slices.

An operation along a sharded dim may read rows of other ranks: a convolution the neighbouring rows (a halo), a
concatenation or a slice the rows of its result's chunks. Each rank reads one span of the dim. All ranks know all spans,
and so what each sends to each: all rows travel in one all-to-all, and none travels twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsp.comm.collectives import AlongDim, exchanges_of_many, resized, summed_in
from dsp.comm.exchange import Bytes, ExchangePlan, Together, dense, order_of, ranks
from dsp.planner import chunk_sizes

Span = tuple[int, int]  # start and stop


@dataclass(frozen=True)
class RowTraffic:
    """The number of rows that each rank (second index) reads of each rank's chunk (first index)."""

    counts: tuple[tuple[int, ...], ...]

    def gives(self, rank: int) -> Sequence[int]:
        """The rows of this rank's chunk that each rank reads."""
        return self.counts[rank]

    def takes(self, rank: int) -> Sequence[int]:
        """The rows that this rank reads of each rank's chunk."""
        return [row[rank] for row in self.counts]

    @cached_property
    def travels(self) -> bool:
        """Tell whether any rank has to send rows."""
        return any(k for rank, row in enumerate(self.counts) for reader, k in enumerate(row) if reader != rank)

    def sent(self, row: int) -> tuple[list[int], list[int]]:
        """The bytes that each rank sends if a row has `row` bytes: to those that read, and of gradients back."""

        def of(counts: Iterable[tuple[int, ...]]) -> list[int]:
            return [row * (sum(reads) - reads[rank]) for rank, reads in enumerate(counts)]

        return of(self.counts), of(zip(*self.counts))


@lru_cache(maxsize=4096)
def starts_of(size: int, n: int) -> tuple[int, ...]:
    return tuple(min(rank * -(-size // n), size) for rank in range(n))


@lru_cache(maxsize=4096)
def row_traffic(size: int, spans: tuple[tuple[Span, ...], ...]) -> RowTraffic:
    """The rows that ranks read of each other's chunks of a dim of `size`, if they read these spans; by rank."""
    n = len(spans)
    chunks = [(start, start + length) for start, length in zip(starts_of(size, n), chunk_sizes(size, n))]
    counts = (tuple(sum(max(0, min(b, d) - max(a, c)) for c, d in pieces) for pieces in spans) for a, b in chunks)
    return RowTraffic(tuple(counts))


class Rows(NamedTuple):
    """The rows of dim `dim`, of global `size`, that each rank reads; the tensor is sharded along the dim, or whole."""

    dim: int
    size: int
    spans: tuple[Span, ...]  # by rank

    @property
    def traffic(self) -> RowTraffic:
        return row_traffic(self.size, tuple((span,) for span in self.spans))

    def sent(self, shape: Sequence[int], itemsize: int) -> tuple[list[int], list[int]]:
        """The bytes that each rank sends of a tensor of global `shape`: in forward, and of its gradient in backward."""
        return self.traffic.sent(itemsize * math.prod(size for d, size in enumerate(shape) if d != self.dim))


class RowReads:
    """The rows of one tensor that one rank reads, and that others read of its chunk.

    gives: for each rank, start and length of the rows it reads in this rank's chunk; takes: those of its rows in
    this rank's span; travel: both without this rank's own, of which `counts` are the lengths.
    """

    def __init__(self, rows: Rows, rank: int) -> None:
        self.dim, size, spans = rows
        self.traffic, self.rank, n = rows.traffic, rank, len(spans)
        starts, gives, takes = starts_of(size, n), self.traffic.gives(rank), self.traffic.takes(rank)
        self.chunk = chunk_sizes(size, n)[rank]
        self.span = spans[rank][1] - spans[rank][0]
        first = spans[rank][0]
        self.gives = [(max(s - starts[rank], 0) if k else 0, k) for (s, _), k in zip(spans, gives)]
        self.takes = [(max(s - first, 0) if k else 0, k) for s, k in zip(starts, takes)]
        ways = self.gives, self.takes
        self.travel = [[(start, k * (r != rank)) for r, (start, k) in enumerate(way)] for way in ways]
        self.counts = [[k for _, k in way] for way in self.travel]

    def stay(self, g: Tensor, home: bool) -> Tensor:
        """The gradient on this rank where no rows of any rank travel: those that others read have none."""
        start, length = self.gives[self.rank]
        if not home:
            return g.narrow(self.dim, start, length)
        return F.pad(g, (*(0, 0) * (g.ndim - 1 - self.dim), start, self.chunk - start - length))


@lru_cache(maxsize=4096)
def _reads(dims: tuple[int, ...], sizes: tuple[int, ...], spans: tuple[int, ...], n: int, rank: int) -> list[RowReads]:
    pairs = tuple(zip(spans[::2], spans[1::2]))
    return [RowReads(Rows(d, s, pairs[i * n : (i + 1) * n]), rank) for i, (d, s) in enumerate(zip(dims, sizes))]


def reads_of(dims: Sequence[int], sizes: Sequence[int], spans: Sequence[int], group: str) -> list[RowReads]:
    return _reads(tuple(dims), tuple(sizes), tuple(spans), *ranks(group))


class RowsOfOthers(AlongDim):
    """An exchange of the rows of one tensor that ranks read of each other; those of this rank's own do not travel.

    home: the adjoint, in which each chunk gets the sum of the gradients of the rows read from it, in fp32 at least.
    """

    def __init__(self, x: Tensor, reads: RowReads, group: str, home: bool) -> None:
        self.reads, self.home = reads, home
        goes, self.comes = (reads.takes, reads.gives) if home else (reads.gives, reads.takes)
        spans, gives, self.takes = reads.travel[home], reads.counts[home], reads.counts[not home]
        super().__init__(
            (tuple(x.shape), order_of(x)), reads.dim, group, gives, self.takes,
            lambda rows: torch.cat([rows.narrow(0, *span) for span in spans]),
        )  # fmt: skip
        self.local = x.narrow(self.dim, *goes[reads.rank])

    def unpack(self, received: Tensor) -> Tensor:
        return self.from_each(received.split(self.out_splits))

    def from_each(self, parts: Sequence[Tensor]) -> Tensor:
        row_shape = self.arriving[1:]
        received = [part.view(k, *row_shape).movedim(0, self.dim) for part, k in zip(parts, self.takes)]
        received[self.reads.rank] = self.local
        if not self.home:
            return dense(torch.cat(received, self.dim), self.dim_order)
        shape, dtype = [*self.local.shape], self.local.dtype
        shape[self.dim] = self.reads.chunk
        total = self.local.new_zeros(shape, dtype=summed_in(dtype))
        for part, (start, k) in zip(received, self.comes):
            total.narrow(self.dim, start, k).add_(part)
        return total.to(dtype)


def _exchange(home: bool, xs: list[Tensor], *arguments: Any) -> list[tuple[ExchangePlan, Any]]:
    group = arguments[-1]
    plans: list[ExchangePlan] = [RowsOfOthers(x, reads, group, home) for x, reads in zip(xs, reads_of(*arguments))]
    if len(plans) == 1:
        return [(plans[0], xs[0])]
    return [(Together([Bytes(p, x.dtype) for p, x in zip(plans, xs)] if len({x.dtype for x in xs}) > 1 else plans), xs)]


def _back(
    home: bool, gs: list[Tensor], asks: list[int], shapes: Any, dims: Any, sizes: Any, spans: Any, group: str
) -> Any:
    n, _ = ranks(group)
    spans = [k for i in asks for k in spans[2 * n * i :][: 2 * n]]
    arguments = [dims[i] for i in asks], [sizes[i] for i in asks], spans, group
    reads = reads_of(*arguments)
    if not any(r.traffic.travels for r in reads):
        return [r.stay(g, home) for g, r in zip(gs, reads)]
    return (torch.ops.dsp.rows_home if home else torch.ops.dsp.rows)(gs, *arguments)


def _fake(home: bool, xs: list[Tensor], *arguments: Any) -> list[Tensor]:
    results = [resized(x, {r.dim: r.chunk if home else r.span}) for x, r in zip(xs, reads_of(*arguments))]
    return [y.new_empty(y.shape) for y in results] if home else results


for _name, _home in (("rows", False), ("rows_home", True)):
    _schema = f"{_name}(Tensor[] xs, int[] dims, int[] sizes, int[] spans, str group) -> Tensor[]"
    exchanges_of_many(_schema, partial(_exchange, _home), partial(_fake, _home), partial(_back, not _home), "rows")


def read_rows(xs: Sequence[Tensor], rows: Sequence[Rows], group: str) -> list[Tensor]:
    """This rank's span of each tensor, of which it holds its chunk; nothing is sent where all have theirs."""
    if any(r.traffic.travels for r in rows):
        spans = [k for r in rows for span in r.spans for k in span]
        return list(torch.ops.dsp.rows(list(xs), [r.dim for r in rows], [r.size for r in rows], spans, group))
    _, rank = ranks(group)
    read = []
    for x, r in zip(xs, rows):
        start, stop = r.spans[rank]
        read.append(x.narrow(r.dim, start - starts_of(r.size, len(r.spans))[rank] if start < stop else 0, stop - start))
    return read
