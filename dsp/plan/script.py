"""The script of a run: the planner's decision on each node of the record, looked up by what the node reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from dsp.calls import Operand
from dsp.layout import Cut

Via = tuple[Cut | None, Cut | None]  # from and to: cuts of the tensor that the value's producer returned


@dataclass
class StageStep:
    """The decision on a stage call.

    option: the dim that it is sharded along (None: replicated); push: for each result, the cut that it is switched to
    at once; random: it may draw random numbers; via: for each tensor, the copies to make first, in order; constants:
    the non-tensors that it returned at full size; made: for each result, the sizes of dims that no input has; onto: the
    dim along which the ranks' sums are reduce-scattered; pieces: the number of pieces it runs in, each switched while
    the next one is computed; ahead: for each tensor, whether it arrives in pieces.
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
    """The decision on an operation that does not run on its operands in their current layouts.

    cuts: the layout that each tensor must have (None: replicated), or None to take all as they come; push: for each
    result, the cut that it is switched to at once; source: the cut of a new tensor, of which each rank makes only its
    shard; via: for each operand, the copies to make first, in order; apart: joined operands stay sharded one by one.
    """

    cuts: list[Cut | None] | None = None
    push: list[Cut | None] = field(default_factory=list)
    source: Cut | None = None
    via: list[list[Via]] = field(default_factory=list)
    apart: bool = False

    @cached_property
    def idle(self) -> bool:
        """Tell whether an operation on replicated tensors runs as it would without this step."""
        return self.source is None and not any(self.cuts or ()) and not any(self.push)


Key = tuple[Any, ...]


class Number(NamedTuple):
    """A sharded tensor read by a node: its number in the record, and its global shape."""

    number: int
    shape: tuple[int, ...]


Read = Number | tuple[int, ...]  # a tensor read by a node: if it is replicated, only its shape


def key_of_operation(name: str, args: Any, kwargs: Any, tensors: Sequence[Read]) -> Key:
    """The key of an operation: its name and arguments; `tensors` stand for the tensors among these, in order."""
    stream = iter(tensors)
    return "glue", name, (*[told(v, stream) for v in args], *[(k, told(v, stream)) for k, v in kwargs.items()])


def key_of_stage(name: str, tensors: Sequence[Read]) -> Key:
    return "stage", name, tuple(tensors)


def told(value: Any, tensors: Iterator[Any]) -> Any:
    """The part of an argument that enters a key.

    Of a float only the type does: no rule reads floats, and a schedule would make every call a new one.
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
    """A node of the record, with its decision.

    index: its position among the operations, or among the stage calls, of the record; results: the numbers of the
    tensors that it returns; same: the dtype of its first argument, if it returns that unchanged; copied: it looks like
    a view but makes a value of its own; fresh: it might return a view but allocates memory; exact: its full key was
    found, not only its sharded tensors (`Script.loosely`).
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
    """The nodes with one key, in order; mostly one."""

    nodes: list[PlannedNode] = field(default_factory=list)


@dataclass
class Script:
    """The script of a run: the planner's decisions by the key of a node.

    inputs: the cut that each declared input is split to; numbers: these inputs' numbers in the record; outputs: for
    each output, the copies to make first, in order; on_wholes: names of operations that read no sharded tensor and that
    the plan shards at least once; compiled: compiled functions between stages run uncompiled; recorded: made from a run
    that read its data, so that the next run may differ; recipes: how its operations run, filled in as they run.
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
    planned_counts: Any = field(default=None, repr=False, compare=False)  # for this rank, once a run needs them

    @cached_property
    def in_pieces(self) -> frozenset[str]:
        """The stages with a call that runs in pieces."""
        nodes = (node for key, alike in self.nodes.items() if key[0] == "stage" for node in alike.nodes)
        return frozenset(node.name for node in nodes if node.step is not None and node.step.pieces > 1)

    @cached_property
    def loosely(self) -> dict[Key, PlannedNode]:
        """The nodes that can be found only by name and sharded tensors, because no other node has the same."""
        found: dict[Key, list[PlannedNode]] = {}
        for key, alike in self.nodes.items():
            found.setdefault(loose(key), []).extend(alike.nodes)
        return {key: replace(nodes[0], exact=False) for key, nodes in found.items() if len(nodes) == 1 and key[2:]}

    def key(self) -> str:
        """A text that must be equal on all ranks."""
        nodes = [node for alike in self.nodes.values() for node in alike.nodes]
        return repr((sorted(self.inputs.items()), sorted(self.outputs.items()), self.random_glue, nodes))


def loose(key: Key) -> Key:
    """The part of a node's key that has only its sharded tensors."""
    return *key[:2], *numbers_in(key[2])


def numbers_in(part: Any) -> Iterator[Number]:
    if isinstance(part, Number):
        yield part
    elif isinstance(part, tuple):
        for inner in part:
            yield from numbers_in(inner)


Where = tuple[str, int, str]  # "stage", "glue", "output" or "input"; its position among those; its name
INPUTS: Where = ("input", 0, "the inputs")
