"""Facts about a parallel model's records of forwards, and its tensors between stages."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from dsp.comm.layout import Cut
from dsp.core.carrier import carry
from dsp.core.copies import Copies
from dsp.core.decide import decide, names_of
from dsp.core.growth import grown
from dsp.core.offers import lay_out
from dsp.core.recording import RecordOptions, record_forward
from dsp.glue.offers import ShardingRules
from dsp.overlap.choice import Overlaps
from dsp.report.measure import Measure
from dsp.report.plan import Goal, printed
from dsp.report.traffic import PHASES, Transfer, planned_transfers
from dsp.stages.known import stages_of


def parallel(model: nn.Module) -> Any:
    """The `dsp.core.parallel.Parallel` that runs a parallel model's forward."""
    return model.forward.__self__  # type: ignore[union-attr]


def records(model: nn.Module) -> list[Any]:
    """The record of each kind of calls so far, the first one first."""
    return [*parallel(model).records.values()]


def planned(model: nn.Module) -> bool:
    """Tell whether each call so far followed a plan that was made before it."""
    return all(r.planned and not r.driver.unplanned for r in records(model))


def left_plan(model: nn.Module) -> bool:
    """Tell whether the last call ran what its plan did not have."""
    return any(r.driver.unplanned for r in records(model))


def same_key(model: nn.Module) -> list[list[str]]:
    """The decisions on nodes that look alike, for each group of such nodes."""
    groups = [nodes for record in records(model) for nodes in record.by_key.values()]
    return [[str((n.offer.needs, n.moves, n.push)) for n in nodes] for nodes in groups if len(nodes) > 1]


def persistent_shard(model: nn.Module, x: Tensor, dim: int) -> Tensor:
    """A tensor as a call of a parallel model would leave it, sharded along a dim."""
    record, cut = records(model)[0], Cut(dim)
    local = parallel(model).axis.narrow(x, cut).contiguous()
    return carry(record, local, record.ref(local, x.shape), cut)


def stage_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the plan's stage call that each call of a stage is, from now on."""
    turns: list[int] = []
    bring = Copies.bring

    def counted(self: Any, node: Any, *operands: Any) -> Any:
        if node.kind == "stage":
            turns.append([n for n in self.record.nodes if n.kind == "stage"].index(node))
        return bring(self, node, *operands)

    monkeypatch.setattr(Copies, "bring", counted)
    return turns


class Figures(NamedTuple):
    """The plan of a model's first inputs. bytes: by phase, of the busiest rank; shards: it gathers nothing, and
    every stage is sharded."""

    bytes: dict[str, int]
    shards: bool


def figures(model: nn.Module) -> Figures | None:
    """The plan of the first inputs that a parallel model ran on; None if there is none."""
    record = records(model)[0]
    gathers = any(m.dst is None for node in record.nodes for m in node.moves)
    stages = [node for node in record.nodes if node.kind == "stage"]
    shards = not gathers and all(node.offer.option.name is not None for node in stages)
    return Figures(planned_bytes(record), shards) if record.planned else None


def sent_in(transfers: Iterable[Transfer], phase: str, rank: int) -> tuple[int, int]:
    """Calls and bytes of one rank in a phase."""
    of_phase = [t for t in transfers if t.phase == phase]
    return sum(t.calls for t in of_phase), sum(t.sent[rank] for t in of_phase)


def planned_bytes(record: Any) -> dict[str, int]:
    """The bytes of a planned record by phase, of the rank that sends most."""
    transfers = planned_transfers(record)
    return {phase: max(sent_in(transfers, phase, rank)[1] for rank in range(record.n)) for phase in PHASES}


def planned_forward(
    model: nn.Module,
    kwargs: dict[str, Any],
    *,
    equal: bool,
    stages: Any = None,
    recompute: bool = False,
    **options: Any,
) -> tuple[Any, ...]:
    """All that a plan for three ranks is made of. equal: of equal stages, equal calls run once; options: dtype."""
    declared, root = stages_of(model, stages)
    how = RecordOptions(partial(Measure, recompute=recompute), equal=equal, **options)
    record, _ = record_forward(model, declared, root, (), kwargs, 3, ShardingRules(), how)
    lay_out(record)
    problem = decide(record, gather=False).problem
    names = "kind name cost draws operand_grads result_grads regions module constants writes".split()
    nodes = [[getattr(node, name) for name in names] for node in record.nodes]
    return problem, nodes, [*names_of(record, record.nodes).values()], record.draws, record.saved


def recorded(model: nn.Module, args: Any, *, data: bool) -> Any:
    """The measured record of a forward on three ranks."""
    declared, root = stages_of(model, None)
    record, _ = record_forward(model, declared, root, args, {}, 3, ShardingRules(), RecordOptions(Measure, data=data))
    del record.driver  # it holds tensors
    lay_out(record)
    return record


def edges_of(record: Any) -> Any:
    """For each node of a record, the memory of its operands, and what says where gradients come from."""
    return [([t.memory for t in n.refs], n.operand_grads, n.result_grads) for n in record.nodes]


def problem_of(record: Any) -> Any:
    """The planner's problem of a record."""
    return decide(record, gather=True).problem


def regions_of(record: Any) -> list[int | None]:
    """The activation checkpoint around each node."""
    return [n.regions[0].region if n.regions else None for n in record.nodes]


def dims_of_stages(record: Any) -> list[list[str | None]]:
    """The dims that each stage call can be sharded along."""
    return [[o.name for o in n.call.options] for n in record.nodes if n.kind == "stage"]


def promised(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Bytes and calls of this rank by phase, as planned for the first inputs that a parallel model ran on."""
    transfers, rank = planned_transfers(records(model)[0]), parallel(model).axis.rank
    return {phase: sent_in(transfers, phase, rank)[::-1] for phase in PHASES}


def decisions(plan: Any) -> Any:
    """The decisions of a plan, to compare it by with another one."""
    nodes = [node for node in plan.record.nodes if node.offer is not None]
    moves = [[(m.src, m.dst) for m in node.moves] for node in nodes]
    return [(n.name, n.offer.needs, n.offer.gives, m, n.push) for n, m in zip(nodes, moves)]


def overlap_of(model: nn.Module) -> Any:
    """The hardware or the number of pieces by which a parallel model cuts stages; None if it cuts none."""
    return next((p.overlap for p in parallel(model).passes if hasattr(p, "overlap")), None)


def plan_text(model: nn.Module) -> str:
    """The table of the plan that the first inputs of a parallel model have now."""
    runtime, record = parallel(model), grown(records(model)[0])
    lay_out(record)
    decision, wire = decide(record, runtime.gather), runtime.axis.wire
    overlaps = Overlaps(record, decision, overlap_of(model), wire)
    return printed(record, decision, Goal(record.n, gather_output=runtime.gather), wire, overlaps).text()


def graphs_of(model: nn.Module) -> list[Any]:
    """The graphs of each kind of calls of a compiled model; None where none can be made."""
    return [kind.graphs for kind in parallel(model).events.instead.kinds.values()]
