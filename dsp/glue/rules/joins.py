"""Rules of joining and splitting tensors."""

from __future__ import annotations

import itertools
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from dsp.comm.halo import Rows
from dsp.comm.layout import Cut, chunk
from dsp.core.torch_calls import GlueError, Operand
from dsp.glue.rules.call import Frame, Outcome, align, first, rule


@rule("cat concat concatenate stack", piecewise=True)
def cat(f: Frame) -> Outcome:
    tensors = list(f.get(0, "tensors"))
    reference = next(t for t in tensors if t.cut is not None)
    cut = reference.cut
    assert cut is not None
    stacked = f.name == "stack"
    dim = f.normal(f.get(1, "dim", 0), reference.ndim + stacked)
    if not stacked:  # torch leaves out tensors of shape (0,), such as a cache that has nothing yet
        tensors = [t for t in tensors if t.shape != (0,) or reference.ndim == 1]
        if len(tensors) == 1:
            return Outcome(cut, reference.shape[cut.dim])
    if dim == cut.dim and not stacked:
        return side_by_side(f, tensors, cut) if f.side_by_side else dealt_anew(f, tensors, cut)
    outcome = Outcome(Cut(cut.dim + (stacked and dim <= cut.dim), cut.outer), reference.shape[cut.dim])
    everything = f.operands()
    for t in tensors:
        if t.ndim != reference.ndim or t.shape[cut.dim] != reference.shape[cut.dim]:
            raise f.refuse("its tensors have different sizes along the sharded dim")
        if t.cut is None:
            outcome.narrow[next(i for i, o in enumerate(everything) if o is t)] = cut
        elif t.cut != cut:
            raise f.refuse("its tensors are sharded along different dims")
    return outcome


def side_by_side(f: Frame, tensors: list[Operand], cut: Cut) -> Outcome:
    """Join along the sharded dim: each rank joins its own shards, and nothing is sent."""
    alike(f, tensors, cut)
    pieces, places = list[int](), f.operands()
    outcome = Outcome(None)
    for t in tensors:
        if t.cut is None:
            outcome.narrow[next(i for i, o in enumerate(places) if o is t)] = Cut(cut.dim)
        elif t.cut.dim != cut.dim:
            raise f.refuse("its tensors are sharded along different dims")
        pieces += (t.cut or Cut(cut.dim)).pieces(t.shape[cut.dim])
    outcome.cut, outcome.size = Cut.of_pieces(cut.dim, tuple(pieces)), sum(pieces)
    return outcome


def alike(f: Frame, tensors: list[Operand], cut: Cut) -> None:
    """Raise GlueError unless tensors to be joined along a sharded dim have the same other dims."""
    most = max(t.ndim for t in tensors)
    sizes = {(*t.shape[: cut.dim], *t.shape[cut.dim + 1 :]) for t in tensors if t.ndim == most}
    if any(t.ndim != most for t in tensors) or len(sizes) > 1:
        raise f.refuse("its tensors have different sizes along other dims than the sharded one, too")


def dealt_anew(f: Frame, tensors: list[Operand], cut: Cut) -> Outcome:
    """Join along the sharded dim: each rank reads the rows that its chunk of the result consists of."""
    if cut.outer != 1 or any(t.cut not in (None, cut) for t in tensors):
        raise f.refuse("its tensors are sharded along different dims")
    alike(f, tensors, cut)
    sizes = [t.shape[cut.dim] for t in tensors]
    chunks = [chunk(sum(sizes), f.n, rank) for rank in range(f.n)]
    places, before = f.operands(), 0
    outcome = Outcome(cut, sum(sizes))
    for t, size in zip(tensors, sizes):
        spans = [(min(max(a - before, 0), size), min(max(a + k - before, 0), size)) for a, k in chunks]
        outcome.rows[next(i for i, o in enumerate(places) if o is t)] = (Rows(cut.dim, size, tuple(spans)),)
        before += size
    return outcome


def stretches(
    f: Frame, x: Operand, cut: Cut, ranges: list[range], func: Any, landing: int | None = None
) -> Outcome:  # fmt: skip
    """Ranges of the sharded dim, each sharded in chunks of its own; `func` makes results of the rows a rank reads.

    `landing`: the dim's position in the results, if it changes.
    """
    if cut.outer != 1 or any(r.step < 1 for r in ranges):
        raise f.refuse("it takes parts of the sharded dim")

    def span(r: range, rank: int) -> tuple[int, int]:
        start, length = chunk(len(r), f.n, rank)
        part = r[start : start + length]
        return (part[0], part[-1] + 1) if part else (0, 0)

    rows = tuple(Rows(cut.dim, x.shape[cut.dim], tuple(span(r, rank) for rank in range(f.n))) for r in ranges)
    sizes = tuple(map(len, ranges))
    i = next(i for i, o in enumerate(f.operands()) if o is x)
    out = Cut(cut.dim if landing is None else landing)
    return Outcome(out, sizes[0], rows={i: rows}, sizes=sizes, func=func, args=(x,), kwargs={})


class Stretch(NamedTuple):
    """Consecutive pieces of a dim, each sharded on its own: their cut, and their position in this rank's shard."""

    cut: Cut
    start: int
    length: int


def stretch(f: Frame, x: Operand, cut: Cut, positions: range) -> Stretch:
    """The pieces of a dim that is joined or a fold in a range, which must start and stop where pieces meet."""
    pieces = cut.pieces(x.shape[cut.dim])
    ends = list(itertools.accumulate(pieces, initial=0))
    if positions.step != 1 or positions.start not in ends or positions.stop not in ends or not positions:
        raise refuse_pieces(f, cut)
    # an empty piece makes two ends equal: it is left out
    first, last = len(ends) - 1 - ends[::-1].index(positions.start), ends.index(positions.stop)
    lengths = [f.local_size(Cut(0), piece) for piece in pieces]
    return Stretch(Cut.of_pieces(cut.dim, pieces[first:last]), sum(lengths[:first]), sum(lengths[first:last]))


def refuse_pieces(f: Frame, cut: Cut) -> GlueError:
    """The refusal of parts of the sharded dim."""
    joined = f", a concatenation of pieces {list(cut.pieces(0))}, each sharded on its own" if cut.joined else ""
    return f.refuse(f"it takes parts of the sharded dim{joined}")


def split_pieces(f: Frame, x: Operand, cut: Cut, ranges: list[range]) -> Outcome:
    """Split a dim that is joined or a fold where its pieces meet: each rank splits its shard."""
    parts = [stretch(f, x, cut, positions) for positions in ranges]
    cuts, lengths = tuple(s.cut for s in parts), [s.length for s in parts]
    if sum(lengths) != f.local_size(cut, x.shape[cut.dim]):
        raise refuse_pieces(f, cut)
    sizes, args = tuple(map(len, ranges)), (x, lengths, cut.dim)
    return Outcome(cuts[0], sizes[0], sizes=sizes, cuts=cuts, func=torch.split, args=args, kwargs={})


@rule("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split narrow index_select", piecewise=True)
def take(f: Frame) -> Outcome:
    x, cut = first(f)
    position, default = {"narrow": (1, None), "index_select": (1, None)}.get(f.name, (2, 0))
    dim = f.normal(f.get(position, "dim", default), x.ndim)
    if dim != cut.dim:
        return Outcome(cut, x.shape[cut.dim])
    size = x.shape[dim]
    if f.name == "narrow":
        start, length = f.get(2, "start"), f.get(3, "length")
        if isinstance(start, Operand):
            raise f.refuse("its start is a tensor")
        positions = range(size)[start:][:length]
        if cut.outer != 1:
            part = stretch(f, x, cut, positions)
            return Outcome(part.cut, length, args=(x, dim, part.start, part.length), kwargs={})
        return stretches(f, x, cut, [positions], lambda x: x)
    sections = next((a for a in (*f.args[1:2], *(v for k, v in f.kwargs.items() if k != "dim"))), None)
    if f.name == "index_select" or isinstance(sections, Operand):
        raise f.refuse("it takes parts of the sharded dim")
    name = f.name.removeprefix("unsafe_")
    lengths = [len(p) for p in getattr(torch.empty(size, device="meta"), name)(sections)]
    ends = list(itertools.accumulate(lengths, initial=0))
    ranges = [range(a, b) for a, b in itertools.pairwise(ends)]
    return split_pieces(f, x, cut, ranges) if cut.outer != 1 else stretches(f, x, cut, ranges, _as_tuple)


def _as_tuple(parts: Any) -> tuple[torch.Tensor, ...]:
    return (parts,) if isinstance(parts, torch.Tensor) else tuple(parts)


@rule("unbind select iter", piecewise=True)
def drop(f: Frame) -> Outcome:
    x, cut = first(f)
    dim = f.normal(f.get(1, "dim", 0), x.ndim)
    if dim == cut.dim:
        if f.name == "select":
            return one_of(f, x, cut, f.get(2, "index"), ())
        if not x.shape[dim]:  # an empty tensor has no parts
            return Outcome(None)
        raise f.refuse("it takes parts of the sharded dim")
    return Outcome(Cut(cut.dim - (dim < cut.dim), cut.outer), x.shape[cut.dim])


def one_of(f: Frame, x: Operand, cut: Cut, index: int, items: tuple[Any, ...]) -> Outcome:
    """One position of the sharded dim, then `x[items]`: its owner's numbers, plus zeros from all other ranks."""
    size = x.shape[cut.dim]
    if cut.outer != 1 or not -size <= index < size:
        raise f.refuse("it takes parts of the sharded dim")
    start, length = chunk(size, f.n, f.rank)
    return Outcome(None, args=(x, cut.dim, index % size - start, length, items), kwargs={}, func=_one_of, reduce=1.0)


def _one_of(x: torch.Tensor, dim: int, index: int, length: int, items: tuple[Any, ...]) -> torch.Tensor:
    row = x.select(dim, index) if 0 <= index < length else x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)
    return row[items]


@rule("getitem", piecewise=True)
def getitem(f: Frame) -> Outcome:
    x, cut = first(f)
    index, at, out = opened(f, x, cut)
    item, size = index[at], x.shape[cut.dim]
    if isinstance(item, int):
        return one_of(f, x, cut, item, (*index[:at], *index[at + 1 :]))
    if item == slice(None):
        return Outcome(Cut(out, cut.outer), size)
    whole = (*index[:at], slice(None, None, item.step), *index[at + 1 :])
    if item.indices(size) != (0, size, 1):
        if cut.outer != 1:
            part = stretch(f, x, cut, range(size)[item])
            local = (*index[:at], slice(part.start, part.start + part.length), *index[at + 1 :])
            return Outcome(Cut(out, part.cut.outer), len(range(size)[item]), args=(x, local), kwargs={})
        return stretches(f, x, cut, [range(size)[item]], itemgetter(whole), landing=out)
    # an explicit end such as x[:, :7] becomes local too
    return Outcome(Cut(out, cut.outer), size, args=(x, whole), kwargs={})


def opened(f: Frame, x: Operand, cut: Cut) -> tuple[tuple[Any, ...], int, int]:
    """An index with a slice for each dim that it leaves out, the position of the sharded dim's item in it, and the
    sharded dim of the result."""
    index = f.args[1] if isinstance(f.args[1], tuple) else (f.args[1],)
    lists = lists_in(f, index)
    count = x.ndim - sum(i is not None and i is not Ellipsis for i in index)
    if count < 0:
        raise f.refuse("too many indices")
    dots = next((at for at, i in enumerate(index) if i is Ellipsis), len(index))
    index = (*index[:dots], *[slice(None)] * count, *index[dots + 1 :])
    at = [at for at, i in enumerate(index) if i is not None][cut.dim]
    item = index[at]
    known = isinstance(item, slice) and not any(isinstance(k, Operand) for k in (item.start, item.stop, item.step))
    if not (known or isinstance(item, int)):
        raise f.refuse("it takes parts of the sharded dim")
    if lists and (isinstance(item, int) or item.indices(x.shape[cut.dim]) != (0, x.shape[cut.dim], 1)):
        raise f.refuse("it takes parts of the sharded dim and indexes another dim by a list")
    if lists:
        lengths = [len(i) if isinstance(i, list) else i.shape[0] for i in lists]
        mark = 1 + max(*x.shape, *lengths)  # no other dim of the result has this size
        marked = Operand((*x.shape[: cut.dim], mark, *x.shape[cut.dim + 1 :]))
        out = indexed_shape((*index[:at], slice(None), *index[at + 1 :]), marked).index(mark)
    else:
        out = sum(not isinstance(i, int) for i in index[:at])
    return index, at, out


def lists_in(f: Frame, index: tuple[Any, ...]) -> list[Any]:
    """The lists and index tensors among the items of an index; a mask of several dims is refused."""
    lists = [i for i in index if isinstance(i, (Operand, list))]
    flat = all(i.ndim == 1 if isinstance(i, Operand) else all(type(k) is int for k in i) for i in lists)
    if not flat or any(isinstance(i, bool) for i in index):
        raise f.refuse("indexing with masks has no rule for a sharded tensor", "Use torch.where")
    return lists


@rule("setitem", piecewise=True)
def setitem(f: Frame) -> Outcome:
    x, value = f.args[0], f.args[2]
    indices = [o for o in f.operands() if o is not x and o is not value]
    if x.cut is None:
        raise f.refuse("it writes a sharded tensor into a whole one")
    if any(o.cut is not None for o in indices):
        raise f.refuse(
            "it writes to places that a sharded index or mask names",
            "Write out of place: torch.where(mask, value, x), x.scatter(...) or x.index_add(...)",
        )
    index, at, out = opened(f, x, x.cut)
    item, size = index[at], x.shape[x.cut.dim]
    if isinstance(item, int) or item.indices(size) != (0, size, 1):
        return into(f, index, at, out)
    return over(f, (*index[:at], slice(None), *index[at + 1 :]), Cut(out, x.cut.outer))


@rule("index_put")
def index_put(f: Frame) -> Outcome:
    """Writes at index tensors for the first dims."""
    x, cut = f.args[0], f.args[0].cut
    indices, value = f.get(1, "indices"), f.get(2, "values")
    if cut is None or any(i is None or i.cut is not None for i in indices) or cut.dim < len(indices):
        raise f.refuse("it writes to places of the sharded dim, or by a sharded index")
    if any(i.ndim > 1 and i.shape == x.shape[d : d + i.ndim] for d, i in enumerate(indices)):
        raise f.refuse("an index tensor of this shape may be a mask of several dims")
    lead = max(i.ndim for i in indices)
    outcome = Outcome(cut, x.shape[cut.dim])
    if not isinstance(value, Operand):
        return outcome
    target = Cut(cut.dim - len(indices) + lead, cut.outer)
    narrow_value(f, outcome, Operand((*(2,) * lead, *x.shape[len(indices) :]), target), value)
    return outcome


def narrow_value(f: Frame, outcome: Outcome, target: Operand, value: Operand) -> None:
    """Let each rank take its part of a value that is written to `target`, which it has a part of."""
    if value.ndim > target.ndim:
        raise f.refuse("the value has more dims than what it is written to")
    _, aligned = align(Frame(f.name, (target, value), {}, f.n, f.rank), [target, value])
    if 1 in aligned.narrow:
        outcome.narrow[f.operands().index(value)] = aligned.narrow[1]


def over(f: Frame, index: tuple[Any, ...], target: Cut) -> Outcome:
    """Write into all rows that this rank holds of the target, whose sharded dim has the cut `target`, at `index`."""
    x, value = f.args[0], f.args[2]
    outcome = Outcome(x.cut, x.shape[x.cut.dim], args=(x, index, value), kwargs={})
    if isinstance(value, Operand):
        narrow_value(f, outcome, Operand(indexed_shape(f.args[1], x), target), value)
    return outcome


def into(f: Frame, index: tuple[Any, ...], at: int, out: int) -> Outcome:
    """Write into a range of the sharded dim, or one position: each rank writes the rows in its chunk, and reads the
    rows of the value that go there."""
    x, value, cut, item = f.args[0], f.args[2], f.args[0].cut, index[at]
    size = x.shape[cut.dim]
    if cut.outer != 1 and isinstance(item, slice):
        to = stretch(f, x, cut, range(size)[item])
        return over(f, (*index[:at], slice(to.start, to.start + to.length), *index[at + 1 :]), Cut(out, to.cut.outer))
    if cut.outer != 1 or (isinstance(item, int) and not -size <= item < size):
        raise f.refuse("it writes to parts of the sharded dim")
    places = range(size)[item] if isinstance(item, slice) else range(size)[item % size :][:1]

    def inside(rank: int) -> tuple[int, int]:
        start, length = chunk(size, f.n, rank)
        ends = (-((places.start - end) // places.step) for end in (start, start + length))
        a, b = (min(max(end, 0), len(places)) for end in ends)
        return (a, b) if a < b else (0, 0)

    a, b = inside(f.rank)
    rows = [k - chunk(size, f.n, f.rank)[0] for k in places[a:b]]
    local = (*index[:at], slice(rows[0], rows[-1] + 1, places.step) if rows else slice(0, 0), *index[at + 1 :])
    outcome = Outcome(cut, size, args=(x, local, value), kwargs={})
    if not isinstance(value, Operand):
        return outcome
    dim = out - len(indexed_shape(index, x))  # of the value, negative: it may have fewer dims
    if isinstance(item, int):
        if value.cut is not None:
            raise f.refuse("its value for one position of the sharded dim is sharded itself")
        if value.ndim >= -dim:
            outcome.func = lambda x, index, value: x.__setitem__(index, value.unsqueeze(dim - 1))
        return outcome
    if value.cut not in (None, Cut(value.ndim + dim)) or value.ndim > len(indexed_shape(index, x)):
        raise f.refuse("its value is sharded along another dim")
    if value.cut is not None or (value.ndim >= -dim and value.shape[dim] > 1):
        if value.shape[dim] != len(places):
            raise f.refuse(f"its value has {value.shape[dim]} rows for {len(places)} places")
        spans = tuple(inside(rank) for rank in range(f.n))
        outcome.rows[f.operands().index(value)] = (Rows(value.ndim + dim, len(places), spans),)
    return outcome


def indexed_shape(index: Any, x: Operand) -> tuple[int, ...]:
    def plain(i: Any) -> Any:
        return torch.empty(i.shape, dtype=torch.long, device="meta") if isinstance(i, Operand) else i

    items = index if isinstance(index, tuple) else (index,)
    return tuple(torch.empty(x.shape, device="meta")[tuple(plain(i) for i in items)].shape)
