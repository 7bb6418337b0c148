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

from dsp.comm.messages import messages
from dsp.support.formatting import human, number_of

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
        local_bytes = nbytes / self.size
        return next(way for until, way in self.steps if local_bytes <= until)

    def on(self, group: str) -> str:
        """The name of a process group, followed by these ways, as the ops take it (`ways_of` reads it)."""
        if all(way == DIRECT for _, way in self.steps):
            return group
        return "|".join([group, str(self.size), str(self.node), *(f"{until!r}:{way}" for until, way in self.steps)])

    def legs(self, way: str, to_each: Callable[[int], Sequence[int]], rank: int) -> dict[str, tuple[int, int]]:
        """The bytes that a rank sends within and between nodes, and the calls. `to_each` says what each rank sends.

        A kind of link that does not exist is left out. A direct switch is one call, between nodes.
        """
        node, place, goes, mates = self.node, rank % self.node, to_each(rank), self.mates(rank)
        calls = {DIRECT: (0, 1), HIERARCHICAL: (1, 1), ROUNDS: (node - 1, self.size - node)}[way]
        if way == HIERARCHICAL:
            within = sum(goes) - sum(goes[place::node])
            passed = [to_each(mate)[place::node] for mate in mates]
            between = sum(map(sum, passed)) - sum(sizes[rank // node] for sizes in passed)
        else:
            within = sum(goes[mates.start : mates.stop]) - goes[rank]
            between = sum(goes) - goes[rank] - within
        links = {WITHIN: (within, calls[0])} if node > 1 else {}
        return links | ({BETWEEN: (between, calls[1])} if self.nodes > 1 else {})

    def __str__(self) -> str:
        texts = [f"{way} up to {human(int(until))} a rank" for until, way in self.steps[:-1]]
        return f"switches over {number_of(self.nodes, 'node')} of {self.node}: {', '.join([*texts, self.steps[-1][1]])}"


STRAIGHT = Ways(1)


@lru_cache(maxsize=4096)
def ways_of(group: str) -> tuple[str, Ways | None]:
    """The name of the process group, and the ways that follow it, if any, in the `group` of an op."""
    name, *fields = group.split("|")
    if not fields:
        return name, None
    steps = [step.split(":") for step in fields[2:]]
    return name, Ways(int(fields[0]), int(fields[1]), tuple((float(until), way) for until, way in steps))


ToEach = Callable[[int], Sequence[int]]  # the counts of elements that a rank sends to each


def legs_of(
    way: str, send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> tuple[int, Iterator[list[Any]]]:
    """The number of legs of an exchange, and their works, each to be begun when the one before it has arrived.

    send, out: flat tensors, sent and received; `comes` counts the elements from each rank.
    """
    legs = hierarchical if way == HIERARCHICAL else in_rounds
    return 2 if way == HIERARCHICAL else group.size() - 1, legs(send, out, comes, to_each, group, node)


def hierarchical(
    send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> Iterator[list[Any]]:
    """Two legs: within the node, each rank gets all that is for its place on any node; then between nodes."""
    n, rank = group.size(), group.rank()
    home, place = divmod(rank, node)
    mates = range(home * node, home * node + node)
    sizes = [to_each(mate) for mate in mates]
    passed = [[*each[place::node]] for each in sizes]  # from each rank of the node, for this place on each node
    blocks = send.split([*sizes[place]])
    neighbours = [i for i in range(node) if i != place]
    near = [(mates[i], torch.cat(blocks[i::node])) for i in neighbours]
    received = [send.new_empty(0 if i == place else sum(each)) for i, each in enumerate(passed)]
    yield messages(near, [(mates[i], received[i]) for i in neighbours], group)
    by_mate = [blocks[place::node] if i == place else received[i].split(each) for i, each in enumerate(passed)]
    for_node = [*zip(*by_mate)]
    rooms = out.split([sum(comes[first : first + node]) for first in range(0, n, node)])
    torch.cat(for_node[home], out=rooms[home])
    far = [(k * node + place, k) for k in range(n // node) if k != home]
    yield messages([(r, torch.cat(for_node[k])) for r, k in far], [(r, rooms[k]) for r, k in far], group)


def in_rounds(
    send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> Iterator[list[Any]]:
    """Rounds in which a rank sends to one other rank and receives from one: first those within its node."""
    n, rank = group.size(), group.rank()
    home, place = divmod(rank, node)
    goes, rooms = send.split([*to_each(rank)]), out.split([*comes])
    rooms[rank].copy_(goes[rank])
    for far, near in product(range(n // node), range(node)):
        if far or near:
            to, of = ((home + d * far) * node % n + (place + d * near) % node for d in (1, -1))
            yield messages([(to, goes[to])], [(of, rooms[of])], group)
