"""The record of a forward: what it did, in order, as data. No tensor is part of it.

A `Recorder` (`dsp.plan.recorder`) is told of a forward as it runs, on tensors without data or for real on shards, and
writes a `Record`: nodes (operations between stages, calls of stages) over references to tensors. It decides nothing.
What a plan knows of a forward it reads off the record: `dsp.plan.choices` makes the planner's problem of it.
``print(record)`` shows it, a line a node.
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
    """A tensor as one node met it, of global shape.

    number: of the tensor, the same wherever it is met; memory: a number that its views have, too (-1: not known);
    edge: a number for where autograd takes a gradient of it (None: nowhere, or of a tensor that no plan follows);
    dense: whether the tensor that it is a view of, or itself, lies in memory without gaps and in order.
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
    """The cost of an operation on one process: FLOPs, bytes read and written, bytes of the largest tensor it makes,
    of its work, and of what it saves for backward; `saves` whether it saves anything, counted before or not."""

    flops: int
    touched: int
    largest: int
    work: int
    saved: int
    saves: bool


@dataclass(frozen=True)
class Measured:
    """The cost of a stage call on one process: bytes of work, and saved for backward; `keeps` whether any were.

    touched: bytes that it reads and writes, outside and inside of what communicates by itself; sends: by option;
    surplus: likewise, FLOPs at full size by which the busiest rank does more than its chunk of a sharded dim says;
    writes: whether it wrote to what its modules hold; operations: those that are no views.
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
    """One thing that a forward did.

    operands: the tensors that it read; line: of the user's code, as "model.py:37"; region: the number of the
    activation checkpoint that it is in; module: the path of the module whose forward it is in; compiled: the functions
    given to torch.compile that it is in.
    """

    operands: list[Ref]
    line: str = ""
    region: int | None = None
    module: str = ""
    compiled: tuple[str, ...] = ()

    def written(self) -> tuple[Sequence[Ref], str]:
        """The tensors that a plan may shard since, and what made them."""
        return (), ""


@dataclass(kw_only=True)
class OperationNode(Node):
    """An operation between stages, the `index`-th: a torch function.

    args, kwargs: what it was called with, a `Ref` for each tensor; results: the tensors that it returned; returned:
    "tensors", "tensor" (one, by itself), "number" (anything else), "nothing" or "unsupported"; in_place: it wrote into
    its first operand; overwritten: where a gradient came to that before; base: where one comes to what the first result
    is a view of.
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

    given: all tensors among its arguments, of which `operands` have a pattern or are bound without one; nested: those
    within an argument that no pattern can name, and an error for each if it is sharded; writes: by operand, where a
    gradient came to it before the stage wrote into it, if it did; constants: what it returned beside tensors; own: it
    is an activation checkpoint itself; again: backward starts anew from its inputs.
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
        """By result, the sizes of dims that no input has."""
        return [{n: r.sizes[n] for n in r.pattern.names if n not in self.sizes} for r in self.results]

    def written(self) -> tuple[Sequence[Ref], str]:
        return [r.tensor for r in self.results], f"stage {self.name} '{self.pattern}' "


@dataclass(kw_only=True)
class LeftNode(Node):
    """A tensor that an earlier call left sharded, where this one met it first."""

    cut: Cut

    def written(self) -> tuple[Sequence[Ref], str]:
        return self.operands, "left by an earlier call "


@dataclass(kw_only=True)
class WholeNode(Node):
    """Something that reads the whole of its operands, for which no rule stands in: they may not be sharded."""

    error: GlueError


class Input(NamedTuple):
    """A declared input of the model."""

    param: str
    tensor: Ref
    pattern: TensorPattern


@dataclass
class Record:
    """The nodes of a forward in order, on behalf of `n` ranks.

    root_sizes: of the dims that the root pattern names; reached: the edges that a gradient comes to from the outputs;
    data: whether the tensors had any.
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

    def __str__(self) -> str:
        return "\n".join(text_of(self))


def text_of(record: Record) -> Iterator[str]:
    """A record as text, a line a node: tensors that a plan may shard have numbers, all others show their shape."""
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
