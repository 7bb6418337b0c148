"""Rows of a sharded dim dealt to the ranks so that each has as many of the early ones as of the late, and back.

Under a mask the work of a row depends on its place: of a causal one the last chunk of N has (2N - 1)/N of the mean.
Pieces of `step` rows are dealt in turn, there and back: of two rounds rank i has pieces i and 2N - 1 - i, head and
tail; of more rounds, rows whose work is uneven in any other way. Both ways are one all-to-all of M/N bytes a rank, M
being those of the whole tensor, nearly all of which travel. A rank has its rows in order, so that those of each rank
arrive one after the other.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dsp.comm.collectives import implement
from dsp.comm.exchange import EXACT, dense, exchanged, like, order_of, ranks
from dsp.comm.halo import RowTraffic, row_traffic
from dsp.comm.observers import run_observed, save_observer
from dsp.comm.traffic_formulas import counts, nbytes
from dsp.planner import chunk_sizes

_lib = torch.library.Library("dsp", "FRAGMENT")
_lib.define("deal(Tensor x, int dim, int size, int step, str group) -> Tensor", tags=EXACT)
_lib.define("collect(Tensor x, int dim, int size, int step, str group) -> Tensor", tags=EXACT)


class RowDeal:
    """`size` rows over n ranks in pieces of `step`, of which the last may be shorter."""

    def __init__(self, size: int, n: int, step: int) -> None:
        self.size, self.n, self.step = size, n, step
        self.orders = dict[tuple[int, torch.device], tuple[Tensor, Tensor]]()

    @classmethod
    def halves(cls, size: int, n: int) -> RowDeal:
        """Head and tail: two pieces a rank."""
        return deal_of(size, n, max(1, -(-size // (2 * n))))

    def spans(self, rank: int) -> list[tuple[int, int]]:
        """The start and stop of a rank's pieces, in order."""
        return [(i, min(i + self.step, self.size)) for i in range(0, self.size, self.step) if self.owner(i) == rank]

    def owner(self, row: int) -> int:
        turn, place = divmod(row // self.step, self.n)
        return self.n - 1 - place if turn % 2 else place

    @cached_property
    def traffic(self) -> RowTraffic:
        return row_traffic(self.size, tuple(tuple(self.spans(rank)) for rank in range(self.n)))

    def own(self, rank: int) -> int:
        """How many rows are dealt to a rank."""
        return sum(self.traffic.taken(rank))

    def order(self, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The rows of a rank's chunk by those to whom they are dealt; and where each of them is then."""
        if (rank, device) not in self.orders:
            to = self.sorted(rank)
            self.orders[rank, device] = to.to(device), to.argsort().to(device)
        return self.orders[rank, device]

    def sorted(self, rank: int) -> Tensor:
        parts = chunk_sizes(self.size, self.n)
        start = sum(parts[:rank])
        rows = torch.arange(start, start + parts[rank], device="cpu")
        turn, place = rows // self.step // self.n, rows // self.step % self.n
        return torch.where(turn % 2 == 0, place, self.n - 1 - place).argsort(stable=True)

    @property
    def causal_load(self) -> float:
        """The pairs that the busiest rank computes under a causal mask, over those of a chunk among equals."""
        each = [sum(pairs(b) - pairs(a) for a, b in self.spans(rank)) for rank in range(self.n)]
        return max(each) * self.size / (pairs(self.size) * chunk_sizes(self.size, self.n)[0]) if self.size else 1.0


def pairs(size: int) -> int:
    """Pairs of a query and a key that is not later."""
    return size * (size + 1) // 2


@lru_cache(maxsize=64)
def deal_of(size: int, n: int, step: int) -> RowDeal:
    return RowDeal(size, n, step)


def _deal(x: Tensor, dim: int, size: int, step: int, group: str) -> Tensor:
    n, rank = ranks(group)
    deal = deal_of(size, n, step)
    lead = x.movedim(dim, 0)
    send, rest = lead.index_select(0, deal.order(rank, x.device)[0]), lead.shape[1:].numel()
    come, go = ([k * rest for k in way] for way in (deal.traffic.taken(rank), deal.traffic.given(rank)))
    made = exchanged(send.reshape(-1), come, go, group).view(deal.own(rank), *lead.shape[1:])
    return dense(made.movedim(0, dim), order_of(x))


def _collect(x: Tensor, dim: int, size: int, step: int, group: str) -> Tensor:
    n, rank = ranks(group)
    deal = deal_of(size, n, step)
    lead = x.movedim(dim, 0).contiguous()
    rest = lead.shape[1:].numel()
    come, go = ([k * rest for k in way] for way in (deal.traffic.given(rank), deal.traffic.taken(rank)))
    came = exchanged(lead.view(-1), come, go, group).view(-1, *lead.shape[1:]) if rest else lead
    made = came.index_select(0, deal.order(rank, x.device)[1])
    return dense(made.movedim(0, dim), order_of(x))


def _rows_of(x: Tensor, dim: int, rows: int) -> Tensor:
    return like(x, [*x.shape[:dim], rows, *x.shape[dim + 1 :]])


for _name, _kernel in (("deal", _deal), ("collect", _collect)):
    implement(_lib, _name, _kernel)


@torch.library.register_fake("dsp::deal", lib=_lib)
def _(x: Tensor, dim: int, size: int, step: int, group: str) -> Tensor:
    n, rank = ranks(group)
    return _rows_of(x, dim, deal_of(size, n, step).own(rank))


@torch.library.register_fake("dsp::collect", lib=_lib)
def _(x: Tensor, dim: int, size: int, step: int, group: str) -> Tensor:
    n, rank = ranks(group)
    return _rows_of(x, dim, chunk_sizes(size, n)[rank])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    save_observer(ctx)
    ctx.where = inputs[1:]


def _back(op: str) -> Any:
    def back(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, getattr(torch.ops.dsp, op), grad, *ctx.where), None, None, None, None

    return back


torch.library.register_autograd("dsp::deal", _back("collect"), setup_context=_keep, lib=_lib)
torch.library.register_autograd("dsp::collect", _back("deal"), setup_context=_keep, lib=_lib)


@counts("rows", "deal")
def _dealt(x: Tensor, dim: int, size: int, step: int, group: str) -> int:
    n, rank = ranks(group)
    return nbytes(x) // max(x.shape[dim], 1) * (x.shape[dim] - deal_of(size, n, step).traffic.given(rank)[rank])


@counts("rows", "collect")
def _collected(x: Tensor, dim: int, size: int, step: int, group: str) -> int:
    return _dealt(x, dim, size, step, group)


def deal_rows(x: Tensor, dim: int, deal: RowDeal, group: str) -> Tensor:
    """The rows of dim `dim` that are dealt to this rank, of a tensor of which it holds its chunk."""
    return torch.ops.dsp.deal(x, dim, deal.size, deal.step, group) if deal.traffic.travels else x


def collect_rows(x: Tensor, dim: int, deal: RowDeal, group: str) -> Tensor:
    """This rank's chunk of dim `dim`, of a tensor of which it holds the rows that were dealt to it."""
    return torch.ops.dsp.collect(x, dim, deal.size, deal.step, group) if deal.traffic.travels else x
