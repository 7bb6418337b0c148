"""Causal attention with equal work on all ranks: a pair of blocks is computed by one of the two ranks that hold them.

Rank i holds block i of queries and of keys. If only keys travelled, as in a ring, the last rank would compute N blocks
and the first rank one. Instead of N - 1 hops there are N/2 turns (after Li et al., arXiv 2310.03294). In turn d each
rank meets the block of the rank d places before it, modulo N. If that block is earlier, its keys and values are sent
here. If it is later, its queries are sent here, and their output goes back, with its log-sum-exp. In the last turn of
an even N two ranks share each pair: one takes the first half of the queries, the other the rest.

    N = 5     rank 0    rank 1    rank 2    rank 3    rank 4          (i j): queries of block i, keys of block j
    turn 1    (4 0)     (1 0)     (2 1)     (3 2)     (4 3)
    turn 2    (3 0)     (4 1)     (2 0)     (3 1)     (4 2)

The order of places is unchanged, so position embeddings need no change. The last ranks may have no places; they take no
part.

Letters: b batch, n places of this rank, h heads, g heads of keys and values, e channels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsp.comm.exchange import ranks
from dsp.comm.messages import messages
from dsp.embedded.blocks import block, block_backward, merge
from dsp.support.private import _resolve_process_group


class Hop:
    """Tensors sent to rank `to` while those of rank `origin` arrive in `rooms`; `wait` returns the rooms, filled."""

    def __init__(self, send: Sequence[Tensor], to: int, rooms: Sequence[Tensor], origin: int, group: str) -> None:
        self.sent, self.rooms = [x.contiguous() for x in send], rooms
        going, coming = [(to, x) for x in self.sent], [(origin, x) for x in rooms]
        self.works = messages(going, coming, _resolve_process_group(group))  # type: ignore[arg-type]

    def wait(self) -> Sequence[Tensor]:
        for work in self.works:
            work.wait()
        return self.rooms


class Turn(NamedTuple):
    """One turn of a rank. Ranks are given by position among the peers that hold places.

    to: the rank to which its block is sent; origin: the rank whose block arrives; keys_go, keys_come: keys and values
    are sent or arrive, instead of queries; go, come: the number of queries sent or received; first: the first of its
    own queries that meet the arriving keys; keys: the number of places on `origin`.
    """

    to: int
    origin: int
    keys_go: bool
    keys_come: bool
    go: int
    come: int
    first: int
    keys: int


def turns(parts: Sequence[int], rank: int) -> list[Turn]:
    """The turns of a rank, for ranks that hold these parts; the last parts may be empty."""
    n = sum(part > 0 for part in parts)
    if rank >= n:
        return []
    plan = []
    for d in range(1, n // 2 + 1):
        share = 2 if 2 * d == n else 1  # ranks that share a pair
        to, origin = (rank + d) % n, (rank - d) % n
        first = parts[rank] // 2 if share == 2 else 0
        plan.append(
            Turn(
                to, origin, to > rank, origin < rank, parts[rank] // share, parts[origin] // share, first, parts[origin]
            )
        )
    return plan


def work(parts: Sequence[int]) -> list[int]:
    """The number of (query, key) pairs that each rank computes."""
    counts = []
    for rank, part in enumerate(parts):
        met = [(part - t.first) * t.keys if t.keys_come else t.come * part for t in turns(parts, rank)]
        counts.append(part * (part + 1) // 2 + sum(met))
    return counts


def sent(q: Tensor, k: Tensor, parts: Sequence[int], rank: int) -> tuple[int, int]:
    """The bytes that a rank sends in forward and in backward; q and k give batch, heads, channels and dtype."""
    (b, _, h, e), g = q.shape, k.shape[2]
    narrow, wide = q.element_size(), wide_of(q).itemsize
    forward = backward = 0
    for t in turns(parts, rank):
        keys = 2 * b * parts[rank] * g * e
        forward += keys * narrow if t.keys_go else b * t.go * h * e * narrow
        backward += keys * narrow if t.keys_go else b * t.go * h * (3 * e * narrow + wide)
        forward += 0 if t.keys_come else b * t.come * h * (e * narrow + wide)
        backward += 2 * b * t.keys * g * e * wide if t.keys_come else b * t.come * h * e * wide
    return forward, backward


def calls(parts: Sequence[int]) -> int:
    """The number of exchanges in forward, or in backward: two per turn, there and back."""
    return 2 * len(turns(parts, 0))


def wide_of(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def forward(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[int], among: Sequence[int], group: str
) -> tuple[Tensor, Tensor]:
    """Output (b n h e) and log-sum-exp (b h n) of this rank's queries."""
    (b, n, h, e), wide = q.shape, wide_of(q)
    if not n:
        return torch.empty_like(q), q.new_empty(b, h, 0, dtype=wide)
    kv, plan = torch.stack([k, v]), turns(parts, among.index(ranks(group)[1]))

    def start(t: Turn) -> Hop:
        room = q.new_empty(2, b, t.keys, *k.shape[2:]) if t.keys_come else q.new_empty(b, t.come, h, e)
        return Hop([kv if t.keys_go else q[:, : t.go]], among[t.to], [room], among[t.origin], group)

    def add(rows: slice, more: Tensor, more_lse: Tensor) -> None:
        out[:, rows], lse[..., rows] = merge(out[:, rows], lse[..., rows], more.to(wide), more_lse)

    def add_reply(t: Turn, hop: Hop) -> None:
        if tensors := hop.wait():
            add(slice(t.go), *tensors)

    coming = [start(t) for t in plan[:1]]
    out, lse = block(q, k, v, True)
    out, lse = out.contiguous(), lse.contiguous()
    replies: list[tuple[Turn, Hop]] = []
    for t, following in zip(plan, [*plan[1:], None]):
        (received,) = coming.pop().wait()
        coming += [start(following)] if following else []
        reply: list[Tensor] = []
        if t.keys_come:
            add(slice(t.first, None), *block(q[:, t.first :], received[0], received[1], False))
        elif t.come:
            y, y_lse = block(received, k, v, False)
            reply = [y.to(q.dtype), y_lse]  # a kernel returns the output in this dtype anyway
        rooms = [] if t.keys_go or not t.go else [q.new_empty(b, t.go, h, e), lse.new_empty(b, h, t.go)]
        replies.append((t, Hop(reply, among[t.origin], rooms, among[t.to], group)))
        if len(replies) > 1:  # this turn's reply travels while the next turn computes
            add_reply(*replies.pop(0))
    for t, hop in replies:
        add_reply(t, hop)
    return out.to(q.dtype), lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: Sequence[int],
    among: Sequence[int], group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v of this rank; sums in fp32 at least."""
    b, n, h, e = q.shape
    if not n:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kv, plan = torch.stack([k, v]), turns(parts, among.index(ranks(group)[1]))

    def start(t: Turn) -> Hop:
        rows = slice(t.go)
        send = [kv] if t.keys_go else [torch.stack([q[:, rows], grad[:, rows], out[:, rows]]), lse[..., rows]]
        of_keys, of_queries = (2, b, t.keys, *k.shape[2:]), (3, b, t.come, h, e)
        rooms = [q.new_empty(of_keys if t.keys_come else of_queries)]
        rooms += [] if t.keys_come else [lse.new_empty(b, h, t.come)]
        return Hop(send, among[t.to], rooms, among[t.origin], group)

    def add_reply(t: Turn, hop: Hop) -> None:
        (grads,) = hop.wait()
        if t.keys_go:
            dkv.add_(grads)
        else:
            dq[:, : t.go] += grads

    coming = [start(t) for t in plan[:1]]
    dq, *both = block_backward(grad, q, k, v, out, lse, True)
    dq, dkv = dq.contiguous(), torch.stack(both)
    replies: list[tuple[Turn, Hop]] = []
    for t, following in zip(plan, [*plan[1:], None]):
        received, *received_lse = coming.pop().wait()
        coming += [start(following)] if following else []
        reply = dq.new_zeros(2, b, t.keys, *k.shape[2:]) if t.keys_come else dq.new_zeros(b, t.come, h, e)
        if t.keys_come:
            rows = slice(t.first, None)
            y, y_lse = out[:, rows], lse[..., rows].contiguous()
            more, *both = block_backward(grad[:, rows], q[:, rows], received[0], received[1], y, y_lse, False)
            dq[:, rows] += more
            reply = torch.stack(both)
        elif t.come:
            queries, of_out, y = received
            reply, *both = block_backward(of_out, queries, k, v, y, received_lse[0], False)
            dkv += torch.stack(both)
        room = dkv.new_empty(dkv.shape) if t.keys_go else dq.new_empty(b, t.go, h, e)
        replies.append((t, Hop([reply], among[t.origin], [room], among[t.to], group)))
        if len(replies) > 1:
            add_reply(*replies.pop(0))
    for t, hop in replies:
        add_reply(t, hop)
    dk, dv = dkv.to(q.dtype).unbind()
    return dq.to(q.dtype), dk.clone(), dv.clone()
