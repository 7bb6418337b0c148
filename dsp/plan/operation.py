"""One operation of glue as the planner sees it, and the ways in which it may run."""

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

Combo = tuple[Layout, ...]  # a layout for each value that an operation reads


@dataclass
class Operation:
    """An operation of a record on behalf of `n` ranks, with what is known of its operands."""

    node: OperationNode
    n: int
    syms: list[Sym | None]
    outputs: list[Ref] = field(default_factory=list)
    brought: dict[tuple[int, Cut], Cut | None] = field(default_factory=dict)
    alone: OperationNode | None = None  # of new zeros: what costs something where they are whole

    @property
    def index(self) -> int:
        return self.node.index

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def written(self) -> bool:
        """Tell whether it wrote in place, into its first operand."""
        return self.node.in_place

    @property
    def tracked(self) -> list[Ref]:
        return self.node.operands

    @property
    def flops(self) -> int:
        """FLOPs of it on one process, as far as they are known."""
        return self.node.cost.flops if self.node.cost is not None else 0

    @cached_property
    def facts(self) -> NodeFacts:
        return NodeFacts(self.node, [None if s is None else s.value for s in self.syms])

    @cached_property
    def values(self) -> list[int]:
        """Each value among its operands once."""
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
        """Tell whether its result stands for more numbers than it takes memory for."""
        return self.name in EXPANDED and self.outputs[0].numel() > self.tracked[0].numel()

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor that it makes, or writes; of a view none."""
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
        """Where its tensors are cut, by position, if values are laid out so."""
        syms = [(i, s, layout.get(s.value)) for i, s in enumerate(self.syms) if s is not None]
        return {i: s.cuts[key] for i, s, key in syms if key is not None}

    def brings(self, v: int, cut: Cut) -> Cut | None:
        """Where the outputs are cut if of all operands only this value is: which of them brings the dim."""
        if (v, cut) not in self.brought:
            outcome = self.outcome(self.cuts({v: cut}))
            self.brought[v, cut] = None if isinstance(outcome, GlueError) else outcome.cut
        return self.brought[v, cut]

    def unfolded(self, how: str) -> GlueError:
        """It writes into memory of which `how` made a view that on a part may be a copy."""
        return self.frame({}).refuse(
            f"what it writes into has a view that {how}() made, and that is one for how the tensor lies in memory, "
            "where a rank's part may lie otherwise",
            "Write it out of place, or make the tensor contiguous() before the view",
        )


@dataclass
class Offers:
    """How one operation of glue may run: choices for the planner, and the layouts of its outputs."""

    choices: list[Choice] = field(default_factory=list)
    sizes: dict[Cut, Extent] = field(default_factory=dict)
    names: dict[Cut, str] = field(default_factory=dict)
    origins: dict[Cut, tuple[int, Cut]] = field(default_factory=dict)  # the operand's layout that each is made of
    resized: set[Cut] = field(default_factory=set)  # layouts in which each output has a size of its own
    view: bool = True  # the same data in every layout
    viewed: bool = False  # in some layout
    refusal: GlueError | None = None
    through: bool = False  # whether a dim gets through as it is, that is neither batch nor joined of pieces

    def refuse(self, error: GlueError | None) -> None:
        """One way is refused; the first reason is the one that is told."""
        if error is not None:
            self.refusal = self.refusal or error
            self.view = False

    def sizes_of(self, t: Ref) -> dict[Cut, Extent]:
        return self.sizes | {cut: cut.extent(t.shape[cut.dim]) for cut in self.sizes if cut in self.resized}

    @property
    def parts(self) -> list[Choice]:
        """Those in which something is sharded."""
        return [c for c in self.choices if any(c.needs)]

    @property
    def narrow(self) -> bool:
        """Tell whether nothing but batch, joined pieces, or what is whole already gets through as it is."""
        return bool(self.refusal or any(c.execution for c in self.choices)) and not self.through

    @property
    def sent_by_one(self) -> bool:
        """True if in some layout one rank holds what the operation takes of its only operand, and sends it to all."""
        passing = [c.execution.passing for c in self.choices if c.execution and len(c.needs) == 1 and any(c.needs)]
        return any(p and p.kind == "all_reduce" for p in passing) and all(any(c.needs) for c in self.choices)
