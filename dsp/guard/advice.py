"""Warnings about plans, each logged once: ranks without a part, and work that every rank repeats."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dsp.core.observed import Events, ModelCall, Observed
from dsp.core.record import Node, Record
from dsp.glue.rules import RULES
from dsp.planner import chunk_sizes
from dsp.report.plan import Goal, plan_stages
from dsp.report.table import Whole, every_rank_runs, idle_ranks
from dsp.stages.notation import BATCH_NAMES

log = logging.getLogger("dsp")

NO_PLAN = (
    "the first call of {model} runs without a plan: it {why}. Stages choose their shards as they run. Later calls are "
    "planned by it: {what}"
)


class Advice:
    """The warnings of one model. advised: on its first plan."""

    def __init__(self, parallel: Observed) -> None:
        self.parallel, self.advised = parallel, False

    def on_record(self, call: ModelCall) -> None:
        if not call.record.planned:
            log.info("no plan ahead of the run, stages choose greedily: it %s", self.parallel.reason)
        elif not self.advised:
            self.advised = True
            self.on_plan(call)

    def on_plan(self, call: ModelCall) -> None:
        """Warn of ranks without a part, and of work that every rank repeats."""
        record, model = call.record, self.parallel
        if short := [*idle_in(record)]:
            self.say(". ".join(idle_ranks(record.n, short)))
        if not repeats_work(record):
            return
        if record.replans:  # to measure it would run the forward again
            if rows := repeated(record):
                text = every_rank_runs(rows)
                self.say(NO_PLAN.format(model=type(model.model).__name__, why=model.reason, what=text))
            return
        try:
            goal = Goal(record.n, gather_output=model.gather)
            plan = plan_stages(model.model, model.stages, model.root, call.args, call.kwargs, goal, advise=True)
        except Exception as reason:
            log.debug("no advice on a plan: %s: %s", type(reason).__name__, reason)
            return
        if plan.advice:
            self.say(plan.advice)

    def say(self, text: str) -> None:
        (log.warning if self.parallel.axis.rank == 0 else log.info)(text)


def advise_on_plans(parallel: Observed, events: Events) -> None:
    """Warn of what a model's first plan leaves to wish for; log why a forward was not planned before it ran."""
    events.record.append(Advice(parallel).on_record)


def idle_in(record: Record) -> Iterator[tuple[str, str | None, int]]:
    """The name of each stage call of which a third of the ranks have no part, the dim that it is sharded along, and the
    number of these ranks."""
    for node in record.nodes:
        option = None if node.offer is None else node.offer.option
        if option is not None and option.name is not None:
            idle = chunk_sizes(option.size, record.n).count(0)
            if 3 * idle >= record.n:
                yield node.name, option.name, idle


def repeats_work(record: Record) -> bool:
    """Tell whether every rank may repeat work on long tensors; what that costs, a measured plan tells.

    What has no rule, such as a cell, may have long tensors inside.
    """
    unknown = any(n.name not in RULES and n.refs and n.results for n in record.nodes if n.kind == "operation")
    return record.compiled or unknown or any(replicated_node(record, node) for node in record.nodes)


def repeated(record: Record) -> list[Whole]:
    """The operations that every rank runs in full, the longest first."""
    rows = dict[str, Whole]()
    for node in record.nodes:
        if node.kind == "operation" and replicated_node(record, node):
            row = rows.get(node.name, Whole(node.name, "", 0, 0.0, 0))
            rows[node.name] = Whole(node.name, "", max(row.bytes, longest(node)), 0.0, row.calls + 1)
    return sorted(rows.values(), key=lambda row: row.bytes, reverse=True)


def longest(node: Node) -> int:
    """Bytes of the longest tensor that a node reads or makes."""
    return max((t.nbytes for t in (*node.refs, *node.results)), default=0)


def replicated_node(record: Record, node: Node) -> bool:
    """Tell whether every rank runs a node in full, on a long tensor."""
    if node.offer is None or node.view or node.identity or node.kind == "output":
        return False
    if node.kind == "stage":
        return node.offer.option is None or node.offer.option.name in (None, *BATCH_NAMES)
    return longest(node) * record.n >= 1.5 * record.longest and not any((*node.offer.needs, *node.offer.gives))
