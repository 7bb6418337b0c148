"""DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): each rank computes some of the heads, over all places.

One all-to-all switches queries, keys and values from places to heads, another switches the output back: 4 M/N bytes a
rank and attention, of which (N-1)/N travel; M is the bytes of the activation. With grouped queries (h/g query heads
share a head of keys and values) a rank receives the heads that its queries need: (2 + 2 w N/h) M/N, where w, the number
of key heads that a rank needs, is g/N if N divides g and 1 if g divides N.

Letters: b batch, n places of this rank, m of all ranks, h heads, g heads of keys and values, e channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dsp.comm.exchange import ranks
from dsp.embedded.core import AttentionCore
from dsp.planner import chunk_sizes
from dsp.stages.methods import CommBytes, Peers, RankPart
from dsp.stages.notation import NotationError

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend, size: int, group: str) -> Tensor:
    """Attention over sharded places, computed on a part of the heads.

    q (b n h e), k and v (b n g e): this rank's `torch.chunk` of `size` places -> (b n h e). `attend` takes q, k and v
    for all places and a part of the heads. `group` is the name of a process group. Backward sends as much as forward.
    Raise ValueError if there are more ranks than heads.
    """
    n, _ = ranks(group)
    return _attention(q, k, v, attend, Peers.all(size, n), group)


def _attention(q: Tensor, k: Tensor, v: Tensor, attend: Attend, peers: Peers, group: str) -> Tensor:
    """`ulysses_attention` among some ranks of a group, each with its part of the places."""
    n, rank = len(peers.ranks), peers.ranks.index(ranks(group)[1])
    deal = deal_heads(q.shape[2], k.shape[2], n)
    if deal.kv is not None:
        k, v = (torch.cat([x.narrow(2, i, 1) for i in deal.kv], 2) for x in (k, v))
    # one tensor to switch, with the heads for one rank adjacent
    dealt = zip(*(x.split(parts, 2) for x, parts in ((q, deal.q_parts), (k, deal.kv_parts), (v, deal.kv_parts))))
    qkv = torch.cat([x for to_one in dealt for x in to_one], 2)
    heads = [h + 2 * g for h, g in zip(deal.q_parts, deal.kv_parts)]
    # with places as the first dim, received parts join without a copy
    qkv = torch.ops.dsp.switch_among(qkv.transpose(0, 1), 0, 2, peers.parts, heads, peers.ranks, group).transpose(0, 1)
    h, g = deal.q_parts[rank], deal.kv_parts[rank]
    q, k, v = qkv.split([h, g, g], 2)
    if h:
        k, v = (deal.local(x, rank) for x in (k, v))
        y = attend(q, k, v)
    else:  # a rank without heads still takes part in the exchanges
        y = q + k[:, :, :0] + v[:, :, :0]
    y = torch.ops.dsp.switch_among(y.transpose(0, 1), 2, 0, deal.q_parts, peers.parts, peers.ranks, group)
    return y.transpose(0, 1)


class Deal(NamedTuple):
    """The heads of each rank. kv: the heads of keys in the order in which they are sent; None: in their own order."""

    q_parts: tuple[int, ...]
    kv_parts: tuple[int, ...]
    kv: tuple[int, ...] | None
    serves: tuple[tuple[int, ...], ...]  # by rank: for each query head, the index of its key head among the rank's

    def local(self, x: Tensor, rank: int) -> Tensor:
        """Keys or values of one rank as attention takes them: one head per equal group of query heads."""
        serves = self.serves[rank]
        count = serves[-1] + 1
        each, remainder = divmod(len(serves), count)
        if remainder or serves != tuple(i // each for i in range(len(serves))):
            return torch.cat([x.narrow(2, i, 1) for i in serves], 2)
        return x.narrow(2, 0, count)


@lru_cache(maxsize=64)
def deal_heads(h: int, g: int, n: int) -> Deal:
    """Divide h query heads over n ranks as torch.chunk does; each rank also gets the key heads (of g) that it needs."""
    if n > h:
        raise NotationError(
            f"ulysses deals {h} heads over {n} ranks, so some ranks would have no head and nothing to do. Use at most "
            f"{h} ranks (in the trainer: parallel.sp={h}); or a model with more heads; or method='dsp_ulysses', which "
            "deals heads over fewer ranks; or method='dsp', 'ring' or 'dsp_ring', which work with any number of heads"
        )
    each = h // g
    q_parts = chunk_sizes(h, n)
    starts = [sum(q_parts[:r]) for r in range(n)]
    needs = [range(a // each, -(-(a + p) // each)) if p else range(0) for a, p in zip(starts, q_parts)]
    serves = tuple(tuple(i // each - need.start for i in range(a, a + p)) for a, p, need in zip(starts, q_parts, needs))
    if tuple(map(len, needs)) == chunk_sizes(g, n) and sum(map(len, needs)) == g:
        return Deal(q_parts, chunk_sizes(g, n), None, serves)
    width = max(map(len, needs))
    sent = tuple(need[min(i, len(need) - 1)] if need else 0 for need in needs for i in range(width))
    return Deal(q_parts, (width,) * n, sent, serves)


class Ulysses(AttentionCore):
    label = "ulysses"

    def attend(self, place: RankPart, forward: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        peers = place.peers
        y = _attention(q, k, v, forward, peers, place.axis.group)
        if not deal_heads(q.shape[2], k.shape[2], len(peers.ranks)).q_parts[peers.ranks.index(place.axis.rank)]:
            for p in self.module.parameters():  # unused without a head: a zero gradient, for the average over ranks
                y = y + p.flatten()[:0].sum()
        return y

    def price(self, q: Tensor, k: Tensor, v: Tensor, rows: Sequence[int]) -> CommBytes:
        (b, m, h, e), n = q.shape, len(rows)
        deal = deal_heads(h, k.shape[2], n)
        unit, kv, shares = b * e * q.element_size(), sum(deal.kv_parts), list(zip(rows, deal.q_parts, deal.kv_parts))
        # queries to heads and back to places; keys and values to heads forward, and back in backward
        forward = max(part * (h - qs + 2 * (kv - kvs)) + (m - part) * qs for part, qs, kvs in shares)
        backward = max(part * (h - qs) + (m - part) * (qs + 2 * kvs) for part, qs, kvs in shares)
        traffic = {"switch": (forward * unit, 2)}
        return CommBytes(traffic, {"switch": (backward * unit, 2)}, traffic)
