"""Facts about a parallel model's plans and tensors, asked in one way of the old house and of the new one."""

from __future__ import annotations

from functools import partial
from os import environ
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from dsp.known import stages_of
from dsp.layout import Cut

NEW = environ.get("DSP_HOUSE") == "new"


def sharded_type() -> type[Tensor]:
    """The type of a tensor between stages."""
    if NEW:
        from dsp.core.carrier import Carrier

        return Carrier
    from dsp.sharded import Sharded

    return Sharded


def planned(model: nn.Module) -> bool:
    """Tell whether each call so far followed a plan that was made before it."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if NEW:
        return all(r.planned and not r.driver.unplanned for r in runtime.records.values())
    plans = [entry.plan for entry in runtime.entries.values()]
    return all(plan is not None and not plan.script.recorded for plan in plans) and not any(
        entry.told for entry in runtime.entries.values()
    )


def left_plan(model: nn.Module) -> bool:
    """Tell whether the last call ran what its plan did not have."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if NEW:
        return any(r.driver.unplanned for r in runtime.records.values())
    return any(entry.astray for entry in runtime.entries.values())


def same_key(model: nn.Module) -> list[list[str]]:
    """The decisions on nodes that look alike, for each group of such nodes."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if NEW:
        groups = [nodes for record in runtime.records.values() for nodes in record.by_key.values()]
        return [[str((n.offer.needs, n.moves, n.push)) for n in nodes] for nodes in groups if len(nodes) > 1]
    nodes = [found.nodes for entry in runtime.entries.values() for found in entry.plan.script.nodes.values()]
    return [[repr(node.step) for node in several] for several in nodes if len(several) > 1]


def plans(model: nn.Module) -> int:
    """The number of plans of a model."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    return len(runtime.records if NEW else runtime.entries)


def persistent_shard(model: nn.Module, x: Tensor, dim: int) -> Tensor:
    """A tensor as a call of a parallel model would leave it, sharded along a dim."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    axis, cut = runtime.axis, Cut(dim)
    local = axis.narrow(x, cut).contiguous()
    if NEW:
        from dsp.core.carrier import carry as carry_

        record = next(iter(runtime.records.values()))
        return carry_(record, local, record.ref(local, x.shape), cut)
    from dsp.sharded import carry

    return carry(local, axis.at(x.shape, cut))


def stage_turns(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of the plan's stage call that each call of a stage is, from now on; None for one without a plan."""
    turns: list[int | None] = []
    if NEW:
        from dsp.core.copies import Copies

        bring = Copies.bring

        def brought(self: Any, node: Any, *operands: Any) -> Any:
            if node.kind == "stage":
                turns.append([n for n in self.record.nodes if n.kind == "stage"].index(node))
            return bring(self, node, *operands)

        monkeypatch.setattr(Copies, "bring", brought)
        return turns
    from dsp.run.stage_calls import StageCalls

    decide = StageCalls.decision

    def decided(self: Any, *call: Any) -> Any:
        decision = decide(self, *call)
        turns.append(decision.node and decision.node.index)
        return decision

    monkeypatch.setattr(StageCalls, "decision", decided)
    return turns


class Figures(NamedTuple):
    """The plan of a model's first inputs. bytes: by phase, of the busiest rank; shards: it gathers nothing, and
    every stage is sharded; sends: what it sends, to compare plans by."""

    bytes: dict[str, int]
    shards: bool
    sends: Any = None


def figures(model: nn.Module) -> Figures | None:
    """The plan of the first inputs that a parallel model ran on; None if there is none, or it was recorded in a run."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if NEW:
        record = next(iter(runtime.records.values()))
        gathers = any(m.dst is None for node in record.nodes for m in node.moves)
        stages = [node for node in record.nodes if node.kind == "stage"]
        shards = not gathers and all(node.offer.option.name is not None for node in stages)
        return Figures(planned_bytes(record), shards) if record.planned else None
    plan = next(iter(runtime.entries.values())).plan
    if plan is None or plan.script.recorded:
        return None
    shards = all(s.kind != "gather" for s in plan.switches) and all(r.layout is not None for r in plan.stages)
    return Figures(plan.bytes, shards, (plan.sends, plan.switches))


def planned_bytes(record: Any) -> dict[str, int]:
    """The bytes of a planned record by phase, of the rank that sends most."""
    from dsp.report.traffic import PHASES, planned_transfers, sent_in

    transfers = planned_transfers(record)
    return {phase: max(sent_in(transfers, phase, rank)[1] for rank in range(record.n)) for phase in PHASES}


def planned_forward(
    model: nn.Module, kwargs: dict[str, Any], *, equal: bool, stages: Any = None, **options: Any
) -> tuple[Any, ...]:
    """All that a plan for three ranks is made of. equal: of equal stages, equal calls run once; options: dtype and
    recompute."""
    found, root = stages_of(model, stages)
    if NEW:
        from dsp.core.decide import decide, names_of
        from dsp.core.offers import lay_out
        from dsp.core.recording import RecordOptions, record_forward
        from dsp.glue.offers import ShardingRules
        from dsp.report.measure import Measure

        measure = partial(Measure, recompute=options.pop("recompute", False))
        how = RecordOptions(measure, equal=equal, **options)
        record, _ = record_forward(model, found, root, (), kwargs, 3, ShardingRules(), how)
        lay_out(record)
        problem = decide(record, gather=False).problem
        names = "kind name cost draws operand_grads result_grads regions module constants writes".split()
        nodes = [[getattr(node, name) for name in names] for node in record.nodes]
        return problem, nodes, [*names_of(record, record.nodes).values()], record.draws, record.saved
    from dsp.plan.rehearsal import trace

    t = trace(model, found, root, (), kwargs, 3, gather_output=False, twins=equal, **options)
    events = [(e.kind, e.index, e.name, e.memory, e.flops, e.random, e.grad, e.region) for e in t.events]
    return t.values, t.grads, t.names, t.ops, events, t.inputs, t.random_glue, t.resident


def recorded(model: nn.Module, args: Any, *, data: bool) -> Any:
    """The measured record of a forward on three ranks."""
    found, root = stages_of(model, None)
    if NEW:
        from dsp.core.offers import lay_out
        from dsp.core.recording import RecordOptions, record_forward
        from dsp.glue.offers import ShardingRules
        from dsp.report.measure import Measure

        record, _ = record_forward(model, found, root, args, {}, 3, ShardingRules(), RecordOptions(Measure, data=data))
        del record.driver  # it holds tensors
        lay_out(record)
        return record
    from dsp.plan.rehearsal import trace

    return trace(model, found, root, args, {}, 3, gather_output=True, real=data).record


def edges_of(record: Any) -> Any:
    """For each node of a record, the memory of its operands, and what says where gradients come from."""
    if NEW:
        return [([t.memory for t in n.refs], n.operand_grads, n.result_grads) for n in record.nodes]
    nodes = [([t.memory for t in n.operands], [t.edge for t in n.operands]) for n in record.nodes]
    return nodes, record.reached


def problem_of(record: Any) -> Any:
    """The planner's problem of a record."""
    if NEW:
        from dsp.core.decide import decide

        return decide(record, gather=True).problem
    from dsp.plan.operations import Operations

    t = Operations.of(record, {}, gather=True).trace()
    return t.ops, t.values, t.names


def regions_of(record: Any) -> list[int | None]:
    """The activation checkpoint around each node."""
    if NEW:
        return [n.regions[0].region if n.regions else None for n in record.nodes]
    return [n.region for n in record.nodes]


def dims_of_stages(record: Any) -> list[list[str | None]]:
    """The dims that each stage call can be sharded along."""
    if NEW:
        return [[o.name for o in n.call.options] for n in record.nodes if n.kind == "stage"]
    return [[o.name for o in n.options] for n in record.nodes if hasattr(n, "options")]


def promised(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bytes and calls of this rank by phase, as planned for the first inputs that a parallel model ran on."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if NEW:
        from dsp.report.traffic import PHASES, planned_transfers, sent_in

        transfers, rank = planned_transfers(next(iter(runtime.records.values()))), runtime.axis.rank
        return {phase: sent_in(transfers, phase, rank)[::-1] for phase in PHASES}
    counts = next(iter(runtime.entries.values())).plan.script.planned_counts
    return {phase: (t.bytes, t.calls) for phase, t in counts.phases.items()}


def warnings_of(model: nn.Module) -> list[str]:
    """The warnings that a model sends other than its plan."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    return [] if NEW else [kind.told for kind in runtime.entries.values() if kind.told]


def decisions(plan: Any) -> Any:
    """The decisions of a plan, to compare it by with another one."""
    if not NEW:
        return plan.script.key()
    nodes = [node for node in plan.record.nodes if node.offer is not None]
    moves = [[(m.src, m.dst) for m in node.moves] for node in nodes]
    return [(n.name, n.offer.needs, n.offer.gives, m, n.push) for n, m in zip(nodes, moves)]


def overlap_by(model: nn.Module) -> str:
    """The hardware or the number of pieces by which a parallel model cuts stages."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    return repr(next(p.overlap for p in runtime.passes if hasattr(p, "overlap")) if NEW else runtime.overlap)


# the function that sends a tensor ahead; its first argument knows what is in flight
LAUNCH = "dsp.overlap.ahead.launch" if NEW else "dsp.run.glue.send_ahead"
# the modules that ask whether a tensor is so small that its switch shares a call
ASK = "dsp.core.placement dsp.report.traffic" if NEW else "dsp.plan.program dsp.plan.traffic"
ASK_FOR_SIZE = ("dsp.moves", *ASK.split())


def in_flight(holder: Any) -> dict[Any, Any]:
    """By memory, the waits for tensors of a forward that are in flight."""
    return holder.in_flight if NEW else holder.coming


def plan_text(model: nn.Module) -> str:
    """The table of the plan that the first inputs of a parallel model have now."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    if not NEW:
        return next(iter(runtime.entries.values())).plan.text()
    from dsp.core.decide import decide
    from dsp.core.growth import grown
    from dsp.core.offers import lay_out
    from dsp.overlap.choice import Overlaps
    from dsp.report.plan import Goal, printed

    record = grown(next(iter(runtime.records.values())))
    lay_out(record)
    decision, wire = decide(record, runtime.gather), runtime.axis.wire
    overlap = next((p.overlap for p in runtime.passes if hasattr(p, "overlap")), None)
    goal = Goal(record.n, gather_output=runtime.gather)
    return printed(record, decision, goal, wire, Overlaps(record, decision, overlap, wire)).text()


def graphs_of(model: nn.Module) -> list[Any]:
    """The graphs of each kind of calls of a compiled model; None where none can be made."""
    runtime: Any = model.forward.__self__  # type: ignore[union-attr]
    return [kind.graphs for kind in (runtime.events.instead.kinds if NEW else runtime.entries).values()]
