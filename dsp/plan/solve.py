"""The planner's problem of a trace, and its solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsp.layout import Cut
from dsp.plan.events import Event, Execution, Passing, Trace
from dsp.planner import Choice, Infeasible, Op, Problem, Solution, chunk_sizes, length, solve
from dsp.stages import Stage
from dsp.text import Moving
from dsp.wire import AS_IT_IS, Wire

if TYPE_CHECKING:
    from dsp.hardware import Hardware
    from dsp.legs import Ways
    from dsp.overlap.options import Overlap


@dataclass(frozen=True)
class Goal:
    """The goal of a plan; the first six fields and the last two are arguments of `dsp.plan`.

    again_inside: each stage is recomputed within its hooks, even if the trace saw no checkpoint; kept_inside: what
    stages send inside is not sent again by such a recomputation; batch: batch may be sharded to save bytes.
    """

    size: int
    memory: int | None = None
    dtype: torch.dtype | None = None
    gather_output: bool = False
    hardware: Hardware | None = None
    given: Mapping[str, Cut] = field(default_factory=dict)
    again_inside: bool = False
    kept_inside: bool = False
    batch: bool = True
    permits: tuple[Wire, ...] = (AS_IT_IS,)
    ways: Ways | None = None
    overlap: Overlap = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size, the number of ranks, must be at least 1, got {self.size}")
        if len(self.permits) > 1 and self.hardware is None:
            raise ValueError(
                "wire='auto' weighs the time that fewer bytes save against the time to convert them, by the "
                "hardware: pass hardware=dsp.Hardware(...), or name a format"
            )

    @property
    def wire(self) -> Wire:
        """The formats in which switches travel; if several are permitted, the exact one."""
        return self.permits[0]


class Decision(NamedTuple):
    """An op of a trace, its event, and the choice that was made for it."""

    at: int
    op: Op
    event: Event
    choice: Choice

    @property
    def execution(self) -> Execution:
        return self.choice.execution or Execution()

    @property
    def passing(self) -> Passing | None:
        """The collective that combines the ranks' parts of the op, if there is one."""
        return self.execution.passing


@dataclass(frozen=True)
class Solved:
    """A trace with the planner's choices; `stages` by name."""

    trace: Trace
    stages: Mapping[str, Stage]
    size: int
    problem: Problem
    solution: Solution

    @cached_property
    def steps(self) -> list[Decision]:
        ops = zip(self.trace.ops, self.trace.events, self.solution.choices)
        return [Decision(i, op, event, op.choices[c]) for i, (op, event, c) in enumerate(ops)]

    def stage(self, step: Decision) -> Stage | None:
        return self.stages[step.event.name] if step.event.kind == "stage" else None


def solved(t: Trace, stages: Mapping[str, Stage], goal: Goal) -> Solved:
    """Solve a trace: without sharding batch where another dim will do, unless nothing else fits the memory.

    An op sharded only along batch sends nothing, but with 2 samples on 3 ranks it is data parallelism with an idle
    rank. Another dim is sharded then, if that makes the largest shard smaller.
    """

    def taking(admitted: Sequence[Sequence[int]]) -> Solved:
        ops = [replace(op, choices=tuple(op.choices[c] for c in own)) for op, own in zip(t.ops, admitted)]
        if goal.memory is not None:
            ops = [
                replace(op, choices=tuple(replace(c, work=e.memory[0]) for c in op.choices))
                if e.kind == "whole"
                else op
                for op, e in zip(ops, t.events)
            ]
        problem = Problem(tuple(t.values), tuple(ops), goal.size, goal.memory, t.resident)
        with Moving("plan") as line:
            found = solve(problem, line.say)
        choices = tuple(own[c] for own, c in zip(admitted, found.choices))
        return Solved(t, stages, goal.size, problem, replace(found, choices=choices))

    try:
        found = taking(_without_batch(t, goal.size, goal.batch))
    except Infeasible:
        return taking([range(len(op.choices)) for op in t.ops])
    if _batch_alone(found):
        with suppress(Infeasible):
            other = taking(_without_batch(t, goal.size, batch=False))
            return min(found, other, key=lambda plan: plan.solution.largest)
    return found


def _batch_alone(found: Solved) -> bool:
    """Tell whether only batch is sharded, and a shard of it is at least 1.5/N of it."""
    cut = [(step, v, k) for step in found.steps for v, k in step.op.layouts(step.choice) if k is not None]
    sizes = (found.problem.values[v].extent(k) for _, v, k in cut)
    long = any(2 * found.size * chunk_sizes(size, found.size)[0] >= 3 * length(size) for size in sizes)
    return long and all(step.choice.rank for step, _, _ in cut)


def _without_batch(t: Trace, n: int, batch: bool) -> list[list[int]]:
    """The choices of every op that are compared by bytes.

    Sharing out the batch is the task of data parallelism, and the batch may be 1. So stages are not sharded along it if
    each of them has another dim. Any op that has another dim is not sharded along it unevenly either: uneven means, for
    a stage, shards of unequal sizes; for glue, a shard longer than 1.5/N of the dim.
    """

    def uneven(op: Op, c: Choice, stage: bool) -> bool:
        sizes = (t.values[v].extent(k) for v, k in op.layouts(c) if k is not None)
        return any(
            length(size) % n > 0 if stage else 2 * n * chunk_sizes(size, n)[0] > 3 * length(size) for size in sizes
        )

    stages = [op for op, event in zip(t.ops, t.events) if event.kind == "stage"]
    spared = all(any(not c.rank for c in op.choices) for op in stages)

    def admitted(op: Op, stage: bool) -> list[int]:
        other = any(not c.rank and any(c.needs + c.gives) for c in op.choices)
        left_out = [c.rank and other and (not batch or (stage and spared) or uneven(op, c, stage)) for c in op.choices]
        return [i for i, out in enumerate(left_out) if not out]

    return [admitted(op, event.kind == "stage") for op, event in zip(t.ops, t.events)]
