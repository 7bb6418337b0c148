"""Residual or branch: in ``x = x + f(norm(x))`` either the stream x is switched, once, or the branch, in and out.

A plan weighs both, join by join, for every residual addition that it sees: those in glue. Here each is imposed on all
joins of a stream, to show what it would cost. Where a stage is a whole block the addition lies inside it, and there is
only the stream to switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsp.planner import Extent, Layout, Problem, solve

FORBIDDING = 1 << 40  # times the price of what should not move


@dataclass(frozen=True)
class Residual:
    """A residual stream (all additions over these dims) and what the model's forward sends, as (bytes, calls), if

    plan: nothing is imposed; switched: its branches are never switched, only the stream is; kept: the stream stays
    sharded along `along` all the way, and branches are switched in and out. None: that cannot be.
    """

    dims: str
    joins: int
    plan: tuple[int, int]
    switched: tuple[int, int] | None
    kept: tuple[int, int] | None
    along: Layout = None


@dataclass(frozen=True)
class _Join:
    op: int
    out: int  # value
    branch: frozenset[int]  # values made on the way from the stream to the join


def joins(problem: Problem, stages: Sequence[bool]) -> list[_Join]:
    """The glue that adds to a value what stages made of it. `stages`: which ops are stages."""
    producer = {v: k for k, op in enumerate(problem.ops) for v in op.outputs}
    found: dict[int, _Join] = {}  # by output

    def branch(stream: int, value: int) -> frozenset[int]:
        """The values made on the way from one to the other; none if no stage is on it, or another join."""
        first = producer.get(stream, -1)
        queue, behind = [value], set()
        while queue:
            v = queue.pop()
            if producer.get(v, -1) > first and v not in found and v not in behind:
                behind.add(v)
                queue += problem.ops[producer[v]].inputs
        made: set[int] = {stream}
        by_stage: set[int] = set()
        for v in sorted(behind, key=producer.__getitem__):
            inputs = problem.ops[producer[v]].inputs
            if made.intersection(inputs):
                made.add(v)
                if stages[producer[v]] or by_stage.intersection(inputs):
                    by_stage.add(v)
        return frozenset(made - {stream}) if value in by_stage else frozenset()

    for k, op in enumerate(problem.ops):
        if stages[k] or len(op.inputs) != 2 or len(op.outputs) != 1:
            continue
        out = op.outputs[0]
        for stream, value in (op.inputs, op.inputs[::-1]):
            inner = branch(stream, value)
            if inner and problem.values[stream].nbytes == problem.values[out].nbytes:
                found[out] = _Join(k, out, inner)
                break
    return list(found.values())


def residuals(problem: Problem, stages: Sequence[bool], solution: tuple[int, int]) -> list[Residual]:
    """Every residual stream of a problem whose plan sends `solution`; each alternative is planned without a limit."""
    streams: dict[tuple[tuple[tuple[str, Extent], ...], int], list[_Join]] = {}
    for join in joins(problem, stages):
        out = problem.values[join.out]
        streams.setdefault((out.sizes, out.nbytes), []).append(join)
    free = replace(problem, capacity=None)
    found = []
    for (sizes, _), stream in streams.items():
        heavy = frozenset().union(*(join.branch for join in stream))
        values = tuple(
            replace(v, itemsize=v.itemsize * FORBIDDING) if i in heavy else v for i, v in enumerate(problem.values)
        )
        best = solve(replace(free, values=values))
        switched = None if any(m.value in heavy for m in best.moves) else (best.bytes, best.calls)
        kept: tuple[int, int] | None = None
        along: Layout = None
        for layout in _layouts(problem, stream):
            ops = list(problem.ops)
            for join in stream:
                own = ops[join.op]
                choices = tuple(c for c in own.choices if set(c.needs + c.gives) == {layout})
                ops[join.op] = replace(own, choices=choices)
            best = solve(replace(free, ops=tuple(ops)))
            if kept is None or (best.bytes, best.calls) < kept:
                kept, along = (best.bytes, best.calls), layout
        dims = " ".join(dim for dim, _ in sizes)
        found.append(Residual(dims, len(stream), solution, switched, kept, along))
    return found


def _layouts(problem: Problem, stream: Sequence[_Join]) -> list[Layout]:
    """Those that the stream can keep through all its joins, the last resorts left out."""
    every = [
        {c.gives[0]: None for c in problem.ops[j.op].choices if not c.rank and set(c.needs) == set(c.gives) != {None}}
        for j in stream
    ]
    return [layout for layout in every[0] if all(layout in other for other in every)]
