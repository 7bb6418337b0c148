"""The cheapest layouts for a sequence of ops, within a memory: equation 9 of the DSP paper (arXiv 2403.10266).

    min over layouts of  sum of CommCost,   subject to  Memory <= capacity

A problem is a straight line of ops over values. Each op offers choices: the layout that it needs of every input and
gives to every output. A value appears in one layout; moves make copies of it in others: a split (free), a switch (one
all-to-all) or a gather (one all-gather). The best plan has the least

    (bytes, calls, sum of choice ranks, largest)        compared in this order

where bytes and calls are those of the moves and of the ops' own communication, for the busiest rank and one run of the
sequence, and largest is the largest local size of a copy moved, needed or produced, or of an op's work.

Two searches, both exact. `_Elimination` finds the cheapest plan of all; where its peak does not fit, `_Sweep` goes over
the ops in order and carries along what is held. Nothing here knows tensors: bytes in, decisions out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, chain, combinations, count, islice, pairwise, product
from math import inf, prod
from typing import Any, Literal, NamedTuple, TypeVar

Layout = str | None  # the dim that is sharded over the sequence-parallel ranks; None: whole on every rank
Copies = frozenset[Layout]  # layouts of one value
T = TypeVar("T")

ROWS = 20_000  # rows of a table in the elimination; a problem that needs more goes to the sweep
STATES = 300  # labels after an op in the sweep; if there are more it keeps the best, and is not exact
FUSE = 1 << 20  # bytes a rank of a tensor up to which it shares a collective (measured in benchmarks/README.md)
RIVALS = 64  # labels, the most promising, that a new one is compared with


class Infeasible(ValueError):
    """No plan fits in the capacity."""


@dataclass(frozen=True)
class Value:
    """A tensor that lives between ops: its dims in order, folds unfolded, and the bytes of an element.

    `home` is for a value that no op produces: the layouts it may start in at no cost, the preferred one first. `fixed`
    is for one that is written in place and has views: it is moved only if nothing else will do. Dims may lie in each
    other, a fold and a part of it: then `numel` says how many elements there are. `apart` are pairs of dims between
    which no one all-to-all leads: from one to the other the value is gathered, and split.
    """

    name: str
    sizes: tuple[tuple[str, int], ...]
    itemsize: int
    home: tuple[Layout, ...] = ()
    fixed: bool = False
    numel: int | None = None
    apart: frozenset[frozenset[str]] = frozenset()

    @property
    def nbytes(self) -> int:
        numel = prod(size for _, size in self.sizes) if self.numel is None else self.numel
        return numel * self.itemsize

    def local_bytes(self, layout: Layout, n: int, rank: int = 0) -> int:
        """Bytes of a shard over n ranks, by default of the largest."""
        if layout is None:
            return self.nbytes
        size = dict(self.sizes)[layout]
        return self.nbytes * chunk_sizes(size, n)[rank] // max(size, 1)


@dataclass(frozen=True)
class Choice:
    """One way to run an op: the layout needed of each input and given to each output, and what it takes of a rank."""

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    work: int = 0  # transient bytes while the op runs
    saved: int = 0  # bytes kept from then on: activations for backward
    bytes: int = 0  # communication inside the op, such as an all-reduce over the sharded dim
    calls: int = 0
    rank: int = 0  # preference among equals, lower is better: batch is a last resort


@dataclass(frozen=True)
class Op:
    """A stage, or a piece of glue; `inputs` and `outputs` index `Problem.values`."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Problem:
    """Ops in order, on `size` ranks of `capacity` bytes each, of which `resident` are always taken (parameters)."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    size: int
    capacity: int | None = None
    resident: int = 0


@dataclass(frozen=True)
class Move:
    """A new copy of a value in layout `dst`, made from its copy in `src`; the busiest rank sends `bytes`.

    It precedes op `before`: the first that needs the copy, or a copy made from it, or (under a capacity) the room that
    a smaller copy leaves. Op `after` produced the value, -1 for an input: no move of it can be launched earlier.
    """

    value: int
    src: Layout
    dst: Layout
    before: int
    after: int
    bytes: int
    kind: Literal["split", "switch", "gather"]


@dataclass(frozen=True)
class Solution:
    """The plan: for each op the index of its choice, for each input value the layout it starts in, the moves in order.

    `peak` is the most that a rank holds while an op runs: resident, all saved so far, outputs, work, and copies, each
    from where it appears to its last use, as an operand or as the source of a move. `exact` is False if the search was
    cut short; `states` is how much it looked at.
    """

    choices: tuple[int, ...]
    homes: dict[int, Layout]
    moves: tuple[Move, ...]
    bytes: int
    calls: int
    largest: int
    peak: int
    exact: bool
    states: int


@lru_cache(maxsize=4096)  # asked for at every stage call
def chunk_sizes(size: int, n: int) -> tuple[int, ...]:
    """How torch.chunk deals `size` elements to n ranks: 5 over 4 gives 2, 2, 1, 0."""
    chunk = -(-size // n)
    return tuple(min(chunk, max(0, size - chunk * rank)) for rank in range(n))


def fuses(nbytes: int, n: int) -> bool:
    """Whether a tensor of so many bytes over n ranks shares one all-to-all with others that switch where it does.

    The shared buffer costs a copy more on either side: for large tensors more than the call that it saves.
    """
    return nbytes <= FUSE * n


def price(value: Value, src: Layout, dst: Layout, n: int) -> tuple[int, int]:
    """(bytes sent by the busiest of n ranks, calls) of one move; M is the bytes of the whole value.

    split   None -> d    0               a local narrow
    switch  d -> d'      M/N · (N-1)/N   one all-to-all: a rank sends its chunk of d, less its own chunk of d'
    gather  d -> None    M · (N-1)/N     one all-gather: a rank sends its chunk to every other
    """
    if n == 1 or src == dst or src is None:
        return 0, 0
    sizes = dict(value.sizes)
    chunks = chunk_sizes(sizes[src], n)
    if dst is None:
        return (n - 1) * value.local_bytes(src, n), 1
    sent = max(chunk * (sizes[dst] - kept) for chunk, kept in zip(chunks, chunk_sizes(sizes[dst], n)))
    return value.nbytes * sent // max(sizes[src] * sizes[dst], 1), 1


def sent_by(value: Value, src: Layout, dst: Layout, n: int, rank: int) -> int:
    """Bytes that one of n ranks sends in a move; `price` has those of the busiest."""
    if n == 1 or src == dst or src is None:
        return 0
    own = value.local_bytes(src, n, rank)
    if dst is None:
        return (n - 1) * own
    size = dict(value.sizes)[dst]
    return own * (size - chunk_sizes(size, n)[rank]) // max(size, 1)


def solve(problem: Problem) -> Solution:
    """The cheapest plan whose peak is within the capacity (paper, equation 9).

    Moves are weighed over a value's whole life: used in t, s and t again it pays one switch, and if it must be whole
    later it is gathered early where that saves a switch. Under a capacity a copy may be dropped and made again. A value
    is whole or laid out as some choice, or its own home, says; no other layout is tried.

    Raises Infeasible if nothing fits, ValueError for a problem that makes no sense.
    """
    facts, capacity = _Facts(problem), problem.capacity
    solution = _Elimination(facts).solve() or _Sweep(facts, inf).solve()
    return solution if capacity is None or solution.peak <= capacity else _Sweep(facts, capacity).solve()


def _cost(nbytes: int, calls: int, rank: int = 0) -> int:
    """One integer that orders costs by bytes, then calls, then rank, and that adds and subtracts as they do."""
    return (nbytes << 64) + (calls << 32) + rank


class _Shape:
    """The layouts that a value may take: what each weighs on a rank, and the cheapest way to any set of copies."""

    def __init__(self, value: Value, layouts: Sequence[Layout], n: int):
        self.layouts = layouts
        self.local = {a: value.local_bytes(a, n) for a in layouts}
        extra = 1 << 160 if value.fixed else 0  # more than all bytes
        never = 1 << 192  # there is another way
        self.price = {
            (a, b): _cost(*price(value, a, b, n))
            + (extra if a != b else 0)
            + (never if frozenset((a, b)) in value.apart else 0)
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
        """Whether a copy in a does for one in b that no op needs: as good a source, and no larger."""
        small = self.local[a] <= self.local[b] or not self.price[a, b]
        return small and all(self.price[a, c] <= self.price[b, c] for c in self.layouts if c != b)

    def _reach(self, held: Copies) -> dict[Copies, tuple[int, Layout, Layout]]:
        """For every larger set the cost of the cheapest way there and its last move, (cost, src, dst).

        A move adds one copy, so the cheapest way to a set extends the cheapest way to a set with one copy less.
        """
        best: dict[Copies, tuple[int, Layout, Layout]] = {held: (0, None, None)}
        for new in _subsets([a for a in self.layouts if a not in held]):
            for src, dst in product(self.layouts, self.layouts):
                had = held | new - {dst}
                if src in had and dst in new:
                    cost = best[had][0] + self.price[src, dst]
                    if held | new not in best or cost < best[held | new][0]:
                        best[held | new] = cost, src, dst
        return best

    def _spread(self, held: Copies, wanted: Copies) -> tuple[int, int, Copies]:
        """(cost, largest new copy, all copies) of the cheapest set of copies that has those wanted."""
        ways = ((way[0], self.most(goal - held), goal) for goal, way in self.reach(held).items() if wanted <= goal)
        return min(ways, key=lambda way: way[:2])

    def path(self, held: Copies, goal: Copies) -> list[tuple[Layout, Layout]]:
        """The moves (src, dst) in order from the copies held to the goal."""
        moves: list[tuple[Layout, Layout]] = []
        while goal != held:
            _, src, dst = self.reach(held)[goal]
            moves.insert(0, (src, dst))
            goal = goal - {dst}
        return moves


class _Run(NamedTuple):
    """One choice of one op, digested."""

    cost: int
    largest: int
    needs: dict[int, Copies]  # of each input value
    gives: dict[int, Layout]  # to each output value
    room: int  # bytes of outputs and work
    saved: int


class _Facts:
    """What a problem implies: who produces a value, which layouts it may take, which ops want it and in which."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.producer = _check(problem)
        self.shapes = self._shapes()
        self.runs = [  # of each op, by the index of the choice
            {i: self._digest(op, choice) for i, choice in enumerate(op.choices)} for op in problem.ops
        ]
        if problem.capacity is not None:
            self.prune(problem.capacity)

    @cached_property
    def live(self) -> list[list[int]]:
        """The values there before each op."""
        ops = self.problem.ops
        last = {v: k for k, op in enumerate(ops) for v in op.inputs}
        return [[v for v in sorted(last) if self.producer[v] < k <= last[v]] for k in range(len(ops) + 1)]

    @cached_property
    def wanted(self) -> list[dict[int, Copies]]:
        """For each op the layouts that it or a later one may need of each value."""
        found: list[dict[int, Copies]] = [{}]
        for runs in reversed(self.runs):
            wanted = dict(found[-1])
            for v, needs in chain.from_iterable(run.needs.items() for run in runs.values()):
                wanted[v] = wanted.get(v, frozenset()) | needs
            found.append(wanted)
        return found[::-1]

    def _shapes(self) -> list[_Shape]:
        named: list[set[Layout]] = [set(value.home) for value in self.problem.values]
        for op in self.problem.ops:
            for choice in op.choices:
                for v, layout in zip(op.inputs + op.outputs, choice.needs + choice.gives):
                    named[v].add(layout)
        # alike values share one
        shape = cache(lambda value, layouts: _Shape(value, layouts, self.problem.size))
        return [
            shape(replace(value, name="", home=()), (None, *(dim for dim, _ in value.sizes if dim in dims)))
            for value, dims in zip(self.problem.values, named)
        ]

    def _digest(self, op: Op, choice: Choice) -> _Run:
        needs: dict[int, Copies] = {}
        for v, layout in zip(op.inputs, choice.needs):
            needs[v] = needs.get(v, frozenset()) | {layout}
        gives = dict(zip(op.outputs, choice.gives))
        read = [self.shapes[v].most(layouts) for v, layouts in needs.items()]
        made = [self.shapes[v].local[layout] for v, layout in gives.items()]
        cost = _cost(choice.bytes, choice.calls, choice.rank)
        return _Run(cost, max(choice.work, *read, *made, 0), needs, gives, choice.work + sum(made), choice.saved)

    def prune(self, capacity: int) -> None:
        """Leave out the choices that cannot fit, whatever the other ops do. Raises Infeasible if an op has no other."""
        while True:
            saved, takes = self.problem.resident, []  # of each op, by the index of the choice: bytes at the very least
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

    def takes(self, run: _Run, live: Sequence[int]) -> int:
        """The bytes that a choice adds at least to what is resident and saved when it runs."""
        least = {v: min(self.shapes[v].local.values()) for v in live}
        needs = {v: self.shapes[v].weigh(layouts) for v, layouts in run.needs.items()}
        return run.saved + run.room + sum((least | needs).values())

    def infeasible(self, k: int, need: float, missed: str = "") -> Infeasible:
        problem = self.problem
        return Infeasible(
            f"no plan fits in {_human(problem.capacity or 0)} a rank: op {problem.ops[k].name!r} needs at least "
            f"{_human(need)}, of which {_human(problem.resident)} are resident{missed}; more than {problem.size} "
            "ranks, activation checkpointing or a larger memory would help"
        )

    def move(self, v: int, src: Layout, dst: Layout, before: int) -> Move:
        nbytes, _ = price(self.problem.values[v], src, dst, self.problem.size)
        kind: Literal["split", "switch", "gather"] = "split" if src is None else "gather" if dst is None else "switch"
        return Move(v, src, dst, before, self.producer[v], nbytes, kind)

    def solution(
        self, choices: Sequence[int], homes: dict[int, Layout], moves: Sequence[Move], exact: bool, states: int
    ) -> Solution:
        """A plan and what it takes, by replaying it."""
        values, size = self.problem.values, self.problem.size
        taken = [op.choices[choice] for op, choice in zip(self.problem.ops, choices)]
        runs = [options[choice] for options, choice in zip(self.runs, choices)]
        lives: list[list[int]] = []  # of each copy: local bytes, the first and the last op that finds it there
        latest: dict[tuple[int, Layout], list[int]] = {}

        def appear(v: int, layout: Layout, first: int) -> None:
            latest[v, layout] = [self.shapes[v].local[layout], first, first - 1]
            lives.append(latest[v, layout])

        for v, layout in homes.items():
            appear(v, layout, 0)
        for k, run in enumerate(runs):
            for move in (move for move in moves if move.before == k):
                latest[move.value, move.src][2] = max(latest[move.value, move.src][2], k - 1)
                appear(move.value, move.dst, k)
            for v, layout in ((v, layout) for v, layouts in run.needs.items() for layout in layouts):
                latest[v, layout][2] = k
            for v, layout in run.gives.items():
                appear(v, layout, k + 1)  # at op k it is part of the room
        held = [run.room + saved for run, saved in zip(runs, accumulate(run.saved for run in runs))]
        for nbytes, first, last in lives:
            for k in range(first, last + 1):
                held[k] += nbytes
        idle = {v: value.home[0] for v, value in enumerate(values) if value.home and v not in homes}
        calls = [price(values[move.value], move.src, move.dst, size)[1] for move in moves]
        sizes = [run.largest for run in runs] + [self.shapes[move.value].local[move.dst] for move in moves]
        return Solution(
            choices=tuple(choices),
            homes=homes | idle,
            moves=tuple(moves),
            bytes=sum(choice.bytes for choice in taken) + sum(move.bytes for move in moves),
            calls=sum(choice.calls for choice in taken) + sum(calls),
            largest=max(sizes, default=0),
            peak=self.problem.resident + max(held, default=0),
            exact=exact,
            states=states,
        )


_Asked = tuple[tuple[Layout, ...], Copies]  # of a value: the layouts that it may start in, those asked of it so far
_Row = tuple[Any, ...]  # a value for each variable of a table
_Table = tuple[tuple[int, ...], dict[_Row, tuple[int, int]]]  # variables, and for each row (cost, largest)


class _Elimination:
    """The cheapest plan where memory is no limit.

    Then every copy may stay, so what a value costs follows from where it starts and from the set of all layouts ever
    asked of it. The whole is a sum of terms, each in the choices of a few ops, and eliminating one choice after another
    minimizes it. Nothing is lost that way, and a skip across the network is no harder than one to the next op.
    """

    def __init__(self, facts: _Facts):
        self.facts = facts
        self.total = cache(self._total)

    def solve(self) -> Solution | None:
        """None if a table outgrows ROWS, as it may where many values live side by side and each op reads several."""
        best, rows = _minimize(self.tables())
        if best is None:
            return None
        choices = [best[k] for k in range(len(self.facts.runs))]
        return self.facts.solution(choices, *self.moves(choices), exact=True, states=rows)

    def tables(self) -> list[_Table]:
        """The terms. Variable k is the choice of op k; those beyond are a value's state between two of its uses."""
        facts = self.facts
        tables: list[_Table] = [
            ((k,), {(choice,): (run.cost, run.largest) for choice, run in runs.items()})
            for k, runs in enumerate(facts.runs)
        ]
        variables = count(len(facts.runs))
        uses_of: list[list[int]] = [[] for _ in facts.problem.values]
        for k, op in enumerate(facts.problem.ops):
            for v in dict.fromkeys(op.inputs):
                uses_of[v].append(k)
        for v, value in enumerate(facts.problem.values):
            if None in value.home and not value.fixed:
                continue  # there on every rank: any copy of it is a split, for nothing
            scope: tuple[int, ...] = ()
            rows: dict[_Row, _Asked] = {(): (value.home, frozenset())}
            if facts.producer[v] >= 0:
                scope = (facts.producer[v],)
                rows = {(i,): ((run.gives[v],), frozenset()) for i, run in facts.runs[scope[0]].items()}
            uses = uses_of[v]
            for k in uses:
                table: dict[_Row, tuple[int, int]] = {}
                after: dict[_Row, _Asked] = {}
                for (row, (starts, asked)), (choice, run) in product(rows.items(), facts.runs[k].items()):
                    state = starts, asked | run.needs[v]
                    cost, relay, *_ = self.total(facts.shapes[v], *state)
                    cost -= self.total(facts.shapes[v], starts, asked)[0]
                    if k == uses[-1]:
                        table[row + (choice,)] = cost, relay  # only now is it settled which copies are made
                    else:
                        table[row + (choice, state)] = cost, 0
                        after[(state,)] = state
                link = () if k == uses[-1] else (next(variables),)
                tables.append(((*scope, k, *link), table))
                scope, rows = link, after
        return tables

    def _total(self, shape: _Shape, starts: tuple[Layout, ...], asked: Copies) -> tuple[int, int, Layout, Copies]:
        """(cost, largest copy made though not asked, start, all copies) of the cheapest way to the layouts asked."""
        ways = []
        for start in starts:
            cost, _, goal = shape.spread(frozenset({start}), asked)
            ways.append((cost, shape.most(goal - asked - {start}), start, goal))
        return min(ways, key=lambda way: way[:2])

    def moves(self, choices: Sequence[int]) -> tuple[dict[int, Layout], list[Move]]:
        """The homes, and the moves in order, each before the first op that needs its copy or one made from it."""
        facts = self.facts
        starts = {v: value.home for v, value in enumerate(facts.problem.values)}
        asked: dict[int, dict[Layout, int]] = {}  # of each value the layouts it is needed in, and the first op
        for k, choice in enumerate(choices):
            run = facts.runs[k][choice]
            starts.update((v, (layout,)) for v, layout in run.gives.items())
            for v, needs in run.needs.items():
                for layout in needs:
                    asked.setdefault(v, {}).setdefault(layout, k)
        homes: dict[int, Layout] = {}
        moves: list[Move] = []
        for v, first in asked.items():
            _, _, start, goal = self.total(facts.shapes[v], starts[v], frozenset(first))
            if facts.producer[v] < 0:
                homes[v] = start
            steps = facts.shapes[v].path(frozenset({start}), goal)
            for src, dst in reversed(steps):
                first[src] = min(first.get(src, first[dst]), first[dst])
            moves += [facts.move(v, src, dst, first[dst]) for src, dst in steps]
        return homes, sorted(moves, key=lambda move: (move.before, move.value))


def _minimize(tables: list[_Table]) -> tuple[dict[int, Any] | None, int]:
    """(the value of each variable that makes the sum of the tables least, rows made), by variable elimination.

    The next variable to go is the one that makes the smallest table. That table holds, for every row of values that its
    neighbours may have, the best value of the variable.
    """
    values: dict[int, dict[Any, None]] = {}  # as an ordered set: the plan must not depend on hashes
    near: dict[int, set[int]] = {}
    of: dict[int, dict[int, None]] = {}  # the tables that each variable is in
    left = dict(enumerate(tables))
    for number, (scope, table) in left.items():
        for i, variable in enumerate(scope):
            values.setdefault(variable, {}).update((row[i], None) for row in table)
            near.setdefault(variable, set()).update(scope)
            of.setdefault(variable, {})[number] = None
    size = {variable: prod(len(values[other]) for other in near[variable]) for variable in near}
    queue = [(rows, variable) for variable, rows in size.items()]
    heapify(queue)
    chosen: list[tuple[int, tuple[int, ...], dict[_Row, Any]]] = []
    made = 0
    while queue:
        rows, variable = heappop(queue)
        if size.get(variable) != rows:
            continue  # it was put in again, with another size
        joined: _Table = ((variable,), {(value,): (0, 0) for value in values[variable]})
        for number in of.pop(variable):
            term = left.pop(number)
            for other in term[0]:
                if other != variable:
                    del of[other][number]
            joined = _join(joined, term)
            made += len(joined[1])
            if len(joined[1]) > ROWS:
                return None, made
        scope = joined[0][1:]
        best: dict[_Row, tuple[tuple[int, int], Any]] = {}
        for (value, *row), cost in joined[1].items():
            if tuple(row) not in best or cost < best[tuple(row)][0]:
                best[tuple(row)] = cost, value
        chosen.append((variable, scope, {row: value for row, (_, value) in best.items()}))
        number = len(tables) + len(chosen)
        left[number] = scope, {row: cost for row, (cost, _) in best.items()}
        del size[variable]
        for other in scope:
            of[other][number] = None
            near[other] = (near[other] | near[variable]) - {variable}
            size[other] = prod(len(values[third]) for third in near[other])
            heappush(queue, (size[other], other))
    found: dict[int, Any] = {}
    for variable, scope, choose in reversed(chosen):
        found[variable] = choose[tuple(found[other] for other in scope)]
    return found, made


def _join(one: _Table, two: _Table) -> _Table:
    """The table over the variables of both whose rows agree with a row of each: costs add, the larger size stays."""
    (scope, rows), (other, others) = one, two
    fresh = [i for i, variable in enumerate(other) if variable not in scope]
    shared = [(scope.index(variable), i) for i, variable in enumerate(other) if variable in scope]
    match: dict[_Row, list[tuple[_Row, int, int]]] = {}
    for row, (cost, largest) in others.items():
        match.setdefault(tuple(row[i] for _, i in shared), []).append((tuple(row[i] for i in fresh), cost, largest))
    joined = {
        row + more: (cost + more_cost, max(largest, more_largest))
        for row, (cost, largest) in rows.items()
        for more, more_cost, more_largest in match.get(tuple(row[i] for i, _ in shared), ())
    }
    return scope + tuple(other[i] for i in fresh), joined


class _Label(NamedTuple):
    """The best way known to one state of the sweep: the copies held of each live value."""

    cost: int
    largest: int
    saved: int
    state: tuple[Copies, ...]
    parent: _Label | None = None
    choice: int = 0
    goals: tuple[Copies, ...] = ()  # the copies of each live value before the op, just before any is dropped


class _Option(NamedTuple):
    """What may become of a value's copies: moves lead to `goal`, the op finds `keep`, the next one `after`."""

    cost: int
    largest: int
    nbytes: int
    keep: Copies
    goal: Copies
    after: Copies


class _Sweep:
    """The cheapest plan within a capacity: a dynamic program over the ops; the state is the copies held of each value.

    To hold more is never worse until an op finds no room: only then are copies dropped, and values moved that the op
    does not read. A label is forgotten if another does as well even when it has to make up for what it does not hold.
    """

    def __init__(self, facts: _Facts, capacity: float):
        self.facts, self.capacity, self.exact, self.states = facts, capacity, True, 0
        self.tight: dict[int, float] = {}  # the least bytes that a label needed at an op
        self.options, self.regret = cache(self._options), cache(self._regret)

    def solve(self) -> Solution:
        homes = product(*(self.facts.problem.values[v].home for v in self.facts.live[0]))
        states = (tuple(frozenset({layout}) for layout in layouts) for layouts in islice(homes, STATES + 1))
        labels = self.cut([_Label(0, 0, 0, state) for state in states], lambda label: self.weigh(0, label))
        labels = self.select(0, labels)
        for k in range(len(self.facts.runs)):
            labels = self.select(k + 1, [new for label in labels for new in self.extend(k, label)])
            if not labels:
                missed = "" if self.exact else " (the search was cut short and may have missed a plan)"
                raise self.facts.infeasible(k, self.tight[k], missed)
        path = [labels[0]]
        while path[0].parent:
            path.insert(0, path[0].parent)
        choices = [label.choice for label in path[1:]]
        return self.facts.solution(choices, *self.moves(path), exact=self.exact, states=self.states)

    def extend(self, k: int, label: _Label) -> Iterator[_Label]:
        """Every way on from a label through op k that finds room."""
        facts, wanted = self.facts, self.facts.wanted[k + 1]
        for choice, run in facts.runs[k].items():
            saved = label.saved + run.saved
            room = self.capacity - facts.problem.resident - saved - run.room
            options = [
                self.options(facts.shapes[v], held, run.needs.get(v, frozenset()), wanted.get(v, frozenset()))
                for v, held in zip(facts.live[k], label.state)
            ]
            least = sum(min(option.nbytes for option in every) for _, every in options)
            self.tight[k] = min(self.tight.get(k, inf), self.capacity - room + least)
            for cost, largest, _, picks in self.combine(options, room):
                state = {v: pick.after for v, pick in zip(facts.live[k], picks)}
                state |= {v: frozenset({layout}) for v, layout in run.gives.items()}
                yield _Label(
                    cost=label.cost + run.cost + cost,
                    largest=max(label.largest, run.largest, largest),
                    saved=saved,
                    state=tuple(state[v] for v in facts.live[k + 1]),
                    parent=label,
                    choice=choice,
                    goals=tuple(pick.goal for pick in picks),
                )

    def combine(
        self, options: Sequence[tuple[list[_Option], list[_Option]]], room: float
    ) -> list[tuple[int, int, int, tuple[_Option, ...]]]:
        """(cost, largest, bytes, options) of the ways to take one option for each value, within the room."""
        most = _rest(max(option.nbytes for option in full) for full, _ in options)
        least = _rest(min(option.nbytes for option in every) for _, every in options)
        ways: list[tuple[int, int, int, tuple[_Option, ...]]] = [(0, 0, 0, ())]
        for i, (full, every) in enumerate(options):
            ways = [
                (cost + new.cost, max(largest, new.largest), nbytes + new.nbytes, (*picks, new))
                for cost, largest, nbytes, picks in ways
                for new in (full if nbytes + most[i] <= room else every)
                if nbytes + new.nbytes + least[i + 1] <= room
            ]
            ways = self.cut(sorted(ways, key=lambda way: way[:2]), lambda way: way[2])
        return ways

    def _options(
        self, shape: _Shape, held: Copies, needs: Copies, wanted: Copies
    ) -> tuple[list[_Option], list[_Option]]:
        """What may become of the copies held before an op that needs some, if none must go, and if any may."""

        def option(keep: Copies) -> _Option:
            cost, largest, goal = shape.spread(held, keep)
            after = keep
            for layout in (layout for layout in shape.layouts if layout in keep - wanted):
                if any(shape.replaces(other, layout) for other in after - {layout}):
                    after = after - {layout}
            return _Option(cost, largest, shape.weigh(keep), keep, goal, after)

        if not wanted:  # the value's last use
            return [option(needs)], [option(needs)]
        full = [option(goal) for goal in shape.reach(held) if needs <= goal] if needs - held else [option(held)]
        every = [option(keep) for keep in _subsets(shape.layouts) if keep and needs <= keep]
        return self.worthwhile(shape, full, wanted), self.worthwhile(shape, every, wanted)

    def worthwhile(self, shape: _Shape, options: list[_Option], wanted: Copies) -> list[_Option]:
        """The options that no other of no more bytes matches even when it has to make up for the difference."""
        best: list[_Option] = []
        for new in sorted(options, key=lambda option: option[:3]):
            for old in best:
                cost, largest = self.regret(shape, old.keep, new.keep, wanted)
                total = old.cost + cost, max(old.largest, largest)
                if old.nbytes <= new.nbytes and (total[0] < new.cost or total <= new[:2]):
                    break
            else:
                best.append(new)
        return best

    def _regret(self, shape: _Shape, mine: Copies, other: Copies, wanted: Copies) -> tuple[int, int]:
        """(cost, largest) of the moves after which my copies of a value are as good as the other ones, at any capacity.

        Those are the moves to the other copies. Or to all that ops want, where these weigh no more than one of the
        other copies that no op wants: a whole copy, as a rule. (Nor may that one be the source of a useful third.)
        """
        best = shape.spread(mine, other)[:2]
        spare = other - wanted
        if spare and all(shape.weigh(wanted) <= shape.local[a] for a in spare):
            third = [a for a in shape.layouts if a not in wanted and a is not None]
            if all(any(shape.replaces(b, a) for b in wanted) for a in third):
                best = min(best, shape.spread(mine, wanted)[:2])
        return best

    def select(self, k: int, labels: list[_Label]) -> list[_Label]:
        """The labels worth keeping before op k, the most promising first."""
        shapes, wanted, live = self.facts.shapes, self.facts.wanted[k], self.facts.live[k]

        def order(label: _Label) -> tuple[int, int, int]:  # as if half of the copies still missing had to be paid
            lack = sum(shapes[v].spread(held, wanted[v])[0] for v, held in zip(live, label.state))
            return 2 * label.cost + lack, label.largest, label.saved

        best: list[_Label] = []
        saved: dict[tuple[Copies, ...], int] = {}
        for label in sorted(labels, key=order):
            if label.saved < saved.get(label.state, inf) and not any(self.beats(k, a, label) for a in best[:RIVALS]):
                saved[label.state] = label.saved
                best.append(label)
        best = self.cut(best, lambda label: self.weigh(k, label))
        self.states += len(best)
        return best

    def beats(self, k: int, label: _Label, other: _Label) -> bool:
        """Whether a label does as well as the other whatever follows."""
        gap, largest = other.cost - label.cost, label.largest
        if label.saved > other.saved:
            return False
        for v, mine, its in zip(self.facts.live[k], label.state, other.state):
            if mine != its:
                cost, size = self.regret(self.facts.shapes[v], mine, its, self.facts.wanted[k][v])
                gap, largest = gap - cost, max(largest, size)
                if gap < 0:
                    return False
        return gap > 0 or largest <= other.largest

    def weigh(self, k: int, label: _Label) -> int:
        """Bytes held before op k."""
        return label.saved + sum(self.facts.shapes[v].weigh(held) for v, held in zip(self.facts.live[k], label.state))

    def cut(self, items: list[T], weigh: Callable[[T], int]) -> list[T]:
        """At most STATES items: half of them the first, which are the most promising, half the lightest of the rest."""
        if len(items) <= STATES:
            return items
        self.exact = False
        first = (STATES + 1) // 2
        return items[:first] + sorted(items[first:], key=weigh)[: STATES - first]

    def moves(self, path: Sequence[_Label]) -> tuple[dict[int, Layout], list[Move]]:
        """The homes, and the moves in order."""
        facts = self.facts
        homes = {v: layout for v, held in zip(facts.live[0], path[0].state) for layout in held}
        moves = [
            facts.move(v, src, dst, k)
            for k, (before, label) in enumerate(pairwise(path))
            for v, held, goal in zip(facts.live[k], before.state, label.goals)
            for src, dst in facts.shapes[v].path(held, goal)
        ]
        return homes, moves


def _subsets(items: Iterable[Layout]) -> Iterator[Copies]:
    """All subsets, the smaller first."""
    items = list(items)
    return (frozenset(some) for size in range(len(items) + 1) for some in combinations(items, size))


def _rest(sizes: Iterable[int]) -> list[int]:
    """The sum of what is left at each position: 1, 2, 3 gives 6, 5, 3, 0."""
    return list(accumulate(reversed(list(sizes)), initial=0))[::-1]


def _human(nbytes: float) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.4g} {unit}"
    return f"{nbytes} B"


def _check(problem: Problem) -> list[int]:
    """The op that produces each value, -1 for an input. Raises ValueError for a problem that makes no sense."""
    values, producer = problem.values, [-1] * len(problem.values)
    if problem.size < 1:
        raise ValueError(f"a plan is for at least 1 rank, not {problem.size}")
    for k, op in enumerate(problem.ops):
        if not op.choices:
            raise ValueError(f"op {op.name!r} offers no choice")
        for v in op.inputs:
            if producer[v] < 0 and not values[v].home:
                raise ValueError(
                    f"op {op.name!r} reads {values[v].name!r}: no op before produces it, and it has no home"
                )
        for v in op.outputs:
            if producer[v] >= 0 or values[v].home:
                raise ValueError(f"op {op.name!r} produces {values[v].name!r}, which exists already")
            producer[v] = k
        for choice in op.choices:
            if (len(choice.needs), len(choice.gives)) != (len(op.inputs), len(op.outputs)):
                raise ValueError(
                    f"op {op.name!r} has {len(op.inputs)} inputs and {len(op.outputs)} outputs, but a choice with "
                    f"{len(choice.needs)} needs and gives {len(choice.gives)}"
                )
    layouts = [
        (values[v], layout)
        for op in problem.ops
        for choice in op.choices
        for v, layout in zip(op.inputs + op.outputs, choice.needs + choice.gives)
    ]
    layouts += [(value, layout) for value in values for layout in value.home]
    for value, layout in layouts:
        if layout is not None and layout not in dict(value.sizes):
            dims = " ".join(dim for dim, _ in value.sizes)
            raise ValueError(f"{value.name!r} cannot be sharded along {layout!r}: its dims are '{dims}'")
    return producer
