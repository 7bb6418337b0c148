"""The trace of a forward: the planner's problem, and the place in a run where each of its decisions applies."""

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
    """A tracked tensor: its value, and for each layout of the value (a cut of it) the cut of this tensor, a view of it.

    `spare` is the same for dims that are not layouts yet, channels or heads: when an operation needs one,
    `Values.offer_spare` makes it a layout of the value.
    """

    value: int
    cuts: dict[Cut, Cut]
    spare: dict[Cut, Cut] = field(default_factory=dict)


class Passing(NamedTuple):
    """The collective that combines the ranks' parts of an op, its adjoint, and the bytes that each rank sends in both.

    pieces: for each result of the op, what each rank sends in backward, if each result comes from a separate part;
    after: for each result that travels in a collective of its own after the op, what each rank sends (its gradient,
    which also has its own collective, is in `pieces`); returns: the number of collectives in backward.
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
        """Bytes that the busiest rank sends forward."""
        return max(map(sum, zip(self.forward, *self.after)))

    @property
    def calls(self) -> int:
        return 1 + len(self.after)

    def where(self, asked: Sequence[bool]) -> Passing:
        """The same traffic if only these results get a gradient."""
        own = [piece for piece, asks in zip(self.pieces, asked) if asks]
        if self.after:
            every = [piece for piece in (self.backward, *own) if any(piece)]
            return self._replace(backward=tuple(map(sum, zip(*every))), returns=len(every))
        return self._replace(backward=tuple(map(sum, zip(*own)))) if own and self.pieces else self


@dataclass(frozen=True)
class Execution:
    """The way an op runs under one of its choices."""

    option: Option | None = None  # for a stage
    sends: CommBytes = field(default_factory=CommBytes)  # inside a stage
    surplus: float = 0.0  # FLOPs of the busiest rank beyond its chunk's share, at full size
    passing: Passing | None = None  # for a stage that sums
    source: Cut | None = None  # the cut of a new tensor that is made in shards
    narrowed: tuple[Cut | None, ...] = ()  # for such a tensor, the cuts in which its replicated operands are narrowed
    copied: bool = False  # whether a copy takes the place of a view
    apart: bool = False  # whether joined operands stay sharded one by one


@dataclass
class Event:
    """The place of a planner op in a run: a stage call, a glue op, or the model's output."""

    kind: str  # "stage", "glue", "source", "output"; "whole": glue on tensors that the plan cannot shard
    index: int  # its position among the stage calls, glue ops or outputs
    name: str
    operands: list[Sym | None] = field(default_factory=list)  # tracked tensor arguments, in order
    sizes: dict[str, int] = field(default_factory=dict)
    region: int | None = None  # the activation checkpoint it runs in
    own: bool = False  # whether the stage is a checkpoint itself
    grad: bool = False  # whether its outputs take part in backward
    memory: tuple[int, int] = (0, 0)  # (work, saved) bytes at full size
    flops: int = 0  # of its forward at full size
    touched: tuple[int, int] = (0, 0)  # bytes read and written at full size: outside and inside of `Inside`
    operations: int = 0  # in a stage's forward
    random: bool = False
    largest: int = 0  # bytes of the largest tensor it makes
    module: str = ""  # the module whose forward it is in
    line: str = ""  # of the user's code, as "model.py:37"
    written: bool = False  # a glue op that writes in place
    constants: list[Any] = field(default_factory=list)  # non-tensors that a stage returned
    shares: list[bool] = field(default_factory=list)  # by result: whether another, or an operand, has its memory
    made: list[dict[str, int]] = field(default_factory=list)  # by result of a stage: sizes of dims that no input has


@dataclass
class NodeFacts:
    """The facts of a node that a run needs beside its decision.

    values: the value that each tensor read belongs to (None: replicated); same: the dtype of the first argument, if
    the node returns it unchanged; copied: it looks like a view but makes a value of its own; fresh: it might return a
    view but allocates memory.
    """

    node: OperationNode | StageNode
    values: list[int | None]
    same: torch.dtype | None = None
    copied: bool = False
    fresh: bool = False


@dataclass
class Trace:
    """The planner's ops and values, the event of each op, and further facts that the run needs.

    A layout of a value is a cut of the tensor that its producer returned; `names` has the names of the dims.
    """

    values: list[Value]
    grads: list[bool]
    names: list[dict[Cut, str]]  # for each value
    ops: list[Op]
    events: list[Event]
    inputs: dict[str, int]  # model parameter -> value
    random_glue: bool
    resident: int
    recompute: bool = False  # whether every stage is recomputed in backward
    whole_grads: list[int] = field(default_factory=list)  # bytes of each undeclared input that requires a gradient
    stretched: set[int] = field(default_factory=set)  # values without memory of their own: shorter ones, expanded
    facts: list[NodeFacts] = field(default_factory=list)  # of operations and stages, in order
    saves: dict[int, float] | None = None  # activation checkpoint -> the last event that saves, if known
    sizes: dict[str, int] = field(default_factory=dict)  # of the dims that the root pattern names
    unnamed: dict[str, Tensor] = field(default_factory=dict)  # the inputs that the root pattern leaves out
    left: list[Tensor] = field(default_factory=list)  # sharded tensors of earlier calls that the forward met
    compiled: list[str] = field(default_factory=list)  # functions passed to torch.compile, followed uncompiled
    tracked: dict[int, Sym] = field(default_factory=dict)  # by number in the record
    record: Record | None = None
    reads: str = ""  # what reads data, and its line, if the forward does so: then this is the record of one run

    def name(self, value: int, cut: Layout) -> str | None:
        """The name of a value's layout; None if replicated."""
        return None if cut is None else self.names[value][cut]

    def forwards(self, event: Event) -> int:
        """The cost of an event in a training step, in forwards: backward counts as two, a recomputation as one."""
        region = event.region is not None
        again = region + (event.own or (self.recompute and event.kind == "stage" and not region))
        return 1 + (2 + again) * event.grad
