"""Operations of glue as the planner sees them: the layouts that each takes of its operands, by its rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from dsp.calls import GlueError
from dsp.collectives import summed_in
from dsp.layout import Cut
from dsp.plan.backwards import Backwards
from dsp.plan.choices import Choices
from dsp.plan.events import Event, Execution, Passing, Sym, Trace
from dsp.plan.names import letters_of, names_of, of_piece, of_pieces
from dsp.plan.operation import Combo, Offers, Operation
from dsp.plan.record import Cost, Node, OperationNode, Record, Ref, StageNode
from dsp.plan.values import Edges, is_batch
from dsp.planner import Choice, Extent, Layout, Op, length
from dsp.rules import DealtRows, Outcome, source_cuts
from dsp.rules.functions import DENSE, FOLDS, PRODUCTS, draws
from dsp.rules.sources import EXPANDED
from dsp.traits import FILLED, SOURCES, grows

# they may return their argument unchanged
SAME = frozenset(
    """
contiguous flatten ravel to type type_as float double half bfloat16 bool byte short int long cpu cuda real conj
conj_physical resolve_conj resolve_neg positive dropout alpha_dropout feature_dropout feature_alpha_dropout
""".split()
)

JOINS = frozenset({"cat", "concat", "concatenate"})
COMBOS = 256  # combinations of layouts to try; if there are more, only those with one dim for all values


SHORT = 8  # a pass starts again if a share of the longest tensor is this many times a tensor that counted as long
AGAIN = 4  # times that a pass may start again


class Longer(Exception):
    """A tensor is so long that earlier tensors count as short: operations on those may run on replicated tensors."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Saver(NamedTuple):
    """A save for backward in an activation checkpoint: by the event at `at`, or, unless `event`, by an operation
    without an event just before it, whose results have the edges `ends` (None: not known)."""

    region: int
    at: int
    event: bool
    ends: Edges | None = None


class Operations(Choices):
    """Offers the choices of operations between stages, by their rules."""

    def __init__(self, record: Record, longest: int = 0, restarts: bool = False) -> None:
        super().__init__(record)
        self.restarts = restarts
        self.longest = longest  # bytes of the longest value so far, or of one known from an earlier pass
        self.held = math.inf  # the fewest bytes that counted as long, so that an operation was not run replicated
        self.folded: dict[int, str] = {}  # memory -> the maker of a view that on shards may be a copy
        self.stretched: set[int] = set()  # values that are expanded from shorter ones
        self.savers: list[Saver] = []
        self.taken: dict[int, Operation] = {}  # op -> an operation that makes one new value
        self.filled: dict[int, Operation] = {}  # number -> new zeros that nothing has used yet

    @classmethod
    def of(cls, record: Record, given: Mapping[str, Cut], gather: bool) -> Operations:
        longest = 0
        for again in range(AGAIN, -1, -1):
            made = cls(record, longest, restarts=bool(again))
            try:
                made.read(given, gather)
                break
            except Longer as longer:  # known only now; the next pass starts with it
                longest = longer.nbytes // SHORT
        return made

    def node(self, node: Node) -> None:
        before = len(self.ops)
        if isinstance(node, StageNode) and node.saves and node.region is not None:
            self.savers.append(Saver(node.region, before, True))
        super().node(node)
        if isinstance(node, OperationNode) and node.cost is not None:
            self.price(node, node.cost, before)

    def operands_of(self, node: StageNode) -> list[Sym | None]:
        self.meet(node.given)
        return super().operands_of(node)

    def value(
        self, t: Ref, name: str, sizes: Mapping[Cut, Extent], names: Mapping[Cut, str], whole: bool,
        letters: Sequence[str], alone: bool = False,
    ) -> int:  # fmt: skip
        """alone: it is made only of replicated tensors, so that every rank may make it in full."""
        if not alone:
            self.grow(t.numel() * t.element_size())
        index = super().value(t, name, sizes, names, whole, letters)
        if alone:
            self.values[index] = replace(self.values[index], alone=True)
        return index

    def alone(self, op: Operation) -> bool:
        """Tell whether all values that an operation reads are made only of replicated tensors."""
        return all(self.values[v].alone for v in op.values)

    def operation(self, node: OperationNode) -> None:
        """Add an operation between stages."""
        name, written, tracked = node.name, node.in_place, node.operands
        self.meet(tracked, written)
        op = Operation(node, self.n, [self.sym(t) for t in tracked])
        self.facts.append(op.facts)
        if written and tracked and (edges := self.edges_of(tracked[0], op.syms[0])) is not None:
            edges.add(node.overwritten)
        if op.values:
            self.used(tracked[written:], op.syms[written:])  # an operand written into had its edge noted above
            self.compiled |= dict.fromkeys(node.compiled)
            itself = node.returned == "tensor" and node.results[0].number == tracked[0].number
            if name in SAME and itself and not draws(name, node.args, node.kwargs):
                op.facts.same = tracked[0].dtype
            elif node.returned != "unsupported":
                self.glue(op)
        elif name in FILLED and node.returned == "tensor":
            self.filled[node.results[0].number] = op
        elif name in SOURCES and tracked and node.returned == "tensor":
            self.source(op, node.results[0], dict.fromkeys(source_cuts(op.frame({})), ""))
        elif node.returned == "tensor" and not written and grows(name, tracked, node.results[0]):
            self.outer(op, node.results[0])

    def sharded(self, t: Ref) -> bool:
        """Tell whether a tensor whose data is read in full may be sharded.

        A tensor computed from replicated ones, such as an expanded mask, is not: from now on it stays replicated.
        """
        sym = self.sym(t)
        return sym is not None and not self.stays_whole(sym.value)

    def stays_whole(self, value: int) -> bool:
        """Keep a value replicated, if it is computed only from replicated tensors; tell whether it is."""
        made = self.of_whole(value)
        for i in made or ():
            whole = [c for c in self.ops[i].choices if not any((*c.needs, *c.gives))]
            self.ops[i] = replace(self.ops[i], choices=tuple(whole))
        return made is not None

    def of_whole(self, value: int) -> set[int] | None:
        """The ops that make a value only from replicated tensors; None if it has other origins."""
        made = next((i for i, op in enumerate(self.ops) if value in op.outputs), None)
        if made is None or self.events[made].kind not in ("source", "glue") or self.events[made].name in FILLED:
            return None
        before = [self.of_whole(v) for v in self.ops[made].inputs]
        return None if None in before else {made}.union(*filter(None, before))

    def meet(self, tensors: Sequence[Ref], written: bool = False) -> None:
        """Decide on new zeros at first use: a source if a sharded tensor is written into them, else replicated."""
        for i, t in enumerate(tensors):
            if (made := self.filled.pop(t.number, None)) is None:
                continue
            if i == 0 and written and any(self.sym(other) is not None for other in tensors):
                self.source(made, t, self.cuts_of_filled(t))
            elif made.alone is not None:
                self.add_whole(made.alone)

    def outer(self, op: Operation, out: Ref) -> None:
        """Add a tensor made of shorter replicated ones: if it is long, each rank may make only its shard."""
        if self.long([out]):
            narrowed = self.narrowed(op)
            names = {cut: self.batch_name if cut.dim == 0 and out.shape[0] == self.batch else "" for cut in narrowed}
            self.source(op, out, names, narrowed)

    def narrowed(self, op: Operation) -> dict[Cut, tuple[Cut | None, ...]]:
        """The cuts of a result that each rank may make from replicated operands, and the cuts of those operands.

        Operands that a plan may shard stay whole.
        """
        found: dict[Cut, tuple[Cut | None, ...]] = {}
        for i, (t, s) in enumerate(zip(op.tracked, op.syms)):
            for cut in (Cut(d) for d, size in enumerate(t.shape) if s is None and size > 1):
                outcome = op.outcome({i: cut})
                if isinstance(outcome, GlueError) or outcome.cut is None or outcome.cut.outer != 1 or outcome.rows:
                    continue
                alone = [cut if j == i else outcome.narrow.get(j) for j in range(len(op.tracked))]
                found.setdefault(outcome.cut, tuple(alone))
        return found

    def source(
        self, op: Operation, out: Ref, cuts: dict[Cut, str],
        narrowed: Mapping[Cut, tuple[Cut | None, ...]] | None = None,
    ) -> None:  # fmt: skip
        """Add a tensor, expanded or filled with a number, of which each rank may make only its shard (`cuts`).

        narrowed: for each cut, those of the replicated operands that it is computed from.
        """
        if not cuts:
            return
        sizes = {cut: cut.extent(out.shape[cut.dim]) for cut in cuts}
        name = f"{op.name} {list(out.shape)}"
        value = self.value(out, name, sizes, cuts, True, [""] * out.ndim, alone=bool(narrowed))
        if op.name in EXPANDED:
            self.stretched.add(value)
        elif op.name in FILLED:  # it will be written into, so a shard split from a full copy would not do
            self.values[value] = replace(self.values[value], fixed=True)
        ways = {cut: Execution(source=cut, narrowed=narrowed[cut] if narrowed else ()) for cut in cuts}
        choices = [Choice((), (cut,), rank=int(is_batch(cuts[cut])), execution=way) for cut, way in ways.items()]
        made = Op(op.name, (), (value,), (*choices, Choice((), (None,))))
        self.add(made, Event("source", op.index, op.name), op.node)

    def glue(self, op: Operation) -> None:
        """Add an operation on tensors that may be sharded."""
        op.outputs = [*op.node.results]
        if op.name in DENSE and op.outputs[0].memory != op.tracked[0].memory:
            op.facts.fresh = True
        if not op.outputs and op.into is not None:
            op.outputs = [op.tracked[0]]  # x[...] = y
        if not op.outputs and not op.written:
            if op.node.returned == "nothing" or op.name.startswith("distributed."):  # async_op=True returns a Work
                self.gathers(op)
            elif op.name not in ("__setattr__", "set"):
                self.reads(op)
            return
        if op.node.kwargs.get("out") is not None:
            raise op.frame({}).refuse("out= has no rule for a sharded tensor")
        if op.into is not None:
            if (how := self.folded.get(op.tracked[0].memory)) is not None:
                raise op.unfolded(how)
            self.fix(op.tracked[0], op.into.value)
        if op.name in FOLDS:
            self.fold(op.name, op.outputs[0], op.tracked[0])
        self.offer(op, self.found(op))

    def offer(self, op: Operation, found: Offers) -> None:
        """Add an operation with its offers: as a view, or with values of its own."""
        if found.view and op.outputs:
            found.view = self.is_view(op.outputs[0], op.tracked[0], found.viewed)
        if found.view and self.torn(op):
            found = self.opened(op)
            found.view = False
        if found.viewed and not found.view:
            op.facts.copied = True
        if found.view and len(op.outputs) == 1 and len(op.values) == 1:
            self.follow_view(op, found)
        else:
            self.make(op, found)

    def reads(self, op: Operation) -> None:
        """Add an operation that reads numbers from sharded tensors."""
        if not self.record.data:
            raise GlueError(
                f"{op.name}() between stages reads values of a sharded tensor; compute it inside a stage, or from "
                "replicated inputs"
            )
        self.gathers(op)

    def gathers(self, op: Operation) -> None:
        """Add an operation without results, for which a run gathers its tensors."""
        event = Event("glue", op.index, op.name, operands=op.syms)
        self.add(Op(op.name, tuple(op.values), (), (Choice((None,) * len(op.values), ()),)), event, op.node)

    def found(self, op: Operation) -> Offers:
        """The offers of an operation."""
        found = self.closed(op)
        if found.narrow:  # try other dims
            found = self.opened(op)
        if found.sent_by_one and op.name in ("getitem", "select") and not self.long(op.tracked):
            found.choices.append(Choice((None,), (None,) * len(op.outputs)))  # gathered once for all steps of a loop
        if not found.choices:
            self.run_whole(op, found, [] if op.written else op.outputs)
        elif op.outputs and not (op.written or found.sizes or found.parts) and self.long(op.outputs):
            # its operands are replicated anyway: a long result is split for free
            found.choices.clear()
            self.run_whole(op, found, op.outputs)
        read = [t for t, s in zip(op.tracked, op.syms) if s is not None]  # weights are replicated anyway
        made = () if op.stretches else op.outputs
        may_be_whole = len(found.parts) < len(found.choices)
        if self.alone(op):
            return self.by_weights(op, found)
        if may_be_whole and any(c.rank == 0 for c in found.parts) and self.long((*read, *made)):
            # no tensor longer than a rank's share of the longest runs replicated without need
            found.choices = found.parts
        return found

    def by_weights(self, op: Operation, found: Offers) -> Offers:
        """Add the cuts that weights bring to a result made of replicated tensors, as a bias is cut along heads."""
        if len(op.outputs) == 1 and not op.written:
            for cut, narrowed in self.narrowed(op).items():
                if cut not in found.sizes:
                    found.sizes[cut], found.names[cut] = op.outputs[0].shape[cut.dim], ""
                    execution = Execution(narrowed=narrowed)
                    found.choices.append(Choice((None,) * len(op.values), (cut,), execution=execution))
        return found

    def closed(self, op: Operation) -> Offers:
        """The offers along dims that are layouts already; short operands may be gathered."""
        if op.written and op.into is None:  # a write into a replicated tensor needs replicated operands
            return Offers()
        if op.name in PRODUCTS:  # one operand may be gathered, or both switched to a dim that the product does not sum
            return self.opened(op)
        self.align(op.tracked, op.syms)
        largest = max((t.numel() for t in op.outputs), default=0)
        small = {s.value for s, t in zip(op.syms, op.tracked) if s is not None and 2 * t.numel() <= largest}
        return self.ways(op, lambda v: self.whole[v] or v in small)

    def opened(self, op: Operation) -> Offers:
        """The offers along all dims, with any operand gathered."""
        for s in op.syms:
            if s is not None:
                self.offer_spare(s)
        return self.ways(op, lambda v: True)

    def is_view(self, out: Ref, x: Ref, viewed: bool) -> bool:
        """Tell whether a result that looks like a view (by its rule, if `viewed`) is one."""
        # in a run on shards memory does not decide: other ranks may see it differently
        return (viewed and self.record.data) or out.memory == x.memory

    def torn(self, op: Operation) -> bool:
        """Tell whether it splits a dim where chunks would not end: into heads whose number N does not divide.

        A value of its own can be sharded along the heads; a view could not.
        """
        if len(op.tracked) > 1 or len(op.outputs) > 1:
            return False
        old, new = op.tracked[0].shape, op.outputs[0].shape
        for cut in op.first.spare.values():
            if cut.outer == 1 and first_part(old, new, cut.dim) and isinstance(op.outcome({0: cut}), GlueError):
                return True
        return first_part(old, new, 0) == self.batch and self.batch % self.n > 0

    def follow_view(self, op: Operation, found: Offers) -> None:
        """Track the result as a view of the operand's value."""
        mapped = {c.needs[0]: c.gives[0] for c in found.choices if c.needs[0] and c.gives[0]}
        spare = {}
        for cut, own in op.first.spare.items():
            moved = op.outcome({i: own for i, s in enumerate(op.syms) if s is not None})
            if not isinstance(moved, GlueError) and moved.cut is not None:
                spare[cut] = moved.cut
        self.track(op.outputs[0], Sym(op.first.value, mapped, spare))
        self.viewed.add(op.first.value)

    def make(self, op: Operation, found: Offers) -> None:
        """Add an operation whose results are values of their own."""
        choices, produced = found.choices, list[int]()
        if found.sizes:
            whole, letters, alone = any(c.gives[0] is None for c in choices), letters_of(self, op), self.alone(op)
            for t in op.outputs:
                name = f"{op.name} {list(t.shape)}"
                produced.append(self.value(t, name, found.sizes_of(t), found.names, whole, letters(t), alone))
                self.origins |= {(produced[-1], cut): origin for cut, origin in found.origins.items()}
                if op.stretches:
                    self.stretched.add(produced[-1])
                if op.node.base is not None:  # a later use may be another view of the base that was written
                    self.edges[produced[-1]].add(op.node.base)
        else:
            for t in op.outputs:
                self.tracked.pop(t.number, None)
            choices = [replace(c, gives=(), rank=0) for c in choices]
        if len(produced) == 1 and not (self.record.data or op.written or op.name in PRODUCTS):
            self.taken[len(self.ops)] = op
        grad = (op.outputs or op.tracked)[0].requires_grad
        event = Event("glue", op.index, op.name, operands=op.syms, grad=grad, largest=op.largest, written=op.written)
        made = Op(op.name, tuple(op.values), tuple(produced), tuple(choices))
        self.add(made, event, op.node, op.outputs or op.tracked[:1])

    # --- the offers of an operation ---

    def ways(self, op: Operation, gathered: Callable[[int], bool]) -> Offers:
        """The offers for all layouts of the operands; `gathered`: tells which values may be gathered."""
        keys: list[list[Layout]] = []
        for v in op.values:
            own = [s for s in op.syms if s is not None and s.value == v]
            shared = [k for k in own[0].cuts if all(k in s.cuts for s in own)]
            keys.append([*shared, *([None] if gathered(v) else [])])
        found = Offers()
        if any(not k for k in keys):
            found.refusal = op.frame({}).refuse("no dim of it can be sharded")
        combos: Iterable[Combo] = itertools.product(*keys)
        if math.prod(map(len, keys)) > COMBOS:
            combos = self.alike(op, keys)
        for combo in combos:
            if any(combo) and op.into is not None and combo[op.values.index(op.into.value)] is None:
                continue  # a write into a replicated tensor needs replicated operands
            if any(combo):
                self.try_way(op, combo, found)
                if op.name in JOINS:
                    self.try_way(op, combo, found, apart=True)
            elif all(self.whole[v] for v in op.values):
                found.choices.append(Choice(combo, (None,) * len(op.outputs)))
        return found

    def alike(self, op: Operation, keys: Sequence[Sequence[Layout]]) -> list[Combo]:
        """The combinations in which all values that have a dim of one name are sharded along it, or none is."""
        named = [{cut and (self.names[v][cut] or cut): cut for cut in own} for v, own in zip(op.values, keys)]
        shared = [name for name in named[0] if all(name in own or None in own for own in named)]
        return [tuple(own.get(name) for own in named) for name in shared]

    def try_way(self, op: Operation, combo: Combo, found: Offers, apart: bool = False) -> None:
        """Add the rule's outcome for operands in these layouts; `apart`: joined operands stay sharded one by one."""
        cuts = op.cuts(dict(zip(op.values, combo)))
        outcome = op.outcome(cuts, apart)
        if isinstance(outcome, GlueError):
            found.refuse(None if apart else outcome)
            return
        if apart and (outcome.cut is None or not outcome.cut.joined):
            return
        passing = self.passing(op, outcome, cuts)
        sent = 0 if passing is None else passing.most
        found.view &= outcome.cut is not None and outcome.view
        if outcome.cut is None:
            whole = (None,) * len(op.outputs)
            found.choices.append(Choice(combo, whole, bytes=sent, calls=1, execution=Execution(passing=passing)))
            return
        found.viewed |= outcome.view
        batch = self.learn(op, combo, outcome, outcome.cut, found)
        copied = not op.written and any(op.outputs[0].memory == op.tracked[i].memory for i in outcome.rows)
        joined = any(c.joined for c in (outcome.cut, *cuts.values()))
        found.through |= not (sent or copied or joined or batch)
        gives, calls = (outcome.cut,) * len(op.outputs), passing.calls if passing is not None else 0
        surplus = (outcome.load - 1) * op.flops
        execution = Execution(passing=passing, copied=copied, apart=apart, surplus=surplus)
        special = None if execution == Execution() else execution
        found.choices.append(Choice(combo, gives, bytes=sent, calls=calls, rank=int(batch), execution=special))

    def learn(self, op: Operation, combo: Combo, outcome: Outcome, cut: Cut, found: Offers) -> bool:
        """Note the results' layout `cut` in `found`, and tell whether it is along batch."""
        if cut not in found.sizes:
            self.carry(op, combo, cut, found)
        if outcome.rows or outcome.sizes or cut.joined:
            found.resized.add(cut)
        return is_batch(found.names[cut])

    def carry(self, op: Operation, combo: Combo, cut: Cut, found: Offers) -> None:
        """Note the size and the name of the results' dim `cut`, after the operand that brings it."""
        # the model's own name for the dim, if it has one; a name of batch goes first
        laid = [(v, own) for v, own in zip(op.values, combo) if own is not None]
        carry = [(v, own) for v, own in laid if op.brings(v, own) == cut] or laid
        names = [self.names[v][own] for v, own in carry]
        at = min(range(len(names)), key=lambda i: (not is_batch(names[i]), not names[i]))
        (v, own), name = carry[at], names[at]
        known = self.values[v].extent(own)
        extent = max((cut.extent(t.shape[cut.dim]) for t in op.outputs), key=length)
        if op.name in JOINS and cut.joined:
            name = of_pieces(self, op, combo, cut)
        elif own.joined and cut.outer != own.outer:
            name = of_piece(name, own, extent)
        else:
            found.origins[cut] = v, own
        # the size of the dim itself, without dims folded into its chunks
        folded = isinstance(known, int) and isinstance(extent, int) and known and extent % known == 0
        found.sizes[cut], found.names[cut] = known if folded else extent, name

    def passing(self, op: Operation, outcome: Outcome, cuts: Mapping[int, Cut]) -> Passing | None:
        """The traffic inside an operation: sums, numbers of each rank, or rows that other ranks hold."""
        if outcome.numbers is not None:
            wide = max(summed_in(op.tracked[i].dtype).itemsize for i in cuts)
            each = (outcome.numbers.numel * wide * (self.n - 1),) * self.n
            asks = any(op.tracked[i].requires_grad for i in cuts)
            return Passing("gather", "reduce_scatter", each, each if asks else (0,) * self.n)
        if outcome.cut is None:
            size = sum(t.numel() * summed_in(t.dtype).itemsize for t in op.outputs)
            each = (-(-2 * size * (self.n - 1) // self.n),) * self.n
            return Passing("all_reduce", "all_reduce", each, each)
        if outcome.deal is not None:
            return self.dealt(op, outcome.deal, outcome.cut)
        there, back, pieces = [0] * self.n, [0] * self.n, list[tuple[int, ...]]()
        for i in cuts.keys() & outcome.rows.keys():
            t = op.tracked[i]
            for rows in outcome.rows[i]:
                forward, backward = rows.sent(t.shape, t.element_size())
                there = list(map(add, there, forward))
                own = backward if t.requires_grad else [0] * self.n
                back, pieces = list(map(add, back, own)), [*pieces, tuple(own)]
        apart = tuple(pieces) if len(pieces) == len(op.outputs) else ()
        return Passing("rows", "rows", tuple(there), tuple(back), apart) if any(there) else None

    def dealt(self, op: Operation, dealing: DealtRows, cut: Cut) -> Passing | None:
        """The traffic of an operand whose rows are dealt to the ranks, and of results that are sent back."""
        deal, x = dealing.deal, op.tracked[dealing.operand]
        none, after, pieces = (0,) * self.n, list[tuple[int, ...]](), list[tuple[int, ...]]()
        there, back = map(tuple, deal.traffic.sent(x.nbytes // deal.size))
        for i, t in enumerate(op.outputs):
            row = t.nbytes // t.shape[cut.dim] if i in dealing.results else 0
            again, home = map(tuple, deal.traffic.sent(row))
            after += [home] if any(home) else []
            pieces.append(again if t.requires_grad else none)
        back = back if x.requires_grad else none
        return Passing("rows", "rows", there, back, tuple(pieces), tuple(after)) if any(there) else None

    def run_whole(self, op: Operation, found: Offers, outputs: Sequence[Ref]) -> None:
        """Run replicated, as no dim is left to shard: operands are gathered, and results may be split for free."""
        if op.into is not None:
            assert found.refusal is not None
            if not self.whole[op.into.value]:
                raise found.refusal
            self.values[op.into.value] = replace(self.values[op.into.value], fixed=True)
        found.view = False
        found.choices.append(Choice((None,) * len(op.values), (None,) * len(outputs)))
        known, shape = op.first, self.shapes[op.first.value]
        for d, size in enumerate(outputs[0].shape if outputs else ()):
            if size < 2 or any(t.ndim <= d or t.shape[d] != size for t in outputs):
                continue
            same = [cut for cut, own in known.cuts.items() if own == Cut(d) and shape[d : d + 1] == (size,)]
            found.sizes[Cut(d)], found.names[Cut(d)] = size, self.names[known.value][same[0]] if same else ""

    # --- lengths, writes and views ---

    def grow(self, nbytes: int) -> None:
        self.longest = max(self.longest, nbytes)
        if self.restarts and SHORT * self.n * self.held <= self.longest:
            raise Longer(self.longest)

    def long(self, tensors: Iterable[Ref]) -> bool:
        """Tell whether one of the tensors is longer than a rank's share of the longest."""
        nbytes = max(t.numel() * t.element_size() for t in tensors)
        if self.n * nbytes > self.longest:
            self.held = min(self.held, nbytes)
        return self.n * nbytes > self.longest

    def cuts_of_filled(self, t: Ref) -> dict[Cut, str]:
        """The cuts of the dims that new zeros may be sharded along, with the dims' names."""
        cuts = {Cut(d): "" for d, size in enumerate(t.shape) if size > 1}
        if self.batch > 1 and Cut(0) in cuts and t.shape[0] % self.batch == 0:  # the first is batch, or a fold with it
            cuts.pop(Cut(0))
            cuts |= {Cut(0): self.batch_name} if t.shape[0] == self.batch else {Cut(0, self.batch): ""}
        return cuts

    def align(self, tracked: Sequence[Ref], syms: Sequence[Sym | None]) -> None:
        """Let each operand be sharded along the dims that other operands are, where they broadcast together."""
        known = {
            (c.dim - t.ndim, c.outer, t.shape[c.dim])
            for t, s in zip(tracked, syms) if s is not None
            for c in s.cuts.values()
        }  # fmt: skip
        for t, s in zip(tracked, syms):
            for cut in list(s.spare.values()) if s is not None else []:
                if (cut.dim - t.ndim, cut.outer, t.shape[cut.dim]) in known:
                    self.offer_spare(s, cut)  # type: ignore[arg-type]

    def fix(self, t: Ref, value: int) -> None:
        """Note a write in place: if the tensor has views or is one, none of these should be moved."""
        kin = self.sharing.get(t.memory, set()) | {value}
        if len(kin) > 1 or value in self.viewed:
            for v in kin:
                self.values[v] = replace(self.values[v], fixed=True)

    def fold(self, name: str, out: Ref, x: Ref) -> None:
        """Note a view of a tensor that is not contiguous: a shard may have other strides, and be copied instead."""
        if out.memory == x.memory and not x.dense:
            self.folded.setdefault(x.memory, name)

    # --- the cost of operations ---

    def price(self, node: OperationNode, cost: Cost, before: int) -> None:
        """Add the cost of an operation; there are ops from `before` on if a plan may shard its operands."""
        own = len(self.ops) > before
        if node.region is not None and cost.saves:  # without an op it comes after op before - 1
            ends = None if own or node.in_place else {t.edge for t in node.results}
            self.savers.append(Saver(node.region, before, own, ends))
        if own:
            event, op = self.events[-1], self.ops[-1]
            event.flops, event.touched = cost.flops, (cost.touched, 0)
            event.largest = max(event.largest, cost.largest)
            if cost.saved:
                parts = [replace(c, saved=int(cost.saved * op.share(c, self.values, self.n))) for c in op.choices]
                self.ops[-1] = replace(op, choices=tuple(parts))
        elif cost.flops or cost.touched:
            if node.name in FILLED:  # counts if nothing sharded is written into them
                self.filled[node.results[0].number].alone = node
            else:
                self.add_whole(node)

    def add_whole(self, node: OperationNode) -> None:
        """Add an operation on tensors that the plan cannot shard, to the op of those before it in the same module."""
        cost, grad = node.cost, any(t.requires_grad for t in node.results)
        assert cost is not None
        alike = "whole", node.module, grad, node.region
        last = self.events[-1] if self.events else None
        if last is None or (last.kind, last.module, last.grad, last.region) != alike:
            event = Event("whole", node.index, node.name, grad=grad, memory=(cost.work, cost.saved))
            event.flops, event.touched, event.largest = cost.flops, (cost.touched, 0), cost.largest
            self.add(Op(node.name, (), (), (Choice((), (), saved=cost.saved),)), event, node, node.results)
            return
        self.made[-1] += [{t.edge} for t in node.results]
        last.flops, last.largest = last.flops + cost.flops, max(last.largest, cost.largest)
        last.touched = (last.touched[0] + cost.touched, 0)
        if cost.work > last.memory[0]:
            last.name = node.name
        last.memory = max(last.memory[0], cost.work), last.memory[1] + cost.saved
        self.ops[-1] = replace(self.ops[-1], name=last.name, choices=(Choice((), (), saved=last.memory[1]),))

    # --- the result ---

    def leave_views(self) -> None:
        """Keep values that are written in place, earlier or later, as views of their base where possible."""
        for k, op in enumerate(self.ops):
            stay = [c for c in op.choices if not (c.execution and c.execution.copied)]
            if any(self.values[v].fixed for v in (*op.inputs, *op.outputs)) and any(any(c.needs) for c in stay):
                self.ops[k] = replace(op, choices=tuple(stay))
        written = [kin for kin in self.sharing.values() if any(self.values[v].fixed for v in kin)]
        if not written:
            return
        makers = {v: k for k, op in enumerate(self.ops) for v in op.outputs}
        readers: dict[int, list[int]] = {}
        for k, op in enumerate(self.ops):
            for v in {*op.inputs}:
                readers.setdefault(v, []).append(k)
        for kin in written:
            self.together({v: makers[v] for v in kin & makers.keys()}, {v: readers.get(v, []) for v in kin})

    def together(self, makers: Mapping[int, int], readers: Mapping[int, Sequence[int]]) -> None:
        """Let a tensor, its views and the writes into them take one layout: a move in between would miss a write.

        If the tensor is made in no layout that suits its views, its maker switches it to one that suits all readers;
        if there is none, all of them run on replicated tensors. makers, readers: of each value in this memory, the op
        that makes it and those that read it.
        """
        users = {*makers.values(), *(k for v, own in readers.items() for k in own if self.writes(k, v))}
        if any(self.events[k].kind not in ("glue", "source") for k in users):
            return
        if all(self.agree(k, v, users, readers[v]) for v, k in makers.items()):
            return
        for k in users:
            whole = Choice((None,) * len(self.ops[k].inputs), (None,) * len(self.ops[k].outputs))
            self.ops[k] = replace(self.ops[k], choices=(whole,))

    def agree(self, maker: int, value: int, users: Collection[int], readers: Sequence[int]) -> bool:
        """Let all readers of a value take it as its maker may switch it, if none of its own layouts suits `users`.

        Return False if no layout suits all readers.
        """
        op = self.ops[maker]
        made = {c.gives[op.outputs.index(value)] for c in op.choices}
        if self.suiting(made, value, [k for k in readers if k in users]):
            return True
        switched = self.suiting({cut for cut, _ in self.values[value].sizes}, value, readers)
        for k in readers if switched else ():
            at = self.ops[k].inputs.index(value)
            self.ops[k] = replace(self.ops[k], choices=tuple(c for c in self.ops[k].choices if c.needs[at] in switched))
        return bool(switched)

    def writes(self, k: int, value: int) -> bool:
        """Tell whether an op writes into a value."""
        event = self.events[k]
        return event.written and (into := event.operands[0]) is not None and into.value == value

    def suiting(self, layouts: set[Layout], value: int, readers: Iterable[int]) -> set[Layout]:
        """The layouts, of these, in which all readers of a value may take it."""
        for op in (self.ops[k] for k in readers):
            layouts = layouts & {c.needs[op.inputs.index(value)] for c in op.choices}
        return layouts

    def saves(self) -> dict[int, float] | None:
        """The last op of each activation checkpoint that saves something (k - 0.5: between op k - 1 and op k).
        Checkpoints that backward does not reach are left out: they are not recomputed."""
        if not self.record.measured:
            return None
        found, asked = dict[int, float](), set[int]()
        for s in self.savers:
            found[s.region] = s.at if s.event else s.at - 0.5
            if self.events[s.at].grad if s.event else s.ends is None or s.ends & self.record.reached:
                asked.add(s.region)
        return {region: last for region, last in found.items() if region in asked}

    def trace(self, resident: int = 0) -> Trace:
        for number in self.record.kept & self.tracked.keys():  # others may read it when the forward has ended
            self.stays_whole(self.tracked[number].value)
        Backwards(self, self.taken).complete()
        self.leave_views()
        found = super().trace(resident)
        return replace(found, names=names_of(self), stretched=self.stretched, saves=self.saves())


def first_part(old: Sequence[int], new: Sequence[int], d: int) -> int:
    """The size of the first of the dims into which a reshape splits a dim; 0 if it does not split it."""
    before = math.prod(old[:d])
    into = next((new[j] for j in range(len(new)) if math.prod(new[:j]) == before and new[j] > 1), 0)
    return into if 1 < into < old[d] else 0
