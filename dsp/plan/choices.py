"""The planner's problem, derived from the record of a forward: the choices that each node offers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dsp.calls import GlueError
from dsp.layout import Cut
from dsp.methods import CommBytes
from dsp.notation import NotationError, TensorPattern
from dsp.plan.events import Event, Execution, NodeFacts, Passing, Sym, Trace
from dsp.plan.record import LeftNode, Node, OperationNode, Record, Ref, StageNode, WholeNode
from dsp.plan.values import Values, is_batch
from dsp.planner import MOVES, Choice, Layout, Op, Value
from dsp.stages import Option, cut_for, fits_fold

WRITES = (
    "{name}() between stages writes in place into a sharded tensor. Write it out of place, or move it into a stage (a "
    "submodule with a pattern), where tensors are local"
)


class Choices(Values):
    """Collects the planner's problem from a record's nodes. Operations between stages run on replicated tensors."""

    def __init__(self, record: Record) -> None:
        super().__init__(record)
        self.inputs: dict[str, int] = {}
        self.facts: list[NodeFacts] = []
        self.compiled: dict[str, None] = {}  # names of compiled functions that ran between stages

    @classmethod
    def of(cls, record: Record, given: Mapping[str, Cut], gather: bool) -> Choices:
        """The choices of a forward.

        given: the cuts of inputs that arrive sharded; gather: whether the outputs are gathered. Raises GlueError and
        NotationError where a sharded tensor is used and must not be.
        """
        made = cls(record)
        made.read(given, gather)
        return made

    @classmethod
    def refuse(cls, record: Record, given: Mapping[str, Cut]) -> None:
        """Raise the errors that `of` raises for the nodes of a record, which may be incomplete."""
        cls(record).read(given, gather=True)

    def read(self, given: Mapping[str, Cut], gather: bool) -> None:
        """Follow the nodes of the record, in order."""
        self.root_inputs(given)
        for node in self.record.nodes:
            try:
                self.node(node)
            except GlueError as error:
                error.line = node.line
                raise
        self.root_outputs(gather)

    def node(self, node: Node) -> None:
        if isinstance(node, StageNode):
            self.stage(node)
        elif isinstance(node, LeftNode):
            self.left_value(node.operands[0], node.cut)
        elif isinstance(node, WholeNode):
            if any(map(self.sharded, node.operands)):
                raise node.error
        elif isinstance(node, OperationNode):
            self.operation(node)

    def sharded(self, t: Ref) -> bool:
        """Tell whether a tensor whose data is read in full may be sharded."""
        return self.sym(t) is not None

    def operation(self, node: OperationNode) -> None:
        """Add an operation between stages."""
        syms = [self.sym(t) for t in node.operands]
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        self.facts.append(facts := NodeFacts(node, [None if s is None else s.value for s in syms]))
        if not values:
            return
        self.used(node.operands, syms)
        if node.returned == "tensor" and node.results[0].number == node.operands[0].number and not node.in_place:
            facts.same = node.operands[0].dtype
            return
        if node.in_place and syms[0] is not None:
            raise GlueError(WRITES.format(name=node.name))
        event = Event("glue", node.index, node.name, operands=syms, grad=any(t.requires_grad for t in node.results))
        self.add(Op(node.name, tuple(values), (), (Choice((None,) * len(values), ()),)), event, node, node.results)

    # --- stages ---

    def stage(self, node: StageNode) -> None:
        """Add a call of a stage."""
        measured, sizes, syms = node.measured, node.sizes, self.operands_of(node)
        first = node.region is None or all(event.region != node.region for event in self.events)
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        tensors, results = [r.tensor for r in node.results], node.results
        out_cuts = [self.cuts_of(p, t, own) for t, p, own in results]
        choices = [self.option(node, option, self.needs(option, values, syms), out_cuts) for option in node.options]
        if node.again and (first or node.own):  # its backward starts over from its inputs, so they are kept
            kept = [[self.values[v].local_bytes(k, self.n) for v, k in zip(values, c.needs)] for c in choices]
            choices = [replace(c, saved=c.saved + sum(own)) for c, own in zip(choices, kept)]
        produced = [
            self.patterned(t, f"{node.name}[{node.index}]", own, cuts, node.options[0].name is None, p)
            for (t, p, own), cuts in zip(results, out_cuts)
        ]
        event = Event(
            "stage", node.index, node.name, operands=syms, sizes=sizes, flops=measured.flops,
            memory=(measured.work, measured.saved), touched=measured.touched, random=measured.random,
            largest=measured.largest, grad=any(t.requires_grad for t in tensors), constants=node.constants,
            made=node.made, own=node.own, operations=measured.operations,
        )  # fmt: skip
        self.add(Op(node.name, tuple(values), tuple(produced), tuple(choices)), event, node, tensors)

    def operands_of(self, node: StageNode) -> list[Sym | None]:
        """The operands of a stage. Its facts are noted, and the edges of operands that it writes into."""
        given = map(self.sym, node.given)
        self.facts.append(NodeFacts(node, [None if s is None else s.value for s in given]))
        for t, error in node.nested:
            if self.sym(t) is not None:
                raise error
        self.compiled |= dict.fromkeys(node.compiled)
        syms = [self.sym(t) for t in node.operands]
        self.used(node.operands, syms)
        for s, (written, before) in zip(syms, node.writes):
            if s is not None and written:
                self.edges[s.value].add(before)
        return syms

    def option(
        self, node: StageNode, option: Option, needs: tuple[Layout, ...], out_cuts: Sequence[Mapping[str, Cut]]
    ) -> Choice:
        """The choice of a stage sharded along one dim, or replicated."""
        measured, results = node.measured, node.results
        share, sends = option.share(self.n), measured.sends.get(option.name, CommBytes())
        passing = adding_up(option.onto, results[0].tensor, results[0].sizes, self.n) if option.onto else None
        return Choice(
            needs,
            tuple(None if option.lands is None else c.get(option.lands) for c in out_cuts),
            work=int(measured.work * share) + (results[0].tensor.nbytes if option.onto else 0),
            saved=int(measured.saved * share),
            rank=int(option.last_resort),
            bytes=sum(nbytes for nbytes, _ in sends.forward.values()) + (max(passing.forward) if passing else 0),
            calls=sum(calls for _, calls in sends.forward.values()) + (passing is not None),
            execution=Execution(option, sends, measured.surplus.get(option.name, 0.0), passing),
        )

    def cuts_of(self, p: TensorPattern, t: Ref, sizes: Mapping[str, int]) -> dict[str, Cut]:
        """The dims of a pattern that a tensor may be sharded along, and their cuts."""
        cuts = {}
        for name in p.names:
            cut = cut_for(p, t.shape, name, sizes)
            if cut is not None and sizes[name] > 1 and fits_fold(p, name, sizes, self.n):
                cuts[name] = cut
        return cuts

    def patterned(
        self, t: Ref, name: str, sizes: Mapping[str, int], cuts: Mapping[str, Cut], whole: bool, p: TensorPattern
    ) -> int:
        """Track a tensor with a pattern as a new value, which may be sharded along the dims of `cuts`."""
        names = {cut: dim for dim, cut in cuts.items()}
        return self.value(t, name, {cut: sizes[dim] for cut, dim in names.items()}, names, whole, letters_in(p))

    def needs(self, option: Option, values: Iterable[int], syms: list[Sym | None]) -> tuple[Layout, ...]:
        """The layout of each value that an option of a stage needs."""
        found = []
        for v in values:
            need: set[Layout] = set()
            for sym, cut in zip(syms, option.cuts):
                if sym is None or sym.value != v:
                    continue
                if cut is not None and cut not in sym.cuts.values():
                    self.offer_spare(sym, cut)
                need.add(next((of for of, own in sym.cuts.items() if own == cut), None) if cut else None)
            # two arguments that need different layouts of one value: it is gathered, then split for each
            found.append(need.pop() if len(need) == 1 else None)
        return tuple(found)

    # --- the model's own inputs and outputs ---

    def root_inputs(self, given: Mapping[str, Cut]) -> None:
        taken = self.record.parameters
        for name in given.keys() - set(taken):
            raise NotationError(
                f"given= has {name!r}, which is not a tensor argument of the model; its tensor arguments are "
                f"{', '.join(taken)}"
                if taken
                else f"given= has {name!r}: the stages need a root pattern that declares it"
            )
        for param, t, pattern in self.record.inputs:
            cuts, home = self.cuts_of(pattern, t, self.root_sizes), None
            if param in given:
                home = given[param]
                if home not in cuts.values():
                    raise NotationError(
                        f"input {param!r} arrives as {given[param].placement()}, which '{pattern}' cannot express"
                    )
            index = self.patterned(t, param, self.root_sizes, cuts, home is None, pattern)
            self.values[index] = replace(self.values[index], home=(home,))
            self.inputs[param] = index

    def root_outputs(self, gather: bool) -> None:
        for position, t in enumerate(self.record.outputs):
            if (sym := self.sym(t)) is None:
                continue
            self.used([t], [sym])
            cuts = [] if gather else [of for of, own in sym.cuts.items() if not own.joined]  # a DTensor has none
            choices = [Choice((of,), (), rank=int(is_batch(self.names[sym.value][of]))) for of in cuts]
            event = Event("output", position, "output", operands=[sym], grad=t.requires_grad)
            self.add(Op("output", (sym.value,), (), tuple(choices or [Choice((None,), ())])), event, None, [t])

    # --- the result ---

    def leave_out_dead_ends(self) -> None:
        """Note which results get no gradient from the outputs: those detached or unused later."""
        reached = self.record.reached
        for k, (op, event, made) in enumerate(zip(self.ops, self.events, self.made)):
            asked = [bool(edges & reached) for edges in made]
            event.grad &= any(asked)
            self.ops[k] = replace(op, choices=tuple(with_asked(c, asked) for c in op.choices))
        self.grads = [bool(edges & reached) for edges in self.edges]

    def trace(self, resident: int = 0) -> Trace:
        """The planner's problem; `resident`: bytes that each rank holds in any case."""
        self.leave_out_dead_ends()
        self.values = [replace(value, apart=self.apart(v)) for v, value in enumerate(self.values)]
        return Trace(
            self.values, self.grads, self.names, self.ops, self.events, self.inputs, self.record.random, resident,
            facts=self.facts, sizes=self.root_sizes, compiled=[*self.compiled], tracked=self.tracked,
            record=self.record,
        )  # fmt: skip


def with_asked(c: Choice, asked: Sequence[bool]) -> Choice:
    """A choice whose backward traffic counts the results that get a gradient."""
    passing = c.execution and c.execution.passing
    return replace(c, execution=replace(c.execution, passing=passing.where(asked))) if passing else c


def adding_up(along: str, t: Ref, sizes: Mapping[str, int], n: int) -> Passing:
    """The reduce-scatter that adds up a stage's results, one term from each rank, and shards the sum along a dim."""
    value = Value("", ((along, sizes[along]),), t.element_size(), numel=t.numel())
    there = MOVES["reduce_scatter"].sent(value, None, along, n)
    return Passing("reduce_scatter", "gather", tuple(there), tuple(MOVES["gather"].sent(value, along, None, n)))


def letters_in(p: TensorPattern) -> list[str]:
    """The name of each axis of a tensor in a pattern; a fold has the name of its last dim."""
    return [axis[-1] if axis else "" for axis in p.axes]
