"""Rows of a sharded dim that other ranks hold, for operations along the dim: windows, joins, slices.

An operation along a sharded dim may read rows of other ranks: a convolution the neighbouring rows (a halo), a
concatenation or a slice the rows of its result's chunks. Each rank reads one span of the dim. All ranks know all spans,
and so what each sends to each: all rows travel in one all-to-all, and none travels twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dsp.comm.collectives import back_many, implement, keep_many, summed_in
from dsp.comm.exchange import EXACT, dense, exchanged, like, order_of, ranks
from dsp.comm.observers import run_observed
from dsp.comm.traffic_formulas import counts, nbytes
from dsp.planner import chunk_sizes

_lib = torch.library.Library("dsp", "FRAGMENT")
_lib.define("rows(Tensor[] xs, int[] dims, int[] sizes, int[] spans, str group) -> Tensor[]", tags=EXACT)
_lib.define("rows_home(Tensor[] grads, int[] dims, int[] sizes, int[] spans, str group) -> Tensor[]", tags=EXACT)

Span = tuple[int, int]  # start and stop


@dataclass(frozen=True)
class RowTraffic:
    """The number of rows that each rank (second index) reads of each rank's chunk (first index)."""

    counts: tuple[tuple[int, ...], ...]

    def given(self, rank: int) -> Sequence[int]:
        """The rows of this rank's chunk that each rank reads."""
        return self.counts[rank]

    def taken(self, rank: int) -> Sequence[int]:
        """The rows that this rank reads of each rank's chunk."""
        return [own[rank] for own in self.counts]

    @cached_property
    def travels(self) -> bool:
        """Tell whether any rank has to send rows."""
        return any(k for rank, own in enumerate(self.counts) for other, k in enumerate(own) if other != rank)

    def sent(self, row: int) -> tuple[list[int], list[int]]:
        """The bytes that each rank sends if a row has `row` bytes: to those that read, and of gradients back."""

        def of(counts: Iterable[tuple[int, ...]]) -> list[int]:
            return [row * (sum(own) - own[rank]) for rank, own in enumerate(counts)]

        return of(self.counts), of(zip(*self.counts))


@lru_cache(maxsize=4096)
def starts_of(size: int, n: int) -> tuple[int, ...]:
    return tuple(min(rank * -(-size // n), size) for rank in range(n))


@lru_cache(maxsize=4096)
def row_traffic(size: int, spans: tuple[tuple[Span, ...], ...]) -> RowTraffic:
    """The rows that ranks read of each other's chunks of a dim of `size`, if they read these spans; by rank."""
    n = len(spans)
    chunks = [(start, start + length) for start, length in zip(starts_of(size, n), chunk_sizes(size, n))]
    counts = (tuple(sum(max(0, min(b, d) - max(a, c)) for c, d in own) for own in spans) for a, b in chunks)
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


class _RowExchange:
    """The exchange of one tensor on one rank.

    given: for each rank, start and length of the rows it reads in this rank's chunk; taken: those of its rows in
    this rank's span.
    """

    def __init__(self, rows: Rows, rank: int) -> None:
        self.dim, size, spans = rows
        self.traffic, self.rank, n = rows.traffic, rank, len(spans)
        starts, given, taken = starts_of(size, n), self.traffic.given(rank), self.traffic.taken(rank)
        self.chunk = chunk_sizes(size, n)[rank]
        self.span = spans[rank][1] - spans[rank][0]
        first = spans[rank][0]
        self.given = [(max(s - starts[rank], 0) if k else 0, k) for (s, _), k in zip(spans, given)]
        self.taken = [(max(s - first, 0) if k else 0, k) for s, k in zip(starts, taken)]


@lru_cache(maxsize=4096)
def _ways(
    dims: tuple[int, ...], sizes: tuple[int, ...], spans: tuple[int, ...], n: int, rank: int
) -> list[_RowExchange]:
    pairs = tuple(zip(spans[::2], spans[1::2]))
    return [_RowExchange(Rows(d, s, pairs[i * n : (i + 1) * n]), rank) for i, (d, s) in enumerate(zip(dims, sizes))]


def ways_of(dims: Sequence[int], sizes: Sequence[int], spans: Sequence[int], group: str) -> list[_RowExchange]:
    return _ways(tuple(dims), tuple(sizes), tuple(spans), *ranks(group))


def _swap(pieces: list[list[Tensor]], shapes: list[list[list[int]]], group: str) -> list[list[Tensor]]:
    """Send each rank its pieces, one of every tensor, in one exchange; return the received ones, in these shapes."""
    dtypes = [p.dtype for p in pieces[0]]
    raw = len(set(dtypes)) > 1  # then as bytes
    flat = [torch.cat([in_a_row(p, raw) for p in own]) for own in pieces]
    width = [p.element_size() if raw else 1 for p in pieces[0]]
    lengths = [[w * math.prod(s) for w, s in zip(width, own)] for own in shapes]
    received = exchanged(torch.cat(flat), list(map(sum, lengths)), [p.numel() for p in flat], group)
    came = received.split([k for own in lengths for k in own])
    parts = iter([p.clone() for p in came] if raw else came)  # bytes may not be aligned for their dtype
    return [[next(parts).view(t).view(s) for t, s in zip(dtypes, own)] for own in shapes]


def in_a_row(t: Tensor, raw: bool) -> Tensor:
    """The elements of a tensor as a flat tensor; with `raw`, their bytes."""
    flat = t.reshape(-1).contiguous()
    return flat.view(torch.uint8) if raw else flat


def _with(x: Tensor, dim: int, size: int) -> list[int]:
    return [*x.shape[:dim], size, *x.shape[dim + 1 :]]


def _rows(xs: list[Tensor], dims: list[int], sizes: list[int], spans: list[int], group: str) -> list[Tensor]:
    ways, (n, rank) = ways_of(dims, sizes, spans, group), ranks(group)
    pieces = [
        [x.narrow(w.dim, *(w.given[r] if r != rank else (0, 0))) for x, w in zip(xs, ways)] for r in range(n)
    ]  # fmt: skip
    shapes = [[_with(x, w.dim, w.taken[q][1] if q != rank else 0) for x, w in zip(xs, ways)] for q in range(n)]
    came = _swap(pieces, shapes, group)
    for i, (x, w) in enumerate(zip(xs, ways)):
        came[rank][i] = x.narrow(w.dim, *w.given[rank])
    return [
        dense(torch.cat([came[q][i] for q in range(n)], w.dim), order_of(x)) for i, (x, w) in enumerate(zip(xs, ways))
    ]


def _rows_home(grads: list[Tensor], dims: list[int], sizes: list[int], spans: list[int], group: str) -> list[Tensor]:
    """The adjoint: each chunk gets the sum of the gradients of the rows read from it, added in fp32 at least."""
    ways, (n, rank) = ways_of(dims, sizes, spans, group), ranks(group)
    pieces = [[g.narrow(w.dim, *(w.taken[q] if q != rank else (0, 0))) for g, w in zip(grads, ways)] for q in range(n)]
    shapes = [[_with(g, w.dim, w.given[r][1] if r != rank else 0) for g, w in zip(grads, ways)] for r in range(n)]
    came = _swap(pieces, shapes, group)
    totals = []
    for i, (g, w) in enumerate(zip(grads, ways)):
        came[rank][i] = g.narrow(w.dim, *w.taken[rank])
        total = g.new_zeros(_with(g, w.dim, w.chunk), dtype=summed_in(g.dtype))
        for r in range(n):
            total.narrow(w.dim, *w.given[r]).add_(came[r][i])
        totals.append(total.to(g.dtype))
    return totals


for _name, _kernel in (("rows", _rows), ("rows_home", _rows_home)):
    implement(_lib, _name, _kernel)


@torch.library.register_fake("dsp::rows", lib=_lib)
def _(xs: list[Tensor], dims: list[int], sizes: list[int], spans: list[int], group: str) -> list[Tensor]:
    return [like(x, _with(x, w.dim, w.span)) for x, w in zip(xs, ways_of(dims, sizes, spans, group))]


@torch.library.register_fake("dsp::rows_home", lib=_lib)
def _(grads: list[Tensor], dims: list[int], sizes: list[int], spans: list[int], group: str) -> list[Tensor]:
    return [g.new_empty(_with(g, w.dim, w.chunk)) for g, w in zip(grads, ways_of(dims, sizes, spans, group))]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, ctx.dims, ctx.sizes, ctx.spans, ctx.group = inputs
    keep_many(ctx, xs)


def _stays(op: str, x: Tensor, w: _RowExchange) -> Tensor:
    """The result of `op` on this rank where no rows of any rank travel: those that others read have no gradient."""
    start, length = w.given[w.rank]
    if op == "rows":
        return x.narrow(w.dim, start, length)
    return F.pad(x, (*(0, 0) * (x.ndim - 1 - w.dim), start, w.chunk - start - length))


def _adjoint(op: str) -> Any:
    def adjoint(ctx: Any, grads: list[Tensor | None]) -> Any:
        def send(asks: list[int]) -> list[Tensor]:
            n, _ = ranks(ctx.group)
            spans = [k for i in asks for k in ctx.spans[2 * n * i : 2 * n * (i + 1)]]
            where = [ctx.dims[i] for i in asks], [ctx.sizes[i] for i in asks], spans
            ways = ways_of(*where, ctx.group)
            if not any(w.traffic.travels for w in ways):
                return [_stays(op, grads[i], w) for i, w in zip(asks, ways)]  # type: ignore[arg-type]
            return run_observed(ctx, getattr(torch.ops.dsp, op), [grads[i] for i in asks], *where, ctx.group)

        return back_many(ctx, grads, send), None, None, None, None

    return adjoint


torch.library.register_autograd("dsp::rows", _adjoint("rows_home"), setup_context=_keep, lib=_lib)
torch.library.register_autograd("dsp::rows_home", _adjoint("rows"), setup_context=_keep, lib=_lib)


def _sent(way: str) -> Callable[..., int]:
    """The bytes of the rows that lie in one way, `given` or `taken`, and not here."""

    def sent(xs: list[Tensor], dims: list[int], sizes: list[int], spans: list[int], group: str) -> int:
        _, rank = ranks(group)
        found = 0
        for x, w in zip(xs, ways_of(dims, sizes, spans, group)):
            own = sum(k for r, (_, k) in enumerate(getattr(w, way)) if r != rank)
            found += nbytes(x) // max(x.shape[w.dim], 1) * own
        return found

    return sent


counts("rows", "rows")(_sent("given"))
counts("rows", "rows_home")(_sent("taken"))


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
