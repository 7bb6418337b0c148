"""What a forward does, written down as the planner's problem: values, and the ways of each operation and stage."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add
from typing import Any

from torch import Tensor

from dsp.collectives import summed_in
from dsp.inside import Sends
from dsp.layout import Cut, separable
from dsp.notation import BATCH_NAMES, NotationError, solve_sizes
from dsp.plan.events import Event, Passing, Sym, Trace
from dsp.planner import Choice, Op, Value
from dsp.private import StorageWeakRef, checkpoint_frame
from dsp.rules import (
    RULES,
    SOURCES,
    Frame,
    GlueError,
    Operand,
    Outcome,
    no_rule,
    source_cuts,
    tensor_args,
    with_operands,
)
from dsp.rules.functions import PRODUCTS
from dsp.signature import Bound
from dsp.stages import Stage, cut_for, fits_fold
from dsp.tensors import constants_in, leading_to, memory, node, overwritten, tensors_in


def is_batch(key: str) -> bool:
    return key.rstrip("'") in BATCH_NAMES


# they return their argument where there is nothing to do
SAME = frozenset("contiguous flatten ravel to type type_as float double half bfloat16 real conj resolve_conj".split())


@dataclass
class Ways:
    """How one operation of glue may run: choices for the planner, and where each layout cuts the outputs."""

    choices: list[Choice] = field(default_factory=list)
    cuts: dict[str, Cut] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    resized: set[str] = field(default_factory=set)  # layouts in which each output has a size of its own
    passing: dict[tuple[str | None, ...], Passing] = field(default_factory=dict)  # by what a choice needs
    copied: set[tuple[str | None, ...]] = field(default_factory=set)  # likewise: where what would be a view is a copy
    view: bool = True  # the same data in every layout
    viewed: bool = False  # in some layout
    refusal: GlueError | None = None

    def sizes_of(self, t: Tensor) -> dict[str, int]:
        own = {key: t.shape[cut.dim] // cut.outer for key, cut in self.cuts.items() if key in self.resized}
        return self.sizes | own


class Recorder:
    """Collects the planner's problem from a forward as it runs: on fake tensors (`Tracer`), or for real on shards."""

    def __init__(self, n: int, root_sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.n, self.root_sizes = n, dict(root_sizes)
        self.batch = math.prod(size for name, size in root_sizes.items() if is_batch(name))
        self.values: list[Value] = []
        self.nodes: list[set[Any]] = []  # of autograd, for each value: a write in place may add another
        self.made: list[list[set[Any]]] = []  # likewise, for the outputs of each op
        self.cuts: list[dict[str, Cut]] = []
        self.shapes: list[tuple[int, ...]] = []
        self.sharing: dict[StorageWeakRef, set[int]] = {}  # the values that live in one memory
        self.viewed: set[int] = set()  # values of which there are views
        self.whole: list[bool] = []  # whether a value may be whole without a gather
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.inputs: dict[str, int] = {}
        self.longest = 0  # bytes of the longest value so far
        self.stage_calls = 0
        self.random_glue = False
        self.real = True  # whether the tensors have data
        self.frames: list[Any] = []
        self.saves: dict[int, float] = {}
        self.copies: set[int] = set()
        self.same: set[int] = set()
        self.names: list[str] = []  # of all glue operations

    # --- values ---

    def value(self, t: Tensor, name: str, sizes: Mapping[str, int], cuts: dict[str, Cut], whole: bool) -> int:
        """Track a tensor as a new value. `sizes`: its dims; `cuts`: those along which it may be sharded."""
        self.longest = max(self.longest, t.numel() * t.element_size())
        dims = tuple((k, sizes[k]) for k in cuts)
        self.values.append(Value(name, dims, t.element_size(), numel=t.numel()))
        self.nodes.append({node(t)})
        self.cuts.append(dict(cuts))
        self.shapes.append(tuple(t.shape))
        self.whole.append(whole)
        index = len(self.values) - 1
        self.sharing.setdefault(memory(t), set()).add(index)
        named = {c.dim for c in cuts.values()}
        fresh = {d: self.spare_cut(index, d) for d in range(t.ndim) if d not in named}
        spare = {d: cut for d, cut in fresh.items() if t.shape[d] > cut.outer}
        t._dsp_sym = Sym(index, dict(cuts), spare)  # type: ignore[attr-defined]
        return index

    def sym(self, t: Tensor) -> Sym | None:
        """What is known of a tensor, with the dims of its value that another use has named since."""
        found: Sym | None = getattr(t, "_dsp_sym", None)
        if found is not None:
            known = {cut: key for key, cut in self.cuts[found.value].items()}
            for d in list(found.spare):
                if (key := known.get(self.spare_cut(found.value, d))) is not None:
                    found.cuts[key] = found.spare.pop(d)
        return found

    def spare_cut(self, value: int, d: int) -> Cut:
        """Along a dim that nobody named: the first is a fold with batch, as a rule, which is not for sharding."""
        return Cut(d, self.batch if d == 0 and self.shapes[value][0] % self.batch == 0 else 1)

    def name_spare(self, sym: Sym, wanted: Cut | None = None) -> None:
        """Let a value be sharded along the dims of this tensor that nobody named, or along the one `wanted`."""
        for d, cut in list(sym.spare.items()):
            if wanted is not None and cut != wanted:
                continue
            del sym.spare[d]
            value, known, base = self.values[sym.value], self.cuts[sym.value], self.spare_cut(sym.value, d)
            named = next((key for key, c in known.items() if c == base), None)
            if named is not None:  # by another view of it
                sym.cuts[named] = cut
                continue
            key = f"dim{d}"
            while key in known:
                key += "'"
            extent = self.shapes[sym.value][d] // base.outer
            self.values[sym.value] = replace(value, sizes=(*value.sizes, (key, extent)))
            known[key] = base
            sym.cuts[key] = cut

    def region(self) -> int | None:
        frame = checkpoint_frame()
        if frame is None:
            return None
        if not any(f is frame for f in self.frames):
            self.frames.append(frame)
        return next(i for i, f in enumerate(self.frames) if f is frame)

    # --- glue ---

    def record(self, index: int, name: str, args: Any, kwargs: Any, out: Any, written: bool) -> None:
        """Glue operation number `index`; `written`: in place, into its first operand."""
        self.names.append(name)
        tracked = tensor_args(args, kwargs)
        syms = [self.sym(t) for t in tracked]
        if any(s is not None for s in syms):
            self.used(tracked[written:], syms[written:])  # what is written was as it was, until now
            if written and syms[0] is not None:
                self.nodes[syms[0].value].add(overwritten(tracked[0]))
            if name in SAME and args and out is args[0]:
                self.same.add(index)
                return
            self.glue(index, name, args, kwargs, tracked, syms, out, written)
        elif name in SOURCES and tracked and isinstance(out, Tensor):
            self.source(index, name, args, kwargs, out)

    def source(self, index: int, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        frame = self.frame(name, args, kwargs, {})
        cuts = {f"dim{i}": c for i, c in enumerate(source_cuts(frame))}
        if not cuts:
            return
        sizes = {k: out.shape[c.dim] // c.outer for k, c in cuts.items()}
        value = self.value(out, f"{name} {list(out.shape)}", sizes, cuts, whole=True)
        choices = [Choice((), (k,)) for k in cuts] + [Choice((), (None,))]
        self.add(Op(name, (), (value,), tuple(choices)), Event("source", index, name, source=[*cuts.values(), None]))

    def frame(self, name: str, args: Any, kwargs: Any, cuts: Mapping[int, Cut | None]) -> Frame:
        """The call with Operands for tensors; `cuts` by position among the tensor arguments."""
        operands = iter([Operand(tuple(t.shape), cuts.get(i)) for i, t in enumerate(tensor_args(args, kwargs))])
        converted = tuple(with_operands(a, operands) for a in args)
        return Frame(name, converted, {k: with_operands(v, operands) for k, v in kwargs.items()}, self.n)

    def glue(
        self, index: int, name: str, args: Any, kwargs: Any, tracked: list[Tensor], syms: list[Sym | None], out: Any,
        written: bool,
    ) -> None:  # fmt: skip
        if out is NotImplemented:  # x == "a" is False, says Python then
            return
        outputs = tensors_in(out)
        if not outputs and written and syms[0] is not None:
            outputs = [tracked[0]]  # x[...] = y
        if not outputs and not written:
            # nothing, taken apart, is nothing
            if out is None or (isinstance(out, (tuple, list)) and not out) or name in ("__setattr__", "set"):
                return
            if self.real:  # of which the run finds them whole
                read = tuple(dict.fromkeys(s.value for s in syms if s is not None))
                event = Event("glue", index, name, operands=syms)
                self.add(Op(name, read, (), (Choice((None,) * len(read), ()),)), event)
                return
            raise GlueError(
                f"{name}() between stages reads values of a sharded tensor; compute it inside a stage, or from the "
                "whole inputs"
            )
        if kwargs.get("out") is not None:
            raise self.frame(name, args, kwargs, {}).refuse("out= has no rule for a sharded tensor")
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        shared = written and syms[0] is not None and self.fix(tracked[0], syms[0].value)

        def opened() -> Ways:
            """Along the dims that nobody named, too, or with some of its operands gathered."""
            for s in syms:
                if s is not None:
                    self.name_spare(s)
            return self.ways(name, args, kwargs, tracked, syms, values, outputs, lambda v: True)

        if written and syms[0] is None:  # into a tensor that is whole: so must be what it writes
            found = Ways()
        elif name in PRODUCTS:  # one operand may be gathered, or both switched to a dim that the product keeps apart
            found = opened()
        else:
            self.align(tracked, syms)
            largest = max((t.numel() for t in outputs), default=0)
            small = {s.value for s, t in zip(syms, tracked) if s is not None and 2 * t.numel() <= largest}
            found = self.ways(name, args, kwargs, tracked, syms, values, outputs, lambda v: self.whole[v] or v in small)
        if (found.refusal or found.passing or found.copied) and all(
            c.rank or c.bytes or c.needs in found.copied or not any(c.needs) for c in found.choices
        ):
            # nothing but batch, or what is whole already, gets through as it is: what if it came along another dim?
            found = opened()
        if not found.choices:
            if written and syms[0] is not None:
                assert found.refusal is not None
                raise found.refusal
            self.run_whole(found, syms, values, [] if written else outputs)
        elif (
            outputs
            and not (written or found.cuts or any(any(c.needs) for c in found.choices))
            and self.n * max(t.numel() * t.element_size() for t in outputs) > self.longest
        ):
            # its operands are whole anyway: what it makes is split for nothing, if it is long
            found.choices.clear()
            self.run_whole(found, syms, values, outputs)
        size = max(t.numel() * t.element_size() for t in (*tracked, *outputs))
        if size * self.n > self.longest and any(c.rank == 0 and any(c.needs) for c in found.choices):
            # nothing longer than a share of the longest tensor runs whole where it need not
            found.choices = [c for c in found.choices if any(c.needs)]
        found.view &= not found.viewed or self.is_view(outputs[0], tracked[0])
        if found.viewed and not found.view:
            self.copies.add(index)
        if found.view and len(outputs) == 1 and len(values) == 1:
            sym = next(s for s in syms if s is not None)
            mapped = {c.needs[0]: found.cuts[c.gives[0]] for c in found.choices if c.needs[0] and c.gives[0]}
            spare = {}
            for d, cut in sym.spare.items():
                moved = self.outcome(name, args, kwargs, {i: cut for i, s in enumerate(syms) if s is not None})
                if not isinstance(moved, GlueError) and moved.cut is not None:
                    spare[d] = moved.cut
            outputs[0]._dsp_sym = Sym(sym.value, mapped, spare)  # type: ignore[attr-defined]
            self.viewed.add(sym.value)
            return
        choices = found.choices
        if not found.cuts:
            produced: list[int] = []
            for t in outputs:
                if hasattr(t, "_dsp_sym"):
                    del t._dsp_sym
            choices = [Choice(c.needs, (), bytes=c.bytes, calls=c.calls) for c in choices]
        else:
            whole = any(c.gives[0] is None for c in choices)
            produced = [
                self.value(t, f"{name} {list(t.shape)}", found.sizes_of(t), found.cuts, whole) for t in outputs
            ]
        event = Event("glue", index, name, operands=syms, grad=(outputs or tracked)[0].requires_grad, shared=shared)
        event.passing = [found.passing.get(c.needs) for c in choices]
        event.copied = [c.needs in found.copied for c in choices]
        self.add(Op(name, tuple(values), tuple(produced), tuple(choices)), event, outputs or tracked[:1])

    def align(self, tracked: list[Tensor], syms: list[Sym | None]) -> None:
        """What one operand may be sharded along, the others may be, too, where their dims meet."""
        known = {
            (c.dim - t.ndim, c.outer, t.shape[c.dim])
            for t, s in zip(tracked, syms) if s is not None
            for c in s.cuts.values()
        }  # fmt: skip
        for t, s in zip(tracked, syms):
            for cut in list(s.spare.values()) if s is not None else []:
                if (cut.dim - t.ndim, cut.outer, t.shape[cut.dim]) in known:
                    self.name_spare(s, cut)  # type: ignore[arg-type]

    def fix(self, t: Tensor, value: int) -> bool:
        """A tensor is written in place: if it has views or is one, all of them had better stay where they are."""
        kin = self.sharing.get(memory(t), set()) | {value}
        if len(kin) == 1 and value not in self.viewed:
            return False
        for v in kin:
            self.values[v] = replace(self.values[v], fixed=True)
        return True

    def is_view(self, out: Tensor, x: Tensor) -> bool:
        """Whether what looks like a view is one. A run on shards cannot tell: the next rank may see it otherwise."""
        return True

    def outcome(self, name: str, args: Any, kwargs: Any, cuts: Mapping[int, Cut | None]) -> Outcome | GlueError:
        try:
            return RULES.get(name, no_rule)(self.frame(name, args, kwargs, cuts))
        except GlueError as error:
            return error

    def ways(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        tracked: list[Tensor],
        syms: list[Sym | None],
        values: list[int],
        outputs: list[Tensor],
        gathered: Callable[[int], bool],
    ) -> Ways:
        """The layouts of its operands that an operation takes; `gathered` tells which values may come whole."""
        keys: list[list[str | None]] = []
        for v in values:
            own = [s for s in syms if s is not None and s.value == v]
            shared = [k for k in own[0].cuts if all(k in s.cuts for s in own)]
            keys.append([*shared, *([None] if gathered(v) else [])])
        found = Ways()
        if any(not k for k in keys):
            found.refusal = self.frame(name, args, kwargs, {}).refuse("no dim of it can be sharded")

        @functools.cache
        def alone(v: int, k: str) -> Cut | None:
            """Where the outputs are cut if of all operands only this value is: which of them brings the dim."""
            cuts = {i: s.cuts[k] for i, s in enumerate(syms) if s is not None and s.value == v}
            outcome = self.outcome(name, args, kwargs, cuts)
            return None if isinstance(outcome, GlueError) else outcome.cut

        combos: Iterable[tuple[str | None, ...]] = itertools.product(*keys)
        if len(values) > 3:
            every = set(keys[0]).intersection(*keys[1:])
            combos = [(k,) * len(values) for k in keys[0] if k in every]
        for combo in combos:
            layout = dict(zip(values, combo))
            if all(k is None for k in combo):
                if all(self.whole[v] for v in values):
                    found.choices.append(Choice(combo, (None,) * len(outputs)))
                continue
            cuts = {i: s.cuts[k] for i, s in enumerate(syms) if s is not None and (k := layout[s.value]) is not None}
            outcome = self.outcome(name, args, kwargs, cuts)
            if isinstance(outcome, GlueError):
                found.refusal = found.refusal or outcome
                found.view = False
                continue
            sent = 0
            if (passing := self.passing(outcome, tracked, outputs, cuts)) is not None:
                found.passing[combo], sent = passing, max(passing.forward)
            if outcome.cut is None:
                found.choices.append(Choice(combo, (None,) * len(outputs), bytes=sent, calls=1))
                found.view = False
                continue
            found.view &= outcome.view
            found.viewed |= outcome.view
            # the model's own name for the dim, if there is one; batch is batch whatever else it is called
            carry = [k for v, k in layout.items() if k is not None and alone(v, k) == outcome.cut]
            named = carry or [k for k in combo if k is not None]
            first = min(named, key=lambda k: (not is_batch(k), k.startswith("dim")))
            key = next((k for k, c in found.cuts.items() if c == outcome.cut), None)
            if key is None:
                key = first
                while key in found.cuts:
                    key += "'"
                found.cuts[key] = outcome.cut
                # the dim itself, without those folded into its chunks
                known = dict(self.values[values[combo.index(first)]].sizes)[first]
                extent = max(t.shape[outcome.cut.dim] // outcome.cut.outer for t in outputs)
                found.sizes[key] = known if known and extent % known == 0 else extent
            if outcome.rows:
                found.resized.add(key)
                if any(memory(outputs[0]) == memory(tracked[i]) for i in outcome.rows):
                    found.copied.add(combo)
            calls = int(combo in found.passing)
            found.choices.append(Choice(combo, (key,) * len(outputs), bytes=sent, calls=calls, rank=int(is_batch(key))))
        return found

    def passing(
        self, outcome: Outcome, tracked: list[Tensor], outputs: list[Tensor], cuts: Mapping[int, Cut]
    ) -> Passing | None:
        """What the ranks send each other inside an operation: sums, numbers of each rank, or rows that others hold."""
        if outcome.numbers is not None:
            wide = max(summed_in(tracked[i].dtype).itemsize for i in cuts)
            each = (outcome.numbers.numel * wide * (self.n - 1),) * self.n
            asks = any(tracked[i].requires_grad for i in cuts)
            return Passing("gather", "reduce_scatter", each, each if asks else (0,) * self.n)
        if outcome.cut is None:
            size = sum(t.numel() * summed_in(t.dtype).itemsize for t in outputs)
            each = (-(-2 * size * (self.n - 1) // self.n),) * self.n
            return Passing("all_reduce", "all_reduce", each, each)
        there, back = [0] * self.n, [0] * self.n
        for i in cuts.keys() & outcome.rows.keys():
            t = tracked[i]
            for rows in outcome.rows[i]:
                forward, backward = rows.sent(t.shape, t.element_size())
                there = list(map(add, there, forward))
                if t.requires_grad:
                    back = list(map(add, back, backward))
        return Passing("rows", "rows", tuple(there), tuple(back)) if any(there) else None

    def run_whole(self, found: Ways, syms: list[Sym | None], values: list[int], outputs: list[Tensor]) -> None:
        """No dim is left to shard: gather the operands, run on every rank, and split again for nothing."""
        found.view = False
        found.choices.append(Choice((None,) * len(values), (None,) * len(outputs)))
        if not outputs:
            return
        known = next(s for s in syms if s is not None)
        shape = self.shapes[known.value]
        for d, size in enumerate(outputs[0].shape):
            if size < 2 or any(t.ndim <= d or t.shape[d] != size for t in outputs):
                continue
            name = next((k for k, c in known.cuts.items() if c == Cut(d) and shape[d : d + 1] == (size,)), f"dim{d}")
            found.cuts[name], found.sizes[name] = Cut(d), size

    def used(self, tensors: Iterable[Tensor], syms: Iterable[Sym | None]) -> None:
        """If they were written in place, a gradient comes to them another way since."""
        for t, s in zip(tensors, syms):
            if s is not None:
                self.nodes[s.value].add(node(t))

    def add(self, op: Op, event: Event, outputs: Sequence[Tensor] = ()) -> None:
        event.region = self.region()
        self.made.append([self.nodes[v] for v in op.outputs] or [{node(t)} for t in outputs])
        self.ops.append(op)
        self.events.append(event)

    # --- stages ---

    def enter_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        _, bound = stage.signature.bind(args, kwargs)
        sizes = stage.sizes(bound, self.root_sizes)
        self.pending = (stage, bound, sizes, stage.options(bound, sizes, self.n))

    def leave_stage(
        self,
        output: Any,
        *,
        work: int = 0,
        saved: int = 0,
        flops: int = 0,
        touched: tuple[int, int] = (0, 0),
        random: bool = True,
        largest: int = 0,
        keeps_inputs: bool = False,
        sends: Mapping[str | None, Sends] | None = None,
    ) -> None:
        """The stage entered last returned. `keeps_inputs`: backward starts anew from them; `sends`: by option."""
        stage, bound, sizes, options = self.pending
        index = self.stage_calls
        self.stage_calls += 1
        tensors = tensors_in(output)
        patterns = stage.outputs(tensors)
        syms = [self.sym(b.tensor) for b in bound]
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        out_sizes = [dict(sizes) for _ in tensors]
        for s, p, t in zip(out_sizes, patterns, tensors):
            for name in [n for n in p.names if n in stage.pattern.computed]:
                if len(p.axes[p.axis_of(name)]) == 1:
                    s[name] = t.shape[p.axis_of(name)]
            for name, value in solve_sizes([(p, tuple(t.shape))], {**self.root_sizes, **s}, where=stage.where).items():
                if name in stage.pattern.free and value != sizes.get(name, value):
                    raise NotationError(
                        f"{stage.where} returned {tuple(t.shape)}: dim {name!r} is {value} where its input has "
                        f"{sizes[name]}; a dim outside brackets keeps its size"
                    )
                s[name] = value
        out_cuts = []
        for s, p, t in zip(out_sizes, patterns, tensors):
            cuts = {}
            for name in p.names:
                cut = cut_for(p, t.shape, name, s)
                if cut is not None and s[name] > 1 and fits_fold(p, name, s, self.n):
                    cuts[name] = cut
            out_cuts.append(cuts)
        choices, inside = [], list[Sends]()
        for option in options:
            needs = []
            for v in values:
                need: set[str | None] = set()
                for b_sym, cut in zip(syms, option.cuts):
                    if b_sym is None or b_sym.value != v:
                        continue
                    if cut is not None and cut not in b_sym.cuts.values():
                        self.name_spare(b_sym, cut)
                    need.add(next((k for k, c in b_sym.cuts.items() if c == cut), None) if cut else None)
                # one value in two arguments that need it differently: gathered, then cut for each
                needs.append(need.pop() if len(need) == 1 else None)
            share = option.share(self.n)
            inside.append((sends or {}).get(option.name, Sends()))
            kept = sum(self.values[v].local_bytes(k, self.n) for v, k in zip(values, needs)) if keeps_inputs else 0
            choices.append(
                Choice(
                    tuple(needs),
                    tuple(option.name if option.name in c else None for c in out_cuts),
                    work=int(work * share),
                    saved=int(saved * share) + kept,
                    rank=int(option.last_resort),
                    bytes=sum(nbytes for nbytes, _ in inside[-1].forward.values()),
                    calls=sum(calls for _, calls in inside[-1].forward.values()),
                )
            )
        produced = [
            self.value(t, f"{stage.name}[{index}]", s, c, whole=options[0].name is None)
            for t, s, c in zip(tensors, out_sizes, out_cuts)
        ]
        event = Event("stage", index, stage.name, options=options, operands=syms, sizes=sizes)
        event.memory, event.flops, event.touched, event.random = (work, saved), flops, touched, random
        event.largest = largest
        event.grad = any(t.requires_grad for t in tensors)
        event.constants, event.sends = constants_in(output), inside
        self.used((b.tensor for b in bound), syms)
        self.add(Op(stage.name, tuple(values), tuple(produced), tuple(choices)), event, tensors)

    # --- the model's own inputs and outputs ---

    def root_inputs(self, bound: list[Bound], given: Mapping[str, Cut]) -> None:
        for b in bound:
            if b.pattern is None:
                continue
            sizes, cuts = self.root_sizes, {}
            for name in b.pattern.names:
                cut = cut_for(b.pattern, b.tensor.shape, name, sizes)
                if cut is not None and sizes[name] > 1 and fits_fold(b.pattern, name, sizes, self.n):
                    cuts[name] = cut
            home = None
            if b.param in given:
                home = next((k for k, c in cuts.items() if c == given[b.param]), None)
                if home is None:
                    raise NotationError(
                        f"input {b.param!r} arrives as {given[b.param].placement()}, which '{b.pattern}' cannot name"
                    )
            self.inputs[b.param] = self.root_input(b.param, b.tensor, cuts, sizes, home)

    def root_input(
        self, param: str, t: Tensor, cuts: dict[str, Cut], sizes: Mapping[str, int], given: str | None
    ) -> int:
        index = self.value(t, param, sizes, cuts, whole=given is None)
        v = self.values[index]
        self.values[index] = replace(v, home=(given,))
        return index

    def root_outputs(self, output: Any, gather: bool) -> None:
        self.ends = [node(t) for t in tensors_in(output)]
        for i, t in enumerate(tensors_in(output)):
            self.root_output(i, t, gather)

    def apart(self, v: int) -> frozenset[frozenset[str]]:
        """The pairs of layouts of a value that are both parts of one dim: no one all-to-all leads to the other."""
        pairs = itertools.combinations(self.cuts[v].items(), 2)
        return frozenset(frozenset((a, b)) for (a, x), (b, y) in pairs if not separable(self.shapes[v], x, y, self.n))

    def leave_out_dead_ends(self) -> None:
        """A gradient comes from what the forward returns: none to what is detached later, or used no more."""
        self.reached = leading_to(self.ends)
        for event, made in zip(self.events, self.made):
            event.grad &= any(nodes & self.reached for nodes in made)
        self.grads = [bool(nodes & self.reached) for nodes in self.nodes]

    def leave_views(self) -> None:
        """What is written in place, before or later, stays a view of what it is a view of, if it can."""
        for k, (op, event) in enumerate(zip(self.ops, self.events)):
            if any(event.copied) and any(self.values[v].fixed for v in (*op.inputs, *op.outputs)):
                stay = [i for i, copied in enumerate(event.copied) if not copied]
                if any(any(op.choices[i].needs) for i in stay):
                    self.ops[k] = replace(op, choices=tuple(op.choices[i] for i in stay))
                    event.passing, event.copied = [event.passing[i] for i in stay], []

    def trace(self, resident: int = 0) -> Trace:
        self.leave_out_dead_ends()
        self.leave_views()
        self.values = [replace(value, apart=self.apart(v)) for v, value in enumerate(self.values)]
        return Trace(
            self.values, self.grads, self.cuts, self.shapes, self.ops, self.events, self.inputs, self.random_glue,
            resident, saves=self.saves, copies=self.copies, same=self.same, names=self.names, sizes=self.root_sizes,
        )  # fmt: skip

    def root_output(self, position: int, t: Tensor, gather: bool) -> None:
        sym = self.sym(t)
        if sym is None:
            return
        choices = [Choice((None,), ())]
        if not gather:
            choices = [Choice((k,), (), rank=int(is_batch(k))) for k in sym.cuts] or choices
        self.add(
            Op("output", (sym.value,), (), tuple(choices)),
            Event("output", position, "output", operands=[sym], grad=t.requires_grad),
            [t],
        )
