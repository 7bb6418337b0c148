"""The cheapest layouts for a sequence of ops, within a memory: equation 9 of the DSP paper (arXiv 2403.10266).

    min over layouts of  sum of CommCost,   subject to  Memory <= capacity

A problem is a straight line of ops over values. Each op offers choices: the layout that it needs of every input and
gives to every output. A value is made in one layout; moves make copies of it in others: a split (free), a switch (one
all-to-all) or a gather (one all-gather). The best plan has the least

    (bytes, calls, sum of choice ranks, largest)        compared in this order

among the plans that replicate no long value without need, if one of these has as few bytes and as low a sum of ranks.
Bytes and calls are those of the moves and of the ops' own communication, for the busiest rank and one run of the
sequence. `largest` is the largest local size of a copy moved, needed or produced, or of an op's work.

Two searches, both exact: `Elimination` finds the cheapest plan of all; if its peak does not fit, `Sweep` goes over the
ops in order and tracks the copies held. The planner knows no tensors: bytes in, decisions out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from dsp.planner.elimination import FIRST, Elimination
from dsp.planner.index import Index
from dsp.planner.problem import (
    FUSE,
    MOVES,
    Choice,
    Copies,
    Extent,
    Infeasible,
    Layout,
    Move,
    Op,
    Packed,
    Problem,
    Solution,
    Value,
    chunk_sizes,
    dealt,
    fuses,
    length,
    piece_sizes,
    price,
)  # fmt: skip

__all__ = [
    "FUSE", "MOVES", "Choice", "Copies", "Extent", "Infeasible", "Layout", "Move", "Op", "Packed", "Problem",
    "Solution", "Value", "chunk_sizes", "dealt", "fuses", "length", "piece_sizes", "price", "solve",
]  # fmt: skip


def solve(problem: Problem, say: Callable[[str], None] = lambda text: None) -> Solution:
    """The cheapest plan whose peak is within the capacity (paper, equation 9).

    Moves are weighed over a value's whole life: a value used in t, s and t again pays one switch, and one that must be
    replicated later is gathered early where that saves a switch. Under a capacity a copy may be dropped and made again.
    A value is replicated, or in a layout of some choice, or in its home; no other layout is tried. `say` gets progress.

    Raises Infeasible if nothing fits, ValueError for an inconsistent problem.
    """
    facts, capacity = Index(problem), problem.capacity
    solution, same = Elimination(facts, say=say).solve(FIRST), None
    if solution is None:
        from dsp.planner.loops import loops, runs  # loaded here: few problems need it

        facts.settle()
        same = loops(problem)
        solution = Elimination(facts, same, say).solve()
        if solution is None:
            same = runs(problem)
            solution = Elimination(facts, same, say).solve()
    solution = solution or swept(facts, inf, say)
    for plan in (_lean(facts, solution, same, say), solution):
        if plan is not None and (capacity is None or plan.peak <= capacity):
            return plan
    assert capacity is not None
    return swept(Index(problem), capacity, say)


def swept(facts: Index, capacity: float, say: Callable[[str], None]) -> Solution:
    """The cheapest plan within a capacity, by the search that tracks memory."""
    from dsp.planner.sweep import Sweep

    return Sweep(facts, capacity, say).solve()


def _lean(facts: Index, best: Solution, same: Sequence[int] | None, say: Callable[[str], None]) -> Solution | None:
    """A plan that replicates no long value without need, with no more bytes and no higher ranks than the best plan.

    Long means more than a rank's share of the longest value. Such a plan may need more calls: two gathers over two
    ranks send the bytes of four switches.
    """
    problem = facts.problem
    limit = max((value.nbytes for value in problem.values if not value.alone), default=0) / problem.size
    gathered = any(move.dst is None and problem.values[move.value].nbytes > limit for move in best.moves)
    if not gathered and not any(facts.touches(k, i, limit) for k, i in enumerate(best.choices)):
        return None
    facts.narrow(limit)
    lean = Elimination(facts, same, say).solve()
    if lean is None or (lean.bytes, _ranks(problem, lean)) > (best.bytes, _ranks(problem, best)):
        return None
    return replace(lean, exact=best.exact)


def _ranks(problem: Problem, solution: Solution) -> int:
    return sum(op.choices[i].rank for op, i in zip(problem.ops, solution.choices))
