"""The identity of dims: follow the dims of a model's inputs through its forward, by the rules of glue.

Every axis of a followed tensor is a fold of dims. The rules of `dsp.glue.rules` say where a sharded dim is after an
operation, so they can follow any dim. If an operation loses a dim, a new one is born in its place. Two dims turn out to
be the same when they meet (two tensors are added), and a dim turns out to be a fold when a reshape splits it. So a
`Dim` is a node of a union-find, whose leaves are the dims as far as they are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsp.comm.layout import Cut
from dsp.core.record import Node, Ref
from dsp.glue.local import frame_of
from dsp.glue.rules import RULES, Outcome

MANY = 64  # elements of a dim, up to which a rule is tried with one element per rank


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
    distinct: set[Dim] = field(default_factory=set)  # other dims of the same tensor: they cannot be this dim

    def atoms(self) -> tuple[Dim, ...]:
        """The dims that this dim is known to consist of; itself if it is not a fold."""
        d = self
        while d.same is not None:
            d = d.same
        return tuple(a for p in d.parts for a in p.atoms()) if d.parts else (d,)


Axes = list[tuple[Dim, ...]]  # for each axis the dims folded in it, outermost first; () for sizes 0 and 1


class Dims:
    """All dims of a model. A dim born at a place of the record is the same dim in every pass."""

    def __init__(self) -> None:
        self.births: dict[Any, Dim] = {}
        self.axes: dict[int, Axes] = {}  # the dims of followed tensors, by the tensors' numbers in the record
        self.live: set[int] = set()  # the followed tensors that are computed from inputs to be sharded
        self.changes = 0

    def born(self, key: Any, size: int) -> tuple[Dim, ...]:
        if (key, size) not in self.births:
            self.births[key, size] = Dim(size, len(self.births))
        return self.births[key, size].atoms()

    def split(self, dim: Dim, outer: int) -> None:
        """Note that this dim is a fold whose outer part has size `outer`."""
        dim.parts = tuple(Dim(size, dim.order, distinct=set(dim.distinct)) for size in (outer, dim.size // outer))
        self.changes += 1

    def unify(self, one: tuple[Dim, ...], two: tuple[Dim, ...]) -> bool:
        """Note that two folds of the same size are the same; return False if they cannot be."""
        one, two = atoms(one), atoms(two)
        while one and two:
            a, b = one[0], two[0]
            if a is b:
                one, two = one[1:], two[1:]
                continue
            if a.size == b.size:
                if any(b in x.atoms() for x in a.distinct) or any(a in x.atoms() for x in b.distinct):
                    return False
                old, new = sorted((a, b), key=lambda d: d.order)
                new.same = old
                old.distinct |= new.distinct
                self.changes += 1
            else:
                large, small = (a, b) if a.size > b.size else (b, a)
                if large.size % small.size:
                    return False
                self.split(large, small.size)
            one, two = atoms(one), atoms(two)
        return True

    def fill(self, shape: Sequence[int], positions: list[tuple[Cut, tuple[Dim, ...]]], key: Any) -> Axes:
        """The axes of a tensor with these dims found in it. Gaps get new dims; dims that overlap are unified."""
        axes: Axes = []
        for d, size in enumerate(shape):
            if size == 0:
                axes.append(())
                continue
            spans: list[tuple[int, Dim]] = []
            marks = {1, size}
            for cut, dims in positions:
                start = cut.folds
                for dim in atoms(dims) if cut.dim == d else ():
                    ends = sorted({*marks, start, start * dim.size})
                    if size % (start * dim.size) == 0 and all(b % a == 0 for a, b in itertools.pairwise(ends)):
                        marks |= {start, start * dim.size}
                        spans.append((start, dim))
                    start *= dim.size
            axis: list[Dim] = []
            for a, b in itertools.pairwise(sorted(marks)):
                candidates = []
                for start, dim in spans:
                    if start <= a and b <= start * dim.size:
                        candidates.append(self.between(dim, a // start, b // start))
                dims = candidates[0] if candidates else self.born((key, d, a), b // a)
                for more in candidates[1:]:
                    self.unify(dims, more)
                axis += atoms(dims)
            axes.append(tuple(axis))
        return axes

    def claim(self, t: Ref, cut: Cut, dims: tuple[Dim, ...], key: Any) -> None:
        """Note that a followed tensor has these dims at `cut`."""
        axes = self.axes_of(t)
        if axes is not None:
            positions: list[tuple[Cut, tuple[Dim, ...]]] = [(c, (d,)) for d, c in places(axes)]
            self.follow(t, self.fill(t.shape, [*positions, (cut, dims)], key), self.is_live(t))

    def axes_of(self, t: Ref) -> Axes | None:
        """The dims of a followed tensor; None for a tensor that is not followed."""
        axes = self.axes.get(t.number)
        return None if axes is None else [atoms(axis) for axis in axes]

    def is_live(self, t: Ref) -> bool:
        return t.number in self.live

    def follow(self, t: Ref, axes: Axes, live: bool) -> None:
        every = {dim for axis in axes for dim in axis}
        for dim in every:
            dim.distinct |= every - {dim}
        self.axes[t.number] = axes
        (self.live.add if live else self.live.discard)(t.number)

    def between(self, dim: Dim, start: int, end: int) -> tuple[Dim, ...]:
        """The part of a fold from `start` to `end`, both given as products of the sizes of outer dims."""
        at, dims = 1, []
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
                dims.append(a)
            at *= a.size
        return tuple(dims)


def atoms(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    return tuple(a for d in dims for a in d.atoms())


def places(axes: Axes) -> Iterator[tuple[Dim, Cut]]:
    """Every dim of a tensor, with its place."""
    for d, axis in enumerate(axes):
        outer = 1
        for dim in axis:
            yield dim, Cut(d, outer)
            outer *= dim.size


@dataclass
class GlueOp:
    """One operation on followed tensors. accepts: for each of their dims, whether the operation can run with that dim
    sharded."""

    live: bool
    accepts: dict[Dim, bool]


class Follower:
    """Follows dims through the operations of a record."""

    def __init__(self, dims: Dims) -> None:
        self.dims = dims

    def operation(self, node: Node) -> GlueOp | None:
        """Follow dims to an operation's results, by its rule; None if the operation reads no followed tensor."""
        if all(self.dims.axes_of(t) is None for t in node.refs):
            return None
        if RULES.get(node.name) in _RESHAPES and len(node.results) == 1:
            self.split_folds(self.dims.axes_of(node.refs[0]) or [], node.results[0].shape)
        cuts_of = {i: dict(places(axes)) for i, t in enumerate(node.refs) if (axes := self.dims.axes_of(t)) is not None}
        accepts: dict[Dim, bool] = {}
        positions: list[tuple[Cut, tuple[Dim, ...]]] = []
        for dim in dict.fromkeys(d for cuts in cuts_of.values() for d in cuts):
            accepts[dim], more = self.along(dim, node, {i: cuts[dim] for i, cuts in cuts_of.items() if dim in cuts})
            positions += more
        live = any(map(self.dims.is_live, node.refs))
        for k, t in enumerate(node.results):
            fit = [(c, d) for c, d in positions if c.dim < t.ndim]
            self.dims.follow(t, self.dims.fill(t.shape, fit, ("op", node, k)), live)
        return GlueOp(live, accepts)

    def along(
        self, dim: Dim, node: Node, carriers: Mapping[int, Cut]
    ) -> tuple[bool, list[tuple[Cut, tuple[Dim, ...]]]]:
        """(whether an operation runs with a dim sharded, the places of that dim in the results). If the results have
        it twice, the second place gets a new dim."""
        # n ranks with one element each fit every structure; long dims are tried on few ranks: rules may loop over them
        n, odd = (dim.size, max(dim.size - 1, 1)) if dim.size <= MANY else ranks_for(dim.size)
        outcome, uneven = outcome_of(node, carriers, n), outcome_of(node, carriers, odd)
        tried = [outcome]
        if outcome is not None:
            for i, cut in outcome.narrow.items():  # a replicated operand that has the dim, too
                self.dims.claim(node.refs[i], cut, (dim,), ("op", node))
        elif len(carriers) > 1:  # as in q @ k.T: each operand's dim has its own place in the result
            tried = [outcome_of(node, {i: cut}, n) for i, cut in carriers.items()]
        cuts = dict.fromkeys(o.cut for o in tried if o is not None and o.cut is not None)
        return outcome is not None and uneven is not None, [
            (cut, (dim,) if k == 0 else self.dims.born(("op", node, k, dim.order), dim.size))
            for k, cut in enumerate(cuts)
        ]

    def split_folds(self, axes: Axes, new: Sequence[int]) -> None:
        """Split the dims that a reshape cuts through: the reshape shows that they are folds."""
        for mark in itertools.accumulate(new, lambda a, b: a * b):
            at = 1
            for dim in [d for axis in axes for d in axis]:
                for a in dim.atoms():
                    if at < mark < at * a.size and mark % at == 0 and a.size % (mark // at) == 0:
                        self.dims.split(a, mark // at)
                    at *= a.size


def outcome_of(node: Node, cuts: Mapping[int, Cut | None], n: int) -> Outcome | None:
    """The rule's outcome on n ranks; None if the rule refuses or fails, as it may on operands it does not expect."""
    try:
        return frame_of(node, [cuts.get(i) for i in range(len(node.operands))], n).outcome()
    except Exception:
        return None


_RESHAPES = {RULES[name] for name in ("view", "view_as", "flatten", "unflatten")}
