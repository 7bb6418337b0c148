"""`parallelize`: the core's parallel model, with the rules of operations between stages and the guards of a run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.core.parallel import Parallel
from dsp.glue.offers import ShardingRules
from dsp.known import of_type, stages_for
from dsp.layout import Axis
from dsp.notation import StagePattern
from dsp.stages import Stage, declared


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
    gather_output: bool = True,
) -> nn.Module:
    """Run `model` on sequences N times longer over the N ranks of `mesh`; in place, and returned.

    model: a module. mesh: a 1-D DeviceMesh, such as ``mesh["sp"]`` of a larger one. stages: submodule pattern to stage
    string, by default ``model.stages``, or the stages that `dsp.known` has for its class; the key ``""`` names the
    model's own inputs and outputs. The parallel model takes the inputs of the bare model: full tensors, the same on
    every rank. It returns full tensors; with ``gather_output=False`` it returns DTensors, whose loss is taken with
    `dsp.mean`. Average parameter gradients over the ranks of `mesh` (DDP, `fully_shard`) to get the single-process
    gradient. At size 1 the model is returned untouched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    axis = Axis.of(mesh)
    declarations = stages_of(model, stages)
    if axis.size > 1:
        Parallel(model, axis, *declarations, gather_output, ShardingRules())
    return model


def stages_of(model: nn.Module, stages: Mapping[str, str] | None) -> tuple[list[Stage], StagePattern | None]:
    """The stages of a model, and the pattern of its inputs and outputs; by default those that the model names, or those
    known for its class."""
    if stages is None:
        stages = getattr(model, "stages", None) or stages_for(model) or of_type(model)
    return declared(model, stages)
