"""The problem of a trace, and its solution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dsp.plan.events import Trace
from dsp.planner import Choice, Infeasible, Op, Problem, Solution, solve


def solved(t: Trace, n: int, memory: int | None, batch: bool) -> tuple[Problem, Solution]:
    """The problem of a trace, and its plan: without batch where there is more, unless nothing else fits the memory."""

    def solved(admitted: Sequence[Sequence[int]]) -> tuple[Problem, Solution]:
        ops = [replace(op, choices=tuple(op.choices[c] for c in own)) for op, own in zip(t.ops, admitted)]
        if memory is not None:
            ops = [
                replace(op, choices=tuple(replace(c, work=e.memory[0]) for c in op.choices))
                if e.kind == "whole"
                else op
                for op, e in zip(ops, t.events)
            ]
        problem = Problem(tuple(t.values), tuple(ops), n, memory, t.resident)
        solution = solve(problem)
        return problem, replace(solution, choices=tuple(own[c] for own, c in zip(admitted, solution.choices)))

    try:
        return solved(_without_batch(t, n, batch))
    except Infeasible:
        return solved([range(len(op.choices)) for op in t.ops])


def _without_batch(t: Trace, n: int, batch: bool) -> list[list[int]]:
    """Of every op the choices that compete by their bytes.

    To share out a batch is what data parallelism is for, and here it may be 1. So it is not for stages, if all of them
    can be sharded along something else; nor for any op that has something else, if its parts would not be even.
    """

    def uneven(op: Op, c: Choice) -> bool:
        sizes = (dict(t.values[v].sizes)[k] for v, k in zip(op.inputs + op.outputs, c.needs + c.gives) if k is not None)
        return any(size % n for size in sizes)

    stages = [op for op, event in zip(t.ops, t.events) if event.kind == "stage"]
    spared = all(any(not c.rank for c in op.choices) for op in stages)

    def admitted(op: Op, stage: bool) -> list[int]:
        other = any(not c.rank and any(c.needs + c.gives) for c in op.choices)
        left_out = [c.rank and other and (not batch or (stage and spared) or uneven(op, c)) for c in op.choices]
        return [i for i, out in enumerate(left_out) if not out]

    return [admitted(op, event.kind == "stage") for op, event in zip(t.ops, t.events)]
