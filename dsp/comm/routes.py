"""The route that a user asks for, and which way over several nodes (`dsp.comm.node_routes`) is the quickest."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dsp.comm.hardware import Exchange, Hardware, measured_links
from dsp.comm.node_routes import DIRECT, HIERARCHICAL, ROUNDS, Ways
from dsp.support.environment import as_number, number
from dsp.support.private import joined_axes

AUTO, WAYS = "auto", (DIRECT, HIERARCHICAL, ROUNDS)
LARGE = 2.0**40
INSTEAD = "route=%r: switches are direct all the same, for %s"
UNEVEN = "%s ranks are not a whole number of nodes of %s"
NODE = "LOCAL_WORLD_SIZE"
UNKNOWN = f"{NODE} does not say how many ranks share a node: set it, or say so by dsp.Route(..., node=8)"
ADVICE = "it is the number of ranks that share a node; set it, or say so by dsp.Route(..., node=8)"

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
            raise ValueError(f"route: node, the ranks of the axis on one node, must be at least 1, got {self.node!r}")

    @staticmethod
    def along(mesh: DeviceMesh, given: str | Route | Hardware | None) -> tuple[DeviceMesh, Route]:
        """The mesh and the route that a user names, resolved. With a route, a mesh of two axes (nodes, and ranks in a
        node) becomes one axis. Collective: call it on every rank of the mesh."""
        if given is None or not isinstance(mesh, DeviceMesh):
            return mesh, Route()
        route = Route.of(given)
        if mesh.ndim == 2 and mesh.mesh_dim_names:
            mesh, route = joined_axes(mesh), replace(route, node=mesh.size(1))
        return mesh, route.at(mesh) if mesh.ndim == 1 else route

    @classmethod
    def of(cls, given: str | Route | Hardware | None) -> Route:
        """The route that a user names; a Hardware stands for the quickest route on it, None for the default."""
        if isinstance(given, Hardware):
            return cls(AUTO, given.node, given)
        return given if isinstance(given, Route) else cls() if given is None else cls(given)

    def at(self, mesh: DeviceMesh) -> Route:
        """The route with the nodes of a 1-D mesh and, for "auto", its measured links filled in. If nodes have unequal
        shares of the mesh, the direct route, with a warning.

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
        """The ways of switches over an axis of `size` ranks; `hardware` is used where the route names none. Raises
        ValueError if the nodes, or the links for "auto", are unknown."""
        hardware = self.hardware or hardware
        if self == Route():
            return Ways(size)
        node = self.node or (hardware.node if hardware is not None else ranks_of_node())
        if not node:
            raise ValueError(
                f"route={self.way!r} needs the number of ranks that share a node, and LOCAL_WORLD_SIZE is not set: "
                f"give route=dsp.Route({self.way!r}, node=8), or hardware=, which has it"
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
                "of dsp.comm.hardware.measured(mesh, node=...)"
            )
        return Ways(size, node, quickest(replace(hardware, node=node), size))


def shares_of(mesh: DeviceMesh) -> list[int]:
    """The number of the mesh's ranks on each node; where ranks differ in LOCAL_WORLD_SIZE, all values of it.

    Collective, since all ranks have to go on alike.
    """
    said: list[Any] = [0] * mesh.size()
    dist.all_gather_object(said, os.environ.get(NODE), group=mesh.get_group())
    if len({*said}) > 1:
        return [0 if text is None else as_number(NODE, text, least=1, advice=ADVICE) for text in said]
    return shared_by_nodes(dist.get_process_group_ranks(mesh.get_group()))


def shared_by_nodes(ranks: Sequence[int]) -> list[int]:
    """The number of a group's ranks on each node, by LOCAL_WORLD_SIZE; empty if that is not set."""
    local = ranks_of_node()
    return [len([*same]) for _, same in groupby(rank // local for rank in ranks)] if local else []


def ranks_of_node() -> int:
    """The number of ranks on each node, by LOCAL_WORLD_SIZE; 0 if that is not set."""
    return number(NODE, 0, least=1, advice=ADVICE)


def exchanges(way: str, nbytes: float, size: int, node: int) -> list[Exchange]:
    """The traffic of a switch of a tensor of which each of `size` ranks holds `nbytes`."""
    nodes, part = size // node, nbytes / size
    if way == DIRECT:
        return [Exchange("switch", part * (size - 1), 1, size)]
    if way == HIERARCHICAL:
        within, between = part * nodes * (node - 1), part * node * (nodes - 1)
        return [Exchange("switch", within, 1, node), Exchange("switch", between, 1, nodes, node)]
    far = size - node
    return [Exchange("ring", part * (node - 1), node - 1, node), Exchange("ring", part * far, far, nodes, node)]


def seconds(way: str, nbytes: float, size: int, hardware: Hardware) -> float:
    """The seconds of a switch in which each of `size` ranks holds `nbytes`; each leg reads and writes them once."""
    copied = 4 * nbytes if way == HIERARCHICAL else 0.0
    return hardware.seconds(*exchanges(way, nbytes, size, hardware.node)) + hardware.computing(0.0, copied)


def quickest(hardware: Hardware, size: int) -> tuple[tuple[float, str], ...]:
    """The quickest ways over `size` ranks: (bytes a rank up to which a way is quickest, way), the last for all larger.

    The seconds of each way are linear in the bytes, so the quickest are those of the lower envelope of three lines.
    """
    ways = WAYS if hardware.node > 1 else (DIRECT, ROUNDS)
    lines = {}
    for way in ways:
        none, many = (seconds(way, nbytes, size, hardware) for nbytes in (0.0, LARGE))
        lines[way] = none, (many - none) / LARGE
    at, bounds = min(lines, key=lambda way: (*lines[way], way)), list[tuple[float, str]]()
    while True:
        start, slope = lines[at]
        later = [((a - start) / (slope - b), b, way) for way, (a, b) in lines.items() if b < slope]
        if not later:
            return (*bounds, (inf, at))
        until, _, following = min(later)
        bounds.append((until, at))
        at = following
