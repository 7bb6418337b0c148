"""The communication inside an operation on parts, as its offer states it to the planner."""

from __future__ import annotations

import math
from typing import Any

from dsp.collectives import summed_in
from dsp.core.record import Node
from dsp.rules import Outcome


def traffic(node: Node, needs: Any, outcome: Outcome, n: int) -> tuple[int, int]:
    """Bytes that the busiest rank sends inside, and calls."""
    wide = [summed_in(t.dtype).itemsize for t in node.refs]
    if outcome.numbers is not None:
        return outcome.numbers.numel * max(wide) * (n - 1), 1
    if outcome.cut is None:
        size = sum(math.prod(r.shape) * summed_in(r.dtype).itemsize for r in node.results)
        return -(-2 * size * (n - 1) // n), 1
    if outcome.deal is not None:
        deal, x = outcome.deal.deal, node.operands[outcome.deal.operand]
        there, _ = deal.traffic.sent(x.nbytes // deal.size)  # type: ignore[attr-defined]
        rows = [node.results[i].nbytes // node.results[i].shape[outcome.cut.dim] for i in outcome.deal.results]
        back = [deal.traffic.sent(row)[1] for row in rows]
        return max(map(sum, zip(there, *back))), 1 + len(back)
    sent = [0] * n
    for i, spans in outcome.rows.items():
        if needs[i] is not None:
            t: Any = node.operands[i]
            for span in spans:
                sent = [a + b for a, b in zip(sent, span.sent(t.shape, t.dtype.itemsize)[0])]
    return max(sent), int(any(sent))
