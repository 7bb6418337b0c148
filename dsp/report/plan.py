"""`plan`: how a model would run on several ranks, found on one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from dsp.comm.hardware import Hardware
from dsp.comm.layout import Cut, cuts_of
from dsp.comm.node_routes import STRAIGHT, Ways
from dsp.comm.routes import Route
from dsp.comm.wire import AS_IT_IS, SAME, Wire, permitted
from dsp.core.decide import Decision, decide
from dsp.core.inputs import signature_of
from dsp.core.offers import lay_out
from dsp.core.reads import place_of_read, reason_of
from dsp.core.record import Layout, Record
from dsp.core.recording import RecordOptions, record_forward
from dsp.core.torch_calls import GlueError
from dsp.glue.offers import ShardingRules
from dsp.overlap.choice import Overlaps
from dsp.overlap.options import Overlap, overlap_of
from dsp.planner import Move
from dsp.report.advice import remedy
from dsp.report.cost import Loads, TableRows
from dsp.report.legs import Routed, packed, routed, sent_over_links
from dsp.report.measure import Measure
from dsp.report.names import Names
from dsp.report.table import Plan
from dsp.report.traffic import PHASES, Transfer, planned_transfers
from dsp.stages.known import stages_of
from dsp.stages.notation import NotationError, StagePattern
from dsp.stages.stage import Stage, clean
from dsp.support.formatting import Moving
from dsp.support.private import wraps_compiled
from dsp.support.python_state import uncollected
from dsp.support.tensors import tensors_in

WORTH = 0.03  # the share of a step that fewer bits have to save
EXACT_TYPE = (
    "dsp: {model} was planned on tensors without data, or on copies of a subclass of torch.Tensor, as a run has them "
    "between stages. If its code asks for the exact type, or for memory, name the submodule that does so in stages"
)


@dataclass(frozen=True)
class Goal:
    """The goal of a plan, of the arguments of `plan`.

    batch: batch may be sharded to save bytes; permits: the formats in which switches may travel, the exact one first;
    recompute: backward recomputes each stage, even if no checkpoint was there; save_exchanges: what is sent inside of
    stages is not sent again then.
    """

    size: int
    memory: int | None = None
    dtype: torch.dtype | None = None
    gather_output: bool = True
    given: Mapping[str, Cut] = field(default_factory=dict)
    hardware: Hardware | None = None
    batch: bool = True
    permits: tuple[Wire, ...] = (AS_IT_IS,)
    ways: Ways = STRAIGHT
    overlap: Overlap = None
    recompute: bool = False
    save_exchanges: bool = False

    @staticmethod
    def of(size: int, *, wire: Any = SAME, route: Any = None, overlap: Any = None, **options: Any) -> Goal:
        """The goal by arguments as for `plan`; options: fields."""
        hardware = options.get("hardware")
        ways, cut = Route.of(route).over(size, hardware), overlap_of(overlap, hardware)
        return Goal(size, **options, permits=permitted(wire), ways=ways, overlap=cut)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size, the number of ranks, must be at least 1, got {self.size}")
        if len(self.permits) > 1 and self.hardware is None:
            raise ValueError(
                "wire='auto' weighs the time that fewer bytes save against the time to convert them, by the "
                "hardware: pass hardware=dsp.Hardware(...), or name a format"
            )


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int,
    stages: Mapping[str, str] | None = None,
    memory: int | None = None,
    dtype: torch.dtype | None = None,
    gather_output: bool = True,
    given: Mapping[str, Placement] | None = None,
    hardware: Hardware | None = None,
    wire: str | Mapping[str, str] = SAME,
    route: str | Route | Hardware | None = None,
    overlap: Any = None,
) -> Plan:
    """The cheapest way to run `model` on `size` ranks, found on one process without running it: nothing is allocated.

    A forward that reads its data is run once, on real inputs. args, kwargs: the arguments of the forward (meta tensors
    will do, unless it reads its data); stages: as for `parallelize`, by default ``model.stages``; memory: bytes a rank
    may hold, parameters included; dtype: the floating-point type to plan for, by default that of the model;
    gather_output: the outputs are gathered, as for `parallelize`; given: the parameters whose arguments will be
    DTensors, sharded already, and their placement; hardware: the devices and the links between them, for an estimate in
    seconds (it neither changes the layouts nor limits the memory); wire, route, overlap: the formats and routes of
    switches, and the pieces in which they travel while stages compute, as for `parallelize`, where "auto" decides by
    `hardware`; ``wire="auto"`` permits fewer bits, which are not exact. Raises ValueError on a stage that does not fit,
    and `dsp.planner.Infeasible` if nothing fits in the memory.
    """
    goal = Goal.of(
        size, memory=memory, dtype=dtype, gather_output=gather_output, given=cuts_of(given or {}), hardware=hardware,
        wire=wire, route=route, overlap=overlap,
    )  # fmt: skip
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    return plan_stages(model, *stages_of(model, stages), args, dict(kwargs or {}), goal, advise=True)


@uncollected()
def plan_stages(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, goal: Goal,
    advise: bool = False,
) -> Plan:  # fmt: skip
    """`plan` for stages that are known already. advise: where operations run replicated, say why, and name a remedy."""
    record, meter = recorded(model, stages, root, args, kwargs, goal)
    lay_out(record)
    params = [*model.parameters(), *model.buffers()]
    kinds = RecordOptions(dtype=goal.dtype)
    resident = sum(t.numel() * kinds.dtype_of(t).itemsize for t in {id(t): t for t in params}.values())
    plan = quickest(record, resident, goal, bool(meter.reads))
    staged = {id(m) for stage in stages for m in stage.module.modules()}
    between = [(path, m) for path, m in model.named_modules() if path and id(m) not in staged]
    compiled = [*meter.compiled, *(clean(path) for path, m in between if wraps_compiled(m))]
    plan = replace(
        plan, reads=meter.reads, compiled=compiled, chosen=not any(stage.whole for stage in stages),
        cut_weights=sum(method.cut for stage in stages for method in stage.methods),
    )  # fmt: skip
    if not advise:
        return plan
    plan = replace(plan, record=record)
    if not plan.of_inputs:
        return plan
    bound = signature_of(model, root).bind(args, kwargs)[1]
    unnamed = {b.param: b.tensor for b in bound if b.pattern is None}
    replan = lambda named: plan_stages(model, stages, named, args, kwargs, goal)  # noqa: E731
    return replace(plan, remedy=remedy(root, record, unnamed, plan, replan))


def quickest(record: Record, resident: int, goal: Goal, reads: bool) -> Plan:
    """The plan with the shortest step by `goal.hardware`, among those in the formats that the goal permits, and, where
    a route sends a full switch another way than its pieces, with and without overlap. reads: the forward reads data."""

    def planned(wire: Wire, overlap: Overlap) -> Plan:
        record.priced = wire.priced
        with Moving("plan") as line:
            decision = decide(record, goal.gather_output, goal.memory, resident, goal.batch, line.say)
        return printed(record, decision, goal, wire, Overlaps(record, decision, overlap, wire, reads))

    also = [None] if isinstance(goal.overlap, Hardware) and goal.ways.node else []
    first, *pairs = itertools.product(goal.permits, [goal.overlap, *also])
    plans = [planned(*first)]
    if any(s.kind == "switch" for s in plans[0].switches):
        plans += [planned(*pair) for pair in pairs]
    return plans[0] if len(plans) == 1 else plans[shortest([(plan.wire, plan.estimate.step) for plan in plans])]


def recorded(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, goal: Goal
) -> tuple[Record, Measure]:
    """The record of the forward, and what measured its nodes.

    A forward that fails on tensors without data runs on copies of the inputs. Raises ValueError if it reads data, and
    these are meta tensors.
    """

    def run(data: bool) -> tuple[Record, Measure]:
        measure = partial(Measure, methods=methods, recompute=goal.recompute)
        options = RecordOptions(measure, goal.dtype, data, arrivals=goal.given)
        record, _ = record_forward(model, stages, root, args, kwargs, goal.size, ShardingRules(), options)
        meter: Measure = record.driver.meter  # type: ignore[attr-defined]
        del record.driver  # it holds tensors
        return record, meter

    paths = {id(m): path for path, m in model.named_modules()}
    methods = [(paths[id(method.module)], method) for stage in stages for method in stage.methods]
    try:
        return run(data=False)
    except (NotationError, GlueError):
        raise
    except Exception as error:
        reason = error
    if any(t.is_meta for t in itertools.chain(tensors_in((args, kwargs)), model.parameters(), model.buffers())):
        if not (place := place_of_read(reason)):
            reason.add_note(EXACT_TYPE.format(model=type(model).__name__))
            raise reason
        raise ValueError(
            f"the forward of {type(model).__name__} depends on the values of tensors: {place}. Meta tensors have "
            "none: pass real inputs, small ones, to a model on a real device. dsp then records one forward, and "
            "plans for forwards that take the same branches"
        ) from None
    try:
        record, meter = run(data=True)
    except (NotationError, GlueError):
        raise
    except Exception as error:
        error.add_note(EXACT_TYPE.format(model=type(model).__name__))
        raise
    meter.reads = reason_of(reason)
    return record, meter


def printed(record: Record, decision: Decision, goal: Goal, wire: Wire, overlaps: Overlaps) -> Plan:
    """The plan of a record with its decision; wire: the formats in which switches travel."""
    planned, names = planned_transfers(record, goal.save_exchanges), Names(record, decision.bases)
    loads, routes = Loads(record, decision), routed(record, planned, goal.ways)
    transfers = [leg for route in routes for leg in route.legs]
    sends = {phase: busiest([t for t in transfers if t.phase == phase], record.n) for phase in PHASES}
    total = {phase: sum(nbytes for nbytes, _ in sent.values()) for phase, sent in sends.items()}
    rows = TableRows(loads, names, by_move(record, decision, routes), overlaps.moves)
    replicated = [work for work, share in zip(loads.flops, loads.shares) if share == 1]
    return Plan(
        record.n,
        [*rows.stages()],
        rows.switches(),
        total,
        loads.peak,
        decision.problem.resident,
        decision.solution.exact,
        entry=dict(record.entry),
        share=max((largest for largest, _ in loads.lengths), default=1) / loads.longest,
        whole=loads.whole(),
        calls={phase: sum(calls for _, calls in sent.values()) for phase, sent in sends.items()},
        flops=int(loads.busiest),
        flops_alone=sum(loads.flops),
        flops_whole=sum(replicated),
        flops_model=sum(s.node.cost.flops * (1 + 2 * any(s.node.result_grads)) for s in loads.steps),
        # a tensor that is sent is copied once, on packing or unpacking
        touched=int(loads.touched) + 2 * sum(total.values()),
        touched_alone=loads.touched_alone,
        sends=sends,
        hardware=goal.hardware,
        problem=decision.problem,
        names=[names.names[base] for base in decision.bases],
        inputs=inputs_along(record, decision, names),
        wire=wire,
        ways=goal.ways,
        links=sent_over_links(routes, PHASES),
        packs=packed(record, planned, wire),
        overlaps=overlaps.rows,
    )


def inputs_along(record: Record, decision: Decision, names: Names) -> dict[str, tuple[str, ...]]:
    """The dims along which each declared input is split."""
    number, used = {base: v for v, base in reversed([*enumerate(decision.bases)])}, dict[int, set[Layout]]()
    for op, choice in zip(decision.problem.ops, decision.choices):
        for v, cut in zip(op.inputs, choice.needs):
            used.setdefault(v, set()).add(cut)
    declared = {param: number[record.inputs[param].base] for param in record.patterns}
    return {
        param: tuple(sorted(str(names.of(v, cut)) for cut in used.get(v, ()) if cut is not None))
        for param, v in declared.items()
    }


def busiest(transfers: Sequence[Transfer], n: int) -> dict[str, tuple[int, int]]:
    """Bytes and calls by kind of collective, of the rank that sends most."""
    sent = [sum(each) for each in zip(*[t.sent for t in transfers])] or [0] * n
    rank, kinds = sent.index(max(sent)), dict[str, tuple[int, int]]()
    for t in transfers:
        nbytes, calls = kinds.get(t.kind, (0, 0))
        kinds[t.kind] = nbytes + t.sent[rank], calls + t.calls
    return kinds


def by_move(record: Record, decision: Decision, routes: Sequence[Routed]) -> dict[Move, tuple[int, int]]:
    """For each move the bytes that the busiest rank sends, and its calls without those shared with an earlier move."""
    costs: dict[Any, list[tuple[int, int]]] = {}
    for transfer, legs, _ in routes:
        if transfer.phase == "forward" and transfer.move is not None:
            cost = max(map(sum, zip(*[leg.sent for leg in legs]))), sum(leg.calls for leg in legs)
            costs.setdefault(transfer.move, []).append(cost)
    sent = {}
    for m in decision.solution.moves:
        if m.kind != "split":
            waiting = costs.get((decision.bases[m.value], m.src, m.dst))
            sent[m] = waiting.pop(0) if waiting else (m.bytes, int(record.n > 1))
    return sent


def shortest(steps: Sequence[tuple[Wire, float]]) -> int:
    """The index of the shortest step; exact ones come first, and fewer bits must save the share WORTH to win."""
    best = 0
    for at, (wire, seconds) in enumerate(steps):
        worth = WORTH if wire != steps[best][0] else 0.0
        if seconds < (1 - worth) * steps[best][1]:
            best = at
    return best
