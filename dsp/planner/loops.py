"""Long loops: similar steps over slices of the same values, such as a scan over time written in Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from dsp.planner.problem import Op, Problem

LONGEST = 64  # ops of one step
RUN = 12  # length of a run: equal ops in two runs of this length take the same choices
OFTEN = 16  # steps, each with a slice of one value, that make a loop long


def loops(problem: Problem) -> list[int]:
    """The op whose choice each op takes: in a long loop the op of the first step, else the op itself.

    A loop is long where many of its steps take a slice of one value: the possible states of that value before each step
    are then too many to enumerate. A loop over layers, each of which reads the previous one's result, does not count.
    """
    ops, kinds = problem.ops, dict[Hashable, int]()
    alike = [kinds.setdefault(_kind(problem, op), len(kinds)) for op in ops]
    first = list(range(len(ops)))
    at = 0
    while at < len(ops):
        period, times = _repeats(alike, at)
        if period and _slices(problem, ops[at : at + period * times]):
            for k in range(at, at + period * times):
                first[k] = at + (k - at) % period
        at += max(1, period * times)
    return first


def runs(problem: Problem) -> list[int]:
    """The op whose choice each op takes: the first that ends, or begins, an equal run of `RUN` ops; else the op itself.

    The tiles of a picture are such runs. Tiles at the edges form other runs than inner tiles.
    """
    kinds = dict[Hashable, int]()
    alike = [kinds.setdefault(_kind(problem, op), len(kinds)) for op in problem.ops]
    first = list(range(len(alike)))

    def root(k: int) -> int:
        while first[k] != k:
            k = first[k]
        return k

    for before in (True, False):
        seen: dict[tuple[int, ...], int] = {}
        for k in range(len(alike)):
            window = alike[max(0, k - RUN + 1) : k + 1] if before else alike[k : k + RUN]
            if len(window) == RUN:
                one, later = sorted((root(k), root(seen.setdefault(tuple(window), k))))
                first[later] = one
    return [root(k) for k in range(len(alike))]


def _kind(problem: Problem, op: Op) -> Hashable:
    """The properties by which two ops count as equal."""
    choices = tuple((c.needs, c.gives, c.work, c.saved, c.bytes, c.calls, c.rank) for c in op.choices)
    values = tuple((problem.values[v].sizes, problem.values[v].fixed) for v in op.inputs + op.outputs)
    return op.name, choices, values


def _repeats(alike: Sequence[int], at: int) -> tuple[int, int]:
    """The period of the longest repetition that begins here, and how often it repeats; (0, 0) if nothing repeats."""
    best = (0, 0)
    for period in range(1, LONGEST + 1):
        step, times = alike[at : at + period], 1
        if at + period >= len(alike) or alike[at + period] != step[0]:
            continue
        while alike[at + times * period : at + (times + 1) * period] == step:
            times += 1
        if times >= OFTEN and period * times > best[0] * best[1]:
            best = period, times
    return best


def _slices(problem: Problem, ops: Sequence[Op]) -> bool:
    """Tell whether many of these ops each take a slice of one value."""
    size = [value.nbytes for value in problem.values]
    times = Counter(
        v for op in ops for v in set(op.inputs) if op.outputs and OFTEN * sum(size[w] for w in op.outputs) <= size[v]
    )
    return max(times.values(), default=0) >= OFTEN
