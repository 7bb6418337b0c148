"""A forward as data: nodes over references to tensors. Recording writes it, planning decides on it, a run follows it.

A node is a call of a stage, an operation between stages, or an output. Whatever it is, it has *offers*: ways to run on
this rank's parts. An offer says in which cut each operand must be and each result is, what it sends inside, and how it
runs. The planner chooses one offer for each node; the decision is written on the node itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsp.comm.layout import Axis, Cut
from dsp.core.torch_calls import GlueError, Operand
from dsp.core.torch_traits import Traits
from dsp.planner import Value
from dsp.stages.methods import NO_METHODS, MethodCost
from dsp.stages.notation import BATCH_NAMES, TensorPattern
from dsp.stages.stage import Option, Stage
from dsp.support.private import checkpoint_frame
from dsp.support.python_state import Path
from dsp.support.tensors import ByTensor, memory

Layout = Cut | None  # None: replicated
MOST = 64  # the results that an operation may have, where nobody knows how many it has


@dataclass(eq=False)
class Ref(Operand):
    """A tensor of a forward, with its global shape; offers say its cuts, so `cut` stays None.

    number: identifies it in its record; memory: a number that it shares with its views; gradient: the reference to its
    gradient, once a hook asked for that; base: its own, or that of which it is a view; maker: of a view, the node that
    made it; detached: the forward detached it.
    """

    number: int = -1
    dtype: torch.dtype = torch.float32
    memory: int = -1
    requires_grad: bool = False
    gradient: Ref | None = None
    base: Base = None  # type: ignore[assignment]  # the offers pass sets it
    maker: Node | None = None
    detached: bool = False
    view_cuts: dict[Cut, Layout] = field(default_factory=dict)  # by cut of the base

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cut_under(self, base_cut: Layout) -> Layout:
        """The cut of this tensor when its base has `base_cut`; None if it has none then, or the base is replicated."""
        if self.maker is None or base_cut is None:
            return base_cut
        if base_cut not in self.view_cuts:
            parent = self.maker.operands[0]
            assert isinstance(parent, Ref)
            cut = parent.cut_under(base_cut)
            view_cut = self.maker.view_cut
            self.view_cuts[base_cut] = None if cut is None or view_cut is None else view_cut(cut)
        return self.view_cuts[base_cut]

    def base_cut(self, cut: Layout) -> Layout:
        """The cut of the base under which this tensor has `cut`; None if there is none, or `cut` is None.

        Under a cut of the base that a view cannot have, such as one through a fold, it is not replicated either.
        """
        return None if cut is None else next((c for c in self.base.cuts if self.cut_under(c) == cut), None)


@dataclass(eq=False)
class Base:
    """A tensor that is no view, with all its views: the planner moves them as one.

    cuts: those that it may have, with the length that is shared out; batch: those that divide the batch; arrival: of an
    input, the layouts in which it may arrive at no cost; last_write: the last node that writes into its memory, if
    others share that; replicable: it may be replicated without a gather; free: every rank can make it without
    communication; persistent: an earlier call left it.
    """

    ref: Ref
    cuts: dict[Cut, Any] = field(default_factory=dict)
    batch: set[Cut] = field(default_factory=set)
    arrival: tuple[Layout, ...] = ()
    last_write: Node | None = None
    replicable: bool = False
    free: bool = False
    persistent: bool = False

    def allow(self, cut: Cut, batch: bool = False) -> None:
        if cut not in self.cuts:
            self.cuts[cut] = cut.extent(self.ref.shape[cut.dim])
            self.batch.update([cut] if batch else [])

    def arrive(self, cut: Layout) -> None:
        """Let this be a tensor that a forward finds in a layout: an input, or what an earlier call left."""
        if cut is not None:
            self.allow(cut)
        self.arrival, self.replicable = (cut,), cut is None


class LocalFunction(Protocol):
    """The function of an offer, for one rank and one call."""

    def __call__(self, axis: Axis, func: Any, args: Any, kwargs: Any) -> Callable[[list[Tensor]], Any]:
        """Return a function from the parts of the operands to the parts of the results."""


class CollectivePart(NamedTuple):
    """The part of a tensor in a collective inside an offer: bytes that each rank sends, and sends in backward.

    operand, result: the numbers of the tensors between which it lies (None: all of them); it has a backward if both get
    a gradient; move: of a switch that the offer makes in pieces.
    """

    sent: tuple[int, ...]
    back: tuple[int, ...]
    operand: int | None = None
    result: int | None = None
    move: Relayout | None = None


class Collective(NamedTuple):
    """A collective that an offer makes inside: its kind, that of its adjoint, and what it carries.

    early: it runs before the operation saves anything for backward; calls: the pieces in which it is made.
    """

    kind: str
    adjoint: str
    parts: tuple[CollectivePart, ...]
    early: bool = False
    calls: int = 1


@dataclass(frozen=True)
class Offer:
    """A way to run a node on parts.

    needs, gives: the cuts of its operands and results; sizes: the global length of each result along its cut, where the
    record does not say; collectives: those inside; last_resort: it shards the batch; local: makes the function that
    runs on parts (None: the node's call runs on them unchanged); option: of a stage, the dim that it is sharded along;
    takes_empty: of a stage, its function takes empty parts, and gives results in whatever layouts `gives` has; methods:
    the cost of its modules that communicate themselves.
    """

    needs: tuple[Layout, ...]
    gives: tuple[Layout, ...] = ()
    sizes: tuple[int | None, ...] = ()
    collectives: tuple[Collective, ...] = ()
    last_resort: bool = False
    local: LocalFunction | None = None
    option: Option | None = None
    takes_empty: bool = False
    methods: MethodCost = field(default=NO_METHODS, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes that the busiest rank sends inside."""
        nbytes = max(map(sum, zip(*[part.sent for c in self.collectives for part in c.parts])), default=0)
        return nbytes + sum(sent for sent, _ in self.methods.sends.forward.values())

    @property
    def calls(self) -> int:
        return sum(c.calls for c in self.collectives) + sum(calls for _, calls in self.methods.sends.forward.values())


class Operation(NamedTuple):
    """The call of an operation, with references in the place of tensors."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Cost(NamedTuple):
    """The cost of a node on one process: FLOPs; bytes read and written, of the largest tensor it makes, of its work,
    and kept for backward.

    in_methods: bytes touched in modules of a stage that communicate themselves; operations: those that are not views;
    recomputed: it runs again in backward; restarts: so does a checkpoint of which it is the first node, from its
    operands, which are kept; itself: the stage is such a checkpoint; parameters: it reads parameters alone; numel:
    elements of the largest tensor.
    """

    flops: int = 0
    touched: int = 0
    largest: int = 0
    work: int = 0
    saved: int = 0
    in_methods: int = 0
    operations: int = 0
    recomputed: bool = False
    restarts: bool = False
    itself: bool = False
    parameters: bool = False
    numel: int = 0


FREE = Cost()  # of a node that nobody measured


class BoundStage(NamedTuple):
    """The call of a stage: the sizes of its dims, and the dims that it can be sharded along."""

    stage: Stage
    sizes: dict[str, int]
    options: list[Option]


class Relayout(NamedTuple):
    """A copy of a base in another layout, made before a node."""

    base: Base
    src: Layout
    dst: Layout


class RegionPlace(NamedTuple):
    """The place of a node in an activation checkpoint: how many tensors that saved before the node, and after it."""

    region: int
    before: int
    after: int


@dataclass(eq=False)
class Node:
    """A node, and, once it is planned, the decision: an offer, the moves before it, and those of its results.

    Its call. kind: "stage", "operation", "output", or "plain" (functions of plain tensors, where they were measured);
    name: the path of the stage, or the plain name of the function; operands: a `Ref`, or, of a tensor that no plan
    shards, its shape; line, module: the line of the user's code, and the path of the module that runs it, where they
    were measured; no_grad: of a stage, it ran in no_grad.

    Its nature. in_place: it writes into its first operand, and returns that or nothing; writes: the operands that it
    writes into; identity: it returned its first operand, unchanged; view: it is one in the plan, of its first operand,
    and view_cut leads from a cut of that to one of the result; rearranges: it makes no new numbers; loose: a copy, but
    a view where memory allows, as a reshape; kin: the results that share memory with others on one device
    (`dsp.core.writes.kin_of`); kin_unknown: no rank can tell; draws: random numbers (None: nobody knows); dynamic: data
    may say the sizes of its results; by_sizes: its node for others than its own; constants: of a stage, the numbers
    that it returned beside tensors; stateful: of a stage, it wrote to what its modules keep.

    Its surroundings. checkpointed: it lies in an activation checkpoint; regions: the places in the checkpoints around
    it, the outermost first; operand_grads, result_grads: through it these get a gradient from the outputs; cost: of its
    run on one process, if measured; methods: of a stage, the cost of its modules that communicate themselves, by the
    dim that it is sharded along.

    The decision. offers: the ways to run it; offer: that which was chosen; moves: before it; push: for each result, the
    layout to which it is switched as soon as it is made (None: none); like: the planned node whose decision it follows,
    since it differs from that in plain numbers alone.
    """

    kind: str
    name: str
    operands: list[Operand]
    call: Operation | BoundStage | None = None
    results: list[Ref] = field(default_factory=list)
    line: str = ""
    module: str = ""
    no_grad: bool = False

    in_place: bool = False
    writes: tuple[int, ...] = ()
    identity: bool = False
    view: bool = False
    view_cut: Callable[[Cut], Layout] | None = None
    rearranges: bool = False
    loose: bool = False
    kin: tuple[tuple[int, int], ...] = ()
    kin_unknown: bool = False
    draws: bool | None = False
    dynamic: bool = False
    by_sizes: dict[tuple[torch.Size, ...], Node] = field(default_factory=dict)
    constants: list[Any] | None = None
    stateful: bool = False

    checkpointed: bool = False
    regions: tuple[RegionPlace, ...] = ()
    operand_grads: tuple[bool, ...] = ()
    result_grads: tuple[bool, ...] = ()
    cost: Cost = FREE
    methods: dict[str | None, MethodCost] = field(default_factory=dict)

    offers: list[Offer] = field(default_factory=list)
    offer: Offer | None = None
    moves: list[Relayout] = field(default_factory=list)
    push: list[Layout] = field(default_factory=list)
    like: Node | None = None

    @property
    def refs(self) -> list[Ref]:
        return [t for t in self.operands if isinstance(t, Ref)]

    @property
    def bases(self) -> list[Base]:
        return list(dict.fromkeys(t.base for t in self.refs))


def replicated(node: Node, results: int = 0) -> Offer:
    """The offer that every operation has: on replicated tensors. results: their number, if it is known."""
    return Offer((None,) * len(node.operands), (None,) * (results or MOST))


class Driver(Protocol):
    """The object that leads a forward past its nodes: while it is recorded, or while it runs."""

    axis: Axis

    def operation(self, func: Any, traits: Traits, args: Any, kwargs: Any, first: Any = None) -> Any:
        """The result of an operation; `first` counts the turns of nodes with one key (None: the first operand does)."""

    def stage(self, stage: Stage, call: Callable[..., Any], args: Any, kwargs: Any, first: Any) -> Any:
        """The result of a stage, whose module is called by `call`; `first` counts the turns of nodes with one key."""

    def read_in_full(self, t: Any, error: GlueError) -> None:
        """Raise `error` if a carrier that a kernel reads, where no operation shows that, is or may be sharded."""


class Record:
    """The nodes of a forward on `n` ranks, in order. Tensors between stages carry it.

    Its inputs. sizes: the sizes of the dims that the root pattern names; patterns: of the inputs that have one; entry:
    the layout in which each input enters; persistent: carriers of earlier calls that it reads, by their paths;
    input_grads: the inputs that get a gradient from the outputs.

    Its nodes. rules: who knows operations (`dsp.core.offers.Rules`); stages: that it may call; by_key: nodes by what
    identifies them (`dsp.core.keys`); outputs: the numbers of those that are carriers; planned: the nodes have
    decisions, made before the first run; priced: gives the planner's value of a tensor the bytes that its switches
    take, where these are not those of the tensor; saved: the tensors that each checkpoint saves in all (infinite: it
    recomputes all it ran); replans, strays: how often it was planned again, and how many calls have added nodes since
    (`dsp.core.growth`).

    Random numbers. draws: something between stages draws some, or a stage on replicated tensors; stages_draw: some
    stage does, or may; drew: a call drew some that were not foreseen.

    Sources, which make a tensor from none that a plan shards, as `torch.arange`: a rank can make its part alone.
    sources: functions and stages of such nodes; sources_recompute: some are in a checkpoint; no_sources: keys of calls
    that are none, because what they make outlives the forward; filled: of those that fill a plain tensor into which
    something is written, however short it is.

    compiled: the forward calls compiled functions between stages, where torch.compile is off.

    A call that runs. hook_parts: the parts that hooks of others saw in it, with the `Ref` and the cut of each;
    in_flight: by memory, the wait for a switched tensor that has not arrived (`dsp.core.carrier.arrive`).
    """

    driver: Driver

    def __init__(self, n: int, sizes: dict[str, int], rules: Any, stages: Iterable[Stage]) -> None:
        self.n, self.sizes, self.rules, self.stages = n, sizes, rules, frozenset(stages)
        self.nodes: list[Node] = []
        self.bases: list[Base] = []
        self.inputs: dict[str, Ref] = {}
        self.patterns: dict[str, TensorPattern] = {}
        self.entry: dict[str, Layout] = {}
        self.persistent: dict[Path, Ref] = {}
        self.by_key: dict[Any, list[Node]] = {}
        self.outputs: set[int] = set()
        self.memories: dict[Any, int] | None = {}  # numbers of memory; None: nobody asks any more
        self.count = 0  # of references
        self.longest = 0  # bytes of the longest tensor
        self.long = 0  # bytes of the longest base so far, but for free ones
        self.planned = self.draws = self.drew = self.stages_draw = self.sources_recompute = self.compiled = False
        self.sources: set[Any] = set()
        self.no_sources: set[Any] = set()
        self.filled: set[Any] = set()
        self.saved: list[float] = []
        self.input_grads: dict[str, Ref] = {}
        self.priced: Callable[[Value], Value] = lambda value: value
        self.replans = self.strays = 0
        self.hook_parts: ByTensor[tuple[Ref, Layout]] | None = None
        self.in_flight: dict[Any, Callable[[], None]] = {}

    def ref(self, t: Tensor, shape: Sequence[int] | None = None) -> Ref:
        """A new reference to a tensor, of which `t` may be a part; shape: its global shape."""
        self.count += 1
        place = -self.count if self.memories is None else self.memories.setdefault(memory(t), len(self.memories))
        size = torch.Size(t.shape if shape is None else shape)
        ref = Ref(size, None, self.count - 1, t.dtype, place, t.requires_grad)
        self.longest = max(self.longest, ref.nbytes)
        return ref

    def new_base(self, ref: Ref, free: bool = False, persistent: bool = False) -> Base:
        """The base of a tensor that is no view. One that is free, or persistent, makes no other tensor short."""
        ref.base = Base(ref, free=free, persistent=persistent)
        self.bases.append(ref.base)
        self.long = self.long if free or persistent else max(self.long, ref.nbytes)
        return ref.base

    def add(self, key: Any, node: Node) -> Node:
        node.checkpointed = checkpoint_frame() is not None
        self.by_key.setdefault(key, []).append(node)
        self.nodes.append(node)
        if node.kind == "output":
            self.outputs.add(key[1])
        return node

    @property
    def batch(self) -> int:
        return math.prod(size for name, size in self.sizes.items() if name in BATCH_NAMES)

    def leads(self, ref: Ref) -> bool:
        """Tell whether the first dim of a tensor is as long as the batch, and so is taken for it."""
        return self.batch > 1 and ref.shape[:1] == (self.batch,)

    def __str__(self) -> str:
        return "\n".join(text_of(self))


def text_of(record: Record) -> Iterator[str]:
    """A record as text, one line a node: tensors that a plan may shard have numbers, all others only their shapes."""
    numbers: dict[Ref, str] = {}

    def read(t: Operand) -> str:
        return numbers.get(t, str([*t.shape])) if isinstance(t, Ref) else str([*t.shape])

    def result(t: Operand) -> str:
        return f"{numbers.setdefault(t, f'%{len(numbers)}')} {[*t.shape]}" if isinstance(t, Ref) else str([*t.shape])

    for param, ref in record.inputs.items():
        pattern = record.patterns.get(param)
        name = param if pattern is None else f"'{pattern}'" if pattern.param else f"{param} '{pattern}'"
        yield f"{result(ref)} = input {name}"
    for node in record.nodes:
        results = node.operands[:1] if node.in_place or node.identity else node.results
        name = (
            f"stage {node.name} '{node.call.stage.pattern.text}' " if isinstance(node.call, BoundStage) else node.name
        )
        if results:
            operands = ", ".join(map(read, node.operands))
            yield f"{', '.join(map(result, results))} = {name}({operands}){node.line and f'  # {node.line}'}"
    yield f"output {', '.join(read(t) for node in record.nodes if node.kind == 'output' for t in node.operands)}"
