"""The communication inside an operation on parts, as its offer states it: what each rank sends, forward and back."""

from __future__ import annotations

import math
from typing import Any

from dsp.comm.collectives import summed_in
from dsp.comm.layout import Cut
from dsp.core.record import Collective, CollectivePart, Node
from dsp.glue.rules import DealtRows, Outcome


def collectives_of(node: Node, needs: Any, outcome: Outcome, n: int) -> tuple[Collective, ...]:
    """The collectives of an operation on `n` ranks, in order. needs: the cuts of its operands."""
    if outcome.numbers is not None:
        i, x = next((i, t) for i, (t, cut) in enumerate(zip(node.operands, needs)) if cut is not None)
        each = (outcome.numbers.numel * summed_in(x.dtype).itemsize * (n - 1),) * n  # type: ignore[attr-defined]
        return (Collective("gather", "reduce_scatter", (CollectivePart(each, each, operand=i),), early=True),)
    if outcome.cut is None:
        size = sum(math.prod(r.shape) * summed_in(r.dtype).itemsize for r in node.results)
        each = (-(-2 * size * (n - 1) // n),) * n
        return (Collective("all_reduce", "all_reduce", (CollectivePart(each, each),)),)
    if outcome.deal is not None:
        return dealt_rows(node, outcome.deal, outcome.cut)
    parts = []
    for i, spans in outcome.rows.items():
        t: Any = node.operands[i]
        for span in spans if needs[i] is not None else ():
            forward, backward = span.sent(t.shape, t.dtype.itemsize)
            parts.append(CollectivePart(tuple(forward), tuple(backward), operand=i))
    if not any(any(part.sent) for part in parts):
        return ()
    if len(parts) == len(node.results):  # each result is made of rows of its own
        parts = [part._replace(result=k) for k, part in enumerate(parts)]
    return (Collective("rows", "rows", tuple(parts), early=True),)


def dealt_rows(node: Node, dealing: DealtRows, cut: Cut) -> tuple[Collective, ...]:
    """The rows of an operand that are dealt to the ranks, and those of results that are sent back."""
    traffic, x = dealing.deal.traffic, node.operands[dealing.operand]
    if not traffic.travels:
        return ()
    forward, backward = traffic.sent(x.nbytes // dealing.deal.size)  # type: ignore[attr-defined]
    parts = [CollectivePart(tuple(forward), tuple(backward), operand=dealing.operand)]
    for k in dealing.results:
        backward, forward = traffic.sent(node.results[k].nbytes // node.results[k].shape[cut.dim])
        parts.append(CollectivePart(tuple(forward), tuple(backward), result=k))
    return tuple(Collective("rows", "rows", (part,), early=k == 0) for k, part in enumerate(parts))
