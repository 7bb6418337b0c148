"""Switches in legs over an axis that is longer than a node: the ways that they may go, and the messages of each.

*direct*: one all-to-all. *hierarchical*: within each node first, where a rank gets all that is for its place on any
node, then between the ranks of one place over the nodes: messages to L - 1 ranks and H - 1 others instead of L H - 1,
as many bytes between nodes, and more within. *rounds*: to one rank after the other, so that no link is contended for.
N ranks are H nodes of L neighbours.

The legs are messages between ranks of the axis' own process group. So there are no groups to make, in an order that all
ranks would have to keep; and for NCCL they are what it makes an all-to-all of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.exchange import EXACT, IN_LEGS, Dealt, InUnits, like, ranks
from dsp.comm.messages import messages
from dsp.support.formatting import human, number_of
from dsp.support.private import _resolve_process_group, arrives_by

DIRECT, HIERARCHICAL, ROUNDS = "direct", "hierarchical", "rounds"
WITHIN, BETWEEN = "switch_within", "switch_between"  # the names under which legs are counted


class Ways(NamedTuple):
    """The ways of switches over an axis of `size` ranks on nodes of `node` ranks (0: unknown, or all on one node).

    steps: (bytes a rank up to which a way is taken, way), the last for all larger switches. reason: why switches are
    direct although another way was asked for.
    """

    size: int
    node: int = 0
    steps: tuple[tuple[float, str], ...] = ((inf, DIRECT),)
    reason: str = ""

    @property
    def nodes(self) -> int:
        return self.size // self.node if self.node else 1

    def mates(self, rank: int) -> range:
        """The ranks on the node of a rank, itself included."""
        return range(rank - rank % self.node, rank - rank % self.node + self.node)

    def way(self, nbytes: int) -> str:
        """The way of a switch of `nbytes` on all ranks together."""
        held = nbytes / self.size
        return next(way for until, way in self.steps if held <= until)

    def on(self, group: str) -> str:
        """The name of a process group, followed by these ways, as the ops take it (`ways_of` reads it)."""
        if all(way == DIRECT for _, way in self.steps):
            return group
        return "|".join([group, str(self.size), str(self.node), *(f"{until!r}:{way}" for until, way in self.steps)])

    def legs(self, way: str, to_each: Callable[[int], Sequence[int]], rank: int) -> dict[str, tuple[int, int]]:
        """The bytes that a rank sends within and between nodes, and the calls. `to_each` says what each rank sends.

        A kind of link that does not exist is left out. A direct switch is one call, between nodes.
        """
        node, place, own, mates = self.node, rank % self.node, to_each(rank), self.mates(rank)
        calls = {DIRECT: (0, 1), HIERARCHICAL: (1, 1), ROUNDS: (node - 1, self.size - node)}[way]
        if way == HIERARCHICAL:
            within = sum(own) - sum(own[place::node])
            passed = [to_each(mate)[place::node] for mate in mates]
            between = sum(map(sum, passed)) - sum(sizes[rank // node] for sizes in passed)
        else:
            within = sum(own[mates.start : mates.stop]) - own[rank]
            between = sum(own) - own[rank] - within
        there = {WITHIN: (within, calls[0])} if node > 1 else {}
        return there | ({BETWEEN: (between, calls[1])} if self.nodes > 1 else {})

    def __str__(self) -> str:
        texts = [f"{way} up to {human(int(until))} a rank" for until, way in self.steps[:-1]]
        return f"switches over {number_of(self.nodes, 'node')} of {self.node}: {', '.join([*texts, self.steps[-1][1]])}"


STRAIGHT = Ways(1)


@lru_cache(maxsize=4096)
def ways_of(group: str) -> tuple[str, Ways | None]:
    """The name of the process group, and the ways that follow it, if any, in the `group` of an op."""
    name, *told = group.split("|")
    if not told:
        return name, None
    steps = [step.split(":") for step in told[2:]]
    return name, Ways(int(told[0]), int(told[1]), tuple((float(until), way) for until, way in steps))


ToEach = Callable[[int], Sequence[int]]  # the counts of elements that a rank sends to each


class Legs:
    """An exchange under way in several legs; each begins when the one before it has arrived.

    send, out: flat tensors, sent and received; `comes` counts the elements from each rank.
    """

    def __init__(
        self, way: str, send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
    ) -> None:
        self.out = out
        leg = hierarchical if way == HIERARCHICAL else in_rounds
        self.left: int = 2 if way == HIERARCHICAL else group.size() - 1
        self.legs = leg(send, out, comes, to_each, group, node)
        self.works = next(self.legs)

    def wait(self) -> None:
        """Wait for the current leg."""
        for work in self.works:
            work.wait()

    def go_on(self) -> None:
        """Begin the next leg, if there is one."""
        if self.left > 1:
            self.wait()
            self.left, self.works = self.left - 1, next(self.legs)

    def last(self) -> list[Any]:
        """Begin all legs but the last and wait for them; return the works of the last one."""
        while self.left > 1:
            self.go_on()
        return self.works

    def finish(self) -> Tensor:
        """Wait for all legs, and return the received tensor."""
        self.last()
        self.wait()
        return self.out


def hierarchical(
    send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> Iterator[list[Any]]:
    """Two legs: within the node, each rank gets all that is for its place on any node; then between nodes."""
    n, rank = group.size(), group.rank()
    own, place = divmod(rank, node)
    mates = range(own * node, own * node + node)
    sizes = [to_each(mate) for mate in mates]
    passed = [[*each[place::node]] for each in sizes]  # from each rank of the node, for this place on each node
    blocks = send.split([*sizes[place]])
    others = [i for i in range(node) if i != place]
    near = [(mates[i], torch.cat(blocks[i::node])) for i in others]
    came = [send.new_empty(0 if i == place else sum(each)) for i, each in enumerate(passed)]
    yield messages(near, [(mates[i], came[i]) for i in others], group)
    by_mate = [blocks[place::node] if i == place else came[i].split(each) for i, each in enumerate(passed)]
    for_node = [*zip(*by_mate)]
    rooms = out.split([sum(comes[first : first + node]) for first in range(0, n, node)])
    torch.cat(for_node[own], out=rooms[own])
    far = [(k * node + place, k) for k in range(n // node) if k != own]
    yield messages([(r, torch.cat(for_node[k])) for r, k in far], [(r, rooms[k]) for r, k in far], group)


def in_rounds(
    send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> Iterator[list[Any]]:
    """Rounds in which a rank sends to one other rank and receives from one: first those within its node."""
    n, rank = group.size(), group.rank()
    own, place = divmod(rank, node)
    goes, rooms = send.split([*to_each(rank)]), out.split([*comes])
    rooms[rank].copy_(goes[rank])
    for far, near in product(range(n // node), range(node)):
        if far or near:
            to, of = ((own + d * far) * node % n + (place + d * near) % node for d in (1, -1))
            yield messages([(to, goes[to])], [(of, rooms[of])], group)


def mates(group: str) -> range:
    """The ranks of a group that are on this rank's node, by the ways in the group's name."""
    (_, rank), (_, ways) = ranks(group), ways_of(group)
    return range(0) if ways is None else ways.mates(rank)


class Listed(NamedTuple):
    """A `Dealt` as a list: what each rank of one node, which begins at rank `first`, sends to each of n ranks."""

    total: int
    rows: Sequence[int]
    first: int
    n: int

    @classmethod
    def of(cls, total: int, rows: Sequence[int], group: str) -> Listed:
        n, rank = ranks(group)
        return cls(total, rows, rank - rank % (len(rows) // n), n)

    def to_each(self, rank: int) -> list[int]:
        return [*self.rows[(rank - self.first) * self.n :][: self.n]]


def in_legs(flat: Tensor, width: int, group: str, dealing: Dealt | None) -> Dealt | None:
    """The counts of an exchange that goes in legs, in elements of the flat tensor; None if it goes directly.

    width: elements of the flat tensor for each one that `dealing` counts.
    """
    ways = ways_of(group)[1]
    if ways is None or dealing is None:
        return None
    dealing = dealing if width == 1 else InUnits([(dealing, width.__mul__)])
    return None if ways.way(dealing.total * flat.element_size()) == DIRECT else dealing


def begun(flat: Tensor, comes: Sequence[int], group: str, dealing: Dealt) -> Legs:
    """An exchange under way in legs."""
    name, ways = ways_of(group)
    assert ways is not None
    way, pg = ways.way(dealing.total * flat.element_size()), _resolve_process_group(name)  # type: ignore[arg-type]
    return Legs(way, flat, flat.new_empty(sum(comes)), comes, dealing.to_each, pg, ways.node)


def begun_later(flat: Tensor, total: int, comes: list[int], rows: list[int], group: str) -> Tensor:
    """The received tensor of an exchange whose legs are done but for the last, which a wait for the tensor completes.

    rows: what the ranks of this node send to each.
    """
    legs = begun(flat, comes, group, Listed.of(total, rows, group))
    arrives_by(legs.out, legs.last())
    return legs.out


class Launched:
    """An exchange under way in legs; a call returns the received tensor."""

    def __init__(self, legs: Legs) -> None:
        self.go_on, self.finish = legs.go_on, legs.finish

    def __call__(self) -> Tensor:
        return self.finish()


def launched(flat: Tensor, comes: Sequence[int], width: int, group: str, dealing: Dealt | None) -> Launched | None:
    """Begin the exchange of a flat tensor in legs; None if it goes directly."""
    legged = in_legs(flat, width, group, dealing)
    return None if legged is None else Launched(begun(flat, comes, group, legged))


def later(flat: Tensor, comes: list[int], width: int, group: str, dealing: Dealt | None) -> Tensor | None:
    """The same as a tensor that has to be waited for."""
    if (legged := in_legs(flat, width, group, dealing)) is None:
        return None
    rows = [size for mate in mates(group) for size in legged.to_each(mate)]
    return torch.ops.dsp.in_legs(flat, legged.total, comes, rows, group)


_lib = torch.library.Library("dsp", "FRAGMENT")
_lib.define("in_legs(Tensor x, int total, int[] comes, int[] rows, str group) -> Tensor", tags=EXACT)
for _device in ("CPU", "CUDA"):  # a part of another op: not noted by itself
    _lib.impl("in_legs", begun_later, _device)
torch.library.register_fake("dsp::in_legs", lambda x, total, comes, rows, group: like(x, [sum(comes)]), lib=_lib)
IN_LEGS.update(launched=launched, later=later)
