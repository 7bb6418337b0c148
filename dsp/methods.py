"""The interface of embedded methods: their work inside of a stage and around it (`dsp.embedded`), and its traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from dsp.layout import Axis, Cut
from dsp.notation import TensorPattern
from dsp.planner import chunk_sizes

Sent = dict[str, tuple[int, int]]  # by kind of collective: bytes of the busiest rank, and calls


def add_sent(*sents: Mapping[str, tuple[int, int]]) -> Sent:
    total: Sent = {}
    for kind, (nbytes, calls) in (item for sent in sents for item in sent.items()):
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + nbytes, before[1] + calls
    return total


@dataclass(frozen=True)
class CommBytes:
    """Communication inside a stage call, by phase of a step; the kinds are those of `dsp.count_comm`."""

    forward: Sent = field(default_factory=dict)
    backward: Sent = field(default_factory=dict)
    recompute: Sent = field(default_factory=dict)  # if activation checkpointing runs the stage again
    before: Sent = field(default_factory=dict)  # of forward, where it is outside of what runs again: before the stage,
    after: Sent = field(default_factory=dict)  # and after it

    def __add__(self, other: CommBytes) -> CommBytes:
        return CommBytes(
            *(add_sent(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(CommBytes))
        )


class StageMethod(Protocol):
    """A submodule of a stage that communicates by itself (`dsp.embedded`); `label` is for the table of the plan."""

    module: nn.Module
    label: str

    @property
    def cut(self) -> int:
        """How many numbers its weights have that are cut over ranks."""

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        """The traffic of one call with these tensors, which are whole, if the stage were sharded `along` a dim.

        sizes: of the stage's dims.
        """

    def load(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> float:
        """The work of the busiest rank in such a call, over that of a chunk as long among equals."""


class Peers(NamedTuple):
    """Ranks of an axis that share a dim, in its order, and how much of it each of them holds."""

    ranks: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def all(cls, size: int, n: int) -> Peers:
        """n ranks, each with its `torch.chunk` of `size`."""
        return cls(tuple(range(n)), chunk_sizes(size, n))


class RankPart(NamedTuple):
    """The place of a stage call: this rank's part of `dim` (None: of no dim, it runs whole), which `peers` share."""

    axis: Axis
    dim: str | None
    peers: Peers

    @property
    def size(self) -> int:
        return sum(self.peers.parts)

    @property
    def own(self) -> int:
        """0: the stage sees one dummy row."""
        return self.peers.parts[self.peers.ranks.index(self.axis.rank)]


class Received(NamedTuple):
    """A tensor on its way into a stage: this rank's part, cut at `cut` (None: whole), of one of global `shape`."""

    local: Tensor
    cut: Cut | None
    pattern: TensorPattern | None
    shape: tuple[int, ...]


class StageWrapper(Protocol):
    """A method's work between a stage's layout for others and the one that the stage runs on (`dsp.embedded`)."""

    def enter(
        self, place: RankPart, sizes: Mapping[str, int], given: Sequence[Received]
    ) -> tuple[RankPart, list[Received]]:
        """Where the stage runs, and what it is given there, without dummy rows."""

    def leave(
        self, place: RankPart, sizes: Mapping[str, int], patterns: Sequence[TensorPattern], made: Sequence[Tensor]
    ) -> list[Tensor]:
        """The stage's results in the layout that others see, with a dummy row where a rank has nothing else."""

    def share(self, sizes: Mapping[str, int], n: int) -> float:
        """The busiest rank's share of the work, over n ranks."""
