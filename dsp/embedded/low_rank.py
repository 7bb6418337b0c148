"""Ring Self-Attention's sparse form (Li et al., arXiv 2105.13120): Linformer's keys and values, added up over ranks.

Linformer (Wang et al., arXiv 2006.04768) attends to r weighted sums of all keys and of all values, with learned weights
for each place. A rank adds up its own places. One all-reduce of 2 r g e numbers a sample, in fp32 at least, adds the
ranks' sums in forward, and one in backward. This traffic does not grow with the length, and queries are not sent.

Within DSP's switch (`dsp.embedded.grid`) a rank sends its sums to the ranks that have the same frames.

Each rank uses the weights of its own places, so gradients of weights are averaged over ranks as usual.

Letters: b batch, n places of this rank, r sums, h heads, g heads of keys and values, e channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsp.comm.exchange import ranks
from dsp.embedded.core import AttentionCore
from dsp.stages.methods import CommBytes, Peers, RankPart


def low_rank_attention(q: Tensor, k: Tensor, v: Tensor, core: Any, size: int, group: str) -> Tensor:
    """Attention to sums over sharded places: only the sums are sent.

    q (b n h e), k and v (b n g e): this rank's `torch.chunk` of `size` places -> (b n h e). ``core.project(k, v, start,
    size)`` takes the keys and values of the places from `start` on and returns their contributions to the sums, (b r g
    e) each; ``core.attend(q, k, v)`` takes the queries and the sums. `group` is the name of a process group.
    """
    n, rank = ranks(group)
    return _attention(q, k, v, core, Peers.all(size, n), rank, lambda x: torch.ops.dsp.all_reduce(x, group))


def _attention(
    q: Tensor, k: Tensor, v: Tensor, core: Any, peers: Peers, rank: int, add_up: Callable[[Tensor], Tensor]
) -> Tensor:
    start = sum(peers.parts[: peers.ranks.index(rank)])
    terms = torch.stack(core.project(k, v, start, sum(peers.parts)))
    wide = torch.promote_types(terms.dtype, torch.float32)
    sums = add_up(terms.to(wide)).to(terms.dtype)
    if not q.shape[1]:  # without places the sums are not used, and their gradient is zero
        return q + sums.flatten()[:0].sum()
    return core.attend(q, *sums.unbind())


def _add_up_among(x: Tensor, peers: Sequence[int], group: str) -> Tensor:
    """An all-reduce among some ranks of a group: each sends its tensor to all of them."""
    ones = (1,) * len(peers)
    spread = x.expand(1, len(peers), *x.shape)
    return torch.ops.dsp.switch_among(spread, 0, 1, ones, ones, peers, group).sum((0, 1))


class LowRank(AttentionCore):
    """The method for cores that have the `project` and `attend` of `low_rank_attention`, and `rows`, which is r."""

    label = "ring (all-reduce)"

    def attend(self, place: RankPart, forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        axis, peers = place.axis, place.peers
        if self.grid is None:
            return low_rank_attention(q, k, v, self.module, place.size, axis.group)
        add_up = partial(_add_up_among, peers=peers.ranks, group=axis.group)
        return _attention(q, k, v, self.module, peers, axis.rank, add_up)

    def price(self, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int]) -> CommBytes:
        rows: Any = self.module.rows
        n, nbytes = len(parts), 2 * len(k) * rows * k.shape[2] * k.shape[3] * max(k.element_size(), 4)
        ring = -(-2 * nbytes * (n - 1) // n)
        once = {"all_reduce": (ring, 1)} if self.grid is None else {"switch": (nbytes * (n - 1), 1)}
        return CommBytes(once, once, once)
