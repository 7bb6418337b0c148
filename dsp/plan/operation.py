"""One operation of glue as the planner sees it, and its offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from dsp.calls import GlueError
from dsp.layout import Cut
from dsp.plan.events import NodeFacts, Sym
from dsp.plan.record import OperationNode, Ref
from dsp.planner import Choice, Extent, Layout
from dsp.rules import Frame, Outcome
from dsp.rules.call import frame_of
from dsp.rules.sources import EXPANDED

Combo = tuple[Layout, ...]  # the layout of each value that an operation reads


@dataclass
class Operation:
    """An operation of a record, for a plan on `n` ranks, with the facts known about its operands."""

    node: OperationNode
    n: int
    syms: list[Sym | None]
    outputs: list[Ref] = field(default_factory=list)
    brought: dict[tuple[int, Cut], Cut | None] = field(default_factory=dict)
    alone: OperationNode | None = None  # an operation on new zeros whose cost counts if they are replicated

    @property
    def index(self) -> int:
        return self.node.index

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def written(self) -> bool:
        """Tell whether the operation wrote in place, into its first operand."""
        return self.node.in_place

    @property
    def tracked(self) -> list[Ref]:
        return self.node.operands

    @property
    def flops(self) -> int:
        """Its FLOPs on one process, if measured."""
        return self.node.cost.flops if self.node.cost is not None else 0

    @cached_property
    def facts(self) -> NodeFacts:
        return NodeFacts(self.node, [None if s is None else s.value for s in self.syms])

    @cached_property
    def values(self) -> list[int]:
        """The values among its operands, each once."""
        return list(dict.fromkeys(s.value for s in self.syms if s is not None))

    @property
    def into(self) -> Sym | None:
        """The tensor that it wrote into, if a plan may shard it."""
        return self.syms[0] if self.written else None

    @property
    def first(self) -> Sym:
        return next(s for s in self.syms if s is not None)

    @property
    def stretches(self) -> bool:
        """Tell whether its result is an expanded view, with more numbers than it has memory for."""
        return self.name in EXPANDED and self.outputs[0].numel() > self.tracked[0].numel()

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that it makes or writes; 0 for a view."""
        made = self.tracked[:1] if self.written else self.outputs
        known = () if self.written else [t.memory for t in self.tracked]
        return max((t.nbytes for t in made if t.memory not in known), default=0)

    def frame(self, cuts: Mapping[int, Cut | None], apart: bool = False) -> Frame:
        """The call with Operands for tensors; `cuts` by position among the tensor arguments."""
        return frame_of(self.node, cuts, self.n, apart)

    def outcome(self, cuts: Mapping[int, Cut | None], apart: bool = False) -> Outcome | GlueError:
        try:
            return self.frame(cuts, apart).outcome()
        except GlueError as error:
            return error

    def cuts(self, layout: Mapping[int, Layout]) -> dict[int, Cut]:
        """The cuts of its tensors, by position, for these layouts of values."""
        syms = [(i, s, layout.get(s.value)) for i, s in enumerate(self.syms) if s is not None]
        return {i: s.cuts[key] for i, s, key in syms if key is not None}

    def brings(self, v: int, cut: Cut) -> Cut | None:
        """The cut of the outputs if only this value is sharded: it shows which operand brings a dim of the outputs."""
        if (v, cut) not in self.brought:
            outcome = self.outcome(self.cuts({v: cut}))
            self.brought[v, cut] = None if isinstance(outcome, GlueError) else outcome.cut
        return self.brought[v, cut]

    def unfolded(self, how: str) -> GlueError:
        """The error for a write into memory of which `how` made a view, which on a shard may be a copy."""
        return self.frame({}).refuse(
            f"it writes into a tensor of which {how}() made a view. Whether {how}() makes a view or a copy depends on "
            "how the tensor lies in memory, and a rank's shard may lie differently",
            "Write it out of place, or make the tensor contiguous() before the view",
        )


@dataclass
class Offers:
    """The offers of one operation: choices for the planner, and the layouts of its outputs."""

    choices: list[Choice] = field(default_factory=list)
    sizes: dict[Cut, Extent] = field(default_factory=dict)
    names: dict[Cut, str] = field(default_factory=dict)
    origins: dict[Cut, tuple[int, Cut]] = field(default_factory=dict)  # layout -> the operand's from which it derives
    resized: set[Cut] = field(default_factory=set)  # layouts in which outputs differ in size
    view: bool = True  # whether all layouts share the operand's data
    viewed: bool = False  # whether some layout does
    refusal: GlueError | None = None
    through: bool = False  # a dim other than batch or joined pieces passes unchanged

    def refuse(self, error: GlueError | None) -> None:
        """Note that one way is refused; the first reason is reported."""
        if error is not None:
            self.refusal = self.refusal or error
            self.view = False

    def sizes_of(self, t: Ref) -> dict[Cut, Extent]:
        return self.sizes | {cut: cut.extent(t.shape[cut.dim]) for cut in self.sizes if cut in self.resized}

    @property
    def parts(self) -> list[Choice]:
        """The choices that shard something."""
        return [c for c in self.choices if any(c.needs)]

    @property
    def narrow(self) -> bool:
        """Tell whether a way is refused or special, and no dim but batch or joined pieces passes unchanged."""
        return bool(self.refusal or any(c.execution for c in self.choices)) and not self.through

    @property
    def sent_by_one(self) -> bool:
        """Tell whether in some layout one rank holds the slice taken from the only operand, and sends it to all."""
        passing = [c.execution.passing for c in self.choices if c.execution and len(c.needs) == 1 and any(c.needs)]
        return any(p and p.kind == "all_reduce" for p in passing) and all(any(c.needs) for c in self.choices)
