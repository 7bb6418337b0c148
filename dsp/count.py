"""Counting what is really communicated: every DSP collective, by phase, exactly."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

from dsp.collectives import added_in, chunk_sizes, ranks
from dsp.embedded.ring import ring_bytes
from dsp.private import TorchDispatchMode, backward_node, backward_pass


class Traffic:
    """Calls and bytes sent by this rank, by collective (``switch``, ``gather``, ``reduce_scatter``, ``all_reduce``)."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return ", ".join(f"{k}: {self.calls[k]} calls {self.bytes[k]} bytes" for k in sorted(self.calls)) or "nothing"


class count_comm(TorchDispatchMode):
    """Count the collectives of a block of code: ``with dsp.count_comm() as comm: ...; comm.forward.calls["switch"]``.

    Attributes `forward`, `backward` and `recompute` (forward work repeated inside backward by activation checkpointing)
    are `Traffic`; `calls` and `bytes` are the totals of all three. Bytes are those this rank sends to others, which is
    what travels: its own part stays. One context covers forward and backward together.

    Collectives other than DSP's that go through torch's functional collectives (a stray DTensor redistribution, say)
    are counted under their own names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward, self.backward, self.recompute = Traffic(), Traffic(), Traffic()

    @property
    def calls(self) -> int:
        return sum(sum(t.calls.values()) for t in (self.forward, self.backward, self.recompute))

    @property
    def bytes(self) -> int:
        return sum(sum(t.bytes.values()) for t in (self.forward, self.backward, self.recompute))

    def by_collective(self) -> dict[str, dict[str, dict[str, int]]]:
        """``{phase: {collective: {"calls": int, "bytes": int}}}``"""
        phases = {"forward": self.forward, "backward": self.backward, "recompute": self.recompute}
        return {p: {k: {"calls": t.calls[k], "bytes": t.bytes[k]} for k in t.calls} for p, t in phases.items()}

    def __repr__(self) -> str:
        return f"forward: {self.forward}; backward: {self.backward}; recompute: {self.recompute}"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func.namespace in ("dsp", "_c10d_functional", "_dtensor") and name in COLLECTIVES:
            traffic = self.forward
            if backward_pass() != -1:
                # a collective of ours in backward is its adjoint's, or else it is forward work done again
                again = func.namespace == "dsp" and not OURS.search(backward_node())
                traffic = self.recompute if again else self.backward
            label = COLLECTIVES[name]
            traffic.calls[label] += 1
            traffic.bytes[label] += sent(name, *args)
        return func(*args, **kwargs)


COLLECTIVES = {
    "switch": "switch",
    "switch_among": "switch",
    "switch_many": "switch",
    "all_to_all_single": "switch",
    "shard_dim_alltoall": "shard_dim_alltoall",
    "gather": "gather",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "ring_attention": "ring",
    "ring_attention_backward": "ring",
}
OURS = re.compile("dsp_(switch|gather|reduce_scatter|all_reduce|ring_attention)|SplitInput|WholeInput|_Launch|_Await")


def sent(name: str, x: Any, *args: Any) -> int:
    """Bytes this rank sends to others in one collective."""
    if name.startswith("ring_attention"):
        return ring_bytes(name, x, *args)
    if name == "switch_many":
        return sum(sent("switch", *one, args[-1]) for one in zip(x, *args[:-1]))
    n, rank = ranks(args[-1])
    own = x.numel() * x.element_size()
    if name == "switch":
        size = x.shape[args[1]]
        kept = chunk_sizes(size, n)[rank]
        return own * (size - kept) // size if size else 0
    if name == "switch_among":
        dst_parts, among, group = args[3:]
        kept = dst_parts[among.index(ranks(group)[1])]
        return own * (sum(dst_parts) - kept) // max(sum(dst_parts), 1)
    if name == "all_to_all_single":
        return (sum(args[1]) - args[1][rank]) * x.element_size()
    if name == "shard_dim_alltoall":
        return own * (n - 1) // n
    if name in ("gather", "all_gather_into_tensor"):
        return own * (n - 1)
    if name in ("reduce_scatter", "reduce_scatter_tensor"):
        dim = args[0] if name == "reduce_scatter" else 0
        size = x.shape[dim]
        return own - math.prod(x.shape) // max(size, 1) * chunk_sizes(size, n)[rank] * x.element_size()
    if name == "all_reduce":  # a ring: reduce-scatter, then all-gather
        return -(-2 * x.numel() * added_in(x.dtype).itemsize * (n - 1) // n)
    return own * (n - 1)
