"""Exchanges that go in legs, by the ways that stand behind the name of a group (`dsp.routes.ways_of`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dsp.collectives import EXACT
from dsp.exchange import Dealt, InUnits, like, ranks
from dsp.private import _resolve_process_group, arrives_by
from dsp.routes import DIRECT, Legs, ways_of


def mates(group: str) -> range:
    """The ranks of a group that share this one's node, by the ways that stand behind its name."""
    (_, rank), (_, ways) = ranks(group), ways_of(group)
    return range(0) if ways is None else ways.mates(rank)


class Listed(NamedTuple):
    """A dealing as a list: what each rank of a node, whose first is `first`, sends to each of n ranks."""

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
    """The dealing of an exchange that goes in legs, in numbers of a flat tensor, of which `width` are one dealt; None
    if it goes directly."""
    ways = ways_of(group)[1]
    if ways is None or dealing is None:
        return None
    dealing = dealing if width == 1 else InUnits([(dealing, width.__mul__)])
    return None if ways.way(dealing.total * flat.element_size()) == DIRECT else dealing


def begun(flat: Tensor, comes: Sequence[int], group: str, dealing: Dealt) -> Legs:
    """An exchange under way in legs, to be waited for."""
    name, ways = ways_of(group)
    assert ways is not None
    way, pg = ways.way(dealing.total * flat.element_size()), _resolve_process_group(name)  # type: ignore[arg-type]
    return Legs(way, flat, flat.new_empty(sum(comes)), comes, dealing.to_each, pg, ways.node)


def begun_later(flat: Tensor, total: int, comes: list[int], rows: list[int], group: str) -> Tensor:
    """The same, all legs but the last through: what whoever waits for it finds. rows: what the ranks of this node send
    to each."""
    legs = begun(flat, comes, group, Listed.of(total, rows, group))
    arrives_by(legs.out, legs.last())
    return legs.out


class Launched:
    """An exchange under way in legs: called, it returns what has come."""

    def __init__(self, legs: Legs) -> None:
        self.go_on, self.finish = legs.go_on, legs.finish

    def __call__(self) -> Tensor:
        return self.finish()


def launched(flat: Tensor, comes: Sequence[int], width: int, group: str, dealing: Dealt | None) -> Launched | None:
    """An exchange of a flat tensor under way in legs; None if it goes directly."""
    legged = in_legs(flat, width, group, dealing)
    return None if legged is None else Launched(begun(flat, comes, group, legged))


def later(flat: Tensor, comes: list[int], width: int, group: str, dealing: Dealt | None) -> Tensor | None:
    """The same, as a tensor to be waited for."""
    if (legged := in_legs(flat, width, group, dealing)) is None:
        return None
    rows = [size for mate in mates(group) for size in legged.to_each(mate)]
    return torch.ops.dsp.in_legs(flat, legged.total, comes, rows, group)


_lib = torch.library.Library("dsp", "FRAGMENT")
_lib.define("in_legs(Tensor x, int total, int[] comes, int[] rows, str group) -> Tensor", tags=EXACT)
for _device in ("CPU", "CUDA"):  # a part of another op: not noted by itself
    _lib.impl("in_legs", begun_later, _device)
torch.library.register_fake("dsp::in_legs", lambda x, total, comes, rows, group: like(x, [sum(comes)]), lib=_lib)
