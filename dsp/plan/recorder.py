"""A forward, written down as the planner's problem: its inputs, stages, glue and outputs, in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from dsp.layout import Cut
from dsp.methods import CommBytes
from dsp.notation import NotationError, TensorPattern, solve_sizes
from dsp.plan.backwards import Backwards
from dsp.plan.events import Event, Execution, Passing, Sym, Trace
from dsp.plan.names import rename
from dsp.plan.operations import Operations
from dsp.plan.values import is_batch
from dsp.planner import MOVES, Choice, Layout, Op, Value
from dsp.signature import Bound
from dsp.stages import Option, Stage, cut_for, fits_fold
from dsp.tensors import constants_in, edge, leading_to, overwritten, tensors_in, version


class Saver(NamedTuple):
    """An event that saves something for backward in an activation checkpoint: the one that comes at `at`, or else an
    operation that is none, before it, whose results are those edges (None: not known)."""

    region: int
    at: int
    event: bool
    ends: set[Any] | None = None


@dataclass(frozen=True)
class Measured:
    """The cost of a stage call on one process: bytes of work, and saved for backward; `keeps` whether any were.

    touched: bytes that it reads and writes, outside and inside of what communicates by itself; sends: by option.
    """

    work: int = 0
    saved: int = 0
    flops: int = 0
    touched: tuple[int, int] = (0, 0)
    random: bool = True
    largest: int = 0
    keeps: bool = False
    sends: Mapping[Layout, CommBytes] = field(default_factory=dict)


class Recorder(Operations):
    """Collects the planner's problem from a forward as it runs: on fake tensors (`Tracer`), or for real on shards."""

    def __init__(self, n: int, root_sizes: Mapping[str, int]) -> None:
        super().__init__(n, root_sizes)
        self.inputs: dict[str, int] = {}
        self.stage_calls = 0
        self.random_glue = False
        self.savers: list[Saver] | None = None  # not known of a run

    # --- stages ---

    def enter_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        self.meet(tensors_in((args, kwargs)))
        self.note_compiled()
        _, bound = stage.signature.bind(args, kwargs)
        sizes = stage.sizes(bound, self.root_sizes)
        self.used((b.tensor for b in bound), [self.sym(b.tensor) for b in bound])  # before it writes into one
        self.pending = (stage, bound, sizes, stage.options(bound, sizes, self.n))
        self.versions = [version(b.tensor) for b in bound]

    def leave_stage(self, output: Any, measured: Measured = Measured(), keeps_inputs: bool = False) -> None:
        """The stage entered last returned. `keeps_inputs`: backward starts anew from them."""
        stage, bound, sizes, options = self.pending
        index, tensors = self.stage_calls, tensors_in(output)
        self.stage_calls += 1
        syms = [self.sym(b.tensor) for b in bound]
        for b, s, before in zip(bound, syms, self.versions):
            if s is not None and version(b.tensor) != before:
                self.edges[s.value].add(overwritten(b.tensor))
        values = list(dict.fromkeys(s.value for s in syms if s is not None))
        results = [(t, p, self.sizes_of_result(stage, t, p, sizes)) for t, p in zip(tensors, stage.outputs(tensors))]
        out_cuts = [self.cuts_of(p, t, own) for t, p, own in results]
        choices = []
        for option in options:
            needs = self.needs(option, values, syms)
            share, sends = option.share(self.n), measured.sends.get(option.name, CommBytes())
            passing = adding_up(option.onto, tensors[0], results[0][2], self.n) if option.onto else None
            sums = max(passing.forward) if passing is not None else 0
            kept = sum(self.values[v].local_bytes(k, self.n) for v, k in zip(values, needs)) if keeps_inputs else 0
            choices.append(
                Choice(
                    needs,
                    tuple(option.lands if option.lands in c else None for c in out_cuts),
                    work=int(measured.work * share) + (tensors[0].nbytes if option.onto else 0),
                    saved=int(measured.saved * share) + kept,
                    rank=int(option.last_resort),
                    bytes=sum(nbytes for nbytes, _ in sends.forward.values()) + sums,
                    calls=sum(calls for _, calls in sends.forward.values()) + (option.onto is not None),
                    way=Execution(option, sends, passing),
                )
            )
        produced = [
            self.value(t, f"{stage.name}[{index}]", own, cuts, options[0].name is None, letters_in(p))
            for (t, p, own), cuts in zip(results, out_cuts)
        ]
        event = Event(
            "stage", index, stage.name, operands=syms, sizes=sizes, flops=measured.flops,
            memory=(measured.work, measured.saved), touched=measured.touched, random=measured.random,
            largest=measured.largest, grad=any(t.requires_grad for t in tensors), constants=constants_in(output),
        )  # fmt: skip
        self.add(Op(stage.name, tuple(values), tuple(produced), tuple(choices)), event, tensors)

    def sizes_of_result(self, stage: Stage, t: Tensor, p: TensorPattern, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes of the dims of a stage's result. What it computes over may have changed."""
        found = dict(sizes)
        for name in [n for n in p.names if n in stage.pattern.computed]:
            if len(p.axes[p.axis_of(name)]) == 1:
                found[name] = t.shape[p.axis_of(name)]
        for name, size in solve_sizes([(p, tuple(t.shape))], {**self.root_sizes, **found}, where=stage.where).items():
            if name in stage.pattern.free and size != sizes.get(name, size):
                raise NotationError(
                    f"{stage.where} returned {tuple(t.shape)}: dim {name!r} is {size} where its input has "
                    f"{sizes[name]}; a dim outside brackets keeps its size"
                )
            found[name] = size
        return found

    def cuts_of(self, p: TensorPattern, t: Tensor, sizes: Mapping[str, int]) -> dict[str, Cut]:
        """The dims of a pattern that a tensor may be sharded along, and where they lie."""
        cuts = {}
        for name in p.names:
            cut = cut_for(p, t.shape, name, sizes)
            if cut is not None and sizes[name] > 1 and fits_fold(p, name, sizes, self.n):
                cuts[name] = cut
        return cuts

    def needs(self, option: Option, values: Iterable[int], syms: list[Sym | None]) -> tuple[Layout, ...]:
        """The layout that an option of a stage takes of each value."""
        found = []
        for v in values:
            need: set[Layout] = set()
            for sym, cut in zip(syms, option.cuts):
                if sym is None or sym.value != v:
                    continue
                if cut is not None and cut not in sym.cuts.values():
                    self.name_spare(sym, cut)
                need.add(next((k for k, c in sym.cuts.items() if c == cut), None) if cut else None)
            # one value in two arguments that need it differently: gathered, then cut for each
            found.append(need.pop() if len(need) == 1 else None)
        return tuple(found)

    # --- the model's own inputs and outputs ---

    def root_inputs(self, bound: list[Bound], given: Mapping[str, Cut]) -> None:
        taken = [b.param for b in bound]
        for name in given.keys() - set(taken):
            raise NotationError(
                f"given names {name!r}, which is not a tensor argument of the model; those are {', '.join(taken)}"
                if taken
                else f"given names {name!r}: the stages need a root pattern that declares it"
            )
        for b in bound:
            if b.pattern is None:
                continue
            sizes, home = self.root_sizes, None
            cuts = self.cuts_of(b.pattern, b.tensor, sizes)
            if b.param in given:
                home = next((k for k, c in cuts.items() if c == given[b.param]), None)
                if home is None:
                    raise NotationError(
                        f"input {b.param!r} arrives as {given[b.param].placement()}, which '{b.pattern}' cannot name"
                    )
            index = self.value(b.tensor, b.param, sizes, cuts, home is None, letters_in(b.pattern))
            self.values[index] = replace(self.values[index], home=(home,))
            self.inputs[b.param] = index

    def root_outputs(self, output: Any, gather: bool) -> None:
        self.ends = tensors_in(output)  # not their nodes: those of others' functions fall apart without a tensor
        for position, t in enumerate(self.ends):
            if (sym := self.sym(t)) is None:
                continue
            self.used([t], [sym])
            cuts = {} if gather else {k: c for k, c in sym.cuts.items() if not c.joined}  # which no DTensor is
            choices = [Choice((k,), (), rank=int(is_batch(k))) for k in cuts]
            event = Event("output", position, "output", operands=[sym], grad=t.requires_grad)
            self.add(Op("output", (sym.value,), (), tuple(choices or [Choice((None,), ())])), event, [t])

    # --- what comes of it ---

    def leave_out_dead_ends(self) -> None:
        """A gradient comes from what the forward returns: none to what is detached later, or used no more."""
        self.reached = leading_to(edge(t) for t in self.ends)
        for k, (op, event, made) in enumerate(zip(self.ops, self.events, self.made)):
            asked = [bool(edges & self.reached) for edges in made]
            event.grad &= any(asked)
            self.ops[k] = replace(op, choices=tuple(with_asked(c, asked) for c in op.choices))
        self.grads = [bool(edges & self.reached) for edges in self.edges]

    def leave_views(self) -> None:
        """Keep values that are written in place, before or later, as views of their base, if they can be."""
        for k, op in enumerate(self.ops):
            stay = [c for c in op.choices if not (c.way and c.way.copied)]
            if any(self.values[v].fixed for v in (*op.inputs, *op.outputs)) and any(any(c.needs) for c in stay):
                self.ops[k] = replace(op, choices=tuple(stay))

    def saves(self) -> dict[int, float] | None:
        """The last event of each activation checkpoint that saves something, at half if it is after it; of those that
        backward asks for anything: no other is computed again."""
        if self.savers is None:
            return None
        found, asked = dict[int, float](), set[int]()
        for s in self.savers:
            found[s.region] = s.at if s.event else s.at - 0.5
            if self.events[s.at].grad if s.event else s.ends is None or s.ends & self.reached:
                asked.add(s.region)
        return {region: last for region, last in found.items() if region in asked}

    def trace(self, resident: int = 0) -> Trace:
        Backwards(self, self.taken).name()
        self.leave_out_dead_ends()
        self.leave_views()
        rename(self)
        self.values = [replace(value, apart=self.apart(v)) for v, value in enumerate(self.values)]
        return Trace(
            self.values, self.grads, self.cuts, self.shapes, self.ops, self.events, self.inputs, self.random_glue,
            resident, saves=self.saves(), copies=self.copies, same=self.same, fresh=self.fresh, names=self.names,
            spare=self.spare,
            sizes=self.root_sizes, stretched=self.stretched, compiled=[*self.compiled],
        )  # fmt: skip


def with_asked(c: Choice, asked: Sequence[bool]) -> Choice:
    """A choice where a gradient comes to these of the results."""
    passing = c.way and c.way.passing
    return replace(c, way=replace(c.way, passing=passing.where(asked))) if passing else c


def adding_up(along: str, t: Tensor, sizes: Mapping[str, int], n: int) -> Passing:
    """The traffic that adds up a stage's results, one sum for each rank, and leaves them sharded along a dim."""
    value = Value("", ((along, sizes[along]),), t.element_size(), numel=t.numel())
    there = MOVES["reduce_scatter"].sent(value, None, along, n)
    return Passing("reduce_scatter", "gather", tuple(there), tuple(MOVES["gather"].sent(value, along, None, n)))


def letters_in(p: TensorPattern) -> list[str]:
    """The name of each axis of a tensor in a pattern: that of a fold is its last dim's."""
    return [axis[-1] if axis else "" for axis in p.axes]
