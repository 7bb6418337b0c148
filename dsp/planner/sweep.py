"""The cheapest plan within a memory limit: a sweep over the ops in order, with the copies held as its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise, product
from math import inf
from typing import NamedTuple, TypeVar

from dsp.planner.index import Index, Shape, subsets
from dsp.planner.problem import Copies, Layout, Move, Solution

T = TypeVar("T")

STATES = 300  # labels kept after an op; if there are more, the best are kept, and the search is not exact
FEW = 12  # labels kept at least, however long the problem
WORK = 3_000_000  # limit of labels made x their live values in one sweep, some 20 s; beyond it fewer labels are kept
RIVALS = 64  # a new label is compared with this many of the most promising ones


class _Label(NamedTuple):
    """The best known partial plan that leads to one state of the sweep: the copies held of each live value."""

    cost: int
    largest: int
    saved: int
    state: tuple[Copies, ...]
    parent: _Label | None = None
    choice: int = 0
    goals: tuple[Copies, ...] = ()  # the copies of each live value at the op, before any is dropped


class _Option(NamedTuple):
    """One future of a value's copies: moves lead to `goal`; the op finds `keep`, and the next op `after`."""

    cost: int
    largest: int
    nbytes: int
    keep: Copies
    goal: Copies
    after: Copies


class Sweep:
    """The cheapest plan within a capacity: a dynamic program over the ops; the state is the copies held of each value.

    Holding more copies is never worse until an op lacks memory. Only then are copies dropped, and values moved that the
    op does not read. A label is dropped if another does as well even after it makes the copies that it lacks.
    """

    def __init__(self, facts: Index, capacity: float, say: Callable[[str], None] = lambda text: None):
        self.facts, self.capacity, self.say, self.exact, self.states = facts, capacity, say, True, 0
        self.width = STATES  # labels to keep; fewer if many live values and many ops would take too long
        self.tight: dict[int, float] = {}  # the least bytes that a label needed at an op
        self.options, self.regret = cache(self._options), cache(self._regret)

    def solve(self) -> Solution:
        homes = product(*(self.facts.problem.values[v].home for v in self.facts.live[0]))
        states = (tuple(frozenset({layout}) for layout in layouts) for layouts in islice(homes, STATES + 1))
        labels = self.cut([_Label(0, 0, 0, state) for state in states], lambda label: self.weigh(0, label))
        labels = self.select(0, labels)
        ahead = _suffix_sums(len(runs) * len(live) for runs, live in zip(self.facts.runs, self.facts.live))
        budget = WORK
        for k in range(len(self.facts.runs)):
            self.say(f"{len(self.facts.runs) - k} operations to lay out")
            if self.capacity == inf:  # with a memory limit, a plan that fits is worth any time
                self.width = min(STATES, max(FEW, budget // max(ahead[k], 1)))
            labels = [new for label in labels for new in self.extend(k, label)]
            budget -= len(labels) * len(self.facts.live[k])
            labels = self.select(k + 1, labels)
            if not labels:
                missed = "" if self.exact else ". The search was cut short, so it may have missed a plan that fits"
                raise self.facts.infeasible(k, self.tight[k], missed)
        path = [labels[0]]
        while path[0].parent:
            path.insert(0, path[0].parent)
        choices = [label.choice for label in path[1:]]
        return self.facts.solution(choices, *self.moves(path), exact=self.exact, states=self.states)

    def extend(self, k: int, label: _Label) -> Iterator[_Label]:
        """All continuations of a label through op k that fit into memory."""
        facts, wanted = self.facts, self.facts.wanted[k + 1]
        for choice, run in facts.runs[k].items():
            saved = label.saved + run.saved
            room = self.capacity - facts.problem.resident - saved - run.room
            options = [
                self.options(facts.shapes[v], copies, run.needs.get(v, frozenset()), wanted.get(v, frozenset()))
                for v, copies in zip(facts.live[k], label.state)
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
        """(cost, largest, bytes, options) of the combinations of one option for each value, within the room."""
        most = _suffix_sums(max(option.nbytes for option in full) for full, _ in options)
        least = _suffix_sums(min(option.nbytes for option in every) for _, every in options)
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
        self, shape: Shape, copies: Copies, needs: Copies, wanted: Copies
    ) -> tuple[list[_Option], list[_Option]]:
        """The futures of the copies held, before an op that needs some: if all may stay, and if any may be dropped."""

        def option(keep: Copies) -> _Option:
            cost, largest, goal = shape.spread(copies, keep)
            after = keep
            for layout in (layout for layout in shape.layouts if layout in keep - wanted):
                if any(shape.replaces(copy, layout) for copy in after - {layout}):
                    after = after - {layout}
            return _Option(cost, largest, shape.weigh(keep), keep, goal, after)

        if not wanted:  # the value's last use
            return [option(needs)], [option(needs)]
        full = [option(goal) for goal in shape.reach(copies) if needs <= goal] if needs - copies else [option(copies)]
        every = [option(keep) for keep in subsets(shape.layouts) if keep and needs <= keep]
        return self.worthwhile(shape, full, wanted), self.worthwhile(shape, every, wanted)

    def worthwhile(self, shape: Shape, options: list[_Option], wanted: Copies) -> list[_Option]:
        """The options that no other, of no more bytes, matches after it makes up for the difference."""
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

    def _regret(self, shape: Shape, copies: Copies, rival: Copies, wanted: Copies) -> tuple[int, int]:
        """(cost, largest) of the moves that make some copies as good as those of a `rival`, at any capacity.

        These are the moves to the rival's copies; or the moves to all wanted copies, if these together weigh no more
        than each unwanted one of the rival (usually the replicated copy) and no unwanted copy is the source of a useful
        third.
        """
        best = shape.spread(copies, rival)[:2]
        spare = rival - wanted
        if spare and all(shape.weigh(wanted) <= shape.local[a] for a in spare):
            third = [a for a in shape.layouts if a not in wanted and a is not None]
            if all(any(shape.replaces(b, a) for b in wanted) for a in third):
                best = min(best, shape.spread(copies, wanted)[:2])
        return best

    def select(self, k: int, labels: list[_Label]) -> list[_Label]:
        """The labels worth keeping before op k, the most promising first."""
        shapes, wanted, live = self.facts.shapes, self.facts.wanted[k], self.facts.live[k]

        def order(label: _Label) -> tuple[int, int, int]:  # as if half of the missing copies had to be paid
            lack = sum(shapes[v].spread(copies, wanted[v])[0] for v, copies in zip(live, label.state))
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

    def beats(self, k: int, label: _Label, rival: _Label) -> bool:
        """Tell whether a label does at least as well as the other whatever follows."""
        gap, largest = rival.cost - label.cost, label.largest
        if label.saved > rival.saved:
            return False
        for v, copies, rival_copies in zip(self.facts.live[k], label.state, rival.state):
            if copies != rival_copies:
                cost, size = self.regret(self.facts.shapes[v], copies, rival_copies, self.facts.wanted[k][v])
                gap, largest = gap - cost, max(largest, size)
                if gap < 0:
                    return False
        return gap > 0 or largest <= rival.largest

    def weigh(self, k: int, label: _Label) -> int:
        """Bytes held before op k."""
        shapes = self.facts.shapes
        return label.saved + sum(shapes[v].weigh(copies) for v, copies in zip(self.facts.live[k], label.state))

    def cut(self, items: list[T], weigh: Callable[[T], int]) -> list[T]:
        """At most `width` items: half are the first and most promising, half the lightest of the rest."""
        if len(items) <= self.width:
            return items
        self.exact = False
        first = (self.width + 1) // 2
        return items[:first] + sorted(items[first:], key=weigh)[: self.width - first]

    def moves(self, path: Sequence[_Label]) -> tuple[dict[int, Layout], list[Move]]:
        """The homes, and the moves in order."""
        facts = self.facts
        homes = {v: layout for v, copies in zip(facts.live[0], path[0].state) for layout in copies}
        moves = [
            facts.move(v, src, dst, k)
            for k, (before, label) in enumerate(pairwise(path))
            for v, copies, goal in zip(facts.live[k], before.state, label.goals)
            for src, dst in facts.shapes[v].path(copies, goal)
        ]
        return homes, moves


def _suffix_sums(sizes: Iterable[int]) -> list[int]:
    """The suffix sums: 1, 2, 3 gives 6, 5, 3, 0."""
    return list(accumulate(reversed(list(sizes)), initial=0))[::-1]
