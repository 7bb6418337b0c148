"""The cost of a decision for the busiest rank: work, memory, and the rows of the table of a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from dsp.core.decide import Decision, copy_of_replicated
from dsp.core.meter import forwards
from dsp.core.record import BoundStage, Node, Record
from dsp.glue.rules.sources import EXPANDED
from dsp.planner import Choice, Layout, Move, Op, chunk_sizes
from dsp.report.names import Names
from dsp.report.table import StageRow, Switch, Whole
from dsp.stages.notation import BATCH_NAMES
from dsp.stages.stage import Option, Stage
from dsp.support.formatting import generic


class PlanStep(NamedTuple):
    """An op of the planner's problem, its node, and the choice that was made."""

    at: int
    node: Node
    op: Op
    choice: Choice

    @property
    def option(self) -> Option | None:
        return None if self.node.offer is None else self.node.offer.option

    @property
    def copied(self) -> int:
        """The bytes of the longest copy of a replicated operand that it makes inside."""
        return 0 if self.node.offer is None else copy_of_replicated(self.node, self.node.offer)


class Loads:
    """The loads of one rank by op: `shares` of the computation, and in `lengths` the bytes of the largest tensor on the
    rank, and of the largest on one process."""

    def __init__(self, record: Record, decision: Decision) -> None:
        self.problem, self.solution, self.size = decision.problem, decision.solution, record.n
        parts = zip(decision.nodes, self.problem.ops, decision.choices)
        self.steps = [PlanStep(at, *part) for at, part in enumerate(parts)]
        self.views = [node for node in record.nodes if node.view or node.identity]
        self.uncounted = {
            op.outputs[0] for _, node, op, _ in self.steps if node.name in EXPANDED and op.outputs and grown(node)
        }  # and what every rank gets
        self.uncounted |= {v for v, base in enumerate(decision.bases) if base.free and base.arrival}
        self.shares = [self.share(step) for step in self.steps]
        self.lengths = [self.largest(step) for step in self.steps]
        self.longest = max((largest for _, largest in self.lengths), default=0) or 1

    def local(self, v: int, cut: Layout) -> int:
        return self.problem.values[v].local_bytes(cut, self.size)

    def share(self, step: PlanStep) -> float:
        """The busiest rank's share of an op: its chunk of the sharded dim, or everything."""
        if step.option is not None and isinstance(step.node.call, BoundStage):
            stage, sizes, _ = step.node.call
            if stage.whole and stage.methods:  # its weights are cut instead
                return 1 / self.size
            if stage.around is not None and step.option.name is not None:
                return stage.around.share(sizes, self.size)
            return step.option.share(self.size)
        return step.op.share(step.choice, self.problem.values, self.size)

    def largest(self, step: PlanStep) -> tuple[int, int]:
        if step.node.kind == "output":  # full, if the caller asked for it
            return 0, 0
        layouts = [(v, cut) for v, cut in step.op.layouts(step.choice) if v not in self.uncounted]
        parts = [self.local(v, cut) for v, cut in layouts]
        full = [self.problem.values[v].nbytes for v, _ in layouts]
        if step.option is not None and step.option.onto:  # each rank's sum has the full size
            parts += full
        most = step.node.cost.largest
        return max([*parts, int(most * self.shares[step.at]), step.copied]), max([*full, most])

    @cached_property
    def copies(self) -> dict[int, int]:
        """The bytes of the longest copy of a full value that operations make inside, by value."""
        longest = dict[int, int]()
        for step in self.steps:
            if copied := step.copied:
                full = (v for v, cut in zip(step.op.inputs, step.choice.needs) if cut is None)
                longest |= {v: max(longest.get(v, 0), copied) for v in full}
        return longest

    @cached_property
    def flops(self) -> list[int]:
        """The FLOPs of each op in a step, on one process."""
        return [forwards(step.node) * step.node.cost.flops for step in self.steps]

    @property
    def busiest(self) -> float:
        """The FLOPs of a step on the busiest rank."""
        surplus = [forwards(s.node) * (s.node.offer.methods.surplus if s.node.offer else 0) for s in self.steps]
        return sum((work + more) * share for work, more, share in zip(self.flops, surplus, self.shares))

    @property
    def touched(self) -> float:
        """Bytes that the busiest rank reads and writes in a step: its share; outside of cut weights, everything."""
        total = 0.0
        for step, share in zip(self.steps, self.shares):
            call, (in_methods, every) = step.node.call, (step.node.cost.in_methods, step.node.cost.touched)
            outside = 1.0 if isinstance(call, BoundStage) and call.stage.whole else share
            total += forwards(step.node) * ((every - in_methods) * outside + in_methods * share)
        return total

    @property
    def touched_alone(self) -> int:
        return sum(forwards(step.node) * step.node.cost.touched for step in self.steps)

    @property
    def peak(self) -> int:
        """The peak of a rank, during functions of plain tensors too."""
        saved = [*accumulate((step.choice.saved for step in self.steps), initial=self.problem.resident)][1:]
        plain = [s + step.node.cost.work for s, step in zip(saved, self.steps) if step.node.kind == "plain"]
        return max([self.solution.peak, *plain])

    def whole(self) -> list[Whole]:
        """The operations that run replicated on tensors longer than 1.5/N of the longest, the most expensive first."""
        total, rows = max(sum(self.flops), 1), dict[tuple[str, str], Whole]()
        for step, (largest, _), work in zip(self.steps, self.lengths, self.flops):
            if step.node.kind not in ("operation", "plain") or any(cut for _, cut in step.op.layouts(step.choice)):
                continue
            largest = max([largest, *(self.copies.get(v, 0) for v in step.op.outputs)])
            if largest * self.size < 1.5 * self.longest or self.size == 1:
                continue
            if step.node.kind == "operation" and not makes(step.node):  # a view, or a read of numbers
                continue
            key = step.node.name, generic(step.node.module)
            row = rows.get(key, Whole(*key, 0, 0.0, 0))
            alone = step.node.cost.parameters
            rows[key] = Whole(*key, max(row.bytes, largest), row.part + work / total, row.calls + 1, alone)
        return sorted(rows.values(), key=lambda w: (w.part, w.bytes), reverse=True)


def makes(node: Node) -> bool:
    """Tell whether a node makes or writes a tensor."""
    read = {t.memory for t in node.refs}
    return node.in_place or any(r.memory not in read for r in node.results) or node.cost.largest > 0


def grown(node: Node) -> bool:
    """Tell whether a result has more numbers than the operand, and no memory for them."""
    return bool(node.operands) and math.prod(node.results[0].shape) > math.prod(node.operands[0].shape)


class TableRows:
    """The rows of a plan's table. sent: for each move the bytes, and the calls without those shared with others;
    pieces: of the moves that are made in pieces."""

    def __init__(
        self, loads: Loads, names: Names, sent: Mapping[Move, tuple[int, int]], pieces: Mapping[Move, int]
    ) -> None:  # fmt: skip
        self.loads, self.names, self.sent, self.pieces = loads, names, sent, pieces
        self.before: dict[int, list[Move]] = {}
        for m in loads.solution.moves:
            if m.kind != "split":
                self.before.setdefault(m.before, []).append(m)

    def switches(self) -> list[Switch]:
        """Every switch and gather of a forward."""
        values, ops = self.loads.problem.values, self.loads.problem.ops
        return [
            Switch(
                m.kind, values[m.value].name, self.names.of(m.value, m.src), self.names.of(m.value, m.dst),
                ops[m.before].name, self.sent[m][0], shared=not self.sent[m][1],
            )
            for m in self.loads.solution.moves if m.kind != "split"
        ]  # fmt: skip

    def stages(self) -> Iterator[StageRow]:
        """A row for each stage call, and for each operation that sends."""
        loads, saved = self.loads, self.loads.problem.resident
        for step in loads.steps:
            moves, option, choice = self.before.get(step.at, []), step.option, step.choice
            saved += choice.saved
            peak = saved + choice.work + sum(loads.local(v, cut) for v, cut in step.op.layouts(choice))
            nbytes = sum(self.sent[m][0] for m in moves) + choice.bytes
            calls = sum(self.sent[m][1] for m in moves) + choice.calls
            share = loads.lengths[step.at][0] / loads.longest
            along = option.name if option is not None else self.layout(step, moves)
            costs = self.moved(step, moves, along), nbytes, peak, calls
            if isinstance(step.node.call, BoundStage) and option is not None:
                row = StageRow(step.op.name, "", (), along, *costs, share=share, line=step.node.line)
                yield self.stage(row, step, step.node.call.stage, option)
            elif moves or choice.bytes:
                yield StageRow(f"({step.op.name})", "", (), along, *costs, share=share, line=step.node.line)

    def stage(self, row: StageRow, step: PlanStep, stage: Stage, option: Option) -> StageRow:
        """The row of a stage call, with what its pattern says of dims."""
        loads = self.loads
        idle = 0 if option.name is None else chunk_sizes(option.size, loads.size).count(0)
        order = dict.fromkeys(x for p in stage.pattern.inputs for x in p.names if x in p.computed)
        offered = [o.option.name for o in step.node.offers if o.option is not None]
        free = tuple(dict.fromkeys(n for n in offered if n is not None and n not in BATCH_NAMES))
        short = tuple(n for n in stage.pattern.free if n not in BATCH_NAMES and n not in free)
        part = loads.flops[step.at] / max(sum(loads.flops), 1)
        return replace(
            row, pattern=stage.pattern.text, computes=(*order,), idle=idle, free=free, short=short, part=part
        )

    def layout(self, step: PlanStep, moves: list[Move]) -> str | None:
        """The name of the dim that an operation is sharded along: of a moved operand, if there is one."""
        needs = dict(zip(step.op.inputs, step.choice.needs))
        ends = [(m.value, m.dst) for m in moves if m.dst is not None and m.dst == needs.get(m.value)]
        return next((self.names.of(v, cut) for v, cut in (*ends, *needs.items()) if cut is not None), None)

    def moved(self, step: PlanStep, moves: list[Move], along: str | None) -> str:
        """The moves before an op that is sharded `along` a dim, which is named so, and the op's own collectives."""
        needs, texts = dict(zip(step.op.inputs, step.choice.needs)), list[str]()
        for m in moves:
            src, dst = self.names.of(m.value, m.src), self.names.of(m.value, m.dst)
            end = along if m.dst == needs.get(m.value, m.src) and along != src else dst
            cut = f" in {self.pieces[m]}" if m in self.pieces else ""
            texts.append(f"gather {src}" if m.kind == "gather" else f"{src} → {end}{cut}")
        if step.choice.bytes and step.node.offer is not None:
            kinds = [c.kind.replace("_", "-") for c in step.node.offer.collectives]
            if step.option is not None and step.option.onto:
                kinds = [f"+{along} → {step.option.onto}"]
            call = step.node.call
            methods = [method.label for method in call.stage.methods] if isinstance(call, BoundStage) else []
            texts += dict.fromkeys([*methods, *kinds])
        return ", ".join(texts)
