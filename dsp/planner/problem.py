"""The planner's problem: ops over values, the layouts that they offer, and what a move between two of them costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

# the dim that is sharded over the sequence-parallel ranks, as any hashable name of it; None: replicated
Layout = Any
Extent = int | tuple[int, ...]  # length of a dim, or the lengths of the pieces joined in it that are sharded one by one
Copies = frozenset[Layout]  # layouts of one value
Packed = Callable[[int], int] | None  # bytes that a number of elements takes when packed; None: sent unpacked

FUSE = 1 << 18  # bytes a rank up to which a tensor shares a collective: packing a larger one costs more than a call


class Infeasible(ValueError):
    """No plan fits in the capacity."""


@dataclass(frozen=True)
class Value:
    """A tensor that lives between ops: its dims in order, folds unfolded, and the bytes of an element.

    `home` is for a value that no op produces: the layouts it may start in at no cost, the preferred one first. `fixed`
    marks a value that is written in place and has views: it is moved only if nothing else will do. Dims may overlap,
    such as a fold and a part of it; `numel` is then the number of elements. `detours` has pairs of dims that no single
    all-to-all connects: between them the value is gathered and split. `real`: its elements are real numbers. `packed`:
    the bytes that a number of elements takes when a switch sends them to one rank, for the value and for its gradient;
    None where they are sent unpacked. `alone`: every rank may make the full value without communication; its length
    makes no other value short.
    """

    name: str
    sizes: tuple[tuple[Layout, Extent], ...]
    itemsize: int
    home: tuple[Layout, ...] = ()
    fixed: bool = False
    numel: int | None = None
    detours: frozenset[frozenset[Layout]] = frozenset()
    real: bool = False
    packed: tuple[Packed, Packed] = (None, None)
    alone: bool = False

    @property
    def gradient(self) -> Value:
        """The gradient of the value, of the same size, which travels in the gradient's format."""
        return replace(self, packed=self.packed[::-1])

    @property
    def travels(self) -> int:
        """Bytes of the full value in the format in which a switch sends it."""
        return self.nbytes if self.packed[0] is None else self.packed[0](self.nbytes // self.itemsize)

    @property
    def nbytes(self) -> int:
        numel = prod(length(size) for _, size in self.sizes) if self.numel is None else self.numel
        return numel * self.itemsize

    def local_bytes(self, layout: Layout, n: int) -> int:
        """Bytes of the largest shard over n ranks."""
        return self.parts(layout, n)[0]

    def parts(self, layout: Layout, n: int) -> list[int]:
        """Bytes that each of n ranks holds."""
        if layout is None:
            return [self.nbytes] * n
        size = self.extent(layout)
        return [self.nbytes * part // max(length(size), 1) for part in chunk_sizes(size, n)]

    def extent(self, layout: Layout) -> Extent:
        return dict(self.sizes)[layout]


@dataclass(frozen=True)
class Choice:
    """One way to run an op: the layout needed of each input and given to each output, and its cost on a rank."""

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...]
    work: int = 0  # transient bytes while the op runs
    saved: int = 0  # bytes kept after the op: activations for backward
    bytes: int = 0  # communication inside the op, such as an all-reduce over the sharded dim
    calls: int = 0
    rank: int = 0  # preference among equals, lower is better: batch is a last resort
    execution: Any = None  # how the op runs by this choice; the planner does not read it


@dataclass(frozen=True)
class Op:
    """A stage, or a piece of glue; `inputs` and `outputs` index `Problem.values`."""

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    choices: tuple[Choice, ...]

    def layouts(self, choice: Choice) -> Iterator[tuple[int, Layout]]:
        """The layouts of all values that the op reads and makes."""
        return zip(self.inputs + self.outputs, choice.needs + choice.gives)

    def share(self, choice: Choice, values: Sequence[Value], n: int) -> float:
        """The share of the op that the busiest rank runs: its chunk of the sharded dim, or everything."""
        cut = ((values[v], k) for v, k in self.layouts(choice) if k is not None)
        return next((value.local_bytes(k, n) / max(value.nbytes, 1) for value, k in cut), 1.0)


@dataclass(frozen=True)
class Problem:
    """Ops in order, on `size` ranks of `capacity` bytes each; `resident` of these are always taken (parameters)."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    size: int
    capacity: int | None = None
    resident: int = 0


@dataclass(frozen=True)
class Move:
    """A new copy of a value in layout `dst`, made from its copy in `src`; the busiest rank sends `bytes`.

    The move precedes op `before`: the first that needs the copy, a copy made from it, or (under a capacity) the memory
    that a smaller copy frees. Op `after` produced the value (-1: an input), so no move of the value can start earlier.
    """

    value: int
    src: Layout
    dst: Layout
    before: int
    after: int
    bytes: int
    kind: str  # a key of `MOVES`


@dataclass(frozen=True)
class Solution:
    """The plan: the index of each op's choice, the layout that each input value starts in, and the moves in order.

    `peak` is the most that a rank holds while an op runs: resident, all saved so far, outputs, work, and copies, each
    from its creation to its last use, as an operand or as the source of a move. `exact` is False if the search was cut
    short; `states` is the number of states it visited.
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


def length(size: Extent) -> int:
    return size if isinstance(size, int) else sum(size)


@lru_cache(maxsize=4096)  # called at every stage call
def chunk_sizes(size: Extent, n: int) -> tuple[int, ...]:
    """Sizes of the n chunks that torch.chunk makes: 5 over 4 gives 2, 2, 1, 0. Joined pieces are chunked one by one."""
    if not isinstance(size, int):
        return tuple(map(sum, zip(*(chunk_sizes(piece, n) for piece in size))))
    chunk = -(-size // n)
    return tuple(min(chunk, max(0, size - chunk * rank)) for rank in range(n))


def piece_sizes(size: int, count: int) -> tuple[int, ...]:
    """The sizes of the pieces into which a rank cuts its own shard: 5 in 3 pieces are 2, 2, 1."""
    return tuple(size // count + (i < size % count) for i in range(count))


def fuses(nbytes: int, n: int) -> bool:
    """Tell whether a tensor of so many bytes over n ranks shares an all-to-all with others switched at the same place.

    The shared buffer costs one more copy on either side: for large tensors more than the call that it saves.
    """
    return nbytes <= FUSE * n


class MoveKind(NamedTuple):
    """A kind of move: calls, bytes that each of n ranks sends for a value from src to dst, and its adjoint."""

    calls: int
    sent: Callable[[Value, Layout, Layout, int], list[int]]
    adjoint: str


def dealt(value: Value, src: Layout, dst: Layout, n: int) -> list[list[int]]:
    """Bytes that each of n ranks sends to each rank, itself included, in a switch of a value."""
    extent, packed = value.extent(dst), value.packed[0] or value.itemsize.__mul__
    size, parts = length(extent), chunk_sizes(extent, n)
    return [[packed(local // value.itemsize * part // max(size, 1)) for part in parts] for local in value.parts(src, n)]


def _switched(value: Value, src: Layout, dst: Layout, n: int) -> list[int]:
    if value.packed[0] is not None:
        return [sum(sent) - sent[rank] for rank, sent in enumerate(dealt(value, src, dst, n))]
    extent, local_bytes = value.extent(dst), value.parts(src, n)
    size, parts = length(extent), chunk_sizes(extent, n)
    return [local * (size - part) // max(size, 1) for local, part in zip(local_bytes, parts)]


def _gathered(value: Value, src: Layout, dst: Layout, n: int) -> list[int]:
    return [(n - 1) * part for part in value.parts(src, n)]


def _scattered(value: Value, src: Layout, dst: Layout, n: int) -> list[int]:
    return [value.nbytes - part for part in value.parts(dst, n)]


# for a value of M bytes over N ranks
MOVES = {
    "split": MoveKind(0, lambda value, src, dst, n: [0] * n, "split"),  # None -> d: a local narrow
    "switch": MoveKind(1, _switched, "switch"),  # d -> d': M/N · (N-1)/N
    "gather": MoveKind(1, _gathered, "reduce_scatter"),  # d -> None: M · (N-1)/N
    "reduce_scatter": MoveKind(1, _scattered, "gather"),  # a sum of one full tensor from each rank -> d: M · (N-1)/N
}


def kind_of(src: Layout, dst: Layout) -> str:
    return "split" if src is None or src == dst else "gather" if dst is None else "switch"


def price(value: Value, src: Layout, dst: Layout, n: int) -> tuple[int, int]:
    """(bytes sent by the busiest of n ranks, calls) of one move."""
    kind = MOVES[kind_of(src, dst)]
    return max(kind.sent(value, src, dst, n)), kind.calls if n > 1 else 0
