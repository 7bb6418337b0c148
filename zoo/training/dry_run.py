"""`dry_run=true`: the plan, memory, bytes and seconds a rank, for any mesh, in one process that allocates nothing."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dsp
from zoo.training import UserError
from zoo.training.config import Config, mesh_shape
from zoo.training.environment import ranks_of_host, world_size
from zoo.training.estimate import saved_for_backward, total
from zoo.training.model import (
    compute_dtype,
    known_hardware,
    make_plan,
    recomputed_modules,
    repeated_stages,
    without_weights,
)
from zoo.training.task import Task
from zoo.training.task_lookup import create_task
from zoo.training.tracking import human_bytes, human_count, number_of

Rows = list[tuple[str, int, str]]  # name, bytes on a rank, note
MOST = 1024  # largest sp in the advice


def dry_run(config: Config) -> None:
    """Print all this for the configured mesh."""
    parallel, dp = config.parallel, config.parallel.dp_replicate * config.parallel.dp_shard
    world = dp * (parallel.sp or max(1, world_size() // dp))
    replicate, shard, sp = mesh_shape(parallel, world)
    task, hardware = create_task(config), known_hardware(config)
    words = task.describe()  # an error of the data comes before what takes a minute
    announce("building the model without weights")
    model, objective, _ = without_weights(config, task)
    announce(f"planning a step over {number_of(sp, 'rank')}")
    plan = make_plan(config, task, objective, sp, route=foreseen_route(config, hardware))
    announce("tracing a step for what backward keeps")
    memory = Memory(config, task, model)
    count = human_count(sum(p.numel() for p in model.parameters()))
    batch = f"{config.train.batch}{words and f' x {words}'}"
    print(f"model {config.model.name}, {count} parameters, batch {batch}")
    if (path := getattr(config.data, "path", None)) and not Path(path).exists():
        print(f"data.path={path} does not exist: planned for the sizes of the configuration")
    print(f"mesh dp_replicate={replicate} x dp_shard={shard} x sp={sp} = {number_of(world, 'rank')}\n\n{plan.text()}")
    print(
        f"\nmemory a rank in training: weights over {number_of(shard * sp, 'rank')} (in the plan's peak they are "
        f"whole), train.checkpoint_activations={config.train.checkpoint_activations}"
    )
    for label, size, note in memory.table(sp):
        print(f"  {label:<24}{human_bytes(size):>10}  {note}".rstrip())
    print(f"\nlargest activations, of which a rank holds 1/{sp}" if sp > 1 else "\nlargest activations")
    for size, label in memory.activations.largest(5):
        print(f"  {human_bytes(size):>10}  {label}")
    print(f"\nsequence parallelism sends {human_bytes(step_bytes(config, plan))} a rank and step")
    print(memory.advice(sp))
    for hint in task.hints(model):
        print(f"hint: {hint}")
    if config.parallel.overlap == "auto" and hardware is None:
        print("parallel.overlap=auto measures the links when the run starts: name hardware.device to see it here")
    if hardware is not None:
        print(
            f"\na step on {config.hardware.device} (products at {config.hardware.products:.0%} of the peak), "
            f"{hardware.links}: shares of computing, of sequence parallelism's communication, and of the weights' that "
            "computing does not hide"
        )
        announce("planning a step by every method on every mesh")
        print(steps_on(hardware, config, task, objective, memory).table(dp, sp, replicate))


def announce(work: str) -> None:
    """Print what is begun, which may take a minute for a large model, beside the results."""
    print(f"{work} ...", file=sys.stderr, flush=True)


@contextmanager
def out_of_memory(config: Config) -> Iterator[None]:
    """Add the memory that a step needs to an out-of-memory error raised inside."""
    try:
        yield
    except RuntimeError as error:
        if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise _needed(config) from error


def _needed(config: Config) -> UserError:
    sp = dist.get_world_size() // (config.parallel.dp_replicate * config.parallel.dp_shard)
    task = create_task(config)
    memory = Memory(config, task, without_weights(config, task)[0])
    largest = ", ".join(f"{human_bytes(size)} of {label}" for size, label in memory.activations.largest(2))
    text = f"out of memory: {memory.advice(sp)}\n  largest activations, over {sp} ranks: {largest}"
    return UserError(text, alone=True)  # the other ranks may have enough memory


def check_memory(config: Config, task: Task, model: nn.Module, plan: dsp.Plan, device: torch.device) -> None:
    """Refuse a run if a rank needs more memory than its device has, or the ranks of a host more than its RAM."""
    replicate, _, sp = mesh_shape(config.parallel, dist.get_world_size())
    if device.type == "cuda":
        capacity, ranks = torch.cuda.get_device_properties(device).total_memory, 1
    else:
        capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        ranks = ranks_of_host()
    trained = sum(p.numel() for p in trainable(model))
    frozen = sum(p.numel() for p in model.parameters()) - trained
    each = 10 if config.optim.name == "adamw8bit" else 16
    weights = (each * trained + compute_dtype(config).itemsize * frozen) * replicate // dist.get_world_size()
    if config.train.offload and device.type == "cuda":
        weights = 0
    if (weights + plan.peak) * ranks > capacity:  # a rough sum first: the estimate takes time
        need, words = Memory(config, task, model).total(sp) * ranks, task.describe()
        if need > capacity:
            raise UserError(
                f"a training step needs {human_bytes(need)} on a device or host that has {human_bytes(capacity)}: "
                f"train.batch={config.train.batch}{words and f' of {words}'}, model {config.model.name}. Make one of "
                "them smaller, or use more ranks; dry_run=true says what would fit"
            )


def trainable(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that training changes: with adapters, only the adapters'."""
    return (p for p in model.parameters() if p.requires_grad)


class Memory:
    """The memory of a rank in training, for any number of ranks and any way to recompute activations."""

    def __init__(self, config: Config, task: Task, model: nn.Module):
        self.config, self.width = config, compute_dtype(config).itemsize
        self.activations_by_way = saved_for_backward(task, compute_dtype(config))
        self.activations = self.activations_by_way[config.train.checkpoint_activations]
        self.whole = total(self.activations.always)  # bytes for a method with full activations on every rank
        self.ways = list(recomputed_modules(model))  # ways to recompute, those that keep most first
        self.parameters = sum(p.numel() for p in model.parameters())
        self.trained = sum(p.numel() for p in trainable(model))
        sizes = sorted((sum(p.numel() for p in stage.parameters()) for stage in repeated_stages(model)), reverse=True)
        self.gathered = sum(sizes[:2]) + self.parameters - sum(sizes)

    def under(self, config: Config) -> "Memory":
        """The memory of the same model in a run of another configuration; nothing is traced again."""
        other = copy(self)
        other.config, other.activations = config, self.activations_by_way[config.train.checkpoint_activations]
        other.whole = total(other.activations.always)
        return other

    def table(self, sp: int, way: str | None = None, shard: int | None = None) -> Rows:
        """The rows, the total last; `way` and `shard` (dp_shard) are by default those of the configuration."""
        train, trained, frozen = self.config.train, self.trained, self.parameters - self.trained
        shards = (shard or self.config.parallel.dp_shard) * sp
        over = f"in fp32 over {number_of(shards, 'rank')}"
        activations = self.activations_by_way[way or train.checkpoint_activations].bytes
        moments = trained * 8, f"two {over}"
        if self.config.optim.name == "adamw8bit":  # and a scale in fp32 for each 256 numbers
            moments = 2 * (trained + trained // 64), f"two in 8 bits over {number_of(shards, 'rank')}"
        rows = [
            ("parameters", trained * 4 // shards, f"{human_count(trained)} {over}"),
            ("gradients", trained * 4 // shards, over),
            ("AdamW moments", moments[0] // shards, moments[1]),
        ]
        if train.ema > 0:
            rows.append(("averaged weights", trained * 4 // shards, over))
        if frozen:
            kind = f"{human_count(frozen)} in {train.precision} over {number_of(shards, 'rank')}"
            rows.insert(1, ("frozen parameters", frozen * self.width // shards, kind))
        if train.offload:
            rows = [(label, 0, f"{human_bytes(size)} in host memory, {note}") for label, size, note in rows]
        if train.accumulation > 1:
            rows.append(("accumulated gradients", trained * 4, "whole, until the last micro-batch"))
        rows += [
            ("gathered weights", self.gathered * self.width, "two stages and what is outside of stages"),
            ("activations", -(-activations // sp), "kept for backward, this rank's share"),
        ]
        return [*rows, ("total", sum(size for _, size, _ in rows), "")]

    def total(self, sp: int, way: str | None = None, shard: int | None = None) -> int:
        return self.table(sp, way, shard)[-1][1]

    def advice(self, sp: int) -> str:
        """The smallest sp that fits a device, and a way to recompute that needs less memory, in words."""
        hardware, way = known_hardware(self.config), self.config.train.checkpoint_activations
        memory = int(hardware.memory if hardware else (self.config.parallel.memory or 80) * 2**30)
        need = self.total(sp)
        fits = next((n for n in (2**i for i in range(MOST.bit_length())) if self.total(n) <= memory), None)
        if fits is None:
            needed = human_bytes(self.total(MOST))
            text = f"no sp up to {MOST} fits {human_bytes(memory)} a device: sp={MOST} needs {needed}"
        else:
            needed = human_bytes(self.total(fits))
            text = f"the smallest sp that fits {human_bytes(memory)} a device is {fits}: {needed}"
            text += "" if fits == sp else f"; sp={sp} needs {human_bytes(need)}"
            text += "; one rank is enough at this size, and more of them save only time" * (fits == 1 < sp)
        less = [other for other in self.ways[self.ways.index(way) + 1 :] if self.total(sp, other) < need]
        if less:
            # the first with which this sp fits takes the least time
            other = next((other for other in less if self.total(sp, other) <= memory), less[-1])
            text += f"; train.checkpoint_activations={other} needs {human_bytes(self.total(sp, other))}"
        return text


def steps_on(hardware: dsp.Hardware, config: Config, task: Task, objective: Any, memory: Memory) -> dsp.embedded.Steps:
    """The time of a step on `hardware` by any method on any mesh, and whether it fits; from plans of the objective."""

    def plan(method: str, sp: int) -> dsp.Plan:
        changed = replace(config, parallel=replace(config.parallel, method=method))
        return make_plan(changed, task, objective, sp, route=foreseen_route(config, hardware), hardware=hardware)

    def rank_bytes(plan: dsp.Plan, shard: int, sp: int) -> int:
        cut = 16 * plan.cut_weights * (shard - 1) // (shard * sp)  # weights, gradients and moments, not over dp
        return memory.total(sp, shard=shard) + cut + (0 if plan.chosen else memory.whole * (sp - 1) // sp)

    return dsp.embedded.Steps(
        plan, rank_bytes, hardware, sum(p.numel() for p in objective.parameters()),
        len(repeated_stages(objective.model)) + 1, compute_dtype(config), task.batch_tokens(),
        config.train.accumulation,
    )  # fmt: skip


def foreseen_route(config: Config, hardware: dsp.Hardware | None) -> dsp.Route | None:
    """The route of switches on this hardware; nothing is measured."""
    way = config.parallel.route
    if way == "auto" and hardware is None:
        raise UserError(
            "parallel.route=auto needs the speed of links, which a dry run does not measure: name the hardware, as in "
            "hardware.device=h100"
        )
    return None if way == "direct" else dsp.Route(way, (hardware or config.hardware).node, hardware)


def step_bytes(config: Config, plan: dsp.Plan) -> int:
    """The bytes of sequence parallelism in a step: forward, backward and recomputation."""
    return sum(plan.bytes.values()) * config.train.accumulation
