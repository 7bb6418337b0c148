"""The trace of a forward: the planner's problem, and where each of its decisions applies in a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.layout import Cut
from dsp.methods import CommBytes
from dsp.plan.record import OperationNode, Record, StageNode
from dsp.planner import Layout, Op, Value
from dsp.stages import Option


@dataclass
class Sym:
    """A tracked tensor: its value, and for every layout of that value, a cut of it, the cut of this tensor, its view.

    `spare` is the same for dims that are no layouts yet, channels or heads: an operation that needs one makes it a
    layout of the value (`Values.offer_spare`).
    """

    value: int
    cuts: dict[Cut, Cut]
    spare: dict[Cut, Cut] = field(default_factory=dict)


class Passing(NamedTuple):
    """A collective by which the parts of an op are put together, its adjoint, and what each rank sends in either.

    pieces: what each rank sends in backward for each of the op's results, if each is made of a part of its own. after:
    what each rank sends when the op has run, for each result that travels then in a collective of its own, as its
    gradient does in backward, which is among `pieces` alone; returns: how many there are in backward.
    """

    kind: str
    adjoint: str
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    pieces: tuple[tuple[int, ...], ...] = ()
    after: tuple[tuple[int, ...], ...] = ()
    returns: int = 1

    @property
    def most(self) -> int:
        """Bytes of the busiest rank forward."""
        return max(map(sum, zip(self.forward, *self.after)))

    @property
    def calls(self) -> int:
        return 1 + len(self.after)

    def where(self, asked: Sequence[bool]) -> Passing:
        """The same where a gradient comes to these of the results."""
        own = [piece for piece, asks in zip(self.pieces, asked) if asks]
        if self.after:
            every = [piece for piece in (self.backward, *own) if any(piece)]
            return self._replace(backward=tuple(map(sum, zip(*every))), returns=len(every))
        return self._replace(backward=tuple(map(sum, zip(*own)))) if own and self.pieces else self


@dataclass(frozen=True)
class Execution:
    """How an op runs by one of its choices."""

    option: Option | None = None  # of a stage
    sends: CommBytes = field(default_factory=CommBytes)  # inside of a stage
    surplus: float = 0.0  # FLOPs of the busiest rank beyond those of its chunk, at full size
    passing: Passing | None = None  # of a stage, where it sums
    source: Cut | None = None  # where a source is made in parts
    copied: bool = False  # whether what would be a view is a copy
    apart: bool = False  # whether what is joined stays sharded piece by piece


@dataclass
class Event:
    """Where a planner op happens in a run: a stage call, a glue op, or the model's output."""

    kind: str  # "stage", "glue", "source", "output"; "whole": glue on tensors that no plan shards
    index: int  # the how-many-th stage call, glue op or output
    name: str
    operands: list[Sym | None] = field(default_factory=list)  # tracked tensor arguments, in order
    sizes: dict[str, int] = field(default_factory=dict)
    region: int | None = None  # the activation checkpoint it runs in
    own: bool = False  # whether the stage is a checkpoint itself
    grad: bool = False  # whether its outputs take part in backward
    memory: tuple[int, int] = (0, 0)  # (work, saved) bytes at full size
    flops: int = 0  # of its forward at full size
    touched: tuple[int, int] = (0, 0)  # bytes its forward reads and writes, likewise: outside and inside of `Inside`
    operations: int = 0  # of a stage's forward
    random: bool = False
    largest: int = 0  # bytes of the largest tensor it makes
    module: str = ""  # the module whose forward it is in
    line: str = ""  # of the user's code, as "model.py:37"
    written: bool = False  # a glue op that writes in place
    constants: list[Any] = field(default_factory=list)  # what a stage returned beside tensors
    shares: list[bool] = field(default_factory=list)  # by result: whether another, or what it read, has its memory
    made: list[dict[str, int]] = field(default_factory=list)  # by result of a stage: dims that no input has


@dataclass
class NodeFacts:
    """A node as a plan has to know it, beside its choices.

    values: what each tensor that it reads is a part or a view of (None: it is whole on every rank); same: the type
    of its first argument, if it returns that as it is; copied: it looks like a view, and makes a value of its own;
    fresh: it might return a view, and makes memory of its own.
    """

    node: OperationNode | StageNode
    values: list[int | None]
    same: torch.dtype | None = None
    copied: bool = False
    fresh: bool = False


@dataclass
class Trace:
    """The planner's ops and values, with the event of each op and what else the run needs to know.

    A layout of a value is a cut of the tensor that its producer returned; `names` has the name of its dim.
    """

    values: list[Value]
    grads: list[bool]
    names: list[dict[Cut, str]]  # of each value
    ops: list[Op]
    events: list[Event]
    inputs: dict[str, int]  # model parameter -> value
    random_glue: bool
    resident: int
    recompute: bool = False  # whether every stage is recomputed in backward
    whole_grads: list[int] = field(default_factory=list)  # bytes of each undeclared input that asks for its gradient
    stretched: set[int] = field(default_factory=set)  # values that take no memory of their own: shorter ones, expanded
    facts: list[NodeFacts] = field(default_factory=list)  # of operations and stages, in order
    saves: dict[int, float] | None = None  # per activation checkpoint: the last event that saves, if that is known
    sizes: dict[str, int] = field(default_factory=dict)  # of the dims that the root pattern names
    unnamed: dict[str, Tensor] = field(default_factory=dict)  # the inputs that the root pattern leaves out
    left: list[Tensor] = field(default_factory=list)  # sharded tensors of earlier calls that the forward met
    compiled: list[str] = field(default_factory=list)  # what torch.compile was given, and is followed uncompiled
    tracked: dict[int, Sym] = field(default_factory=dict)  # by the number of a tensor in the record
    record: Record | None = None
    reads: str = ""  # that and where the forward reads its data, if it does: then this is the record of one run

    def name(self, value: int, cut: Layout) -> str | None:
        """The name of a value's layout; None where it is whole."""
        return None if cut is None else self.names[value][cut]

    def forwards(self, event: Event) -> int:
        """The cost of a step in forwards: backward is two, every activation checkpoint one more."""
        region = event.region is not None
        again = region + (event.own or (self.recompute and event.kind == "stage" and not region))
        return 1 + (2 + again) * event.grad
