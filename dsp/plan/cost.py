"""The cost of a plan's ops for the busiest rank: work, memory, and the bytes sent before each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from dsp.plan.events import Trace
from dsp.plan.solve import Decision, Solved
from dsp.plan.values import is_batch
from dsp.planner import Choice, Layout, Move, chunk_sizes
from dsp.report.table import StageRow, Switch, Whole
from dsp.stages import Stage
from dsp.text import generic


class Loads:
    """The loads of one rank by op: `shares` of the computation, and in `held` the bytes of the largest tensor on the
    rank, and of the largest on one process."""

    def __init__(self, found: Solved) -> None:
        self.found, self.trace, self.size = found, found.trace, found.size
        self.shares = [self.share(step) for step in found.steps]
        self.held = [self.largest(step) for step in found.steps]
        self.longest = max((whole for _, whole in self.held), default=0) or 1

    def local(self, v: int, key: Layout) -> int:
        return self.trace.values[v].local_bytes(key, self.size)

    def share(self, step: Decision) -> float:
        """The busiest rank's share of an op: its chunk of the sharded dim, or everything."""
        stage, option = self.found.stage(step), step.execution.option
        if stage is not None and option is not None:
            if stage.whole and stage.inside:  # its weights are cut instead
                return 1 / self.size
            if stage.around is not None and option.name is not None:
                return stage.around.share(step.event.sizes, self.size)
            return option.share(self.size)
        return step.op.share(step.choice, self.trace.values, self.size)

    def largest(self, step: Decision) -> tuple[int, int]:
        if step.event.kind == "output":  # full, if the caller asked for it
            return 0, 0
        layouts = [(v, key) for v, key in step.op.layouts(step.choice) if v not in self.trace.stretched]
        own = [self.local(v, key) for v, key in layouts]
        whole = [self.trace.values[v].nbytes for v, _ in layouts]
        if step.event.kind == "stage" and step.passing is not None:  # each rank's sum has the full size
            own += whole
        return max([*own, int(step.event.largest * self.shares[step.at])]), max([*whole, step.event.largest])

    @cached_property
    def flops(self) -> list[int]:
        """The FLOPs of each op in a step, on one process."""
        return [self.trace.forwards(event) * event.flops for event in self.trace.events]

    @property
    def busiest(self) -> list[float]:
        """The FLOPs of each op in a step, on the busiest rank."""
        surplus = [self.trace.forwards(step.event) * step.execution.surplus for step in self.found.steps]
        return [(work + more) * share for work, more, share in zip(self.flops, surplus, self.shares)]

    def touched(self, step: Decision) -> float:
        """Bytes that the busiest rank reads and writes in a step: its share; outside of cut weights, everything."""
        stage, (outside, inside) = self.found.stage(step), step.event.touched
        share = self.shares[step.at]
        whole = stage is not None and stage.whole
        return self.trace.forwards(step.event) * (outside * (1.0 if whole else share) + inside * share)

    @property
    def touched_alone(self) -> int:
        return sum(self.trace.forwards(event) * sum(event.touched) for event in self.trace.events)

    @property
    def peak(self) -> int:
        """The peak during glue that the plan cannot shard."""
        saved = accumulate((step.choice.saved for step in self.found.steps), initial=self.trace.resident)
        next(saved)
        return max((s + e.memory[0] for s, e in zip(saved, self.trace.events) if e.kind == "whole"), default=0)

    def whole(self) -> list[Whole]:
        """The glue that runs replicated on tensors longer than 1.5/N of the longest, the most expensive first."""
        total, found = max(sum(self.flops), 1), dict[tuple[str, str], Whole]()
        for step, (own, _), work in zip(self.found.steps, self.held, self.flops):
            event = step.event
            if event.kind not in ("glue", "whole") or any(key for _, key in step.op.layouts(step.choice)):
                continue
            if own * self.size < 1.5 * self.longest or self.size == 1:
                continue
            if event.kind == "glue" and not event.largest:  # it makes no tensor: a view, or a read of numbers
                continue
            key = event.name, generic(event.module)
            known = found.get(key, Whole(*key, 0, 0.0, 0))
            found[key] = Whole(*key, max(known.bytes, own), known.part + work / total, known.calls + 1)
        return sorted(found.values(), key=lambda w: (w.part, w.bytes), reverse=True)


def switches(found: Solved, sent: Mapping[Move, tuple[int, int]]) -> list[Switch]:
    """Every switch and gather of a forward; `sent`: bytes, and calls without those shared with an earlier move."""
    values, ops = found.trace.values, found.trace.ops
    return [
        Switch(
            m.kind,
            values[m.value].name,
            found.trace.name(m.value, m.src),
            found.trace.name(m.value, m.dst),
            ops[m.before].name,
            sent[m][0],
            shared=not sent[m][1],
        )
        for m in found.solution.moves
        if m.kind != "split"
    ]


def rows(loads: Loads, of_move: Mapping[Move, tuple[int, int]], pieces: Mapping[Move, int]) -> list[StageRow]:
    """A row for each stage call, and for each operation that sends. pieces: the number of pieces of a cut move."""
    found, made = loads.found, list[StageRow]()
    before: dict[int, list[Move]] = {}
    for m in found.solution.moves:
        if m.kind != "split":
            before.setdefault(m.before, []).append(m)
    saved = loads.trace.resident
    for step in found.steps:
        stage, option, choice, own = found.stage(step), step.execution.option, step.choice, before.get(step.at, [])
        saved += choice.saved
        peak = saved + choice.work + sum(loads.local(v, key) for v, key in step.op.layouts(choice))
        sent = sum(of_move[m][0] for m in own) + choice.bytes
        calls = sum(of_move[m][1] for m in own) + choice.calls
        share = loads.held[step.at][0] / loads.longest
        along = option.name if option is not None else layout_of(loads.trace, step, own)
        inside = [x.label for x in stage.inside] if stage is not None else []
        rest = moved(loads.trace, own, step, along, inside, pieces), sent, peak, calls
        if stage is not None and option is not None:
            idle = chunk_sizes(option.size, found.size).count(0) if option.name is not None else 0
            row = StageRow(step.op.name, stage.pattern.text, (), along, *rest, idle, share, step.event.line)
            made.append(of_stage(row, stage, step, loads))
        elif own or choice.bytes:
            made.append(StageRow(f"({step.op.name})", "", (), along, *rest, share=share, line=step.event.line))
    return made


def of_stage(row: StageRow, stage: Stage, step: Decision, loads: Loads) -> StageRow:
    """The row, with the dims that the stage computes over, other dims to shard it along, and its share of all FLOPs."""
    order = dict.fromkeys(x for p in stage.pattern.inputs for x in p.names if x in p.computed)
    free = tuple(dict.fromkeys(c.execution.option.name for c in step.op.choices if apart(c)))
    short = tuple(name for name in stage.pattern.free if not is_batch(name) and name not in free)
    return replace(
        row, computes=tuple(order), free=free, short=short, part=loads.flops[step.at] / max(sum(loads.flops), 1)
    )


def apart(choice: Choice) -> bool:
    """Tell whether this choice shards a stage along a dim other than batch."""
    option = choice.execution.option if choice.execution else None
    return option is not None and option.name is not None and not is_batch(option.name)


def layout_of(t: Trace, step: Decision, moves: list[Move]) -> str | None:
    """The name of the dim that an operation is sharded along: of a moved operand, if there is one."""
    needs = dict(zip(step.op.inputs, step.choice.needs))
    ends = [(m.value, m.dst) for m in moves if m.dst is not None and m.dst == needs.get(m.value)]
    return next((t.name(v, cut) for v, cut in (*ends, *needs.items()) if cut is not None), None)


def moved(
    t: Trace, moves: list[Move], step: Decision, along: str | None, inside: list[str], pieces: Mapping[Move, int]
) -> str:
    """The moves before an op that is sharded `along` a dim, which is named so, and the op's own collectives."""
    needs, texts = dict(zip(step.op.inputs, step.choice.needs)), list[str]()
    for m in moves:
        src, dst = t.name(m.value, m.src), t.name(m.value, m.dst)
        end = along if m.dst == needs.get(m.value, m.src) and along != src else dst
        cut = f" in {pieces[m]}" if m in pieces else ""
        texts.append(f"gather {src}" if m.kind == "gather" else f"{src} → {end}{cut}")
    if step.choice.bytes:
        passing = [step.passing.kind.replace("_", "-")] if step.passing is not None else []
        if passing and step.execution.option is not None:
            passing = [f"+{along} → {step.execution.option.onto}"]
        texts += dict.fromkeys([*inside, *passing])
    return ", ".join(texts)
