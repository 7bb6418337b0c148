"""The writer of a record: it observes a forward as it runs, and keeps none of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dsp.calls import GlueError, replaced, tensor_args
from dsp.layout import Cut
from dsp.lines import line_now
from dsp.plan.record import (
    Cost,
    Input,
    LeftNode,
    Measured,
    Node,
    OperationNode,
    Record,
    Ref,
    Result,
    StageNode,
    WholeNode,
)
from dsp.private import FLEX, StorageWeakRef, base_of, checkpoint_frame, compiled_callers
from dsp.signature import Bound
from dsp.stages import Stage
from dsp.tensors import (
    ByTensor,
    constants_in,
    edge,
    leading_to,
    map_tensors,
    memory,
    overwritten,
    tensors_in,
    version,
)
from dsp.traits import FILLED, SOURCES, grows

UNMEASURED = Measured()  # for a run on real tensors


class Recorder:
    """Writes the record of the forward that it observes."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], data: bool = True) -> None:
        self.record = Record(n, dict(root_sizes), data)
        self.numbers = ByTensor[int]()
        self.count = 0
        self.followed: set[int] = set()  # numbers of the tensors that a plan may shard
        self.filled: set[int] = set()  # those made only of new zeros: replicated, until written into
        self.grown: set[int] = set()  # those made only of replicated tensors
        self.memories: dict[StorageWeakRef, int] = {}
        self.edges: dict[Any, int] = {}
        self.frames: list[Any] = []  # the activation checkpoints
        self.operations = self.stages = 0
        self.module = ""

    # --- references ---

    def follows(self, t: Tensor) -> bool:
        """Tell whether a plan may shard a tensor: a declared input, or a tensor computed from one."""
        return self.numbers.get(t) in self.followed

    def made_of_sharded(self, t: Tensor) -> bool:
        """Tell whether a plan may shard a tensor that is not made only of new zeros."""
        return self.follows(t) and self.numbers.get(t) not in self.filled

    def edge(self, e: Any) -> int | None:
        return None if e is None else self.edges.setdefault(e, len(self.edges))

    def ref(self, t: Tensor, follow: bool = False) -> Ref:
        """A reference to a tensor as it is now; `follow`: it was computed from tensors that a plan may shard."""
        number = self.numbers.get(t)
        if number is None:
            number, self.count = self.count, self.count + 1
            self.numbers[t] = number
        if follow:
            self.followed.add(number)
        found = Ref(tuple(t.shape), None, number, t.dtype, requires_grad=t.requires_grad)
        if number in self.followed:
            self.place(found, t)
            found.edge = self.edge(edge(t))
        return found

    def place(self, ref: Ref, t: Tensor) -> None:
        """Note the memory of a tensor."""
        ref.memory = self.memories.setdefault(memory(t), len(self.memories))
        ref.dense = (t if base_of(t) is None else base_of(t)).is_contiguous()

    # --- the events of a forward ---

    def add(self, node: Node) -> None:
        node.region, node.module, node.line = self.region(), self.module, line_now()
        self.record.nodes.append(node)

    def region(self) -> int | None:
        """The number of the activation checkpoint that is running."""
        frame = checkpoint_frame()
        if frame is None:
            return None
        if not any(f is frame for f in self.frames):
            self.frames.append(frame)
        return next(i for i, f in enumerate(self.frames) if f is frame)

    def root_inputs(self, bound: Iterable[Bound]) -> None:
        """Record the model's own inputs; those with a pattern are declared."""
        bound = list(bound)
        self.record.parameters = [b.param for b in bound]
        declared = [b for b in bound if b.pattern is not None]
        self.record.inputs = [Input(b.param, self.ref(b.tensor, True), b.pattern) for b in declared]  # type: ignore[arg-type]

    def left(self, t: Tensor, cut: Cut) -> None:
        """Record a tensor that an earlier call left sharded."""
        self.add(LeftNode(operands=[self.ref(t, True)], cut=cut))

    def reads(self, tensors: Iterable[Tensor], error: GlueError) -> None:
        """Record an operation that raises if one of these tensors is sharded."""
        refs = [self.ref(t) for t in tensors if self.follows(t)]
        if refs:
            self.add(WholeNode(operands=refs, error=error))

    def operation(self, name: str, args: Any, kwargs: Any, out: Any, in_place: bool, cost: Cost | None = None) -> None:
        """Record an operation between stages that just ran."""
        tensors, results = tensor_args(args, kwargs), tensors_in(out)
        source = is_source(name, tensors, out, in_place)
        follow = source or any(map(self.follows, tensors))
        alone = not any(map(self.made_of_sharded, tensors)) and (name in FILLED or not source)
        node = OperationNode(
            operands=self.operands(tensors, in_place) if follow else [self.ref(t) for t in tensors],
            index=self.operations, name=name, results=[self.ref(t, follow) for t in results],
            returned=returned(out), in_place=in_place, cost=cost,
        )  # fmt: skip
        node.args, node.kwargs = replaced(args, kwargs, iter(node.operands))
        self.operations += 1
        if in_place and tensors:
            node.overwritten = self.edge(overwritten(tensors[0]))
        if follow:
            self.made(node, alone)
            node.compiled = compiled()
            base = base_of((results or tensors)[0]) if in_place and (results or tensors) else None
            node.base = None if base is None else self.edge(edge(base))
        else:  # a tensor that a plan shards may be written into the result later
            for ref, t in zip(node.results, results):
                ref.edge = self.edge(edge(t))
        self.add(node)

    def made(self, node: OperationNode, alone: bool) -> None:
        """Note what an operation made: of new zeros `alone`, or only of replicated tensors."""
        made = {t.number for t in (*node.results, *node.operands[: node.in_place])}
        (self.filled.update if alone else self.filled.difference_update)(made)
        if not node.in_place and self.grown.issuperset(t.number for t in node.operands if t.number in self.followed):
            self.grown |= made

    def operands(self, tensors: Sequence[Tensor], in_place: bool) -> list[Ref]:
        """The operands of an operation on tensors that a plan may shard, which include a tensor that it writes into."""
        written = in_place and bool(tensors) and not self.follows(tensors[0])
        found = [self.ref(t, written and i == 0) for i, t in enumerate(tensors)]
        for ref, t in zip(found, tensors):
            if ref.memory < 0:
                self.place(ref, t)
        return found

    def enter_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        _, bound = stage.signature.bind(args, kwargs)
        sizes = stage.sizes(bound, self.record.root_sizes)
        nested = [(self.ref(t), error) for t, error in stage.signature.nested(args, kwargs) if self.follows(t)]
        node = StageNode(
            operands=[self.ref(b.tensor) for b in bound], given=[self.ref(t) for t in tensors_in((args, kwargs))],
            name=stage.name, pattern=stage.pattern.text, index=self.stages, nested=nested, sizes=sizes,
            compiled=compiled(),
            options=stage.options(bound, sizes, self.record.n),
        )  # fmt: skip
        self.pending = node, stage, bound, [version(b.tensor) for b in bound]

    def apart(self, given: Sequence[Tensor], output: Any) -> Any:
        """A stage's output, in which a replicated argument that the stage returned is replaced by another tensor.

        On a shard the stage returns another tensor too. Later reads of the argument itself find it replicated.
        """
        found = tensors_in(output)
        whole = [any(t is g for g in given) and not self.follows(t) for t in found]
        return map_tensors(output, [t.view_as(t) if w else t for t, w in zip(found, whole)]) if any(whole) else output

    def leave_stage(
        self, output: Any, measured: Measured = UNMEASURED, own: bool = False, again: bool = False, saves: bool = False
    ) -> None:
        """Record that the stage entered last returned."""
        node, stage, bound, versions = self.pending
        del self.pending  # it references the stage's inputs
        self.stages += 1
        node.measured, node.own, node.again, node.saves = measured, own, again, saves
        written = [version(b.tensor) != before for b, before in zip(bound, versions)]
        node.writes = [(w, self.edge(overwritten(b.tensor)) if w else None) for b, w in zip(bound, written)]
        tensors = tensors_in(output)
        for t, p in zip(tensors, stage.outputs(tensors)):
            sizes = stage.result_sizes(t, p, node.sizes, self.record.root_sizes)
            node.results.append(Result(self.ref(t, True), p, sizes))
        node.constants = constants_in(output)
        self.add(node)

    def root_outputs(self, output: Any) -> None:
        """Record that the model returned: the record is complete."""
        ends = tensors_in(output)  # the tensors are kept: nodes of custom functions do not outlive them
        self.record.outputs = [self.ref(t) for t in ends]
        self.reached = leading_to(edge(t) for t in ends)
        self.record.reached = {number for e, number in self.edges.items() if e in self.reached}

    def keep(self, reached: Callable[[], Container[int]]) -> None:
        """Note which tensors made of replicated ones are among the objects that are `reached`, by id."""
        alive = {id(t): number for t, number in self.numbers.items() if number in self.grown}
        held = reached() if alive else ()
        self.record.kept = {number for own, number in alive.items() if own in held}

    def asks(self, t: Tensor) -> bool:
        """Tell whether a tensor gets a gradient from the outputs."""
        return edge(t) in self.reached


def is_source(name: str, tensors: Sequence[Tensor], out: Any, in_place: bool) -> bool:
    """Tell whether each rank may make its part, by itself, of a tensor that an operation made."""
    return isinstance(out, Tensor) and (name in SOURCES or (not in_place and grows(name, tensors, out)))


def compiled() -> tuple[str, ...]:
    """The running functions that torch.compile was given, by name: they are followed uncompiled, as plans report."""
    names = []
    for f in compiled_callers():
        own = getattr(f, "__module__", "") == FLEX  # flex_attention, whose kernel is compiled nevertheless
        names.append("" if own else getattr(f, "__qualname__", type(f).__name__))
    return tuple(names)


def returned(out: Any) -> str:
    """The kind of an operation's return value."""
    if isinstance(out, Tensor):
        return "tensor"
    if out is NotImplemented:  # Python then evaluates x == "a" as False
        return "unsupported"
    if out is None or (isinstance(out, (tuple, list)) and not out):  # an empty tuple or list
        return "nothing"
    return "tensors" if tensors_in(out) else "number"
