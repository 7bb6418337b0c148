"""The cheapest plan without a memory limit: choices are eliminated one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import combinations, count, product
from operator import itemgetter
from typing import Any

from dsp.planner.index import Index, Shape, subsets
from dsp.planner.problem import Copies, Layout, Move, Solution

ROWS = 500_000  # rows of a table; a problem that needs more goes to the sweep
FIRST = 300_000  # rows of all tables together, in the first try; then the problem is made smaller
ENOUGH = 4_000_000  # the same, in later tries
HUB = 32  # a variable of one value that is in more tables is left out of them: else all variables become its neighbours

_State = tuple[tuple[Layout, ...], Copies]  # of a value: the layouts it may start in, and those needed so far
_Row = tuple[Any, ...]  # a value for each variable of a table
_Table = tuple[tuple[int, ...], dict[_Row, tuple[int, int]]]  # variables, and for each row (cost, largest)


class Elimination:
    """The cheapest plan without a memory limit.

    Every copy may then be kept, so the cost of a value depends only on the layout it starts in and the set of all
    layouts needed of it. The total cost is a sum of terms, each over the choices of a few ops. Eliminating one choice
    after another minimizes the sum exactly, and a skip across the network is no harder than a link to the next op.

    same: for each op the op whose choice it takes, see `dsp.planner.loops`; by default itself.
    """

    def __init__(self, facts: Index, same: Sequence[int] | None = None, say: Callable[[str], None] = lambda text: None):
        self.facts, self.same, self.say = facts, same or range(len(facts.runs)), say
        self.total, self.outlook = cache(self._total), cache(self._outlook)

    def solve(self, most: float = ENOUGH) -> Solution | None:
        """Return the plan, or None if a table outgrows ROWS rows, or all tables together outgrow `most`.

        A table grows where many values are live at once and each op reads several.
        """
        best, rows = _minimize(self.tables(), most, self.say)
        if best is None:
            return None
        choices = [best[k] for k in self.same]
        exact = [*self.same] == [*range(len(self.same))]
        return self.facts.solution(choices, *self.moves(choices), exact=exact, states=rows)

    def tables(self) -> list[_Table]:
        """The terms. Variable k is the choice of op k; the others are a value's state between two of its uses."""
        facts = self.facts
        tables: list[_Table] = [
            ((self.same[k],), {(choice,): (run.cost, run.largest) for choice, run in runs.items()})
            for k, runs in enumerate(facts.runs)
        ]
        variables = count(len(facts.runs))
        # for each value: op -> choice -> the layouts needed
        uses_of: list[dict[int, dict[int, Copies]]] = [{} for _ in facts.problem.values]
        for k, op in enumerate(facts.problem.ops):
            for v in dict.fromkeys(op.inputs):
                asks = uses_of[v].setdefault(self.same[k], {})
                for i, run in facts.runs[k].items():
                    asks[i] = asks.get(i, frozenset()) | run.needs[v]
        for v, value in enumerate(facts.problem.values):
            if facts.whole(v):
                continue  # on every rank already: any copy is a split, which is free
            scope: tuple[int, ...] = ()
            rows: dict[_Row, _State] = {(): (value.home, frozenset())}
            if facts.producer[v] >= 0:
                scope = (self.same[facts.producer[v]],)
                rows = {(i,): ((run.gives[v],), frozenset()) for i, run in facts.runs[facts.producer[v]].items()}
            uses = list(uses_of[v])
            later = [frozenset[Layout]() for _ in uses]
            for i in range(len(uses) - 1, 0, -1):
                later[i - 1] = later[i].union(*uses_of[v][uses[i]].values())
            for k, ahead in zip(uses, later):
                new = (k,) if k not in scope else ()  # a step of a loop may read what the step before it made
                same: dict[Any, _State] = {}  # one state for all states whose further costs are equal
                table: dict[_Row, tuple[int, int]] = {}
                after: dict[_Row, _State] = {}
                for (row, (starts, layouts)), (choice, needs) in product(rows.items(), uses_of[v][k].items()):
                    if not new and row[scope.index(k)] != choice:
                        continue
                    row += (choice,) * len(new)
                    state = starts, layouts | needs
                    cost, relay, *_ = self.total(facts.shapes[v], *state)
                    cost -= self.total(facts.shapes[v], starts, layouts)[0]
                    if k == uses[-1]:
                        table[row] = cost, relay  # only after the last use is it settled which copies are made
                    else:
                        state = same.setdefault(self.outlook(facts.shapes[v], *state, ahead), state)
                        table[row + (state,)] = cost, 0
                        after[(state,)] = state
                link = () if k == uses[-1] else (next(variables),)
                tables.append(((*scope, *new, *link), table))
                scope, rows = link, after
        return tables

    def _total(self, shape: Shape, starts: tuple[Layout, ...], layouts: Copies) -> tuple[int, int, Layout, Copies]:
        """(cost, largest copy that no op needs, start, all copies) of the cheapest moves to these layouts."""
        ways = []
        for start in starts:
            cost, _, goal = shape.spread(frozenset({start}), layouts)
            ways.append((cost, shape.most(goal - layouts - {start}), start, goal))
        return min(ways, key=lambda way: way[:2])

    def _outlook(self, shape: Shape, starts: tuple[Layout, ...], layouts: Copies, ahead: Copies) -> _Row:
        """(more cost, largest relay) for each set of the layouts that may yet be needed of a value."""
        now = self.total(shape, starts, layouts)[0]
        later = subsets(a for a in shape.layouts if a in ahead)
        ways = (self.total(shape, starts, layouts | more)[:2] for more in later)
        return tuple((cost - now, relay) for cost, relay in ways)

    def moves(self, choices: Sequence[int]) -> tuple[dict[int, Layout], list[Move]]:
        """The homes, and the moves in order, each before the first op that needs its copy or a copy made from it."""
        facts = self.facts
        starts = {v: value.home for v, value in enumerate(facts.problem.values)}
        first_uses: dict[int, dict[Layout, int]] = {}  # for each value: layout needed -> the first op that needs it
        for k, choice in enumerate(choices):
            run = facts.runs[k][choice]
            starts.update((v, (layout,)) for v, layout in run.gives.items())
            for v, needs in run.needs.items():
                for layout in needs:
                    first_uses.setdefault(v, {}).setdefault(layout, k)
        homes: dict[int, Layout] = {}
        moves: list[Move] = []
        for v, first in first_uses.items():
            _, _, start, goal = self.total(facts.shapes[v], starts[v], frozenset(first))
            if facts.producer[v] < 0:
                homes[v] = start
            steps = facts.shapes[v].path(frozenset({start}), goal)
            for src, dst in reversed(steps):
                first[src] = min(first.get(src, first[dst]), first[dst])
            moves += [facts.move(v, src, dst, first[dst]) for src, dst in steps]
        return homes, sorted(moves, key=lambda move: (move.before, move.value))


class _Order:
    """The elimination order: next is the variable that newly joins the least (weighted min-fill, Kjaerulff 1990).

    weights: for each variable the number of its possible values.
    """

    def __init__(self, scopes: Iterable[tuple[int, ...]], weights: Mapping[int, int]) -> None:
        self.weights = weights
        self.near: dict[int, set[int]] = {}  # variable -> those that share a table with it, and itself
        for scope in scopes:
            for variable in scope:
                self.near.setdefault(variable, set()).update(scope)
        self.place = {variable: self.joins(variable) for variable in self.near}
        self.queue = [(at, variable) for variable, at in self.place.items()]
        heapify(self.queue)

    def joins(self, variable: int) -> int:
        pairs = combinations(self.near[variable] - {variable}, 2)
        return sum(self.weights[one] * self.weights[two] for one, two in pairs if two not in self.near[one])

    def __iter__(self) -> Iterator[int]:
        while self.queue:
            at, variable = heappop(self.queue)
            if self.place.get(variable) == at:  # else an outdated entry: the variable is queued again at another place
                yield variable

    def eliminate(self, variable: int, scope: tuple[int, ...]) -> None:
        """Note that a variable was eliminated: its neighbours, the scope of the new table, now share that table."""
        del self.place[variable]
        for neighbour in scope:
            self.near[neighbour] = (self.near[neighbour] | self.near[variable]) - {variable}
        for neighbour in {third for joined in scope for third in self.near[joined]}:
            if (at := self.joins(neighbour)) != self.place[neighbour]:
                self.place[neighbour] = at
                heappush(self.queue, (at, neighbour))


def _minimize(tables: list[_Table], most: float, say: Callable[[str], None]) -> tuple[dict[int, Any] | None, int]:
    """(the value of each variable that makes the sum of the tables least, rows made), by variable elimination.

    Eliminating a variable makes a table with its best value for every row of its neighbours' values. The first result
    is None if a table has more than ROWS rows, or all of them together more than `most`.
    """
    values = _values(tables)
    times = Counter(variable for scope, _ in tables for variable in scope)
    hubs = [variable for variable, options in values.items() if len(options) == 1 and times[variable] > HUB]
    assignment: dict[int, Any] = {variable: next(iter(values[variable])) for variable in hubs}
    live = {number: _without(assignment, table) for number, table in enumerate(tables)}
    of = _tables_of(live)
    order = _Order((scope for scope, _ in live.values()), {v: len(options) for v, options in values.items()})
    chosen: list[tuple[int, tuple[int, ...], dict[_Row, Any]]] = []
    total = 0
    for variable in order:
        say(f"{len(order.place)} choices to make")
        numbers = list(of.pop(variable))
        for number in numbers:
            for neighbour in set(live[number][0]) - {variable}:
                del of[neighbour][number]
        alone: _Table = ((variable,), {(value,): (0, 0) for value in values[variable]})
        least, rows = _least_of_all(alone, [live.pop(number) for number in numbers], most - total)
        total += rows
        if least is None:
            return None, total
        scope, best = least
        chosen.append((variable, scope, {row: value for row, (_, value) in best.items()}))
        number = len(tables) + len(chosen)
        live[number] = scope, {row: cost for row, (cost, _) in best.items()}
        for neighbour in scope:
            of[neighbour][number] = None
        order.eliminate(variable, scope)
    for variable, scope, choose in reversed(chosen):
        assignment[variable] = choose[tuple(map(assignment.__getitem__, scope))]
    return assignment, total


def _tables_of(tables: Mapping[int, _Table]) -> dict[int, dict[int, None]]:
    """The numbers of the tables that contain each variable, as ordered sets."""
    of: dict[int, dict[int, None]] = {}
    for number, (scope, _) in tables.items():
        for variable in scope:
            of.setdefault(variable, {})[number] = None
    return of


def _values(tables: list[_Table]) -> dict[int, dict[Any, None]]:
    """The possible values of each variable, as ordered sets: the plan must not depend on hashes."""
    values: dict[int, dict[Any, None]] = {}
    for scope, table in tables:
        for i, variable in enumerate(scope):
            values.setdefault(variable, {}).update((row[i], None) for row in table)
    return values


def _without(known: Mapping[int, Any], table: _Table) -> _Table:
    """A table without the variables of `known`, each of which has a single value."""
    scope, rows = table
    places = [i for i, variable in enumerate(scope) if variable not in known]
    if len(places) == len(scope):
        return table
    return tuple(scope[i] for i in places), {tuple(row[i] for i in places): cost for row, cost in rows.items()}


def _join(one: _Table, two: _Table) -> _Table:
    """The join of two tables: rows that agree on shared variables are merged, costs added, and the larger size kept."""
    new, pairs = _pairs(one, two)
    joined = {
        row + more: (cost + more_cost, largest if largest > more_largest else more_largest)
        for row, (cost, largest), matching in pairs
        for more, more_cost, more_largest in matching
    }
    return one[0] + new, joined


def _least(one: _Table, two: _Table) -> tuple[tuple[int, ...], dict[_Row, tuple[tuple[int, int], Any]], int]:
    """Two tables joined and minimized over the first variable of `one`: for each row of the others (the least cost, the
    value that has it); and the number of rows joined."""
    new, pairs = _pairs(one, two)
    best: dict[_Row, tuple[tuple[int, int], Any]] = {}
    count = 0
    for row, (cost, largest), matching in pairs:
        value, tail = row[0], row[1:]
        count += len(matching)
        for more, more_cost, more_largest in matching:
            total, place = cost + more_cost, tail + more
            known = best.get(place)
            if known is None or total <= known[0][0]:
                both = total, largest if largest > more_largest else more_largest
                if known is None or both < known[0]:
                    best[place] = both, value
    return one[0][1:] + new, best, count


def _least_of_all(
    joined: _Table, tables: Sequence[_Table], most: float
) -> tuple[tuple[tuple[int, ...], dict[_Row, tuple[tuple[int, int], Any]]] | None, int]:
    """A table joined with others, without its first variable, as in `_least`; and the number of rows made.

    The first result is None if a join has more than ROWS rows, or all of them together more than `most`.
    """
    total = 0
    for table in tables[:-1]:
        joined = _join(joined, table)
        total += len(joined[1])
        if total > most or len(joined[1]) > ROWS:
            return None, total
    scope, best, rows = _least(joined, tables[-1])
    total += rows
    return None if total > most or rows > ROWS else (scope, best), total


_Match = list[tuple[_Row, int, int]]  # rows over the variables that only the second table has, with (cost, largest)


def _pairs(one: _Table, two: _Table) -> tuple[tuple[int, ...], Iterator[tuple[_Row, tuple[int, int], _Match]]]:
    """The variables that only `two` has; and each row of `one` with its cost and the rows of `two` that match."""
    (scope, rows), (scope_two, rows_two) = one, two
    new = [i for i, variable in enumerate(scope_two) if variable not in scope]
    shared = [(scope.index(variable), i) for i, variable in enumerate(scope_two) if variable in scope]
    match: dict[_Row, _Match] = {}
    key, lookup, more = _picked([i for i, _ in shared]), _picked([i for _, i in shared]), _picked(new)
    for row, (cost, largest) in rows_two.items():
        match.setdefault(lookup(row), []).append((more(row), cost, largest))
    none: _Match = []
    return tuple(scope_two[i] for i in new), ((row, cost, match.get(key(row), none)) for row, cost in rows.items())


def _picked(places: Sequence[int]) -> Callable[[_Row], _Row]:
    """A function that returns the values of a row at some places."""
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda row: (row[places[0]],)) if places else (lambda row: ())
