"""The plan: a layout for every stage, the moves between them, what they cost, and the script a run follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from dsp.advice import remedy
from dsp.hardware import Estimate, Exchange, Hardware, clock
from dsp.layout import Cut
from dsp.ledger import Sending
from dsp.notation import BATCH_NAMES, NotationError, StagePattern, parse
from dsp.planner import Choice, Infeasible, Move, Op, Problem, Solution, Value, chunk_sizes, fuses, price, solve
from dsp.reads import traced
from dsp.residual import Residual, residuals
from dsp.rules import GlueError
from dsp.stages import Sends, Sent, Stage, add_sent, find_stages
from dsp.text import generic, human
from dsp.trace import Trace


@dataclass(frozen=True)
class StageRow:
    """One stage call of a plan. Bytes are those the busiest rank sends before this stage; peak is bytes held a rank."""

    name: str
    pattern: str
    computes: tuple[str, ...]
    layout: str | None  # the sharded dim; None: run whole on every rank
    switch: str  # "t → s", "gather s", or ""
    bytes: int
    peak: int
    calls: int = 0  # collectives before this stage
    idle: int = 0  # ranks that have nothing of it
    share: float = 1.0  # the largest tensor that a rank holds of it, over the longest that one process holds


@dataclass(frozen=True)
class Switch:
    """One move of a tensor between layouts: kind is "switch" or "gather"; bytes are those the busiest rank sends."""

    kind: str
    tensor: str
    src: str | None
    dst: str | None
    before: str
    bytes: int
    shared: bool = False  # travels in the collective of one before it


Via = tuple[Cut | None, Cut | None]  # from and to: cuts of the tensor that a value was made as


@dataclass
class StageStep:
    name: str
    option: str | None
    push: list[Cut | None]
    random: bool
    via: list[list[Via]]  # the copies to be made of each tensor first, in this order
    constants: list[Any]  # what it returned beside tensors at full size


@dataclass
class GlueStep:
    name: str
    cuts: list[Cut | None] | None = None  # what each tensor operand must be; None: as they come
    push: list[Cut | None] = field(default_factory=list)
    source: Cut | None = None
    via: list[list[Via]] = field(default_factory=list)  # the copies to be made of each operand first, in this order


@dataclass
class Script:
    """What a run does where: the planner's decisions by order of stage calls and glue operations."""

    inputs: dict[str, Cut | None]
    stages: list[StageStep]
    glue: dict[int, GlueStep]
    random_glue: bool
    copies: frozenset[int] = frozenset()  # glue that only looks like a view: it makes a value of its own
    same: frozenset[int] = frozenset()  # glue that returns its first argument as it is, such as contiguous
    names: tuple[str, ...] = ()  # of all glue operations, those without a step too
    recorded: bool = False  # from a run, not ahead of it: the next run may go another way
    recipes: dict[Any, Any] = field(default_factory=dict, repr=False)  # how its operations run, as far as is known
    word: Any = field(default=None, repr=False, compare=False)  # what it promises of this rank, once that was asked


@dataclass(frozen=True)
class Whole:
    """Glue that every rank runs whole: an operation of one module's forward, how often, and what it costs.

    bytes: of the largest tensor; part: of all that one process computes, in FLOPs.
    """

    name: str
    module: str
    bytes: int
    part: float
    calls: int = 1

    def __str__(self) -> str:
        again = f", {self.part:.0%} of all FLOPs" if self.part >= 0.005 else ""
        where = f" in {self.module}" if self.module else ""
        return f"{self.name}(){where}{f' ×{self.calls}' if self.calls > 1 else ''} ({human(self.bytes)}{again})"


@dataclass(frozen=True)
class Plan:
    """How a model runs on `size` ranks; ``print(plan)`` is a table.

    stages: one row a stage call. switches: every switch and gather of a forward. bytes: what the busiest rank sends in
    one step, by phase: ``forward``, ``backward``, ``recompute`` (forward moves repeated by the model's own activation
    checkpointing). calls: the collectives of a step, likewise. peak: an estimate of the most bytes a rank holds in
    forward: parameters whole (`resident`), activations saved for backward, copies and work of the running stage; not
    gradients, optimizer states, or the transients of backward. flops: of a step on the busiest rank, and `flops_alone`
    on one rank: matrix products, convolutions and attention; `flops_whole`, those that every rank does again. touched:
    bytes that operations read and write in a step, likewise, where nothing is fused. share: the largest tensor that a
    rank holds between the model's inputs and outputs, over the largest of one process: 1/N is the least. whole: the
    glue that every rank runs whole though it is longer than 1.5/N of that. sends: bytes and calls by phase
    and kind of collective. `exact` is False when the search was cut. hardware: what the plan is for, if that was said;
    then `estimate` has the seconds of a step.
    """

    size: int
    stages: list[StageRow]
    switches: list[Switch]
    bytes: dict[str, int]
    peak: int
    resident: int
    exact: bool
    script: Script = field(repr=False)
    sendings: list[Sending] = field(default_factory=list, repr=False, compare=False)  # of a forward, outside of stages
    share: float = 1.0
    whole: list[Whole] = field(default_factory=list)
    remedy: str = ""  # what would help there: a line of stages
    calls: dict[str, int] = field(default_factory=dict)
    flops: int = 0
    flops_alone: int = 0
    flops_whole: int = 0
    touched: int = 0
    touched_alone: int = 0
    cut_weights: int = 0  # numbers of all ranks' weights that the method cuts over them
    sends: dict[str, Sent] = field(default_factory=dict)
    hardware: Hardware | None = None
    problem: Problem | None = field(default=None, repr=False, compare=False)
    staged: tuple[bool, ...] = field(default=(), repr=False, compare=False)  # which of its ops are stages
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)  # the dims that each declared one is split along
    reads: str = ""  # where the forward reads its data, if it does: the plan is for one that goes the same way
    chosen: bool = True  # whether stages that run whole do so for want of a dim to shard, and not by the method

    @cached_property
    def residuals(self) -> list[Residual]:
        """For every residual stream added to in glue: what it costs to switch the stream, and its branches instead."""
        if self.problem is None or self.size == 1:
            return []
        own = self.bytes["forward"], self.calls["forward"] + sum(s.shared for s in self.switches)
        return residuals(self.problem, self.staged, own)

    @property
    def estimate(self) -> Estimate:
        """Seconds of a step. Raises ValueError for a plan made without ``hardware=``."""
        if self.hardware is None:
            raise ValueError("how long a step takes depends on the hardware: dsp.plan(..., hardware=dsp.Hardware(...))")
        return self.takes(self.hardware)

    def takes(
        self, hardware: Hardware, weights: Sequence[Exchange] = (), *, batches: int = 1, overlap: bool = True
    ) -> Estimate:
        """Seconds of a step on some hardware, of so many such batches.

        weights: the collectives of data parallelism (`dsp.hardware.all_reduced`, `fully_sharded`). With `overlap` they
        run beside computing, as far as it lasts; else after it.
        """
        compute, alone = (
            batches * hardware.computing(flops, touched)
            for flops, touched in ((self.flops, self.touched), (self.flops_alone, self.touched_alone))
        )
        comm = batches * hardware.seconds(*self.exchanges)
        waits = hardware.seconds(*weights)
        return Estimate(compute, comm, alone, max(0.0, waits - compute) if overlap else waits)

    @property
    def exchanges(self) -> list[Exchange]:
        """What the axis of this plan sends in a step, by kind."""
        total = add_sent(*self.sends.values())
        return [Exchange(kind, nbytes, calls, self.size) for kind, (nbytes, calls) in total.items()]

    @property
    def _mostly(self) -> str:
        """The kind of collective that sends most: the rows of the table are priced as it."""
        return max(self.exchanges, key=lambda e: e.bytes, default=Exchange("switch", 0, 0, self.size)).kind

    @property
    def advice(self) -> str:
        """Which stages sharding does not help, what running them whole sends, and what would help; or nothing."""
        if not self.chosen:
            return ""
        return ". ".join(filter(None, (self._whole_stages, self._whole_glue)))

    @property
    def _whole_glue(self) -> str:
        if not self.whole:
            return ""
        first, more = self.whole[:3], len(self.whole) - 3
        names = ", ".join(map(str, first)) + (f" and {more} more" if more > 0 else "")
        return f"every rank runs whole what is between stages: {names}" + (f". {self.remedy}" if self.remedy else "")

    @property
    def _whole_stages(self) -> str:
        calls = [r for r in self.stages if r.pattern]
        whole = [r for r in calls if r.layout is None]
        sent = sum(r.bytes for r in whole)
        cost = f" ({human(sent)} a rank gathered for that)" if sent else ""
        if calls and all(r.layout is None or r.layout in BATCH_NAMES for r in calls):
            how = "whole on every rank" if whole else "on its part of the batch, as data parallelism would"
            return (
                f"DSP does not help this model: no stage leaves a dim but batch to shard, so each runs {how}{cost}, "
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
        head = ["stage", "computes", "sharded", "move", "sends", "peak"]
        link = self.hardware.axis(self.size, self._mostly) if self.hardware is not None else None
        if link is not None:
            head.insert(5, "takes")
        rows = [
            [
                f"{r.name}{f'  ×{count}' if count > 1 else ''}",
                " ".join(r.computes) or "-",
                r.layout or "whole",
                r.switch or "-",
                human(r.bytes) if r.bytes else "-",
                *([clock(link.seconds(r.bytes, r.calls)) if r.calls else "-"] if link is not None else []),
                human(r.peak),
            ]
            for r, count in _folded(self.stages)
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        line = "  ".join("─" * w for w in widths)
        text = ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in [head, *rows]]
        moves = [s.kind for s in self.switches]
        plural = {"switch": "switches", "gather": "gathers"}
        count = {k: moves.count(k) for k in dict.fromkeys(moves)}
        kinds = ", ".join(f"{c} {k if c == 1 else plural[k]}" for k, c in count.items()) or "none"
        total = "  ".join(f"{phase} {human(b)}" for phase, b in self.bytes.items())
        shared = sum(s.shared for s in self.switches)
        if shared:
            kinds += f", in {len(moves) - shared} collectives"
        foot = [
            f"{self.size} ranks; moves forward: {kinds}",
            f"bytes a rank sends: {total}",
            f"peak a rank: {human(self.peak)}, of which parameters {human(self.resident)}",
        ]
        if self.size > 1 and self.share * self.size > 1.5:
            foot.append(f"the largest tensor of a rank is {self.share:.2f} of the largest of one process")
        if self.inputs and not any(r.pattern for r in self.stages):  # no stage says what is sharded
            along = ", ".join(f"{k} along {' and '.join(d)}" if d else f"{k} whole" for k, d in self.inputs.items())
            foot.insert(0, f"inputs: {along}")
        foot += [_choices(r) for r in self.residuals]
        if self.hardware is not None:
            foot += self._timing(self.hardware)
        if self.advice:
            foot.append(self.advice)
        foot += self._idle()
        if self.reads:
            foot.append(f"planned from one run on these inputs, for this forward reads its data: {self.reads}")
        if not self.exact:
            foot.append("the search was cut: this plan is good, not proven cheapest")
        return "\n".join([text[0], line, *text[1:], line, *foot])

    def _idle(self) -> list[str]:
        found: dict[tuple[int, str], dict[str, None]] = {}
        for r in self.stages:
            if r.idle and r.layout is not None:
                found.setdefault((r.idle, r.layout), {})[generic(r.name)] = None
        return [
            f"{idle} of {self.size} ranks have nothing to do in {', '.join(names)}: {along!r} is too short for them"
            for (idle, along), names in found.items()
        ]

    def _timing(self, hardware: Hardware) -> list[str]:
        link, e, calls = hardware.axis(self.size, self._mostly), self.estimate, sum(self.calls.values())
        lines = [
            f"a step: compute {clock(e.compute)} + {calls} calls over {link.name} {clock(e.comm)} = {clock(e.step)}; "
            f"on one rank {clock(e.alone)}"
        ]
        if self.size > 1 and e.speedup <= 1:
            idle = "the calls alone" if calls * link.alpha > e.comm / 2 else "the bytes"
            lines.append(f"{self.size} ranks are no faster than one: {idle} take longer than is saved")
        if self.peak > hardware.memory:
            lines.append(f"the peak does not fit in {human(hardware.memory)}")
        return lines


def _choices(r: Residual) -> str:
    """What it costs to switch a residual stream, or its branches."""

    def cost(way: tuple[int, int]) -> str:
        return f"{human(way[0])} in {way[1]}"

    ways = [f"as planned {cost(r.plan)}"]
    if r.switched is not None:
        ways.append(f"only the stream switched {cost(r.switched)}")
    if r.kept is not None:
        ways.append(f"the stream kept along {r.along} and branches switched in and out {cost(r.kept)}")
    return f"{r.joins} residuals over {r.dims}, moves forward: " + "; ".join(ways)


def _folded(rows: Sequence[StageRow]) -> list[tuple[StageRow, int]]:
    """Repeated groups of rows shown once, with how often; the peak shown is the group's last."""

    def key(r: StageRow) -> Any:
        return (generic(r.name), r.computes, r.layout, r.switch, r.bytes)

    shown: list[tuple[StageRow, int]] = []
    i = 0
    while i < len(rows):
        best = (1, 1)
        for period in range(1, 33):  # an Evoformer block is 17 stages
            group = [key(r) for r in rows[i : i + period]]
            times = 1
            while [key(r) for r in rows[i + times * period : i + (times + 1) * period]] == group:
                times += 1
            if times > 1 and times * period > best[0] * best[1]:
                best = (period, times)
        period, times = best
        last = rows[i + (times - 1) * period : i + times * period]
        for r in last:
            name = generic(r.name) if times > 1 else r.name
            shown.append((replace(r, name=name), times))
        i += period * times
    return shown


def make_plan(
    t: Trace, stages: Mapping[str, Stage], n: int, memory: int | None, hardware: Hardware | None = None,
    again_inside: bool = False, kept_inside: bool = False, batch: bool = True,
) -> Plan:  # fmt: skip
    """Solve a trace. `again_inside`: all stages are recomputed within their hooks, also where the trace saw no
    checkpoint; `kept_inside`: what is sent inside of stages is kept all the same; `batch`: whether it may be
    sharded for the sake of bytes."""
    problem, solution = _solved(t, n, memory, batch)
    needs = [op.choices[c].needs for op, c in zip(t.ops, solution.choices)]
    gives = [op.choices[c].gives for op, c in zip(t.ops, solution.choices)]
    producer = {v: (i, k) for i, op in enumerate(t.ops) for k, v in enumerate(op.outputs)}
    used: dict[int, set[str | None]] = {}
    for op, need in zip(t.ops, needs):
        for v, key in zip(op.inputs, need):
            used.setdefault(v, set()).add(key)
    moves: dict[int, list[Move]] = {}
    for m in solution.moves:
        moves.setdefault(m.value, []).append(m)

    # a tensor that no use needs as its producer gave it is switched there: the earliest place, and in the producer's
    # own dtype; all other moves happen at the use
    push: dict[int, str | None] = {}
    for v, first in ((v, ms[0]) for v, ms in moves.items()):
        if v in producer and first.kind != "gather" and first.dst in t.cuts[v]:
            op_index, position = producer[v]
            if t.events[op_index].shared:
                continue
            at_home = gives[op_index][position]
            if at_home not in used.get(v, set()) and all(m.src != at_home for m in moves[v][1:]):
                push[v] = first.dst
    _meet(t, solution, push, n)

    def via(s: Any, i: int) -> list[Via]:
        """The moves of an operand before op i, but for those that its use makes by itself."""
        own = [m for m in moves.get(s.value, []) if m.before == i] if s is not None else []
        return [
            (t.cuts[m.value].get(m.src) if m.src else None, t.cuts[m.value].get(m.dst) if m.dst else None)
            for m in own
            if push.get(m.value, "") != m.dst
        ]

    script = Script({}, [], {}, t.random_glue, frozenset(t.copies), frozenset(t.same), tuple(t.names))
    inputs: dict[str, tuple[str, ...]] = {}
    for param, v in t.inputs.items():
        layouts = used.get(v, set())
        inputs[param] = tuple(sorted(k for k in layouts if k is not None))
        only = next(iter(layouts)) if len(layouts) == 1 else None
        script.inputs[param] = t.cuts[v][only] if only is not None else None
    homes = dict(solution.homes)
    homes.update({v: k for op, give in zip(t.ops, gives) for v, k in zip(op.outputs, give)} | push)
    for i, (op, event, choice) in enumerate(zip(t.ops, t.events, solution.choices)):
        pushes = [t.cuts[v][key] if (key := push.get(v)) is not None else None for v in op.outputs]
        if event.kind == "stage":
            option = event.options[choice].name
            ways = [via(s, i) for s in event.operands]
            script.stages.append(StageStep(event.name, option, pushes, event.random, ways, event.constants))
            # run whole on every rank, it has to draw the same numbers there, as glue does
            script.random_glue |= event.random and option is None
        elif event.kind == "source":
            if event.source[choice] is not None:
                script.glue[event.index] = GlueStep(event.name, source=event.source[choice])
        elif event.kind == "glue":
            layout = dict(zip(op.inputs, needs[i]))
            if not any(pushes) and all(homes[v] == key for v, key in layout.items()):
                continue
            cuts = [s.cuts[key] if s and (key := layout[s.value]) is not None else None for s in event.operands]
            script.glue[event.index] = GlueStep(event.name, cuts, pushes, via=[via(s, i) for s in event.operands])

    recomputing = {event.region for event in t.events if event.grad}

    def again(at: int, after: bool) -> bool:
        """Whether recomputation in backward gets past op `at`: it stops where nothing more was saved."""
        region = t.events[at].region if at >= 0 else None
        if region is None or region not in recomputing:
            return False
        if region in t.saves:
            return t.saves[region] > at or (t.saves[region] == at and not after)
        return any(e.region == region and e.kind == "stage" for e in t.events[at + after :])

    def recomputed(m: Move) -> bool:
        if push.get(m.value, "") == m.dst:
            return again(m.after, after=True)
        # a copy made of what came from outside the region is still there
        inside = m.after < 0 or t.events[m.after].region == t.events[m.before].region
        return inside and again(m.before, after=False)

    by_grad = {(v, k) for op, need, e in zip(t.ops, needs, t.events) if e.grad for v, k in zip(op.inputs, need)}
    by_grad |= {(m.value, m.src) for m in solution.moves}

    def differentiated(m: Move) -> bool:
        return t.grads[m.value] and (m.value, m.dst) in by_grad

    def collective(m: Move) -> Any:
        """The same for moves that share one: switches of small tensors at one place."""
        if m.kind != "switch" or not fuses(t.values[m.value].nbytes, n):
            return m
        return ("push", m.after) if push.get(m.value, "") == m.dst else ("use", m.before)

    taken = [op.choices[c] for op, c in zip(t.ops, solution.choices)]
    sends: dict[str, Sent] = {phase: {} for phase in ("forward", "backward", "recompute")}

    def count(phase: str, kind: str, nbytes: int, times: int = 1) -> None:
        sends[phase] = add_sent(sends[phase], {kind: (nbytes, times)})

    sendings: list[Sending] = []

    def where(at: int) -> tuple[str, int, str]:
        return t.events[at].kind, t.events[at].index, t.ops[at].name

    own_call: dict[Move, int] = {}
    seen: set[Any] = set()
    for m in (m for m in solution.moves if m.kind != "split"):
        for phase, happens, sent in (
            ("forward", True, m.bytes),
            ("backward", differentiated(m), _adjoint_bytes(t.values[m.value], m, n)),
            ("recompute", recomputed(m), m.bytes),
        ):
            if happens:
                new = (phase, collective(m)) not in seen
                seen.add((phase, collective(m)))
                back = phase == "backward" and m.kind == "gather"
                count(phase, "reduce_scatter" if back else m.kind, sent, int(new))
                if phase == "forward":
                    own_call[m] = int(new)
                    at = where(m.after if push.get(m.value, "") == m.dst else m.before)
                    sendings.append(Sending(at, m.kind, int(new), t.values[m.value], m.src, m.dst))
    for i, (event, own) in enumerate(zip(t.events, taken)):
        alike = {"all_reduce": (own.bytes, own.calls)} if own.calls else {}  # a sum in glue is its own adjoint
        if event.kind != "stage" and own.calls:
            sendings.append(Sending(where(i), "all_reduce", own.calls, bytes=own.bytes))
        inside = event.sends[solution.choices[i]] if event.kind == "stage" else Sends(alike, alike, alike)
        sends["forward"] = add_sent(sends["forward"], inside.forward)
        if event.grad:
            sends["backward"] = add_sent(sends["backward"], inside.backward)
        if event.kind != "stage":
            times = int(again(i, after=True))
        elif kept_inside or not event.grad:
            times = 0
        else:
            # a stage is recomputed as a whole: what it saves lies behind what it sends. Twice, if it is a checkpoint
            # within a region that is one, which saves the inputs of its last stage and stops there
            itself = again_inside or event.own
            times = itself + again(i, after=itself)
        sends["recompute"] = add_sent(sends["recompute"], *[inside.recompute] * times)
        if event.grad:
            for around, after in ((inside.before, False), (inside.after, True)):
                if again(i, after):
                    sends["recompute"] = add_sent(sends["recompute"], around)
    # an input that asks for its gradient gets it whole: by an all-gather if it was split, else by an all-reduce
    summed = list(t.whole_grads)
    for param, v in t.inputs.items():
        if t.grads[v] and t.values[v].home == (None,):
            if script.inputs[param]:
                count("backward", "gather", price(t.values[v], next(iter(used[v])), None, n)[0])
            else:
                summed.append(t.values[v].nbytes)
    for size in summed:
        count("backward", "all_reduce", -(-2 * size * (n - 1) // n))
    if n == 1:
        sends = {phase: {} for phase in sends}
    total = {phase: sum(nbytes for nbytes, _ in sent.values()) for phase, sent in sends.items()}
    calls = {phase: sum(times for _, times in sent.values()) for phase, sent in sends.items()}

    everything = [t.forwards(event) * event.flops for event in t.events]
    touched = [tuple(t.forwards(event) * part for part in event.touched) for event in t.events]
    shares = [_share(t, stages, i, solution.choices[i], n) for i in range(len(t.ops))]
    held = [_held(t, i, c, share, n) for i, (c, share) in enumerate(zip(taken, shares))]
    longest = max((whole for _, whole in held), default=1)
    saved = list(accumulate((c.saved for c in taken), initial=t.resident))
    peaks = [saved[i + 1] + event.memory[0] for i, event in enumerate(t.events) if event.kind == "whole"]
    return Plan(
        n, *_rows(t, stages, solution, n, own_call, [own / longest for own, _ in held]), total,
        max([solution.peak, *peaks]), t.resident, solution.exact, script,
        sendings=sendings if n > 1 else [], share=max((own for own, _ in held), default=1) / longest,
        whole=_whole(t, taken, held, everything, n), calls=calls,
        flops=int(sum(f * share for f, share in zip(everything, shares))),
        flops_alone=sum(everything),
        flops_whole=sum(f for f, share in zip(everything, shares) if share == 1),
        touched=int(sum(_touched(t, stages, i, both, shares[i]) for i, both in enumerate(touched)))
        + 2 * sum(total.values()),  # what is sent is copied once, to lie as it goes or comes
        touched_alone=sum(map(sum, touched)),
        cut_weights=sum(inside.cut for stage in stages.values() for inside in stage.inside),
        sends=sends,
        hardware=hardware, problem=problem, inputs=inputs, staged=tuple(event.kind == "stage" for event in t.events),
        reads=t.reads, chosen=not any(stage.whole for stage in stages.values()),
    )  # fmt: skip


def _solved(t: Trace, n: int, memory: int | None, batch: bool) -> tuple[Problem, Solution]:
    """The problem of a trace, and its plan: without batch where there is more, unless nothing else fits the memory."""

    def solved(admitted: Sequence[Sequence[int]]) -> tuple[Problem, Solution]:
        ops = [replace(op, choices=tuple(op.choices[c] for c in own)) for op, own in zip(t.ops, admitted)]
        if memory is not None:
            ops = [
                replace(op, choices=tuple(replace(c, work=e.memory[0]) for c in op.choices))
                if e.kind == "whole"
                else op
                for op, e in zip(ops, t.events)
            ]
        problem = Problem(tuple(t.values), tuple(ops), n, memory, t.resident)
        solution = solve(problem)
        return problem, replace(solution, choices=tuple(own[c] for own, c in zip(admitted, solution.choices)))

    try:
        return solved(_without_batch(t, n, batch))
    except Infeasible:
        return solved([range(len(op.choices)) for op in t.ops])


def _without_batch(t: Trace, n: int, batch: bool) -> list[list[int]]:
    """Of every op the choices that compete by their bytes.

    To share out a batch is what data parallelism is for, and here it may be 1. So it is not for stages, if all of them
    can be sharded along something else; nor for any op that has something else, if its parts would not be even.
    """

    def uneven(op: Op, c: Choice) -> bool:
        sizes = (dict(t.values[v].sizes)[k] for v, k in zip(op.inputs + op.outputs, c.needs + c.gives) if k is not None)
        return any(size % n for size in sizes)

    stages = [op for op, event in zip(t.ops, t.events) if event.kind == "stage"]
    spared = all(any(not c.rank for c in op.choices) for op in stages)

    def admitted(op: Op, stage: bool) -> list[int]:
        other = any(not c.rank and any(c.needs + c.gives) for c in op.choices)
        left_out = [c.rank and other and (not batch or (stage and spared) or uneven(op, c)) for c in op.choices]
        return [i for i, out in enumerate(left_out) if not out]

    return [admitted(op, event.kind == "stage") for op, event in zip(t.ops, t.events)]


def _meet(t: Trace, solution: Solution, push: dict[int, str | None], n: int) -> None:
    """Leave to their use the pushes of tensors that enter one op together: there they share a collective.

    Not inside an activation checkpoint, which would repeat it; and not what only one op pushes, for it shares there.
    """
    uses: dict[int, list[int]] = {}
    for k, op in enumerate(t.ops):
        for v in op.inputs:
            uses.setdefault(v, []).append(k)
    entering: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.kind == "switch" and fuses(t.values[m.value].nbytes, n):
            entering.setdefault(m.before, []).append(m)
    for k, moves in entering.items():
        pushed = [m for m in moves if push.get(m.value, "") == m.dst]
        free = [m for m in pushed if uses[m.value] == [k] and t.events[k].region is None]
        at_use = len(moves) - len(pushed)
        if len(free) + at_use > 1 and (at_use or len({m.after for m in free}) > 1):
            for m in free:
                del push[m.value]


def _share(t: Trace, stages: Mapping[str, Stage], i: int, c: int, n: int) -> float:
    """What the busiest rank computes of an op: its chunk of the sharded dim, or everything."""
    op, event = t.ops[i], t.events[i]
    if event.kind == "stage":
        stage = stages[event.name]
        if stage.whole and stage.inside:  # its weights are cut instead
            return 1 / n
        if stage.around is not None and event.options[c].name is not None:
            return stage.around.share(event.sizes, n)
        return event.options[c].share(n)
    choice = op.choices[c]
    for v, key in zip(op.inputs + op.outputs, choice.needs + choice.gives):
        if key is not None:
            return t.values[v].local_bytes(key, n) / max(t.values[v].nbytes, 1)
    return 1.0


def _held(t: Trace, i: int, c: Choice, share: float, n: int) -> tuple[int, int]:
    """Bytes of the largest tensor that a rank holds of an op, and of the largest that one process does."""
    op, event = t.ops[i], t.events[i]
    if event.kind == "output":  # what the caller asked for
        return 0, 0
    layouts = list(zip(op.inputs + op.outputs, c.needs + c.gives))
    own = [t.values[v].local_bytes(k, n) for v, k in layouts]
    whole = [t.values[v].nbytes for v, _ in layouts]
    return max([*own, int(event.largest * share)]), max([*whole, event.largest])


def _whole(
    t: Trace, taken: Sequence[Choice], held: Sequence[tuple[int, int]], flops: Sequence[float], n: int
) -> list[Whole]:
    """The glue that runs whole, longer than 1.5/N of the longest: what takes most first."""
    longest, total = max((whole for _, whole in held), default=1), max(sum(flops), 1)
    found: dict[tuple[str, str], Whole] = {}
    for event, c, (own, _), work in zip(t.events, taken, held, flops):
        if event.kind in ("stage", "output", "source") or any(c.needs + c.gives) or own * n < 1.5 * longest or n == 1:
            continue
        if event.kind == "glue" and not event.largest:  # nothing is made: a view, or numbers that are read
            continue
        key = event.name, generic(event.module)
        known = found.get(key, Whole(*key, 0, 0.0, 0))
        found[key] = Whole(*key, max(known.bytes, own), known.part + work / total, known.calls + 1)
    return sorted(found.values(), key=lambda w: (w.part, w.bytes), reverse=True)


def _touched(t: Trace, stages: Mapping[str, Stage], i: int, touched: tuple[int, ...], share: float) -> float:
    """What the busiest rank reads and writes of an op: as it computes, but for what lies outside of cut weights."""
    event = t.events[i]
    whole = event.kind == "stage" and stages[event.name].whole
    return touched[0] * (1.0 if whole else share) + touched[1] * share


def _adjoint_bytes(value: Value, m: Move, n: int) -> int:
    """What the busiest rank sends in the backward of a move; with uneven chunks not always what it sends forward."""
    if m.kind == "switch":
        return price(value, m.dst, m.src, n)[0]
    if m.kind == "gather" and m.src is not None:  # a reduce-scatter: all but this rank's own chunk
        size = dict(value.sizes)[m.src]
        return value.nbytes // size * (size - chunk_sizes(size, n)[-1])
    return 0


def _rows(
    t: Trace,
    stages: Mapping[str, Stage],
    solution: Solution,
    n: int,
    own_call: Mapping[Move, int],
    share: Sequence[float],
) -> tuple[list[StageRow], list[Switch]]:
    rows, switches = [], []
    before: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.kind != "split":
            before.setdefault(m.before, []).append(m)
            where = t.values[m.value].name, m.src, m.dst, t.ops[m.before].name
            switches.append(Switch(m.kind, *where, m.bytes, shared=not own_call[m]))
    saved = 0
    for i, (op, event, c) in enumerate(zip(t.ops, t.events, solution.choices)):
        choice = op.choices[c]
        saved += choice.saved
        own = before.get(i, [])
        text = ", ".join(f"gather {m.src}" if m.kind == "gather" else f"{m.src} → {m.dst}" for m in own)
        sent = sum(m.bytes for m in own) + choice.bytes
        if choice.bytes:
            inside = stages[event.name].inside if event.kind == "stage" else []
            what = ", ".join(dict.fromkeys(x.label for x in inside)) or "all-reduce"
            text = f"{text}, {what}" if text else what
        held = sum(t.values[v].local_bytes(k, n) for v, k in zip(op.inputs, choice.needs))
        held += sum(t.values[v].local_bytes(k, n) for v, k in zip(op.outputs, choice.gives))
        peak = t.resident + saved + held + choice.work
        calls = sum(own_call[m] for m in own) + choice.calls
        if event.kind == "stage":
            pattern = stages[event.name].pattern
            order = dict.fromkeys(x for p in pattern.inputs for x in p.names if x in p.computed)
            option = event.options[c]
            idle = chunk_sizes(option.size, n).count(0) if option.name is not None else 0
            rows.append(
                StageRow(op.name, pattern.text, tuple(order), option.name, text, sent, peak, calls, idle, share[i])
            )
        elif own or choice.bytes:
            along = next((k for k in choice.needs if k is not None), None)
            rows.append(StageRow(f"({op.name})", "", (), along, text, sent, peak, calls, share=share[i]))
    return rows, switches


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int,
    stages: Mapping[str, str] | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
    hardware: Hardware | None = None,
) -> Plan:
    """The cheapest way to run `model` on `size` ranks, found on one process without running it: nothing is allocated.

    A forward that reads its data is run once, on inputs that have some. args, kwargs: what its forward takes (meta
    tensors will do, but for such a forward); stages: as for `parallelize`, by default
    ``model.stages``; memory: bytes a rank may hold, parameters included; dtype: the floating-point type to plan for,
    by default that of the model; gather_output: count the gather of the outputs, too; hardware: what the ranks are and
    how they are joined, for an estimate in seconds (it does not change the layouts, nor limit the memory). Raises
    ValueError on a stage that does not fit, and `dsp.planner.Infeasible` if nothing fits in the memory.
    """
    if size < 1:
        raise ValueError(f"size is the number of ranks, got {size}")
    found, root = stages_of(model, stages)
    return plan_stages(model, found, root, args, kwargs, size, memory, dtype, gather_output, hardware, advise=True)


def plan_stages(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    size: int,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    gather_output: bool = False,
    hardware: Hardware | None = None,
    again_inside: bool = False,
    kept_inside: bool = False,
    batch: bool = True,
    advise: bool = False,
) -> Plan:
    """`plan` for stages that were found already; without `batch` nothing is sharded along it that need not be.
    `advise`: where glue runs whole, look for what would help."""
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    t = traced(
        model, stages, root, args, kwargs or {}, size, gather_output=gather_output, dtype=dtype, recompute=again_inside
    )
    made = make_plan(t, {s.name: s for s in stages}, size, memory, hardware, again_inside, kept_inside, batch)
    if not (advise and made.whole):
        return made
    rest = size, memory, dtype, gather_output, hardware, again_inside, kept_inside, batch
    return replace(
        made,
        remedy=remedy(
            model, stages, t, made, lambda more: plan_stages(model, [*stages, *more], root, args, kwargs, *rest)
        ),
    )


def stages_of(model: nn.Module, stages: Mapping[str, str] | None) -> tuple[list[Stage], StagePattern | None]:
    if stages is None:
        stages = getattr(model, "stages", None)
        if stages is None:
            raise NotationError(
                f"{type(model).__name__} has no stages attribute; pass stages={{...}}, for example "
                '{"blocks.*.spatial": "b t [s c]", "blocks.*.temporal": "b [t] s [c]"}'
            )
    found, root = find_stages(model, stages)
    return found, parse(root, root=True) if root is not None else None


__all__ = ["GlueError", "Plan", "chunk_sizes", "make_plan", "plan", "plan_stages", "stages_of"]
