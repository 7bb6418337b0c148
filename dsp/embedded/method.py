"""The methods by name: the stages of a model under each, and the communication inside them; parallelize and plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dsp.comm.hardware import Hardware
from dsp.comm.layout import Axis, cuts_of
from dsp.comm.routes import Route
from dsp.comm.wire import SAME, Wire
from dsp.embedded.core import AttentionCore, Distributed
from dsp.embedded.grid import Grid
from dsp.embedded.place import PlacedStage
from dsp.embedded.ring import Ring
from dsp.embedded.tensor import Region, find_regions
from dsp.embedded.ulysses import Ulysses
from dsp.guard.agreement import agree
from dsp.overlap.options import kind_of, overlap_of, refuse_overlap
from dsp.parallel import install
from dsp.report.plan import Goal, plan_stages
from dsp.report.table import Plan
from dsp.stages.known import stages_of
from dsp.stages.notation import NotationError, StagePattern
from dsp.stages.signature import Signature
from dsp.stages.stage import Stage, find_stages

Prepared = tuple[list[Stage], StagePattern | None]


def attention(kind: type[AttentionCore], switched: bool = False) -> Callable[..., Prepared]:
    """A method whose attention over one dim `along` spans all ranks, for models that name their cores.

    switched: attention spans some of the ranks, and DSP's switch the others (`dsp.embedded.grid`).
    """

    def prepare(model: nn.Module, along: str | None = None) -> Prepared:
        stages, root = stages_of(model, None)
        cores = _cores(model, stages)
        if not cores and isinstance(getattr(model, "cores", None), Mapping):
            raise ValueError(
                f"{type(model).__name__} names no attention core that {kind.label} could run on parts of its keys: its "
                "`cores` are empty. Use method='dsp'"
            )
        if not cores:
            raise ValueError(
                f"{type(model).__name__} has no attribute `cores`, which {kind.label} needs: a dict from the path of "
                "each attention core (the submodule that takes queries, keys and values) to a pattern, as in "
                "`stages`. Set it on the model, or use method='dsp'"
            )
        along, grids = _along(kind.label, along, cores), dict[str, Grid]()
        for core, stage in cores:
            if along not in core.pattern.computed:
                continue
            if any(along not in p.names for p in stage.pattern.outputs):
                raise ValueError(f"{stage.label} returns no {along!r}: '{stage.pattern.text}'; leave it out of `cores`")
            stage.reach = along
            if switched and stage.name not in grids:
                grids[stage.name] = stage.around = Grid(stage, along)
                stage.methods.append(grids[stage.name])
            method = kind.of(core, stage, along)
            method.grid = grids.get(stage.name)
            stage.methods.append(method)
        return stages, root

    return prepare


def megatron_sp(model: nn.Module, along: str | None = None) -> Prepared:
    """Sharded weights, activations sharded along one dim: an all-gather before each region, a reduce-scatter after."""
    stages, root = stages_of(model, None)
    regions = _regions("megatron_sp", model, stages)
    if along is None:
        along = _along("megatron_sp", None, _cores(model, stages))
    for region, stage in regions:
        if any(along not in p.names for p in (stage.pattern.inputs[0], *stage.pattern.outputs)):
            raise ValueError(
                f"megatron_sp along {along!r}: {stage.label} has no such dim in its first input and its outputs, "
                f"'{stage.pattern.text}'"
            )
        stage.reach = along
        stage.methods.append(region)
    return stages, root


def megatron_lm(model: nn.Module) -> Prepared:
    """Sharded weights, replicated activations: an all-reduce after each region, and in its backward."""
    stages, root = stages_of(model, None)
    for stage in stages:
        stage.whole = True
    for region, stage in _regions("megatron_lm", model, stages):
        stage.methods.append(region)
    return stages, root


def dap(model: nn.Module) -> Prepared:
    """FastFold's dynamic axial parallelism: DSP with FastFold's layouts, which the model has as its stages `dap`."""
    stages = getattr(model, "dap", None)
    if stages is None:
        raise ValueError(
            f"method='dap' needs a dict `dap` on {type(model).__name__}, like its `stages`, with the dims that "
            "are not to be sharded in brackets; give it one, or use method='dsp'"
        )
    return stages_of(model, stages)


def _cores(model: nn.Module, stages: Sequence[Stage]) -> list[tuple[Stage, Stage]]:
    """The attention cores that a model names, each with its stage."""
    cores = getattr(model, "cores", None)
    named = find_stages(model, cores)[0] if cores else []
    return [(core, _around(core.name, core.module, stages)) for core in named]


def _along(label: str, along: str | None, cores: Sequence[tuple[Stage, Stage]]) -> str:
    """The dim that stays sharded: `along`, or the only dim that the cores compute over."""
    dims = {dim for core, stage in cores for dim in core.pattern.computed & stage.pattern.computed}
    if along is None and len(dims) == 1:
        return next(iter(dims))
    if along is None or along not in dims:
        if not dims:
            raise ValueError(
                f"{label}: no attention core computes over a dim that its stage computes over, so there is nothing to "
                "shard for it; compare the brackets in `cores` and in `stages`"
            )
        suffix = "" if along is None else f" along {along!r}"
        which = ", ".join(sorted(map(repr, dims)))
        raise ValueError(f"{label}{suffix}: the attention cores compute over {which}; choose one with along=")
    return along


def _regions(label: str, model: nn.Module, stages: Sequence[Stage]) -> list[tuple[Region, Stage]]:
    """The modules with linear layers that the model names for sharding, each with its stage."""
    named = getattr(model, "tensor_parallel", None)
    if not named:
        raise ValueError(
            f"{type(model).__name__} names no linear layers to cut over ranks, which {label} needs: give it a dict "
            "`tensor_parallel` from the path of each layer to 'columns' or 'rows', or use method='dsp'"
        )
    regions = []
    for name, module, linears in find_regions(model, named):
        stage = _around(name, module, stages)
        regions.append((Region(label, name, module, linears, stage.pattern.inputs[0]), stage))
    return regions


def _around(name: str, module: nn.Module, stages: Sequence[Stage]) -> Stage:
    for stage in stages:
        if any(inner is module for inner in stage.module.modules()):
            return stage
    raise NotationError(
        f"tensor_parallel: {name!r} is in no stage, so its inputs have no layout; make a stage of it or around it"
    )


METHODS: dict[str, Callable[..., Prepared]] = {
    "dsp": lambda model: stages_of(model, None),
    "ulysses": attention(Ulysses),
    "ring": attention(Ring),
    "dsp_ulysses": attention(Ulysses, switched=True),
    "dsp_ring": attention(Ring, switched=True),
    "megatron_sp": megatron_sp,
    "megatron_lm": megatron_lm,
    "dap": dap,
}


def prepare(model: nn.Module, method: str, options: Mapping[str, Any]) -> Prepared:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
    return METHODS[method](model, **options)


def parallelize(
    model: nn.Module, mesh: DeviceMesh, method: str, gather_output: bool = True,
    wire: str | Mapping[str, str] = SAME, route: str | Route | Hardware | None = None,
    overlap: int | str | Hardware | None = None, **options: Any,
) -> nn.Module:  # fmt: skip
    """`dsp.parallelize` with another method, one of `METHODS` ("dsp" is DSP itself); in place, and returned.

    Inputs, outputs and the average of gradients are those of DSP. The model names its attention cores in a dict `cores`
    beside `stages`; `along=` chooses the dim that stays sharded if the cores compute over several. `wire`, `route` and
    `overlap` apply to DSP's own switches only: exchanges inside stages are exact, direct and not overlapped. Raise
    ValueError for a method that does not fit the model.
    """
    refuse_overlap(overlap)
    mesh, route = Route.along(mesh, route)
    axis = Axis.of(mesh, Wire.of(wire), route)
    if axis.size > 1:
        travels = {"wire": axis.wire, "route": axis.ways}
        named = {name: getattr(model, name, None) for name in ("stages", "cores", "tensor_parallel", "dap")}
        facts = {"gather_output": gather_output, "method": method, "overlap": repr(overlap), **options}
        agree(axis, model, {**named, **facts, **travels})
    stages, root = prepare(model, method, options)
    if root is not None:
        Signature(model, root, "the model")
    if axis.size > 1:
        cut = overlap_of(overlap, mesh=mesh, dtype=kind_of(model))
        for stage in stages:
            stage.local = PlacedStage if stage.methods else None
        install(model, axis, stages, root, gather_output, overlap=cut)
        for stage in stages:
            for module in stage.methods:
                if isinstance(module, Distributed):
                    module.install(axis)
    return model


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int,
    method: str,
    dtype: torch.dtype | None = None,
    gather_output: bool = True,
    given: Mapping[str, Placement] | None = None,
    hardware: Hardware | None = None,
    recompute: bool = False,
    save_exchanges: bool = False,
    wire: str | Mapping[str, str] = SAME,
    route: str | Route | Hardware | None = None,
    overlap: int | str | Hardware | None = None,
    **options: Any,
) -> Plan:
    """`dsp.plan` with another method; its bytes include the traffic inside stages.

    recompute: backward recomputes every stage, not only those that already are checkpoints, and repeats the traffic
    inside it, unless `save_exchanges` keeps the exchanged tensors. The other arguments are those of `dsp.plan` and
    `parallelize`.
    """
    stages, root = prepare(model, method, options)
    options = {
        "dtype": dtype, "gather_output": gather_output, "hardware": hardware, "given": cuts_of(given or {}),
        "recompute": recompute, "save_exchanges": save_exchanges, "wire": wire, "route": route, "overlap": overlap,
    }  # fmt: skip
    args = (args,) if isinstance(args, Tensor) else tuple(args)
    return plan_stages(model, stages, root, args, dict(kwargs or {}), Goal.of(size, **options))


def save_exchanges() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for torch.utils.checkpoint: tensors exchanged inside a stage are kept, the rest is recomputed."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.namespace == "dsp" else CheckpointPolicy.PREFER_RECOMPUTE
