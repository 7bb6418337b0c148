"""The problem of a trace, and its solution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from dsp.layout import Cut
from dsp.plan.events import Event, Execution, Passing, Trace
from dsp.planner import Choice, Infeasible, Op, Packed, Problem, Solution, Value, chunk_sizes, length, solve
from dsp.stages import Stage
from dsp.text import Moving
from dsp.wire import AS_IT_IS, Wire, format_for

if TYPE_CHECKING:
    from dsp.hardware import Hardware
    from dsp.legs import Ways
    from dsp.overlap import Overlap


@dataclass(frozen=True)
class Goal:
    """The goal of a plan: `dsp.plan` has the first six, and the last two.

    again_inside: all stages are recomputed within their hooks, also where the trace saw no checkpoint; kept_inside:
    what is sent inside of stages is kept all the same; batch: whether it may be sharded for the sake of bytes.
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
            raise ValueError(f"size is the number of ranks, got {self.size}")
        if len(self.permits) > 1 and self.hardware is None:
            raise ValueError(
                "wire='auto' weighs bytes against packing, which depends on the hardware: pass "
                "hardware=dsp.Hardware(...), or name a format"
            )

    @property
    def wire(self) -> Wire:
        """The formats in which switches travel; of several that are permitted the exact one."""
        return self.permits[0]


def travelling(t: Trace, wire: Wire) -> Trace:
    """A trace whose values switch in some formats."""

    def packed(value: Value, name: str) -> Packed:
        form = format_for(name, value.real, value.itemsize)
        return None if form is None else form.nbytes

    if wire == AS_IT_IS:
        return t
    return replace(t, values=[replace(v, packed=(packed(v, wire.forward), packed(v, wire.backward))) for v in t.values])


class Decision(NamedTuple):
    """An op of a trace, where it applies in a run, and the choice taken of it."""

    at: int
    op: Op
    event: Event
    choice: Choice

    @property
    def execution(self) -> Execution:
        return self.choice.execution or Execution()

    @property
    def passing(self) -> Passing | None:
        """The collective that puts the op's parts together, if there is one."""
        return self.execution.passing


@dataclass(frozen=True)
class Solved:
    """A trace with what the planner chose; `stages` by name."""

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
    """A trace solved without batch where there is more, unless nothing else fits the memory.

    What runs along batch alone, 2 samples on 3 ranks, sends nothing, and is data parallelism with idle ranks: something
    else is sharded then, if that makes the largest part smaller.
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
    """Tell whether batch is all that is sharded, and a part of it as long as 1.5/N."""
    cut = [(step, v, k) for step in found.steps for v, k in step.op.layouts(step.choice) if k is not None]
    sizes = (found.problem.values[v].extent(k) for _, v, k in cut)
    long = any(2 * found.size * chunk_sizes(size, found.size)[0] >= 3 * length(size) for size in sizes)
    return long and all(step.choice.rank for step, _, _ in cut)


def _without_batch(t: Trace, n: int, batch: bool) -> list[list[int]]:
    """The choices of every op that compete by their bytes.

    To share out a batch is what data parallelism is for, and here it may be 1. So it is not for stages, if all of them
    can be sharded along something else; nor for any op that has something else, if its parts would not be even: those
    of a stage at all, those of glue so that one is longer than 1.5/N of the whole.
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
