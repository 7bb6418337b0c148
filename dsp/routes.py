"""The routes of a switch over an axis that is longer than a node, and which of them is the quickest for its size.

*direct*: one all-to-all. *hierarchical*: within each node first, where a rank gets all that is for its place on any
node, then between the ranks of one place over the nodes: messages to L - 1 ranks and H - 1 others instead of L H - 1,
as many bytes between nodes, and more within. *rounds*: to one rank after the other, so that no link is contended for.
N ranks are H nodes of L neighbours.

The legs are messages between ranks of the axis' own process group. So there are no groups to make, in an order that all
ranks would have to keep; and for NCCL they are what it makes an all-to-all of.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, product
from math import inf
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dsp.hardware import Exchange, Hardware, measured_links
from dsp.messages import messages
from dsp.private import joined_axes
from dsp.text import human, number_of

DIRECT, HIERARCHICAL, ROUNDS, AUTO = "direct", "hierarchical", "rounds", "auto"
WAYS = (DIRECT, HIERARCHICAL, ROUNDS)
WITHIN, BETWEEN = "switch_within", "switch_between"  # under which the legs are counted
LARGE = 2.0**40
INSTEAD = "route=%r: switches are direct all the same, for %s"
UNEVEN = "%s ranks are not a whole number of nodes of %s"
UNKNOWN = "LOCAL_WORLD_SIZE does not say how many ranks share a node: set it, or say so by dsp.Route(..., node=8)"

log = logging.getLogger("dsp")


@dataclass(frozen=True)
class Route:
    """The route that switches take: "direct", "hierarchical", "rounds", or "auto", the quickest for each one's size.

    node: how many neighbours of the sequence-parallel axis share a node, by default those that LOCAL_WORLD_SIZE says;
    hardware: the links by which "auto" chooses, by default measured.
    """

    way: str = DIRECT
    node: int | None = None
    hardware: Hardware | None = None

    def __post_init__(self) -> None:
        if self.way not in (*WAYS, AUTO):
            raise ValueError(f"route: expected one of {', '.join((*WAYS, AUTO))}, or a dsp.Route, got {self.way!r}")
        if self.node is not None and self.node < 1:
            raise ValueError(f"route: node is how many ranks of the axis share a node, got {self.node!r}")

    @staticmethod
    def along(mesh: DeviceMesh, given: str | Route | Hardware | None) -> tuple[DeviceMesh, Route]:
        """The mesh and the route that a user names, settled. With a route a mesh of two axes, nodes and the ranks in
        one, is used as one axis. Collective: call it on every rank of the mesh."""
        if given is None or not isinstance(mesh, DeviceMesh):
            return mesh, Route()
        route = Route.of(given)
        if mesh.ndim == 2 and mesh.mesh_dim_names:
            mesh, route = joined_axes(mesh), replace(route, node=mesh.size(1))
        return mesh, route.at(mesh) if mesh.ndim == 1 else route

    @classmethod
    def of(cls, given: str | Route | Hardware | None) -> Route:
        """The route that a user names; hardware stands for the quickest on it, None for the default."""
        if isinstance(given, Hardware):
            return cls(AUTO, given.node, given)
        return given if isinstance(given, Route) else cls() if given is None else cls(given)

    def at(self, mesh: DeviceMesh) -> Route:
        """The same with what is found out on the ranks of a 1-D mesh: its nodes, and the links that "auto" lacks. The
        direct one, with a word why, where nodes have unequal shares of the mesh.

        Collective: call it on every rank of the mesh.
        """
        if self.way == DIRECT and self.node is None:
            return self
        shares = [self.node] if self.node else shares_of(mesh)
        node, size = max(shares, default=0), mesh.size()
        if len({*shares}) != 1 or (size > node and size % node):
            why = UNEVEN % (size, " and ".join(map(str, dict.fromkeys(shares)))) if shares else UNKNOWN
            (log.warning if mesh.get_local_rank() == 0 else log.info)(INSTEAD, self.way, why)
            return Route()
        hardware = self.hardware
        if self.way == AUTO and hardware is None and node < size:
            hardware = measured_links(mesh, node=node)
        return replace(self, node=node, hardware=hardware)

    def over(self, size: int, hardware: Hardware | None = None) -> Ways:
        """The ways of switches over an axis of so many ranks, which are nodes of neighbours; `hardware`: where the
        route names none. Raises ValueError if the nodes, or the links for "auto", are not known."""
        hardware = self.hardware or hardware
        if self == Route():
            return Ways(size)
        node = self.node or (hardware.node if hardware is not None else int(os.environ.get("LOCAL_WORLD_SIZE", 0)))
        if not node:
            raise ValueError(
                f"route={self.way!r}: expected how many ranks of the axis share a node, such as "
                f"route=dsp.Route({self.way!r}, node=8), or hardware="
            )
        if size <= node:
            one = self.way == ROUNDS and size > 1
            return Ways(size, size, ((inf, ROUNDS),)) if one else Ways(size)
        if size % node:
            return Ways(size, reason="" if self.way == DIRECT else INSTEAD % (self.way, UNEVEN % (size, node)))
        if self.way != AUTO:
            return Ways(size, node, ((inf, DIRECT if node == 1 and self.way == HIERARCHICAL else self.way),))
        if hardware is None:
            raise ValueError(
                "route='auto' chooses by the links: expected hardware=, such as dsp.Hardware(..., network=...) or that "
                "of dsp.hardware.measured(mesh, node=...)"
            )
        return Ways(size, node, quickest(replace(hardware, node=node), size))


def shares_of(mesh: DeviceMesh) -> list[int]:
    """How many ranks of a mesh each node has; where ranks have another LOCAL_WORLD_SIZE, all of these. Collective: what
    ranks do next has to be the same."""
    said: list[Any] = [0] * mesh.size()
    dist.all_gather_object(said, os.environ.get("LOCAL_WORLD_SIZE", "0"), group=mesh.get_group())
    if len({*said}) > 1:
        return [*map(int, said)]
    return shared_by_nodes(dist.get_process_group_ranks(mesh.get_group()))


def shared_by_nodes(ranks: Sequence[int]) -> list[int]:
    """How many ranks of a group each node has, by LOCAL_WORLD_SIZE; nothing where that is not said."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    return [len([*same]) for _, same in groupby(rank // local for rank in ranks)] if local else []


def exchanges(way: str, nbytes: float, size: int, node: int) -> list[Exchange]:
    """The traffic of a switch in which each of `size` ranks holds so many bytes."""
    nodes, part = size // node, nbytes / size
    if way == DIRECT:
        return [Exchange("switch", part * (size - 1), 1, size)]
    if way == HIERARCHICAL:
        within, between = part * nodes * (node - 1), part * node * (nodes - 1)
        return [Exchange("switch", within, 1, node), Exchange("switch", between, 1, nodes, node)]
    apart = size - node
    return [Exchange("ring", part * (node - 1), node - 1, node), Exchange("ring", part * apart, apart, nodes, node)]


def seconds(way: str, nbytes: float, size: int, hardware: Hardware) -> float:
    """How long a switch takes in which each of `size` ranks holds so many bytes: a leg reads and writes them once."""
    copied = 4 * nbytes if way == HIERARCHICAL else 0.0
    return hardware.seconds(*exchanges(way, nbytes, size, hardware.node)) + hardware.computing(0.0, copied)


def quickest(hardware: Hardware, size: int) -> tuple[tuple[float, str], ...]:
    """The quickest ways over `size` ranks: (bytes a rank up to which it is, way), the last for all beyond.

    The seconds of each way are linear in the bytes, so the quickest are those of the lower envelope of three lines.
    """
    ways = WAYS if hardware.node > 1 else (DIRECT, ROUNDS)
    lines = {}
    for way in ways:
        none, many = (seconds(way, nbytes, size, hardware) for nbytes in (0.0, LARGE))
        lines[way] = none, (many - none) / LARGE
    at, found = min(lines, key=lambda way: (*lines[way], way)), list[tuple[float, str]]()
    while True:
        start, slope = lines[at]
        later = [((a - start) / (slope - b), b, way) for way, (a, b) in lines.items() if b < slope]
        if not later:
            return (*found, (inf, at))
        until, _, following = min(later)
        found.append((until, at))
        at = following


class Ways(NamedTuple):
    """The ways of switches over an axis of `size` ranks, nodes of `node`: 0 where nobody knows, or it lies within one.

    steps: (bytes a rank up to which a way is taken, way), the last for all beyond; reason: why they are direct though
    another way was asked for.
    """

    size: int
    node: int = 0
    steps: tuple[tuple[float, str], ...] = ((inf, DIRECT),)
    reason: str = ""

    @property
    def nodes(self) -> int:
        return self.size // self.node if self.node else 1

    def mates(self, rank: int) -> range:
        """The ranks that share a rank's node, itself among them."""
        return range(rank - rank % self.node, rank - rank % self.node + self.node)

    def way(self, nbytes: int) -> str:
        """The way of one switch, of so many bytes on all ranks together."""
        held = nbytes / self.size
        return next(way for until, way in self.steps if held <= until)

    def on(self, group: str) -> str:
        """The name of a process group with these ways of its switches, for the ops: see `ways_of`."""
        if all(way == DIRECT for _, way in self.steps):
            return group
        return "|".join([group, str(self.size), str(self.node), *(f"{until!r}:{way}" for until, way in self.steps)])

    def legs(self, way: str, to_each: Callable[[int], Sequence[int]], rank: int) -> dict[str, tuple[int, int]]:
        """The bytes that a rank sends within and between nodes, and in how many calls, where any rank sends `to_each`;
        nothing of a link that there is not. A direct switch is one call, between nodes.
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
    """The process group that an op was given the name of, and the ways that stand behind it, if any."""
    name, *told = group.split("|")
    if not told:
        return name, None
    steps = [step.split(":") for step in told[2:]]
    return name, Ways(int(told[0]), int(told[1]), tuple((float(until), way) for until, way in steps))


ToEach = Callable[[int], Sequence[int]]  # the numbers that a rank sends to each rank


class Legs:
    """A switch under way in several legs, each of which begins when the one before it has come.

    send, out: flat tensors, of what goes to each rank and of `comes` that come from each.
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
        """Wait for the leg under way."""
        for work in self.works:
            work.wait()

    def go_on(self) -> None:
        """Begin the next leg, if there is one."""
        if self.left > 1:
            self.wait()
            self.left, self.works = self.left - 1, next(self.legs)

    def last(self) -> list[Any]:
        """The works of the last leg, which has begun."""
        while self.left > 1:
            self.go_on()
        return self.works

    def finish(self) -> Tensor:
        """Wait for all, and return what has come."""
        self.last()
        self.wait()
        return self.out


def hierarchical(
    send: Tensor, out: Tensor, comes: Sequence[int], to_each: ToEach, group: Any, node: int
) -> Iterator[list[Any]]:
    """The two legs: to the ranks of this node all that is for their place on any node, and on to the nodes."""
    n, rank = group.size(), group.rank()
    own, place = divmod(rank, node)
    mates = range(own * node, own * node + node)
    sizes = [to_each(mate) for mate in mates]
    passed = [[*each[place::node]] for each in sizes]  # by each mate, for this place on each node
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
    """The rounds, in each of which a rank sends to one other and receives of one: first within its node."""
    n, rank = group.size(), group.rank()
    own, place = divmod(rank, node)
    goes, rooms = send.split([*to_each(rank)]), out.split([*comes])
    rooms[rank].copy_(goes[rank])
    for far, near in product(range(n // node), range(node)):
        if far or near:
            to, of = ((own + d * far) * node % n + (place + d * near) % node for d in (1, -1))
            yield messages([(to, goes[to])], [(of, rooms[of])], group)
