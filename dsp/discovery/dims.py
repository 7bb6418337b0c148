"""Which dim is which: the dims of a model's inputs followed through its forward, by the rules of glue.

Every axis of a followed tensor is a fold of dims. What the rules of `dsp.rules` say of a sharded dim, they say of any
dim: where it lies after the operation. A dim that an operation loses ends there, and a new one is born in its place.
Dims turn out to be the same when they meet (two tensors added), and to be folds when a reshape takes them apart, so a
`Dim` is a node of a union-find whose leaves are what they are known to be so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsp.layout import Cut
from dsp.plan.record import OperationNode, Ref
from dsp.rules import RULES, Outcome
from dsp.rules.call import frame_of

MANY = 64  # elements of a dim


def ranks_for(size: int) -> tuple[int, int]:
    """The fewest ranks that divide a dim evenly, and the fewest that do not."""
    even, odd = (next(n for n in range(2, size + 2) if (size % n == 0) is divides) for divides in (True, False))
    return even, odd


@dataclass(eq=False)
class Dim:
    size: int
    order: int
    same: Dim | None = None
    parts: tuple[Dim, ...] = ()
    apart: set[Dim] = field(default_factory=set)  # dims of one tensor, which cannot be the same

    def atoms(self) -> tuple[Dim, ...]:
        """The dims that this one is known to consist of, itself if it is one of its own."""
        d = self
        while d.same is not None:
            d = d.same
        return tuple(a for p in d.parts for a in p.atoms()) if d.parts else (d,)


Axes = list[tuple[Dim, ...]]  # for each axis the dims it folds, outermost first; none for sizes 0 and 1


class Dims:
    """All dims of a model. What is born at a place of the record is the same dim whenever that is followed."""

    def __init__(self) -> None:
        self.births: dict[Any, Dim] = {}
        self.axes: dict[int, Axes] = {}  # of the tensors that are followed, by their numbers in the record
        self.live: set[int] = set()  # those computed from the inputs whose dims are to be sharded
        self.changes = 0

    def born(self, key: Any, size: int) -> tuple[Dim, ...]:
        if (key, size) not in self.births:
            self.births[key, size] = Dim(size, len(self.births))
        return self.births[key, size].atoms()

    def split(self, dim: Dim, outer: int) -> None:
        """This dim is a fold, of which the outer part has size `outer`."""
        dim.parts = tuple(Dim(size, dim.order, apart=set(dim.apart)) for size in (outer, dim.size // outer))
        self.changes += 1

    def unify(self, one: tuple[Dim, ...], two: tuple[Dim, ...]) -> bool:
        """Two folds of the same size are the same; False where that cannot be."""
        one, two = atoms(one), atoms(two)
        while one and two:
            a, b = one[0], two[0]
            if a is b:
                one, two = one[1:], two[1:]
                continue
            if a.size == b.size:
                if any(b in x.atoms() for x in a.apart) or any(a in x.atoms() for x in b.apart):
                    return False
                old, new = sorted((a, b), key=lambda d: d.order)
                new.same = old
                old.apart |= new.apart
                self.changes += 1
            else:
                large, small = (a, b) if a.size > b.size else (b, a)
                if large.size % small.size:
                    return False
                self.split(large, small.size)
            one, two = atoms(one), atoms(two)
        return True

    def fill(self, shape: Sequence[int], found: list[tuple[Cut, tuple[Dim, ...]]], key: Any) -> Axes:
        """The axes of a tensor in which dims were found, with new dims where none was; what overlaps is the same."""
        axes: Axes = []
        for d, size in enumerate(shape):
            if size == 0:
                axes.append(())
                continue
            spans: list[tuple[int, Dim]] = []
            marks = {1, size}
            for cut, dims in found:
                start = cut.folds
                for dim in atoms(dims) if cut.dim == d else ():
                    ends = sorted({*marks, start, start * dim.size})
                    if size % (start * dim.size) == 0 and all(b % a == 0 for a, b in itertools.pairwise(ends)):
                        marks |= {start, start * dim.size}
                        spans.append((start, dim))
                    start *= dim.size
            axis: list[Dim] = []
            for a, b in itertools.pairwise(sorted(marks)):
                here = []
                for start, dim in spans:
                    if start <= a and b <= start * dim.size:
                        here.append(self.between(dim, a // start, b // start))
                dims = here[0] if here else self.born((key, d, a), b // a)
                for other in here[1:]:
                    self.unify(dims, other)
                axis += atoms(dims)
            axes.append(tuple(axis))
        return axes

    def claim(self, t: Ref, cut: Cut, dims: tuple[Dim, ...], key: Any) -> None:
        """A followed tensor turns out to have these dims there."""
        axes = self.axes_of(t)
        if axes is not None:
            found: list[tuple[Cut, tuple[Dim, ...]]] = [(c, (d,)) for d, c in places(axes)]
            self.follow(t, self.fill(t.shape, [*found, (cut, dims)], key), self.is_live(t))

    def axes_of(self, t: Ref) -> Axes | None:
        """The dims of a followed tensor."""
        axes = self.axes.get(t.number)
        return None if axes is None else [atoms(axis) for axis in axes]

    def is_live(self, t: Ref) -> bool:
        return t.number in self.live

    def follow(self, t: Ref, axes: Axes, live: bool) -> None:
        every = {dim for axis in axes for dim in axis}
        for dim in every:
            dim.apart |= every - {dim}
        self.axes[t.number] = axes
        (self.live.add if live else self.live.discard)(t.number)

    def between(self, dim: Dim, start: int, end: int) -> tuple[Dim, ...]:
        """The part of a fold that spans [start, end) of it, as products of sizes."""
        at, taken = 1, []
        pending = list(dim.atoms())
        while pending:
            a = pending.pop(0)
            for mark in (start, end):
                if at < mark < at * a.size:
                    self.split(a, mark // at)
                    break
            if a.parts:
                pending = [*a.atoms(), *pending]
                continue
            if start <= at and at * a.size <= end:
                taken.append(a)
            at *= a.size
        return tuple(taken)


def atoms(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(a for d in dims for a in d.atoms())


def places(axes: Axes) -> Iterator[tuple[Dim, Cut]]:
    """Every dim of a tensor, and where it lies."""
    for d, axis in enumerate(axes):
        outer = 1
        for dim in axis:
            yield dim, Cut(d, outer)
            outer *= dim.size


@dataclass
class GlueOp:
    """One operation on followed tensors: for each of their dims, whether it can run with that dim sharded."""

    live: bool
    accepts: dict[Dim, bool]


class Follower:
    """Follows dims through the operations of a record."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims

    def operation(self, node: OperationNode) -> GlueOp | None:
        """The dims of an operation's results, by its rule; None of one that reads nothing that is followed."""
        if all(self.dims.axes_of(t) is None for t in node.operands):
            return None
        if RULES.get(node.name) in _RESHAPES and len(node.results) == 1:
            self.take_apart(self.dims.axes_of(node.operands[0]) or [], node.results[0].shape)
        where = {
            i: dict(places(axes)) for i, t in enumerate(node.operands) if (axes := self.dims.axes_of(t)) is not None
        }
        accepts: dict[Dim, bool] = {}
        found: list[tuple[Cut, tuple[Dim, ...]]] = []
        for dim in dict.fromkeys(d for own in where.values() for d in own):
            accepts[dim], there = self.along(dim, node, {i: own[dim] for i, own in where.items() if dim in own})
            found += there
        live = any(map(self.dims.is_live, node.operands))
        for k, t in enumerate(node.results):
            fit = [(c, d) for c, d in found if c.dim < t.ndim]
            self.dims.follow(t, self.dims.fill(t.shape, fit, ("op", node.index, k)), live)
        return GlueOp(live, accepts)

    def along(
        self, dim: Dim, node: OperationNode, carriers: Mapping[int, Cut]
    ) -> tuple[bool, list[tuple[Cut, tuple[Dim, ...]]]]:
        """(True if an operation runs along a dim, where that comes to lie in the results): in a second place of them
        it is a dim of its own."""
        # on n ranks, one element of the dim on each: every structure fits. Some rules look at each of the ranks
        n, odd = (dim.size, max(dim.size - 1, 1)) if dim.size <= MANY else ranks_for(dim.size)
        outcome, uneven = outcome_of(node, carriers, n), outcome_of(node, carriers, odd)
        tried = [outcome]
        if outcome is not None:
            for i, cut in outcome.narrow.items():  # whole, and it has the dim, too
                self.dims.claim(node.operands[i], cut, (dim,), ("op", node.index))
        elif len(carriers) > 1:  # q @ k.T: the dim of either appears in its own place
            tried = [outcome_of(node, {i: cut}, n) for i, cut in carriers.items()]
        cuts = dict.fromkeys(o.cut for o in tried if o is not None and o.cut is not None)
        return outcome is not None and uneven is not None, [
            (cut, (dim,) if k == 0 else self.dims.born(("op", node.index, k, dim.order), dim.size))
            for k, cut in enumerate(cuts)
        ]

    def take_apart(self, axes: Axes, new: Sequence[int]) -> None:
        """A reshape that cuts through a dim shows that it is a fold."""
        for mark in itertools.accumulate(new, lambda a, b: a * b):
            at = 1
            for dim in [d for axis in axes for d in axis]:
                for a in dim.atoms():
                    if at < mark < at * a.size and mark % at == 0 and a.size % (mark // at) == 0:
                        self.dims.split(a, mark // at)
                    at *= a.size


def outcome_of(node: OperationNode, cuts: Mapping[int, Cut | None], n: int) -> Outcome | None:
    """The rule's outcome on n ranks; None where it refuses, as it does what it was not made for."""
    try:
        return frame_of(node, cuts, n).outcome()
    except Exception:
        return None


_RESHAPES = {RULES[name] for name in ("view", "view_as", "flatten", "unflatten")}
