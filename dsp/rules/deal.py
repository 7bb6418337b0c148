"""Queries dealt to the ranks so that each has as many of the early ones as of the late: under a mask work is uneven.

Where each rank attends from its chunk of the queries to all keys, a causal mask gives the last chunk (2N - 1)/N of the
mean work. So queries travel before, and their results travel home after: M/N of each, of which nearly all travels.
Pieces are dealt in turn, there and back: of two rounds rank i has pieces i and 2N - 1 - i, head and tail.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from dsp.planner import chunk_sizes
from dsp.rows import Rows, Span


class Dealt(NamedTuple):
    """Pieces of `step` rows of `size` over n ranks, the last of them perhaps shorter."""

    size: int
    n: int
    step: int

    @classmethod
    def halves(cls, size: int, n: int) -> Dealt:
        """Head and tail: two pieces a rank."""
        return cls(size, n, -(-size // (2 * n)))

    def spans(self, rank: int) -> list[Span]:
        """A rank's pieces in order, one a round; those at the end may be empty."""
        return [spans[rank] for spans in rounds(*self)]

    def rows(self, dim: int) -> tuple[Rows, ...]:
        """The same of a tensor with such a dim."""
        return tuple(Rows(dim, self.size, spans) for spans in rounds(*self))

    @property
    def causal_load(self) -> float:
        """The pairs that the busiest rank computes under a causal mask, over those of a chunk among equals."""
        each = [sum(pairs(b) - pairs(a) for a, b in self.spans(rank)) for rank in range(self.n)]
        return max(each) / pairs(self.size) * self.size / chunk_sizes(self.size, self.n)[0]


def pairs(size: int) -> int:
    """Pairs of a query and a key that is not later."""
    return size * (size + 1) // 2


@lru_cache(maxsize=1024)
def rounds(size: int, n: int, step: int) -> tuple[tuple[Span, ...], ...]:
    """By round the span of each rank."""
    starts = range(0, size, n * step)
    pieces = [[(min(s + i * step, size), min(s + (i + 1) * step, size)) for i in range(n)] for s in starts]
    return tuple(tuple(own if k % 2 == 0 else own[::-1]) for k, own in enumerate(pieces))
