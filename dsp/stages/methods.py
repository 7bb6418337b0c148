"""The interface of embedded methods (`dsp.embedded`): their work inside a stage and around it, and their traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from dsp.comm.layout import Axis, Cut
from dsp.planner import chunk_sizes
from dsp.stages.notation import TensorPattern

Sent = dict[str, tuple[int, int]]  # by kind of collective: the bytes that the busiest rank sends, and the calls


def add_sent(*sents: Mapping[str, tuple[int, int]]) -> Sent:
    total: Sent = {}
    for kind, (nbytes, calls) in (item for sent in sents for item in sent.items()):
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + nbytes, before[1] + calls
    return total


@dataclass(frozen=True)
class CommBytes:
    """The communication inside a stage call, by phase of a step; kinds are those of `dsp.count_comm`."""

    forward: Sent = field(default_factory=dict)
    backward: Sent = field(default_factory=dict)
    recompute: Sent = field(default_factory=dict)  # if activation checkpointing runs the stage again
    before: Sent = field(default_factory=dict)  # the part of forward that a recomputation does not repeat: before
    after: Sent = field(default_factory=dict)  # the stage, and after it

    def __add__(self, other: CommBytes) -> CommBytes:
        return CommBytes(
            *(add_sent(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(CommBytes))
        )


class MethodCost(NamedTuple):
    """The cost of the modules that communicate in a stage call: what they send, and the FLOPs of the busiest rank
    beyond an equal share, at full size."""

    sends: CommBytes = CommBytes()
    surplus: float = 0.0


NO_METHODS = MethodCost()


class StageMethod(Protocol):
    """A submodule of a stage that communicates by itself (`dsp.embedded`); `label` is its name in a plan's table."""

    module: nn.Module
    label: str

    @property
    def cut(self) -> int:
        """The number of elements of its weights that are sharded over ranks."""

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> CommBytes:
        """The traffic of one call with these whole tensors, if the stage were sharded `along` a dim.

        sizes: those of the stage's dims.
        """

    def load(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> float:
        """The work of the busiest rank in such a call, relative to an equal share of the work."""


class Peers(NamedTuple):
    """The ranks of an axis that share a dim, in the order of its chunks, and the length that each holds."""

    ranks: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def all(cls, size: int, n: int) -> Peers:
        """n ranks, each with its `torch.chunk` of `size`."""
        return cls(tuple(range(n)), chunk_sizes(size, n))


class RankPart(NamedTuple):
    """This rank's part in a stage call: of `dim`, which `peers` share (None: the stage runs whole)."""

    axis: Axis
    dim: str | None
    peers: Peers

    @property
    def size(self) -> int:
        return sum(self.peers.parts)

    @property
    def local_size(self) -> int:
        """The length of this rank's part. If it is 0, the stage runs on one dummy row."""
        return self.peers.parts[self.peers.ranks.index(self.axis.rank)]


class Received(NamedTuple):
    """A tensor on its way into a stage: this rank's part of a tensor of global `shape`, in the layout `cut`
    (None: whole)."""

    local: Tensor
    cut: Cut | None
    pattern: TensorPattern | None
    shape: tuple[int, ...]


class StageWrapper(Protocol):
    """A method around a stage (`dsp.embedded`): the stage itself runs in another layout than its pattern says."""

    def enter(
        self, place: RankPart, sizes: Mapping[str, int], inputs: Sequence[Received]
    ) -> tuple[RankPart, list[Received]]:
        """This rank's part in the inner layout, and the tensors in it, without dummy rows."""

    def leave(
        self, place: RankPart, sizes: Mapping[str, int], patterns: Sequence[TensorPattern], results: Sequence[Tensor]
    ) -> list[Tensor]:
        """The results in the outer layout, with a dummy row on a rank that holds nothing."""

    def share(self, sizes: Mapping[str, int], n: int) -> float:
        """The share of the work of the busiest of n ranks."""
