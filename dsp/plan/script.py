"""The script of a run: the planner's decisions by order of stage calls and glue operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dsp.layout import Cut
from dsp.planner import MOVES, Layout, Value

Via = tuple[Cut | None, Cut | None]  # from and to: cuts of the tensor that a value was made as


@dataclass
class StageStep:
    name: str
    option: str | None
    push: list[Cut | None]
    random: bool
    via: list[list[Via]]  # the copies to be made of each tensor first, in this order
    constants: list[Any]  # what it returned beside tensors at full size
    onto: str | None = None  # the dim along which the ranks' sums are added up


@dataclass
class GlueStep:
    name: str
    cuts: list[Cut | None] | None = None  # what each tensor operand must be; None: as they come
    push: list[Cut | None] = field(default_factory=list)
    source: Cut | None = None
    via: list[list[Via]] = field(default_factory=list)  # the copies to be made of each operand first, in this order
    apart: bool = False  # what it joins stays sharded piece by piece

    @cached_property
    def idle(self) -> bool:
        """Tell whether it asks for nothing of an operation on whole tensors."""
        return self.source is None and not any(self.cuts or ()) and not any(self.push)


@dataclass
class Script:
    """The script of a run: the planner's decisions by order of stage calls and glue operations."""

    inputs: dict[str, Cut | None]
    stages: list[StageStep]
    glue: dict[int, GlueStep]
    random_glue: bool
    copies: frozenset[int] = frozenset()  # glue that only looks like a view: it makes a value of its own
    outputs: dict[int, list[Via]] = field(default_factory=dict)  # the copies to be made of each first, in this order
    same: frozenset[int] = frozenset()  # glue that returns its first argument as it is, such as contiguous
    fresh: frozenset[int] = frozenset()  # glue that may return a view, and makes memory of its own
    names: tuple[str, ...] = ()  # of all glue operations, those without a step too
    spare: frozenset[int] = frozenset()  # glue on tensors that no plan shards: a run may have more of it, or less
    compiled: bool = False  # whether something between stages was compiled, which is put aside
    recorded: bool = False  # from a run, not ahead of it: the next run may go another way
    recipes: dict[Any, Any] = field(default_factory=dict, repr=False)  # how its operations run, as far as is known
    planned_counts: Any = field(default=None, repr=False, compare=False)  # of this rank, once a run asked

    def key(self) -> str:
        """The text that has to be the same on all ranks."""
        stages = [(s.name, s.option, s.onto, s.push, s.via) for s in self.stages]
        apart = sorted(self.copies), sorted(self.same), sorted(self.outputs.items()), sorted(self.inputs.items())
        return repr((stages, sorted(self.glue.items()), self.random_glue, self.names, apart))


Where = tuple[str, int, str]  # "stage", "glue", "output" or "input"; the how-many-th; its name
INPUTS: Where = ("input", 0, "the inputs")


class Sending(NamedTuple):
    """A collective of a plan outside of stages, or a tensor's share of one (calls 0): a move, or so many bytes a rank.

    where: for a backward, where its forward is. A move from `src` to `dst`; its backward goes the other way, and that
    of a gather is the reduce-scatter into `src`.
    """

    phase: str  # "forward", "backward", "recompute"
    where: Where
    kind: str
    calls: int
    value: Value | None = None
    src: Layout = None
    dst: Layout = None
    each: tuple[int, ...] = ()

    def sent(self, n: int) -> Sequence[int]:
        """By each of n ranks."""
        return self.each if self.value is None else MOVES[self.kind].sent(self.value, self.src, self.dst, n)
