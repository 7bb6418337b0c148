"""Exact counts of the collectives that run, by phase."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from dsp.comm.traffic_formulas import COLLECTIVES
from dsp.support.private import OF_AN_OP, TorchDispatchMode, backward_node, backward_pass, schema_of


class Traffic:
    """Calls and bytes sent by this rank, by collective: switch, gather, reduce_scatter, all_reduce, rows. A switch that
    is not direct (`dsp.Route`) counts by link: switch_within nodes and switch_between."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __repr__(self) -> str:
        return ", ".join(f"{k}: {self.calls[k]} calls {self.bytes[k]} bytes" for k in sorted(self.calls)) or "nothing"


class count_comm(TorchDispatchMode):
    """Count the collectives of a block of code: ``with dsp.count_comm() as comm: ...; comm.forward.calls["switch"]``.

    Attributes `forward`, `backward` and `recompute` (forward work repeated inside backward by activation checkpointing)
    are `Traffic`; `calls` and `bytes` are the totals of all three. Bytes are those that this rank sends to others; its
    own part does not count. One context covers forward and backward of the thread that entered it; a backward that
    another thread calls is counted by a context there.

    Other functional collectives of torch (of a stray DTensor redistribution, say) count under their own names.
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
        name = schema_of(func).name.split("::")[1]
        if func.namespace in ("dsp", "_c10d_functional", "_dtensor") and name in COLLECTIVES:
            traffic = self.forward
            if backward_pass() != -1:
                # in backward, one of our collectives belongs to an adjoint, or to forward work that is recomputed
                recompute = func.namespace == "dsp" and not OURS.search(backward_node())
                traffic = self.recompute if recompute else self.backward
            for kind, calls, nbytes in COLLECTIVES[name](*args):
                traffic.calls[kind] += calls
                traffic.bytes[kind] += nbytes
        return func(*args, **kwargs)


OURS = re.compile(  # autograd nodes of the library's ops, and of its functions that send in backward
    f"{OF_AN_OP}_dsp_|SplitInput|WholeInput|_Ahead|_Send|_Join|_Start|_Take|CompiledFunction"
)
