"""The preparation of a model of the zoo before the first step: plan, recompute, compile, weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as recompute

import dsp
from dsp.overlap import overlap_of
from zoo.contract import check
from zoo.training import UserError, init_weights, one_line, user_error
from zoo.training.lora import base_of, freeze
from zoo.training.ranks import on_first_rank
from zoo.training.task import Task

if TYPE_CHECKING:  # its import needs more than torch
    from zoo.training.config import Config


def compute_dtype(config: Config) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.precision]


def without_weights(config: Config, task: Task) -> tuple[Any, Any, list[nn.Module]]:
    """The model, its objective and its stages as they will run, on the meta device."""
    try:
        with torch.device("meta"), sizes_that_exist():
            model = task.model()
            if config.lora.rank:
                freeze(model, compute_dtype(config))
            objective = task.objective(model)
        refuse_other_parameters(objective, model)
        stages = compile_and_recompute(config, model)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            user_error(init_weights.refuse_described, task)  # says what to write, if init.weights are of another model
        if isinstance(error, UserError) or not config.model.overrides:
            raise
        raise UserError(
            f"model: cannot build {config.model.name} with overrides {config.model.overrides}: {one_line(error)}"
        ) from error
    return model, objective, stages


def refuse_other_parameters(objective: nn.Module, model: nn.Module) -> None:
    """Raise UserError for an objective with parameters that are not the model's: they would get no values."""
    known = {id(p) for p in model.parameters()}
    if strangers := [name for name, p in objective.named_parameters() if id(p) not in known]:
        raise UserError(
            f"{type(objective).__name__} has parameters that are not the model's: {', '.join(strangers[:3])}. The "
            "trainer initialises, shards and saves only those of the model: put the module that has them into the model"
        )


@contextmanager
def sizes_that_exist() -> Iterator[None]:
    """Turn the overflow of a tensor's size into a UserError."""
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        if not isinstance(error, OverflowError) and "overflow" not in str(error):
            raise
        raise UserError(f"model and data need a tensor that is too large for any machine: {one_line(error)}") from error


def known_hardware(config: Config) -> dsp.Hardware | None:
    """The hardware that the configuration names; None if it names none."""
    options = config.hardware
    if options.device is None:
        return None
    return user_error(
        dsp.hardware.accelerator, options.device, dtype=compute_dtype(config), products=options.products,
        stream=options.stream, link=options.link, network=options.network, node=options.node,
        memory=config.parallel.memory and config.parallel.memory * 2**30, prefix="hardware: ",
    )  # fmt: skip


def overlap_in(
    config: Config, mesh: DeviceMesh | None = None, measured: dsp.Hardware | None = None
) -> int | dsp.Hardware | None:
    """`parallel.overlap`, with auto decided by configured or measured hardware, else by measuring the mesh."""
    overlap, hardware = config.parallel.overlap, known_hardware(config) or measured
    if overlap == "auto" and hardware is None and mesh is None:
        return None
    return overlap_of(overlap, hardware, mesh if hardware is None else None, compute_dtype(config))


def make_plan(
    config: Config,
    task: Task,
    objective: nn.Module,
    sp: int,
    bucket: int = 0,
    route: dsp.Route | None = None,
    overlap: int | dsp.Hardware | None = None,
    hardware: dsp.Hardware | None = None,
) -> dsp.Plan:
    """Plan for batches of a bucket. route, overlap: the run's, if measured; hardware: decides parallel.wire=auto."""
    with torch.device("meta"), sizes_that_exist():
        inputs = task.example(objective, bucket)
        return user_error(
            dsp.embedded.plan, objective, kwargs=inputs, size=sp, dtype=compute_dtype(config),
            given=task.placements(inputs), method=config.parallel.method, gather_output=False,
            save_exchanges=config.parallel.save_exchanges, wire=config.parallel.wire, route=route,
            overlap=overlap or overlap_in(config, measured=hardware), hardware=hardware,
        )  # fmt: skip


def mean_losses(output: Any) -> dict[str, torch.Tensor]:
    """The terms of the loss that an objective returned, as means over the batch of the sp group."""
    terms = output if isinstance(output, dict) else {"loss": output}
    for name, pair in terms.items():
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise UserError(
                f"the objective returned {type(pair).__name__} as {name}: expected the loss of each element and its "
                "weight, as in `return (prediction - y).square(), None`; the trainer takes the mean, over all ranks"
            )
    return {name: dsp.mean(error, weight) for name, (error, weight) in terms.items()}


def repeated_stages(model: nn.Module) -> list[nn.Module]:
    """The stages whose pattern has a `*`, which stands for one component of a path."""
    return _matching(model, (pattern for pattern in check(model).stages if "*" in pattern))


def recomputed_modules(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The modules that keep only their inputs, by value of train.checkpoint_activations, the one that keeps most first.

    A block is the module at the first `*` of a pattern: one layer with all its stages, or a stage that is a layer.
    """
    stages = repeated_stages(model)
    blocks = _matching(model, (pattern.partition("*")[0] + "*" for pattern in check(model).stages if "*" in pattern))
    return {"none": [], "stages": stages, "blocks": blocks, "both": list(dict.fromkeys([*blocks, *stages]))}


def _matching(model: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """The submodules that match a pattern (`*`: one component of a path), in the order of the patterns."""
    regular = [re.escape(pattern).replace(r"\*", "[^.]+") for pattern in dict.fromkeys(patterns)]
    named = list(model.named_modules())
    return list(dict.fromkeys(module for one in regular for name, module in named if re.fullmatch(one, name)))


def compile_and_recompute(config: Config, model: nn.Module) -> list[nn.Module]:
    """Compile and recompute the inside of stages, where there is no switch; return the stages.

    Blocks are recomputed with the switches between their stages: a plan made after this call counts those switches.
    """
    ways = recomputed_modules(model)
    for stage in ways["stages"] if config.train.compile else []:
        torch._dynamo.config.recompile_limit = 64  # all stages share one forward, in training and validation
        stage.forward = torch.compile(stage.forward)
    mode, saving = config.train.checkpoint_activations, config.parallel.save_exchanges
    if saving and mode in ("blocks", "both"):
        raise UserError(f"parallel.save_exchanges needs train.checkpoint_activations=stages, not {mode}")
    options: dict[str, Any] = {"context_fn": dsp.embedded.save_exchanges} if saving else {}
    for module in ways[mode]:
        module.forward = partial(recompute, module.forward, use_reentrant=False, **options)
    return ways["stages"]


def initialize(model: nn.Module, task: Task, device: torch.device, weights: torch.device | None = None) -> None:
    """Give a model on the meta device its weights, made on rank 0: they do not depend on the number of ranks.

    weights: the device of parameters, if another than `device`, which has the buffers.
    """
    model.to_empty(device=weights or device)
    torch.manual_seed(task.config.train.seed)
    built: list[nn.Module] = []
    on_first_rank(lambda: built.append(init_weights.source(task)))
    source = built[0] if built else None
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    kinds = {name: value.dtype for name, value in model.state_dict().items()}
    state = {name: value.to(kinds[name]) for name, value in source.state_dict().items()} if source else {}
    for name, order in dsp.embedded.rank_order(model).items() if source else ():
        state[name] = state[name][order]
    set_model_state_dict(model, state, options=everywhere)
    for module in model.modules() if weights else ():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    for name, buffer in model.named_buffers():  # also buffers that a state dict leaves out
        if source:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)
    if task.config.lora.rank:
        task.identity["lora"]["base"] = base_of(model)
