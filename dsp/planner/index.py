"""The facts that both searches derive from a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import accumulate, chain, combinations
from math import inf
from typing import NamedTuple

from dsp.planner.problem import Choice, Copies, Infeasible, Layout, Move, Op, Problem, Solution, Value, kind_of, price
from dsp.support.formatting import human


def cost_of(nbytes: int, calls: int, rank: int = 0) -> int:
    """One integer that orders costs by bytes, then calls, then rank, and that adds and subtracts like the three."""
    return (nbytes << 64) + (calls << 32) + rank


class Shape:
    """The layouts that a value may take: the bytes of each on a rank, and the cheapest moves to any set of copies."""

    def __init__(self, value: Value, layouts: Sequence[Layout], n: int):
        self.layouts = layouts
        self.local = {a: value.local_bytes(a, n) for a in layouts}
        extra = 1 << 160 if value.fixed else 0  # more than all bytes
        never = 1 << 192  # more still: a path through another layout exists
        self.price = {
            (a, b): cost_of(*price(value, a, b, n))
            + (extra if a != b else 0)
            + (never if frozenset((a, b)) in value.detours else 0)
            for a in layouts
            for b in layouts
        }
        self.reach = cache(self._reach)
        self.spread = cache(self._spread)

    def weigh(self, layouts: Iterable[Layout]) -> int:
        return sum(self.local[a] for a in layouts)

    def most(self, layouts: Iterable[Layout]) -> int:
        return max((self.local[a] for a in layouts), default=0)

    def replaces(self, a: Layout, b: Layout) -> bool:
        """Tell whether a copy in a can replace one in b that no op needs: as good a source of moves, and no larger."""
        small = self.local[a] <= self.local[b] or not self.price[a, b]
        return small and all(self.price[a, c] <= self.price[b, c] for c in self.layouts if c != b)

    def _reach(self, copies: Copies) -> dict[Copies, tuple[int, Layout, Layout]]:
        """For every larger set of copies the cheapest cost to make it, and the last move: (cost, src, dst).

        A move adds one copy, so the cheapest path to a set extends the cheapest path to a set with one copy less.
        """
        best: dict[Copies, tuple[int, Layout, Layout]] = {copies: (0, None, None)}
        places = [*enumerate(self.layouts)]
        for new in subsets([a for a in self.layouts if a not in copies]):
            ways = []
            for k, dst in places:
                if dst in new:
                    had = copies | new - {dst}
                    step, i = min((self.price[a, dst], i) for i, a in places if a in had)
                    ways.append((best[had][0] + step, i, k))
            if ways:
                cost, i, k = min(ways)  # the first of equal ones
                best[copies | new] = cost, self.layouts[i], self.layouts[k]
        return best

    def _spread(self, copies: Copies, wanted: Copies) -> tuple[int, int, Copies]:
        """(cost, largest new copy, all copies) of the cheapest set of copies that contains the wanted ones."""
        costs = {goal: cost for goal, (cost, *_) in self.reach(copies).items() if wanted <= goal}
        least = min(costs.values())
        ways = ((least, self.most(goal - copies), goal) for goal, cost in costs.items() if cost == least)
        return min(ways, key=lambda way: way[:2])

    def path(self, copies: Copies, goal: Copies) -> list[tuple[Layout, Layout]]:
        """The moves (src, dst), in order, from the copies held to the goal."""
        moves: list[tuple[Layout, Layout]] = []
        while goal != copies:
            _, src, dst = self.reach(copies)[goal]
            moves.insert(0, (src, dst))
            goal = goal - {dst}
        return moves


class Digest(NamedTuple):
    """The facts of one choice of one op."""

    cost: int
    largest: int
    needs: dict[int, Copies]  # of each input value
    gives: dict[int, Layout]  # to each output value
    room: int  # bytes of outputs and work
    saved: int


class Index:
    """The facts that a problem implies: each value's producer and layouts, and the ops that want each layout."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.producer = _check(problem)
        self.shapes = self._shapes([range(len(op.choices)) for op in problem.ops])
        self.runs = [  # for each op: index of a choice -> its facts
            {i: self._digest(op, choice) for i, choice in enumerate(op.choices)} for op in problem.ops
        ]
        if problem.capacity is not None:
            self.prune(problem.capacity)

    @cached_property
    def live(self) -> list[list[int]]:
        """The values that exist before each op."""
        ops = self.problem.ops
        last = {v: k for k, op in enumerate(ops) for v in op.inputs}
        return [[v for v in sorted(last) if self.producer[v] < k <= last[v]] for k in range(len(ops) + 1)]

    @cached_property
    def wanted(self) -> list[dict[int, Copies]]:
        """For each op the layouts of each value that this op or a later one may need."""
        later: list[dict[int, Copies]] = [{}]
        for runs in reversed(self.runs):
            wanted = dict(later[-1])
            for v, needs in chain.from_iterable(run.needs.items() for run in runs.values()):
                wanted[v] = wanted.get(v, frozenset()) | needs
            later.append(wanted)
        return later[::-1]

    def whole(self, v: int) -> bool:
        """Tell whether a value is replicated whatever is chosen: then any copy of it costs nothing."""
        value, k = self.problem.values[v], self.producer[v]
        if value.fixed or k < 0:
            return None in value.home and not value.fixed
        return not any(run.gives[v] for run in self.runs[k].values())

    def settle(self) -> None:
        """Fix an op to run replicated if that costs nothing, its inputs are replicated, and its tensors are no longer
        than the longest that every plan holds. No cheaper plan is lost."""
        must = max((min(run.largest for run in runs.values()) for runs in self.runs), default=0)
        for k, (op, runs) in enumerate(zip(self.problem.ops, self.runs)):
            if len(runs) == 1 or not op.outputs or any(self.problem.values[v].fixed for v in op.outputs):
                continue
            for i, run in runs.items():
                sharded = any((*op.choices[i].needs, *op.choices[i].gives))
                if not (sharded or run.cost) and run.largest <= must and all(map(self.whole, op.inputs)):
                    self.runs[k] = {i: run}
                    break

    def touches(self, k: int, i: int, limit: float) -> bool:
        """Tell whether an op's choice needs or gives a replicated value of more than `limit` bytes."""
        op, values = self.problem.ops[k], self.problem.values
        return any(layout is None and values[v].nbytes > limit for v, layout in op.layouts(op.choices[i]))

    def narrow(self, limit: float) -> None:
        """Remove choices with a replicated value of more than `limit` bytes where another choice exists, and such
        copies as intermediate steps of moves."""
        for k, runs in enumerate(self.runs):
            parts = {i: run for i, run in runs.items() if not self.touches(k, i, limit)}
            self.runs[k] = parts or runs
        self.shapes = self._shapes(self.runs, limit)

    def _shapes(self, choices: Iterable[Iterable[int]], limit: float = inf) -> list[Shape]:
        """choices: the indices of each op's choices; limit: bytes up to which a move may gather a value on the way."""
        named: list[set[Layout]] = [set(value.home) for value in self.problem.values]
        for op, indices in zip(self.problem.ops, choices):
            for choice in (op.choices[i] for i in indices):
                for v, layout in op.layouts(choice):
                    named[v].add(layout)
        # equal values share one Shape
        shape = cache(lambda value, layouts: Shape(value, layouts, self.problem.size))
        shapes = []
        for value, dims in zip(self.problem.values, named):
            whole = None in dims or value.detours or value.nbytes <= limit
            layouts = (*((None,) * bool(whole)), *(dim for dim, _ in value.sizes if dim in dims))
            shapes.append(shape(replace(value, name="", home=()), layouts))
        return shapes

    def _digest(self, op: Op, choice: Choice) -> Digest:
        needs: dict[int, Copies] = {}
        for v, layout in zip(op.inputs, choice.needs):
            needs[v] = needs.get(v, frozenset()) | {layout}
        gives = dict(zip(op.outputs, choice.gives))
        read = [self.shapes[v].most(layouts) for v, layouts in needs.items()]
        write = [self.shapes[v].local[layout] for v, layout in gives.items()]
        cost = cost_of(choice.bytes, choice.calls, choice.rank)
        return Digest(cost, max(choice.work, *read, *write, 0), needs, gives, choice.work + sum(write), choice.saved)

    def prune(self, capacity: int) -> None:
        """Remove choices that cannot fit, whatever the other ops choose. Raises Infeasible if an op has no other."""
        while True:
            saved, takes = self.problem.resident, []  # takes: for each op, choice -> its least bytes
            for live, runs in zip(self.live, self.runs):
                takes.append({i: saved + self.takes(run, live) for i, run in runs.items()})
                saved += min(run.saved for run in runs.values())
            floors = [min(least.values()) for least in takes]
            if max(floors, default=0) > capacity:
                raise self.infeasible(floors.index(max(floors)), max(floors))
            if all(nbytes <= capacity for least in takes for nbytes in least.values()):
                return
            self.runs = [
                {i: run for i, run in runs.items() if least[i] <= capacity} for runs, least in zip(self.runs, takes)
            ]

    def takes(self, run: Digest, live: Sequence[int]) -> int:
        """The least bytes that a choice adds, when it runs, to what is resident and saved."""
        least = {v: min(self.shapes[v].local.values()) for v in live}
        needs = {v: self.shapes[v].weigh(layouts) for v, layouts in run.needs.items()}
        return run.saved + run.room + sum((least | needs).values())

    def infeasible(self, k: int, need: float, missed: str = "") -> Infeasible:
        problem = self.problem
        return Infeasible(
            f"no plan fits in {human(problem.capacity or 0)} a rank: {problem.ops[k].name!r} needs at least "
            f"{human(need)}, of which {human(problem.resident)} for parameters and what else is always held{missed}. "
            f"Use more than {problem.size} ranks, activation checkpointing or a larger memory="
        )

    def move(self, v: int, src: Layout, dst: Layout, before: int) -> Move:
        nbytes, _ = price(self.problem.values[v], src, dst, self.problem.size)
        return Move(v, src, dst, before, self.producer[v], nbytes, kind_of(src, dst))

    def solution(
        self, choices: Sequence[int], homes: dict[int, Layout], moves: Sequence[Move], exact: bool, states: int
    ) -> Solution:
        """The solution of these choices and moves, with the cost that replaying them gives."""
        values, size = self.problem.values, self.problem.size
        picks = [op.choices[choice] for op, choice in zip(self.problem.ops, choices)]
        runs = [options[choice] for options, choice in zip(self.runs, choices)]
        loads = self.loads(runs, homes, moves)
        idle = {v: value.home[0] for v, value in enumerate(values) if value.home and v not in homes}
        calls = [price(values[move.value], move.src, move.dst, size)[1] for move in moves]
        sizes = [run.largest for run in runs] + [self.shapes[move.value].local[move.dst] for move in moves]
        return Solution(
            choices=tuple(choices),
            homes=homes | idle,
            moves=tuple(moves),
            bytes=sum(choice.bytes for choice in picks) + sum(move.bytes for move in moves),
            calls=sum(choice.calls for choice in picks) + sum(calls),
            largest=max(sizes, default=0),
            peak=self.problem.resident + max(loads, default=0),
            exact=exact,
            states=states,
        )

    def loads(self, runs: Sequence[Digest], homes: Mapping[int, Layout], moves: Iterable[Move]) -> list[int]:
        """Bytes that a rank holds at each op: outputs and work, all saved so far, and copies while they are used."""
        lives: list[list[int]] = []  # for each copy: local bytes, and the first and the last op during which it exists
        latest: dict[tuple[int, Layout], list[int]] = {}
        before: dict[int, list[Move]] = {}
        for move in moves:
            before.setdefault(move.before, []).append(move)

        def appear(v: int, layout: Layout, first: int) -> None:
            latest[v, layout] = [self.shapes[v].local[layout], first, first - 1]
            lives.append(latest[v, layout])

        for v, layout in homes.items():
            appear(v, layout, 0)
        for k, run in enumerate(runs):
            for move in before.get(k, []):
                latest[move.value, move.src][2] = max(latest[move.value, move.src][2], k - 1)
                appear(move.value, move.dst, k)
            for v, layout in ((v, layout) for v, layouts in run.needs.items() for layout in layouts):
                latest[v, layout][2] = k
            for v, layout in run.gives.items():
                appear(v, layout, k + 1)  # during op k it is part of run.room
        loads = [run.room + saved for run, saved in zip(runs, accumulate(run.saved for run in runs))]
        for nbytes, first, last in lives:
            for k in range(first, last + 1):
                loads[k] += nbytes
        return loads


def subsets(items: Iterable[Layout]) -> Iterator[Copies]:
    """All subsets, the smaller first."""
    items = list(items)
    return (frozenset(some) for size in range(len(items) + 1) for some in combinations(items, size))


def _check(problem: Problem) -> list[int]:
    """The op that produces each value, -1 for an input. Raises ValueError for an inconsistent problem."""
    values, producer = problem.values, [-1] * len(problem.values)
    if problem.size < 1:
        raise ValueError(f"a plan needs at least 1 rank, got {problem.size}")
    for k, op in enumerate(problem.ops):
        if not op.choices:
            raise ValueError(f"op {op.name!r} offers no choice")
        for v in op.inputs:
            if producer[v] < 0 and not values[v].home:
                raise ValueError(
                    f"op {op.name!r} reads {values[v].name!r}, which no earlier op produces and which is not an "
                    "input of the problem (it has no `home`)"
                )
        for v in op.outputs:
            if producer[v] >= 0 or values[v].home:
                raise ValueError(f"op {op.name!r} produces {values[v].name!r}, which exists already")
            producer[v] = k
    _check_choices(problem)
    return producer


def _check_choices(problem: Problem) -> None:
    """Raise ValueError for a choice that does not fit its op or the op's values."""
    values = problem.values
    for op, choice in ((each, choice) for each in problem.ops for choice in each.choices):
        if (len(choice.needs), len(choice.gives)) != (len(op.inputs), len(op.outputs)):
            raise ValueError(
                f"op {op.name!r} has {len(op.inputs)} inputs and {len(op.outputs)} outputs, but a choice with "
                f"{len(choice.needs)} needs and gives {len(choice.gives)}"
            )
    layouts = [(values[v], k) for op in problem.ops for choice in op.choices for v, k in op.layouts(choice)]
    layouts += [(value, layout) for value in values for layout in value.home]
    for value, layout in layouts:
        if layout is not None and layout not in dict(value.sizes):
            dims = " ".join(dim for dim, _ in value.sizes)
            raise ValueError(f"{value.name!r} cannot be sharded along {layout!r}: its dims are '{dims}'")
