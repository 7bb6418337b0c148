"""The script of a run: the planner's decision on each node of the record, found by what the node reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from dsp.calls import Operand
from dsp.layout import Cut

Via = tuple[Cut | None, Cut | None]  # from and to: cuts of the tensor that a value was made as


@dataclass
class StageStep:
    """The decision on a stage call.

    option: the dim that it is sharded along (None: whole); push: where each result is switched to at once; random:
    it may draw numbers; via: the copies to be made of each tensor first, in this order; constants: what it returned
    beside tensors at full size; made: by result, the sizes of dims that no input has; onto: the dim along which the
    ranks' sums are added up; pieces: in how many it runs, each of which is switched while the next one is computed;
    ahead: which of its tensors come in pieces.
    """

    option: str | None
    push: list[Cut | None]
    random: bool
    via: list[list[Via]]
    constants: list[Any]
    made: list[dict[str, int]]
    onto: str | None = None
    pieces: int = 1
    ahead: list[bool] = field(default_factory=list)


@dataclass
class GlueStep:
    """The decision on an operation that does not run on its operands as they lie.

    cuts: what each tensor must be (None: as they come); push: where each result is switched to at once; source: where a
    tensor of which each rank makes its part alone is cut; via: the copies to be made of each operand first, in this
    order; apart: what it joins stays sharded piece by piece.
    """

    cuts: list[Cut | None] | None = None
    push: list[Cut | None] = field(default_factory=list)
    source: Cut | None = None
    via: list[list[Via]] = field(default_factory=list)
    apart: bool = False

    @cached_property
    def idle(self) -> bool:
        """Tell whether it asks for nothing of an operation on whole tensors."""
        return self.source is None and not any(self.cuts or ()) and not any(self.push)


Key = tuple[Any, ...]


class Number(NamedTuple):
    """A sharded tensor as a node reads it: its number in the record, and its global shape."""

    number: int
    shape: tuple[int, ...]


Read = Number | tuple[int, ...]  # a tensor as a node reads it: of one that is whole on every rank the shape


def key_of_operation(name: str, args: Any, kwargs: Any, tensors: Sequence[Read]) -> Key:
    """The key of an operation: its function, and what that reads; `tensors` are those among its arguments, in order."""
    stream = iter(tensors)
    return "glue", name, (*[told(v, stream) for v in args], *[(k, told(v, stream)) for k, v in kwargs.items()])


def key_of_stage(name: str, tensors: Sequence[Read]) -> Key:
    return "stage", name, tuple(tensors)


def told(value: Any, tensors: Iterator[Any]) -> Any:
    """The part of an argument that tells one node from another.

    A float is none, since no rule reads it: a schedule would make every call a new one.
    """
    kind = type(value)
    if isinstance(value, (torch.Tensor, Operand)):
        return next(tensors)
    if kind in KEPT_AS_IT_IS:
        return value
    if kind in (list, tuple):
        return kind.__name__, *[told(v, tensors) for v in value]
    if kind is torch.Size:
        return "tuple", *value
    if kind is slice:
        return "slice", *[v if isinstance(v, int) else v is None for v in (value.start, value.stop, value.step)]
    return kind.__name__, value if kind is bool else None


KEPT_AS_IT_IS = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass
class PlannedNode:
    """A node of the record as the plan has it.

    index: the how-many-th of its kind in the record; results: the numbers of the tensors that it returns; same: the
    type of its first argument, if it returns that as it is; copied: it looks like a view, and makes a value of its own;
    fresh: it might return a view, and makes memory of its own; exact: it was found by all that it reads, and not by its
    sharded tensors alone (`Script.loosely`).
    """

    name: str
    index: int
    step: Any = None  # StageStep | GlueStep; None: it asks for nothing
    results: tuple[int, ...] = ()
    same: torch.dtype | None = None
    copied: bool = False
    fresh: bool = False
    exact: bool = True


@dataclass
class Alike:
    """The nodes of one key, which read the same in the same way, in their order: mostly one."""

    nodes: list[PlannedNode] = field(default_factory=list)


@dataclass
class Script:
    """The script of a run: the planner's decisions by what a node reads.

    inputs: where each declared input is split; numbers: of these inputs in the record; outputs: the copies to be made
    of each first, in this order; on_wholes: names of operations that read no sharded tensor, some of which the plan
    shards; compiled: whether something between stages was compiled, which is put aside; recorded: from a run, not ahead
    of it: the next run may go another way; recipes: how its operations run, as far as is known.
    """

    inputs: dict[str, Cut | None]
    random_glue: bool
    numbers: dict[str, int] = field(default_factory=dict)
    nodes: dict[Key, Alike] = field(default_factory=dict)
    outputs: dict[int, list[Via]] = field(default_factory=dict)
    on_wholes: frozenset[str] = frozenset()
    random_stages: bool = False
    compiled: bool = False
    recorded: bool = False
    recipes: dict[Any, Any] = field(default_factory=dict, repr=False)
    planned_counts: Any = field(default=None, repr=False, compare=False)  # of this rank, once a run asked

    @cached_property
    def in_pieces(self) -> frozenset[str]:
        """The stages of which a call runs in pieces."""
        nodes = (node for key, alike in self.nodes.items() if key[0] == "stage" for node in alike.nodes)
        return frozenset(node.name for node in nodes if node.step is not None and node.step.pieces > 1)

    @cached_property
    def loosely(self) -> dict[Key, PlannedNode]:
        """The nodes that are the only ones to read those sharded tensors by that name, whatever else they take."""
        found: dict[Key, list[PlannedNode]] = {}
        for key, alike in self.nodes.items():
            found.setdefault(loose(key), []).extend(alike.nodes)
        return {key: replace(nodes[0], exact=False) for key, nodes in found.items() if len(nodes) == 1 and key[2:]}

    def key(self) -> str:
        """The text that has to be the same on all ranks."""
        nodes = [node for alike in self.nodes.values() for node in alike.nodes]
        return repr((sorted(self.inputs.items()), sorted(self.outputs.items()), self.random_glue, nodes))


def loose(key: Key) -> Key:
    """A node's key without anything but its sharded tensors."""
    return *key[:2], *numbers_in(key[2])


def numbers_in(part: Any) -> Iterator[Number]:
    if isinstance(part, Number):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from numbers_in(inner)


Where = tuple[str, int, str]  # "stage", "glue", "output" or "input"; the how-many-th; its name
INPUTS: Where = ("input", 0, "the inputs")
