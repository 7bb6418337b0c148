"""The plan for readers: a layout for every stage, the moves between them, and their cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

import torch.distributed as dist

from dsp.comm.hardware import Estimate, Exchange, Hardware, clock
from dsp.comm.layout import Cut
from dsp.comm.node_routes import BETWEEN, DIRECT, STRAIGHT, WITHIN, Ways
from dsp.comm.wire import AS_IT_IS, Wire
from dsp.overlap.hidden import Overlapped
from dsp.planner import Layout, Problem
from dsp.report.picture import ribbon
from dsp.stages.methods import Sent, add_sent
from dsp.stages.notation import BATCH_NAMES
from dsp.support.formatting import generic, human, number_of


@dataclass(frozen=True)
class StageRow:
    """One stage call of a plan. bytes: what the busiest rank sends before this stage; peak: bytes held a rank."""

    name: str
    pattern: str
    computes: tuple[str, ...]
    layout: str | None  # the sharded dim; None: replicated
    switch: str  # "t → s", "gather s", or ""
    bytes: int
    peak: int
    calls: int = 0  # collectives before this stage
    idle: int = 0  # ranks without a part of it
    share: float = 1.0  # its largest tensor on a rank, over the longest tensor on one process
    line: str = ""  # the line of the user's code that ran it first, as "model.py:37"
    free: tuple[str, ...] = ()  # the dims along which it could be sharded, without batch
    short: tuple[str, ...] = ()  # the dims outside brackets along which it cannot, at these sizes
    part: float = 1.0  # its share of all FLOPs of one process


@dataclass(frozen=True)
class Switch:
    """One move of a tensor between layouts: kind is "switch" or "gather"; bytes: what the busiest rank sends."""

    kind: str
    tensor: str
    src: str | None
    dst: str | None
    before: str
    bytes: int
    shared: bool = False  # travels in an earlier move's collective


@dataclass(frozen=True)
class Whole:
    """Glue that every rank runs in full: an operation of one module's forward, its number of calls, and its cost.

    bytes: of the largest tensor; part: its share of all FLOPs of one process; parameters: it reads parameters alone.
    """

    name: str
    module: str
    bytes: int
    part: float
    calls: int = 1
    parameters: bool = False

    def __str__(self) -> str:
        share = f", {self.part:.0%} of all FLOPs" if self.part >= 0.005 else ""
        place = f" in {self.module}" if self.module else ""
        return f"{self.name}(){place}{f' ×{self.calls}' if self.calls > 1 else ''} ({human(self.bytes)}{share})"


def every_rank_runs(rows: Sequence[Whole]) -> str:
    """A sentence on operations that every rank runs in full, with the first of them."""
    return f"between stages every rank runs these operations whole: {named(rows)}"


def named(rows: Sequence[Whole]) -> str:
    """The first of some operations, and the number of the others."""
    return ", ".join(map(str, rows[:3])) + (f" and {len(rows) - 3} more" if len(rows) > 3 else "")


@dataclass(frozen=True)
class Plan:
    """How a model runs on `size` ranks. ``print(plan)`` prints a table on one rank; `text` returns it on all.

    stages: one row a stage call. switches: every switch and gather of a forward. bytes: what the busiest rank sends in
    one step, by phase: ``forward``, ``backward``, ``recompute`` (forward moves repeated by the model's own activation
    checkpointing). calls: the collectives of a step, likewise. peak: an estimate of the most bytes a rank holds in
    forward: all parameters (`resident`), activations saved for backward, copies and work of the running stage; not
    gradients, optimizer states, or the transients of backward. flops: FLOPs of a step on the busiest rank, and
    `flops_alone` on one process: matrix products, convolutions and attention (causal attention counts visible pairs);
    `flops_whole`: those that every rank repeats; `flops_model`: those on one process without recomputation, by which
    utilisation (MFU) is counted. touched: bytes that operations read and write in a step, likewise, if nothing is
    fused. share: the largest tensor that a rank holds between the model's inputs and outputs, over the largest on one
    process: 1/N is the least. whole: the glue that every rank runs in full on tensors longer than 1.5/N of the
    latter. sends: bytes and calls by phase and kind of collective. `exact` is False if the search was cut short.
    hardware: the hardware that the plan is for, if given; `estimate` then has the seconds of a step. wire: the formats
    in which switches travel. ways: their routes over several nodes; `links` then has the bytes and calls within and
    between nodes, by phase, of the busiest rank of each; a direct switch is one call, between. overlaps: the switches
    that travel while stages compute, or the reason against it, if requested. record: the operations of the forward, in
    order, in a plan made by `dsp.plan`; ``print(plan.record)`` shows one line an operation.
    """

    size: int
    stages: list[StageRow]
    switches: list[Switch]
    bytes: dict[str, int]
    peak: int
    resident: int
    exact: bool
    entry: dict[str, Layout] = field(default_factory=dict, repr=False)  # the cut in which each input enters
    share: float = 1.0
    whole: list[Whole] = field(default_factory=list)
    remedy: str = ""  # a line of stages that would help there
    calls: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    flops_alone: int = 0
    flops_whole: int = 0
    flops_model: int = 0
    touched: int = 0
    touched_alone: int = 0
    cut_weights: int = 0  # numbers of all ranks' weights that the method cuts over them
    sends: dict[str, Sent] = field(default_factory=dict)
    hardware: Hardware | None = None
    problem: Problem | None = field(default=None, repr=False, compare=False)
    names: list[dict[Cut, str]] = field(default_factory=list, repr=False, compare=False)  # for each value
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the dims that each declared input is split along
    compiled: list[str] = field(default_factory=list)  # functions between stages that run uncompiled
    reads: str = ""  # what reads data, and its line: the plan holds for forwards that take the same branches
    record: Any = field(default=None, repr=False, compare=False)
    chosen: bool = True  # whether stages run replicated for want of a dim to shard, not by the method
    wire: Wire = AS_IT_IS
    ways: Ways = STRAIGHT
    links: dict[str, Sent] = field(default_factory=dict)
    overlaps: list[Overlapped] = field(default_factory=list, repr=False)
    packs: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False)  # format -> numbers, and calls

    def __getstate__(self) -> dict[str, Any]:
        """The plan without its record, whose nodes may hold functions of the model, for another process."""
        return {name: value for name, value in vars(self).items() if name != "record"}

    @property
    def estimate(self) -> Estimate:
        """Seconds of a step. Raises ValueError for a plan made without ``hardware=``."""
        if self.hardware is None:
            raise ValueError(
                "how long a step takes depends on the hardware: pass hardware=dsp.Hardware(...) to dsp.plan"
            )
        return self.takes(self.hardware)

    def takes(
        self, hardware: Hardware, weights: Sequence[Exchange] = (), *, batches: int = 1, overlap: bool = True
    ) -> Estimate:
        """Seconds of a step of so many such batches on some hardware.

        weights: the collectives of data parallelism (`dsp.comm.hardware.all_reduced`, `fully_sharded`). With `overlap`
        they run beside computation, as long as that lasts; else after it.
        """
        compute, alone = (
            batches * hardware.computing(flops, touched)
            for flops, touched in ((self.flops, self.touched), (self.flops_alone, self.touched_alone))
        )
        packing = sum(hardware.packs(form, *packed) for form, packed in self.packs.items())
        compute += batches * (packing + sum(o.costs(hardware) for o in self.overlaps))
        comm = batches * hardware.seconds(*self.exchanges)
        waits = hardware.seconds(*weights)
        hidden = batches * sum(o.hides(hardware, self.size) for o in self.overlaps)
        return Estimate(compute, comm, alone, max(0.0, waits - compute) if overlap else waits, hidden)

    @property
    def how(self) -> str:
        """The options of its switches that are not the default: format, pieces, and route over several nodes."""
        pieces = {o.pieces for o in self.overlaps} - {1}
        ways = [way for _, way in self.ways.steps if way != DIRECT]
        formats = dict.fromkeys(self.wire if self.wire != AS_IT_IS else ())
        in_pieces = f"in {' or '.join(map(str, sorted(pieces)))} pieces" if pieces else ""
        return ", ".join(filter(None, ["/".join(formats), in_pieces, *ways]))

    @property
    def exchanges(self) -> list[Exchange]:
        """The traffic of this plan's axis in a step, by kind."""
        total, node = add_sent(*self.sends.values()), self.ways.node
        over = {WITHIN: ("switch", node, 1), BETWEEN: ("switch", self.ways.nodes, node)}
        return [
            Exchange(axis[0], nbytes, calls, *axis[1:])
            for kind, (nbytes, calls) in total.items()
            for axis in (over.get(kind, (kind, self.size, 1)),)
        ]

    @property
    def _mostly(self) -> str:
        """The kind of collective that sends most, by whose speed the rows of the table are timed."""
        return max(self.exchanges, key=lambda e: e.bytes, default=Exchange("switch", 0, 0, self.size)).kind

    @property
    def advice(self) -> str:
        """A text on stages that sharding does not help, the bytes this costs, and what would help; or an empty text."""
        if not self.chosen:
            return ""
        return ". ".join(filter(None, (self._whole_stages, self._whole_glue, self._compiled)))

    @property
    def _compiled(self) -> str:
        if not (names := ", ".join(filter(None, self.compiled))):
            return ""
        return (
            f"operations between stages run one by one, so the compiled {names} is not used: make a "
            "submodule of it, name it in stages, and compile its forward after dsp.parallelize"
        )

    @property
    def _whole_glue(self) -> str:
        inputs, parameters = self.of_inputs, [w for w in self.whole if w.parameters]
        remedied = every_rank_runs(inputs) + (f". {self.remedy}" if self.remedy else "") if inputs else ""
        beside = f"from parameters alone every rank computes {named(parameters)}: no line of stages changes that"
        return ". ".join(filter(None, (remedied, beside if parameters else "")))

    @property
    def of_inputs(self) -> list[Whole]:
        """The operations of `whole` that a stage could shard: they read more than parameters."""
        return [w for w in self.whole if not w.parameters]

    @property
    def _whole_stages(self) -> str:
        calls = [r for r in self.stages if r.pattern]
        whole = [r for r in calls if r.layout is None and (r.share * self.size > 1.5 or r.part >= 0.05)]
        sent = sum(r.bytes for r in whole)
        cost = f" ({human(sent)} a rank gathered for that)" if sent else ""
        if calls and not any(r.free or r.layout not in (None, *BATCH_NAMES) for r in calls):
            mode = "whole on every rank" if whole else "on its part of the batch, as data parallelism would"
            if short := ", ".join(dict.fromkeys(name for r in calls for name in r.short)):
                return (
                    f"DSP does not help at these sizes, because {short} cannot be sharded: such a dim has one element, "
                    f"or is in a fold that {self.size} ranks would tear. So each stage runs {mode}{cost}: give longer "
                    "inputs"
                )
            return (
                f"DSP does not help this model: no stage leaves a dim but batch to shard, so each runs {mode}{cost}, "
                "and no memory is saved. Attention can be sharded along its heads (as in Ulysses) if they are a dim of "
                "a stage: q=b h [s d], k=b h [s d], v=b h [s d] -> b h [s d]"
            )
        if whole:
            names = ", ".join(dict.fromkeys(generic(r.name) for r in whole))
            return (
                f"{len(whole)} stage call{'s' * (len(whole) > 1)} run whole on every rank{cost}, no dim being left to "
                f"shard: {names}"
            )
        return ""

    def __str__(self) -> str:
        """The table on rank 0, so that `print` shows it once; empty on the others."""
        return "" if dist.is_initialized() and dist.get_rank() > 0 else self.text()

    def text(self, lines: bool = False) -> str:
        """The table, on any rank; with `lines` each row ends with its line of the user's code."""
        head = ["stage", "computes", "sharded", "move", "sends", "peak"]
        link = self.hardware.axis(self.size, self._mostly) if self.hardware is not None else None
        if link is not None:
            head.insert(5, "takes")
        if lines:
            head.append("line")
        rows = [
            [
                f"{r.name}{f'  ×{count}' if count > 1 else ''}",
                " ".join(r.computes) or "-",
                r.layout or "whole",
                r.switch or "-",
                human(r.bytes) if r.bytes else "-",
                *([clock(link.seconds(r.bytes, r.calls)) if r.calls else "-"] if link is not None else []),
                human(r.peak),
                *([r.line] if lines else []),
            ]
            for r, count in _folded(self.stages, lines)
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        line = "  ".join("─" * w for w in widths)
        text = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in [head, *rows]]
        return "\n".join([text[0], line, *text[1:], line, *self._foot()])

    def _foot(self) -> list[str]:
        """The lines under the table."""
        moves = [s.kind for s in self.switches]
        kinds = ", ".join(number_of(moves.count(kind), kind) for kind in dict.fromkeys(moves)) or "none"
        total = "  ".join(f"{phase} {human(b)}" for phase, b in self.bytes.items())
        if shared := sum(s.shared for s in self.switches):
            kinds += f", in {number_of(len(moves) - shared, 'collective')}"
        foot = [
            f"{number_of(self.size, 'rank')}; moves in the forward: {kinds}",
            f"bytes a rank sends: {total}",
            f"peak of a rank: {human(self.peak)}, of which parameters {human(self.resident)}",
        ]
        if self.wire != AS_IT_IS:
            foot.append(str(self.wire))
        foot += self._by_link()
        foot += self._overlapped()
        if self.size > 1 and self.share * self.size > 1.5:
            foot.append(f"the largest tensor of a rank is {self.share:.2f} of the largest of one process")
        if self.inputs and not any(r.pattern for r in self.stages):  # no stage shows the sharding
            along = ", ".join(f"{k} along {' and '.join(d)}" if d else f"{k} whole" for k, d in self.inputs.items())
            foot.insert(0, f"inputs: {along}")
        if self.hardware is not None:
            foot += self._timing(self.hardware)
        foot += [self.advice] if self.advice else []
        foot += self.idle()
        if self.reads:
            foot.append(f"planned from one run on these inputs, for this forward {self.reads}")
        if not self.exact:
            foot.append("the search was cut: this plan is good, not proven cheapest")
        return foot

    def _by_link(self) -> list[str]:
        """A line on the route of switches over several nodes, and their traffic within and between nodes."""
        if not self.links:
            return [self.ways.reason or str(self.ways)] if self.ways.reason or self.ways.node else []
        total = add_sent(*self.links.values())
        within, between = (
            f"{human(nbytes)} in {number_of(calls, 'call')}"
            for nbytes, calls in (total.get(kind, (0, 0)) for kind in (WITHIN, BETWEEN))
        )
        return [f"{self.ways}; a rank sends in a step: within nodes {within}, between {between}"]

    def svg(self) -> str:
        """The plan as a picture: a ribbon of its stages, in the colours of the sharded dims."""
        total = "  ".join(f"{phase} {human(b)}" for phase, b in self.bytes.items())
        about = f"{number_of(self.size, 'rank')}; a rank sends: {total}; peak {human(self.peak)}"
        return ribbon(_folded(self.stages), about)

    def _repr_html_(self) -> str:
        """The picture and the table, for a notebook."""
        return f"<div>{self.svg()}<pre>{escape(str(self))}</pre></div>"

    def _overlapped(self) -> list[str]:
        """Lines on the switches that travel while stages compute, and on those that do not."""
        cut, single = [o for o in self.overlaps if o.pieces > 1], dict[tuple[str, str], int]()
        for o in self.overlaps:
            if o.pieces == 1:
                key = generic(o.name), o.reason
                single[key] = single.get(key, 0) + o.switches
        total = sum(o.switches for o in self.overlaps)
        pieces = " or ".join(map(str, sorted({o.pieces for o in cut})))
        lines = [f"{sum(o.switches for o in cut)} of {total} switches travel while stages compute, in {pieces} pieces"]
        return [
            *(lines if cut else []),
            *(
                f"{number_of(n, 'switch')} in one piece{name and f' at {name}'}: {why}"
                for (name, why), n in single.items()
            ),
        ]

    def idle(self) -> list[str]:
        """A sentence for each dim that is too short to give all ranks a part of some stages."""
        return idle_ranks(self.size, [(r.name, r.layout, r.idle) for r in self.stages])

    def _timing(self, hardware: Hardware) -> list[str]:
        link, e, calls = hardware.axis(self.size, self._mostly), self.estimate, sum(self.calls.values())
        hidden = f" - {clock(e.hidden)} while computing" if e.hidden else ""
        lines = [
            f"a step: compute {clock(e.compute)} + {calls} calls over {link.name} {clock(e.comm)}{hidden} = "
            f"{clock(e.step)}; "
            f"on one rank {clock(e.alone)}"
        ]
        if self.size > 1 and e.speedup <= 1:
            idle = "the calls alone" if calls * link.alpha > e.comm / 2 else "the bytes"
            lines.append(f"{self.size} ranks are no faster than one: {idle} take longer than is saved")
        if self.peak > hardware.memory:
            lines.append(f"the peak does not fit in {human(hardware.memory)}")
        return lines


def _folded(rows: Sequence[StageRow], lines: bool = False) -> list[tuple[StageRow, int]]:
    """The rows, with repeated groups shown once, and the number of repetitions; the peak shown is the last one's.

    Blocks are folded first, then passes over all blocks, such as those of recycling.
    """
    return [*_once([*_once([(row, 1) for row in rows], lines, longest=32)], lines, longest=256)]


def _once(rows: Sequence[tuple[StageRow, int]], lines: bool, longest: int) -> Iterator[tuple[StageRow, int]]:
    """The rows with repeated groups of at most `longest` rows in one; an Evoformer block is 17 stages."""
    keys = [(generic(r.name), r.computes, r.layout, r.switch, r.bytes, lines and r.line, n) for r, n in rows]
    i = 0
    while i < len(rows):
        best = (1, 1)
        for period in range(1, min(longest, (len(rows) - i) // 2) + 1):
            if keys[i] != keys[i + period]:
                continue
            group, times = keys[i : i + period], 1
            while keys[i + times * period : i + (times + 1) * period] == group:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        period, times = best
        for row, n in rows[i + (times - 1) * period : i + times * period]:
            yield (replace(row, name=generic(row.name)) if times > 1 else row), n * times
        i += period * times


def idle_ranks(size: int, stages: Iterable[tuple[str, str | None, int]]) -> list[str]:
    """A sentence for each dim that is too short to give all of `size` ranks a part of some stages.

    stages: of each call the name, the sharded dim (None: replicated) and the number of idle ranks.
    """
    names: dict[tuple[int, str], dict[str, None]] = {}
    for name, along, idle in stages:
        if idle > 0 and along is not None:
            names.setdefault((idle, along), {})[generic(name)] = None
    return [
        f"{idle} of {size} ranks have nothing to do in {', '.join(of)}: {along!r} is too short for them"
        for (idle, along), of in names.items()
    ]
