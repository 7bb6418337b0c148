"""The record of a forward: the operations it ran, in order, as data. It holds no tensors.

A `Recorder` (`dsp.plan.recorder`) observes a forward, on tensors without data or on real shards, and writes a
`Record`: nodes (operations between stages, calls of stages) over references to tensors. It makes no decisions. All
that a plan knows about the forward is read off the record: `dsp.plan.choices` derives the planner's problem from it.
``print(record)`` shows one line a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dsp.calls import GlueError, Operand
from dsp.layout import Cut
from dsp.methods import CommBytes
from dsp.notation import NotationError, TensorPattern
from dsp.planner import Layout
from dsp.stages import Option


@dataclass(eq=False)
class Ref(Operand):
    """A tensor as one node read or made it, with its global shape.

    number: identifies the tensor in all nodes; memory: a number shared with its views (-1: not known); edge: a number
    for the place where autograd takes its gradient (None: nowhere, or the plan does not follow the tensor); dense:
    whether the tensor, or the base of which it is a view, is contiguous.
    """

    number: int = -1
    dtype: torch.dtype = torch.float32
    memory: int = -1
    edge: int | None = None
    requires_grad: bool = False
    dense: bool = True

    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize


class Cost(NamedTuple):
    """The cost of an operation on one process: FLOPs, bytes read and written, bytes of the largest tensor it makes, of
    its work, and of what it saves for backward; `saves`: it saves something, whether counted before or not."""

    flops: int
    touched: int
    largest: int
    work: int
    saved: int
    saves: bool


@dataclass(frozen=True)
class Measured:
    """The cost of a stage call on one process: bytes of work, and saved for backward; `keeps`: it saves something.

    touched: bytes read and written, outside and inside of modules that communicate themselves; sends: by option, what
    these modules send; surplus: by option, FLOPs at full size that the busiest rank computes beyond its chunk's share;
    writes: it wrote to tensors of its modules; operations: the number of its operations that are not views.
    """

    work: int = 0
    saved: int = 0
    flops: int = 0
    touched: tuple[int, int] = (0, 0)
    random: bool = True
    largest: int = 0
    keeps: bool = False
    sends: Mapping[Layout, CommBytes] = field(default_factory=dict)
    surplus: Mapping[Layout, float] = field(default_factory=dict)
    writes: bool = False
    operations: int = 0


@dataclass(kw_only=True)
class Node:
    """An operation, a stage call, or another event of a forward.

    operands: the tensors that it read; line: the line of the user's code, as "model.py:37"; region: the number of the
    activation checkpoint around it; module: the path of the module whose forward runs it; compiled: names of the
    functions passed to torch.compile that are running.
    """

    operands: list[Ref]
    line: str = ""
    region: int | None = None
    module: str = ""
    compiled: tuple[str, ...] = ()

    def written(self) -> tuple[Sequence[Ref], str]:
        """The tensors that a plan may shard from here on, and a name for their producer."""
        return (), ""


@dataclass(kw_only=True)
class OperationNode(Node):
    """An operation between stages, the `index`-th: a torch function.

    args, kwargs: its arguments, with a `Ref` for each tensor; results: the tensors that it returned; returned:
    "tensors", "tensor" (a single one), "number" (anything else), "nothing" or "unsupported"; in_place: it wrote into
    its first operand; overwritten: the edge of that operand before the write; base: the edge of the base of which the
    first result is a view.
    """

    index: int
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: list[Ref]
    returned: str
    in_place: bool
    overwritten: int | None = None
    base: int | None = None
    cost: Cost | None = None

    def written(self) -> tuple[Sequence[Ref], str]:
        results = self.results or self.operands[:1] if self.in_place else self.results
        return [t for t in results if t.memory >= 0], self.name


class Result(NamedTuple):
    """A tensor that a stage returned, its pattern, and the sizes of that pattern's dims."""

    tensor: Ref
    pattern: TensorPattern
    sizes: dict[str, int]


@dataclass(kw_only=True)
class StageNode(Node):
    """A call of a stage, the `index`-th.

    given: all tensors among its arguments; `operands` are those bound to a parameter, with a pattern or without;
    nested: those inside an argument that no pattern can name, each with the error to raise if it is sharded; writes:
    for each operand, whether the stage wrote into it, and its edge before; constants: the non-tensors that it returned;
    own: it is itself an activation checkpoint; again: its backward starts over from its inputs.
    """

    name: str
    pattern: str
    index: int
    given: list[Ref]
    nested: list[tuple[Ref, NotationError]]
    sizes: dict[str, int]
    options: list[Option]
    writes: list[tuple[bool, int | None]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    measured: Measured = Measured()
    own: bool = False
    again: bool = False
    saves: bool = False

    @property
    def made(self) -> list[dict[str, int]]:
        """For each result, the sizes of dims that no input has."""
        return [{n: r.sizes[n] for n in r.pattern.names if n not in self.sizes} for r in self.results]

    def written(self) -> tuple[Sequence[Ref], str]:
        return [r.tensor for r in self.results], f"stage {self.name} '{self.pattern}' "


@dataclass(kw_only=True)
class LeftNode(Node):
    """A tensor that an earlier call left sharded, at the place where this forward first used it."""

    cut: Cut

    def written(self) -> tuple[Sequence[Ref], str]:
        return self.operands, "left by an earlier call "


@dataclass(kw_only=True)
class WholeNode(Node):
    """An operation that reads its operands in full and has no rule: they must not be sharded."""

    error: GlueError


class Input(NamedTuple):
    """A declared input of the model."""

    param: str
    tensor: Ref
    pattern: TensorPattern


@dataclass
class Record:
    """The nodes of a forward in order, for a plan on `n` ranks.

    root_sizes: the sizes of the dims that the root pattern names; reached: the edges that the outputs' gradients
    reach; data: whether the tensors had data; kept: the numbers of tensors made of replicated ones that the model, or
    what its code reaches, holds after the forward.
    """

    n: int
    root_sizes: dict[str, int]
    data: bool = True
    parameters: list[str] = field(default_factory=list)  # the names of all tensors among the model's arguments
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Ref] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)
    random: bool = False  # whether something between stages drew random numbers
    measured: bool = False  # whether nodes have their cost
    kept: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return "\n".join(text_of(self))


def text_of(record: Record) -> Iterator[str]:
    """A record as text, one line a node: tensors that a plan may shard have numbers, all others only their shapes."""
    numbers: dict[int, str] = {}

    def read(t: Ref) -> str:
        return numbers.get(t.number, str(list(t.shape)))

    def made(t: Ref) -> str:
        return f"{numbers.setdefault(t.number, f'%{len(numbers)}')} {list(t.shape)}"

    for param, t, pattern in record.inputs:
        yield f"{made(t)} = input '{pattern}'" if pattern.param else f"{made(t)} = input {param} '{pattern}'"
    for node in record.nodes:
        results, what = node.written()
        if results:
            operands = ", ".join(map(read, node.operands))
            yield f"{', '.join(map(made, results))} = {what}({operands}){node.line and f'  # {node.line}'}"
    yield f"output {', '.join(map(read, record.outputs))}"
