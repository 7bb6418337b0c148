"""Ring attention (Li et al., arXiv 2105.13120; Liu et al., arXiv 2310.01889): queries stay, keys and values go round.

Each rank attends to the block that it holds while it sends the block on and receives the next one; outputs are added up
by their log-sum-exp. Forward sends 2M bytes a rank, of which (N-1)/N travel; M is the bytes of the activation (times
g/h with grouped queries). In backward keys and values go round again, and so do their gradients, which are summed in
fp32 at least and take one more hop, home: 2M (N-1)/N bytes for keys and values, and 2M for gradients, M in fp32.

Letters: b batch, n places of this rank, h heads, g heads of keys and values, e channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsp.comm.exchange import ranks
from dsp.comm.traffic_formulas import counts
from dsp.embedded import pairs
from dsp.embedded.blocks import block, block_backward, merge
from dsp.embedded.core import AttentionCore
from dsp.embedded.low_rank import LowRank
from dsp.embedded.pairs import Hop
from dsp.planner import chunk_sizes
from dsp.stages.methods import CommBytes, Peers, RankPart
from dsp.stages.notation import NotationError
from dsp.stages.stage import Stage

_lib = torch.library.Library("dsp", "FRAGMENT")
_lib.define(
    "ring_attention(Tensor q, Tensor k, Tensor v, int[] parts, int[] among, bool causal, str group) -> (Tensor, Tensor)"
)
_lib.define(
    "ring_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int[] parts, "
    "int[] among, bool causal, str group) -> (Tensor, Tensor, Tensor)"
)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, size: int, group: str, causal: bool = False) -> Tensor:
    """Softmax attention over sharded places: keys and values travel from rank to rank.

    q (b n h e), k and v (b n g e), of one dtype: this rank's `torch.chunk` of `size` places -> (b n h e). `causal`: no
    place sees a later one; queries travel, too, so that all ranks do the same work (`dsp.embedded.pairs`). `group` is
    the name of a process group. A rank holds two blocks of keys and values at once.
    """
    n, _ = ranks(group)
    peers = Peers.all(size, n)
    return torch.ops.dsp.ring_attention(q, k, v, peers.parts, peers.ranks, causal, group)[0]


def _hop(kv: Tensor, places: int, among: list[int], group: str) -> Hop:
    """Send a block to the next rank while one of `places` places arrives from the rank before."""
    place = among.index(ranks(group)[1])
    room = kv.new_empty((*kv.shape[:2], places, *kv.shape[3:]))
    return Hop([kv], among[(place + 1) % len(among)], [room], among[place - 1], group)


def _round(kv: Tensor, parts: list[int], among: list[int], group: str) -> Iterator[tuple[int, Tensor]]:
    """The blocks in the order of their arrival, each with its owner; the next one travels meanwhile."""
    n, rank = len(among), among.index(ranks(group)[1])
    for step in range(n):
        owner = (rank - step) % n
        hop = _hop(kv, parts[owner - 1], among, group) if step < n - 1 else None
        yield owner, kv
        if hop is not None:
            (kv,) = hop.wait()


def _forward(
    q: Tensor, k: Tensor, v: Tensor, parts: list[int], among: list[int], causal: bool, group: str
) -> tuple[Tensor, Tensor]:
    if causal:
        return pairs.forward(q, k, v, parts, among, group)
    out = lse = None
    for owner, kv in _round(torch.stack([k, v]), parts, among, group):
        if parts[owner] and len(q[0]):
            part = block(q, kv[0], kv[1], False)
            out, lse = part if out is None or lse is None else merge(out, lse, *part)
    if out is None or lse is None:  # no places here
        return torch.empty_like(q), _no_lse(q)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: list[int], among: list[int],
    causal: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if causal:
        return pairs.backward(grad, q, k, v, out, lse, parts, among, group)
    dq = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
    home: Hop | None = None  # the gradients of a block, which travel one step after the block
    for owner, kv in _round(torch.stack([k, v]), parts, among, group):
        dkv = torch.zeros_like(kv, dtype=dq.dtype)
        if parts[owner] and len(q[0]):
            more, *both = block_backward(grad, q, kv[0], kv[1], out, lse, False)
            dq += more
            dkv = torch.stack(both)
        if home is not None:
            dkv += home.wait()[0]
        home = _hop(dkv, parts[owner - 1], among, group)
    assert home is not None
    dk, dv = home.wait()[0].to(q.dtype).unbind()
    return dq.to(q.dtype), dk.clone(), dv.clone()


def _no_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))


for _device in ("CPU", "CUDA"):
    _lib.impl("ring_attention", _forward, _device)
    _lib.impl("ring_attention_backward", _backward, _device)


@torch.library.register_fake("dsp::ring_attention", lib=_lib)
def _(
    q: Tensor, k: Tensor, v: Tensor, parts: list[int], among: list[int], causal: bool, group: str
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), _no_lse(q)


@torch.library.register_fake("dsp::ring_attention_backward", lib=_lib)
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, parts: list[int], among: list[int],
    causal: bool, group: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.parts, ctx.among, ctx.causal, ctx.group = inputs
    ctx.save_for_backward(q, k, v, *output)


def _adjoint(ctx: Any, grad: Tensor, _: Tensor) -> Any:
    arguments = ctx.parts, ctx.among, ctx.causal, ctx.group
    return *torch.ops.dsp.ring_attention_backward(grad, *ctx.saved_tensors, *arguments), None, None, None, None


torch.library.register_autograd("dsp::ring_attention", _adjoint, setup_context=_keep, lib=_lib)


def hops(sizes: Sequence[int], rank: int, count: int) -> int:
    """The places that a rank sends in the first `count` hops: its own block, then those of the ranks before it."""
    return sum(sizes[(rank - step) % len(sizes)] for step in range(count))


@counts("ring", "ring_attention", calls=lambda *arguments: _calls(arguments[3], arguments[5])[0])
def _sent_forward(q: Tensor, k: Tensor, *arguments: Any) -> int:
    parts, among, causal, group = arguments[-4:]
    return _cost(q, k, parts, among.index(ranks(group)[1]), causal)[0]


@counts("ring", "ring_attention_backward", calls=lambda *arguments: _calls(arguments[6], arguments[8])[1])
def _sent_backward(grad: Tensor, q: Tensor, k: Tensor, *arguments: Any) -> int:
    parts, among, causal, group = arguments[-4:]
    return _cost(q, k, parts, among.index(ranks(group)[1]), causal)[1]


def _cost(q: Tensor, k: Tensor, sizes: Sequence[int], rank: int, causal: bool) -> tuple[int, int]:
    """The bytes that a rank sends in forward and in backward."""
    if causal:
        return pairs.sent(q, k, sizes, rank)
    unit, n = 2 * k.shape[0] * k.shape[2] * k.shape[3], len(sizes)
    forward = hops(sizes, rank, n - 1) * unit * k.element_size()
    return forward, forward + hops(sizes, rank, n) * unit * max(k.element_size(), 4)


def _calls(sizes: Sequence[int], causal: bool) -> tuple[int, int]:
    return (pairs.calls(sizes),) * 2 if causal else (len(sizes) - 1, 2 * len(sizes) - 1)


class Ring(AttentionCore):
    label = "ring"

    def __init__(self, core: Stage, stage: Stage, along: str) -> None:
        super().__init__(core, stage, along)
        if next(core.module.parameters(), None) is not None:
            raise NotationError(
                f"core {core.name!r} has parameters, which ring attention would ignore: it runs plain softmax "
                "attention in place of the core. A core that first sums keys and values over positions, as "
                "Linformer's does, needs the attributes `rows`, `project` and `attend` (dsp.embedded.low_rank). Use "
                "method='dsp' or 'ulysses' for this core"
            )

    @property
    def causal(self) -> bool:
        return bool(getattr(self.module, "causal", False))

    @classmethod
    def of(cls, core: Stage, stage: Stage, along: str) -> AttentionCore:
        sums = all(hasattr(core.module, name) for name in ("rows", "project", "attend"))
        return (LowRank if sums else cls)(core, stage, along)

    def attend(self, place: RankPart, forward: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        peers = place.peers
        return torch.ops.dsp.ring_attention(q, k, v, peers.parts, peers.ranks, self.causal, place.axis.group)[0]

    def load(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> float:
        if along != self.along or not self.causal:
            return 1.0
        q, _, _ = self.bind(args, kwargs)
        parts = chunk_sizes(q.shape[1], n) if self.grid is None else self.grid.parts(sizes, n)
        work = pairs.work(parts)
        return max(work) / sum(work) * sum(parts) / parts[0]

    def price(self, q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]) -> CommBytes:
        each = [_cost(q, k, sizes, rank, self.causal) for rank in range(len(sizes))]
        (forward, backward), calls = map(max, zip(*each)), _calls(sizes, self.causal)
        traffic = {"ring": (forward, calls[0])}
        return CommBytes(traffic, {"ring": (backward, calls[1])}, traffic)
