"""Rows of a sharded dim dealt to the ranks so that each has as many of the early ones as of the late, and back.

Under a mask the work of a row depends on its place: of a causal one the last chunk of N has (2N - 1)/N of the mean.
Pieces of `step` rows are dealt in turn, there and back: of two rounds rank i has pieces i and 2N - 1 - i, head and
tail; of more rounds, rows whose work is uneven in any other way. Both ways are one all-to-all of M/N bytes a rank, M
being those of the whole tensor, nearly all of which travel. A rank has its rows in order, so that those of each rank
arrive one after the other.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial

import torch
from torch import Tensor

from dsp.comm.collectives import AlongDim, exchanges, resized
from dsp.comm.exchange import order_of, ranks
from dsp.comm.halo import RowTraffic, row_traffic
from dsp.planner import chunk_sizes


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

    def local_size(self, rank: int) -> int:
        """How many rows are dealt to a rank."""
        return sum(self.traffic.takes(rank))

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


def _exchange(x: Tensor, dim: int, size: int, step: int, group: str, back: bool = False) -> AlongDim:
    n, rank = ranks(group)
    deal, form = deal_of(size, n, step), (tuple(x.shape), order_of(x))
    chunk, dealt = deal.traffic.gives(rank), deal.traffic.takes(rank)
    if back:
        return AlongDim(form, dim, group, dealt, chunk, make=lambda y: y.index_select(0, deal.order(rank, y.device)[1]))
    return AlongDim(form, dim, group, chunk, dealt, lambda y: y.index_select(0, deal.order(rank, y.device)[0]))


def _rows_of(x: Tensor, dim: int, size: int, step: int, group: str, back: bool = False) -> Tensor:
    n, rank = ranks(group)
    return resized(x, {dim: chunk_sizes(size, n)[rank] if back else deal_of(size, n, step).local_size(rank)})


exchanges(
    "deal(Tensor x, int dim, int size, int step, str group) -> Tensor", _exchange, _rows_of,
    lambda g, shape, *arguments: torch.ops.dsp.collect(g, *arguments), "rows",
)  # fmt: skip
exchanges(
    "collect(Tensor x, int dim, int size, int step, str group) -> Tensor",
    partial(_exchange, back=True), partial(_rows_of, back=True),
    lambda g, shape, *arguments: torch.ops.dsp.deal(g, *arguments), "rows",
)  # fmt: skip


def deal_rows(x: Tensor, dim: int, deal: RowDeal, group: str) -> Tensor:
    """The rows of dim `dim` that are dealt to this rank, of a tensor of which it holds its chunk."""
    return torch.ops.dsp.deal(x, dim, deal.size, deal.step, group) if deal.traffic.travels else x


def collect_rows(x: Tensor, dim: int, deal: RowDeal, group: str) -> Tensor:
    """This rank's chunk of dim `dim`, of a tensor of which it holds the rows that were dealt to it."""
    return torch.ops.dsp.collect(x, dim, deal.size, deal.step, group) if deal.traffic.travels else x
