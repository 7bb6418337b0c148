"""A plan: a solved trace, and the script that a run follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement

from dsp.hardware import Hardware
from dsp.known import stages_of
from dsp.layout import cuts_of
from dsp.legs import STRAIGHT
from dsp.notation import StagePattern
from dsp.overlap import overlap_of
from dsp.plan.advice import remedy
from dsp.plan.cost import Loads, rows, switches
from dsp.plan.events import Trace
from dsp.plan.overlap import Overlaps
from dsp.plan.program import Program
from dsp.plan.reads import traced
from dsp.plan.solve import Goal, solved
from dsp.plan.traffic import PlannedTraffic, of_links
from dsp.report.quickest import shortest
from dsp.report.table import Plan
from dsp.routes import Route
from dsp.stages import Stage
from dsp.wire import SAME, permitted


def make_plan(t: Trace, stages: Mapping[str, Stage], goal: Goal) -> Plan:
    """Solve a trace; `stages` by name."""
    found = solved(replace(t, values=[*map(goal.wire.priced, t.values)]), stages, goal)
    program = Program(found)
    loads = Loads(found)
    overlaps = Overlaps(loads, program, goal.overlap, goal.wire)
    traffic = PlannedTraffic(found, program, goal, overlaps)
    total = {phase: sum(nbytes for nbytes, _ in sent.values()) for phase, sent in traffic.sends.items()}
    shares = loads.shares
    return Plan(
        goal.size,
        rows(loads, traffic.own, overlaps.moves),
        switches(found, traffic.own),
        total,
        max(found.solution.peak, loads.peak),
        t.resident,
        found.solution.exact,
        program.script(overlaps.pieces, overlaps.ahead),
        sendings=traffic.sendings,
        entry={param: program.entry.get(v) for param, v in t.inputs.items()},
        share=max((own for own, _ in loads.held), default=1) / loads.longest,
        whole=loads.whole(),
        calls={phase: sum(times for _, times in sent.values()) for phase, sent in traffic.sends.items()},
        flops=int(sum(loads.busiest)),
        flops_alone=sum(loads.flops),
        flops_whole=sum(f for f, share in zip(loads.flops, shares) if share == 1),
        flops_model=sum(event.flops * (1 + 2 * event.grad) for event in t.events),
        # a tensor that is sent is copied once, on packing or unpacking
        touched=int(sum(map(loads.touched, found.steps))) + 2 * sum(total.values()),
        touched_alone=loads.touched_alone,
        cut_weights=sum(inside.cut for stage in stages.values() for inside in stage.inside),
        sends=traffic.sends,
        hardware=goal.hardware,
        problem=found.problem,
        names=t.names,
        inputs=program.inputs,
        reads=t.reads,
        compiled=t.compiled,
        chosen=not any(stage.whole for stage in stages.values()),
        wire=goal.wire,
        ways=goal.ways or STRAIGHT,
        links=of_links(traffic.links),
        overlaps=overlaps.found,
        packs=traffic.packs,
    )


def quickest(t: Trace, stages: Mapping[str, Stage], goal: Goal) -> Plan:
    """The plan with the shortest step by `goal.hardware`, among those that the goal leaves open: each permitted format,
    and, where a route sends a full switch another way than its pieces, with and without overlap."""
    plans = [make_plan(t, stages, goal)]
    if goal.hardware is None or not any(s.kind == "switch" for s in plans[0].switches):
        return plans[0]
    also = [None] if isinstance(goal.overlap, Hardware) and plans[0].ways.node else []
    for wire, overlap in [*product(goal.permits, [goal.overlap, *also])][1:]:
        plans.append(make_plan(t, stages, replace(goal, permits=(wire,), overlap=overlap)))
    return plans[shortest([(plan.wire, plan.estimate.step) for plan in plans])]


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
    overlap: int | str | Hardware | None = None,
) -> Plan:
    """The cheapest way to run `model` on `size` ranks, found on one process without running it: nothing is allocated.

    A forward that reads its data is run once, on real inputs. args, kwargs: the arguments of the forward (meta tensors
    will do, unless it reads its data); stages: as for `parallelize`, by default ``model.stages``; memory: bytes a rank
    may hold, parameters included; dtype: the floating-point type to plan for, by default that of the model;
    gather_output: whether the outputs are gathered, as for `parallelize`; given: the parameters whose arguments will be
    DTensors, sharded already, and their placement; hardware: the devices and the links between them, for an estimate in
    seconds (it neither changes the layouts nor limits the memory); wire, route, overlap: the formats and routes of
    switches, and which travel while stages compute, as for `parallelize`, where "auto" decides by `hardware`;
    ``wire="auto"`` permits fewer bits, which are not exact. Raises ValueError on a stage that does not fit, and
    `dsp.planner.Infeasible` if nothing fits in the memory.
    """
    found, root = stages_of(model, stages)
    goal = Goal(
        size, memory, dtype, gather_output, hardware, cuts_of(given or {}), permits=permitted(wire),
        ways=Route.of(route).over(size, hardware), overlap=overlap_of(overlap, hardware),
    )  # fmt: skip
    return plan_stages(model, found, root, args, kwargs, goal, advise=True)


def plan_stages(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    goal: Goal,
    advise: bool = False,
) -> Plan:
    """`plan` for stages that are known already. `advise`: where glue runs replicated, name the reason and a remedy."""
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    t = traced(
        model, stages, root, args, kwargs or {}, goal.size,
        gather_output=goal.gather_output, dtype=goal.dtype, given=goal.given, recompute=goal.again_inside,
    )  # fmt: skip
    made = quickest(t, {s.name: s for s in stages}, goal)
    if advise:
        made = replace(made, record=t.record)
    if not (advise and made.whole):
        return made

    better = remedy(root, t, made, lambda named: plan_stages(model, stages, named, args, kwargs, goal))
    return replace(made, remedy=better)
