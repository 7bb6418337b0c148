"""The legs of planned switches over several nodes, and what switches pack in fewer bits: passes over transfers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dsp.comm.node_routes import DIRECT, Ways
from dsp.comm.wire import Wire
from dsp.core.record import Record
from dsp.planner import dealt
from dsp.report.traffic import Transfer, value_of


class Routed(NamedTuple):
    """A transfer and the transfers in its place, one for each kind of link: itself, if it goes directly.

    links: of a switch over several nodes, also a direct one, what it sends over each kind of link.
    """

    transfer: Transfer
    legs: list[Transfer]
    links: list[Transfer]


def routed(record: Record, transfers: Sequence[Transfer], ways: Ways) -> list[Routed]:
    """The transfers of a step in the ways that switches take; one that others share goes by the bytes of all."""
    routes = list[Routed]()
    for exchange in exchanges(transfers) if record.n > 1 else ():
        switched = [t for t in exchange if ways.node and t.kind == "switch" and t.move is not None]
        total = sum(travels(record, t) for t in switched)
        for t in exchange:
            if t not in switched:
                routes.append(Routed(t, [t], []))
                continue
            way = ways.way(total) if t.pieces == 1 else DIRECT
            legs = legs_of(record, t, ways, way)
            routes.append(Routed(t, [t] if way == DIRECT else legs, legs if ways.nodes > 1 else []))
    return routes


def exchanges(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """The transfers that share a collective: the first one has its call."""
    exchange: list[Transfer] = []
    for t in transfers:
        if t.calls and exchange:
            yield exchange
            exchange = []
        exchange.append(t)
    if exchange:
        yield exchange


def travels(record: Record, t: Transfer) -> int:
    """The bytes of a full tensor in the format in which it is switched."""
    assert t.move is not None
    return value_of(record, t.move.base, t.phase).travels


def legs_of(record: Record, t: Transfer, ways: Ways, way: str) -> list[Transfer]:
    """The transfers of a switch over each kind of link."""
    assert t.move is not None
    rows = dealt(value_of(record, t.move.base, t.phase), t.move.src, t.move.dst, record.n)
    legs = [ways.legs(way, rows.__getitem__, rank) for rank in range(record.n)]
    return [
        t._replace(kind=kind, calls=t.calls * legs[0][kind][1], sent=tuple(leg[kind][0] for leg in legs))
        for kind in legs[0]
    ]


def sent_over_links(routes: Iterable[Routed], phases: Iterable[str]) -> dict[str, dict[str, tuple[int, int]]]:
    """Bytes of the rank that sends most over each kind of link, and calls, by phase."""
    links = [t for r in routes for t in r.links]
    totals: dict[str, dict[str, tuple[int, int]]] = {}
    for phase in phases:
        of_phase = [t for t in links if t.phase == phase]
        for kind in dict.fromkeys(t.kind for t in of_phase):
            of_kind = [t for t in of_phase if t.kind == kind]
            most = max(map(sum, zip(*(t.sent for t in of_kind))))
            totals.setdefault(phase, {})[kind] = most, sum(t.calls for t in of_kind)
    return totals


def packed(record: Record, transfers: Iterable[Transfer], wire: Wire) -> dict[str, tuple[int, int]]:
    """By format, the numbers that the busiest rank packs in a step, and how often it packs."""
    packs: dict[str, tuple[int, int]] = {}
    for t in transfers:
        if t.kind != "switch" or t.move is None:
            continue
        value = value_of(record, t.move.base, t.phase)
        if value.packed[0] is not None:
            name = wire.names[t.phase == "backward"]
            numbers, calls = packs.get(name, (0, 0))
            packs[name] = numbers + value.local_bytes(t.move.src, record.n) // value.itemsize, calls + min(t.calls, 1)
    return packs
