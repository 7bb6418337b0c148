"""`parallelize`: the core's parallel model, with the rules of operations between stages and the guards of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.comm.hardware import Hardware
from dsp.comm.layout import Axis
from dsp.comm.routes import Route
from dsp.comm.wire import SAME, Wire
from dsp.compiled.replay import Compiled
from dsp.core.observed import Observe
from dsp.core.parallel import Parallel
from dsp.core.recording import PLAIN, RecordOptions
from dsp.glue.offers import ShardingRules
from dsp.guard.agreement import agree
from dsp.guard.guards import GUARDS
from dsp.overlap.ahead import send_ahead
from dsp.overlap.choice import CutStages
from dsp.overlap.options import Overlap, kind_of, overlap_of, refuse_overlap
from dsp.report.measure import Measure
from dsp.stages.known import stages_of
from dsp.stages.notation import StagePattern
from dsp.stages.pipelines import Method, SharedBatch, axes_of, parts_of
from dsp.stages.stage import Stage


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
    gather_output: bool = True,
    compile: bool | str = False,
    wire: str | Mapping[str, str] = SAME,
    route: str | Route | Hardware | None = None,
    overlap: int | str | Hardware | None = None,
) -> nn.Module:
    """Run `model` on sequences N times longer over the N ranks of `mesh`; in place, and returned.

    model: a module, or a pipeline of diffusers, whose parts of known classes are parallelized. mesh: a 1-D DeviceMesh,
    such as ``mesh["sp"]`` of a larger one. A pipeline's mesh may have two axes: the first divides the batch of each
    call, such as guidance's two predictions. stages: submodule pattern to stage string, by default ``model.stages``, or
    the stages that `dsp.stages.known` has for its class; the key ``""`` names the model's own inputs and outputs. The
    parallel model takes the inputs of the bare model: full tensors, the same on every rank. It returns full tensors;
    with ``gather_output=False`` it returns DTensors, whose loss is taken with `dsp.mean`. Average parameter gradients
    over the ranks of `mesh` (DDP, `fully_shard`) to get the single-process gradient. At size 1 the model is returned
    untouched.

    compile: True, or the name of a backend of torch.compile, compiles the forward with its collectives as one graph,
    from the second call with inputs of one signature on (docs/compile.md). If one graph cannot replace a forward, it
    runs uncompiled, with a warning that says why.

    wire: the format in which a switch sends real numbers: ``"same"``, unchanged; or ``"bf16"``, ``"fp8"`` or
    ``"int8"``, in fewer bits, which is not exact (docs/wire.md). ``{"forward": ..., "backward": ...}`` sets the format
    of gradients apart. route: how a switch goes over ranks of several nodes: ``"direct"``, ``"hierarchical"``,
    ``"rounds"`` or ``"auto"`` (docs/routes.md); with a route `mesh` may have two axes, nodes and ranks within a node.

    overlap: the number of pieces, 2 to 4, in which to run a stage whose result is switched: each piece travels while
    the next one is computed, in backward as well (docs/overlap.md). "auto" measures the links and cuts where that saves
    time; a `dsp.Hardware` decides the same without measuring. Switched numbers are the same; gradients of weights are
    added up piece by piece, which rounds differently.
    """
    refuse_overlap(overlap)
    if compile and overlap is not None:
        raise ValueError(
            f"overlap={overlap!r} with compile={compile!r}: in one graph the compiler decides when something is "
            "sent. Give one of the two; or compile the forwards of stages, block.forward = "
            "torch.compile(block.forward), which overlap= can cut into pieces"
        )
    batches, mesh = axes_of(model, mesh)
    mesh, route = Route.along(mesh, route)
    axis = Axis.of(mesh, Wire.of(wire), route)
    if (parts := parts_of(model, stages, axis.rank)) is not None:
        for part in parts:
            if axis.size > 1:
                parallelize(part.module, mesh, part.stages, gather_output, compile, wire, route, overlap)
                part.place()
            if batches is not None and batches.size() > 1 and not isinstance(part.module, Method):
                SharedBatch(part.module, part.stages, Axis.of(batches)).attach()
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a pipeline of diffusers, not {type(model).__name__}")
    if axis.size > 1:
        patterns = stages if stages is not None else getattr(model, "stages", None)
        facts = {"stages": patterns, "wire": axis.wire, "route": axis.ways, "gather_output": gather_output}
        agree(axis, model, {**facts, "compile": compile, "overlap": repr(overlap)})
    declarations = stages_of(model, stages)
    if axis.size > 1:
        cut = overlap_of(overlap, mesh=mesh, dtype=kind_of(model))
        install(model, axis, *declarations, gather_output, compile, cut)
    return model


def install(
    model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather_output: bool,
    compile: bool | str = False, overlap: Overlap = None,
) -> None:  # fmt: skip
    """Make a model parallel in place, by its stages."""
    observers: Sequence[Observe] = (*GUARDS, Compiled(compile)) if compile else GUARDS
    passes = () if overlap is None else (CutStages(overlap, axis.wire),)
    options = RecordOptions(Measure) if isinstance(overlap, Hardware) else PLAIN
    Parallel(model, axis, stages, root, gather_output, ShardingRules(), observers, passes, options, send_ahead)
