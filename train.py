"""Train a model of the zoo with Dynamic Sequence Parallelism.

    dsp-launch --nproc-per-node 2 train.py configs/demo.yaml [key=value ...]
    python train.py configs/demo.yaml help=1

One file for every architecture, read from top to bottom: config, mesh, data, model, dsp, fsdp, optimizer, loop.
"""

import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dsp
from zoo.data.sampling import hash_seed
from zoo.training import UserError, auto, checkpoint, environment, flight, ranks, user_error
from zoo.training import config as cfg
from zoo.training.check_run import compare
from zoo.training.config_text import help_text, wants_help
from zoo.training.console import Console
from zoo.training.dry_run import check_memory, dry_run, out_of_memory, step_bytes
from zoo.training.guard import Diverged, Guard, Snapshot, StepResult
from zoo.training.loader import batches, open_data, place, worker_ends_named
from zoo.training.meter import Meter, log_line, loss_records
from zoo.training.model import compute_dtype, initialize, make_plan, mean_losses, overlap_in, without_weights
from zoo.training.optim import (
    MovingAverage,
    average_sharded_gradients,
    clip_gradients,
    ema_weights,
    is_due,
    learning_rate,
    optimizers,
    runs_ahead,
    set_learning_rate,
    set_skip,
)
from zoo.training.owner import Owner
from zoo.training.profile import Profiler
from zoo.training.records import naming
from zoo.training.saving import Saver
from zoo.training.summary import closing, opening, resumed
from zoo.training.task import Inputs, Show, Task
from zoo.training.task_lookup import create_show, create_task
from zoo.training.tracking import Tracker, ascii_key, changes, display_name, open_run

STOPPED = 75  # exit status of a run that a signal ended (EX_TEMPFAIL): it asks the launcher to start the run again


@dataclass
class Run:
    """A run on one rank, ready to go on from step `start`."""

    config: cfg.Config
    device: torch.device
    stop: ranks.StopSignal
    task: Task
    show: Show
    mesh: DeviceMesh
    model: Any  # an nn.Module that fully_shard gave more methods
    objective: Any
    predictor: nn.Module
    optimizers: list[torch.optim.Optimizer]
    average: MovingAverage | None
    directory: Path
    plans: dict[int, dsp.Plan]  # by bucket, for the buckets met so far
    guard: Guard
    saver: Saver
    profiler: Profiler
    route: dsp.Route  # the route of switches
    overlap: Any  # `parallel.overlap`, with auto resolved
    ahead: bool = False  # whether a step is taken before its numbers are on the host
    start: int = 0
    tracker: Tracker | None = None  # on rank 0
    waiting: list[StepResult] = field(default_factory=list)  # the steps whose numbers the host has not read yet
    last: StepResult = None  # type: ignore[assignment]  # the last step whose numbers it has read


def setup(config: cfg.Config, device: torch.device, stop: ranks.StopSignal, console: Console, owner: Owner) -> Run:
    hardware = None
    # parallel=auto: the choice of the run that is resumed, else a new choice, by measured links
    if config.parallel.auto:
        world, node = dist.get_world_size(), environment.ranks_of_host()
        choice = ranks.on_first_rank(lambda: auto.previous_choice(config, world))
        if choice is None:
            hardware = auto.measured(config, device, node)
            choice = ranks.on_first_rank(lambda: auto.choose(config, world, hardware))
        config = choice.applied(config)
        ranks.log0(choice.table)

    # mesh: sp innermost, within a node. Every rank holds a share of the weights: FSDP spans dp_shard x sp
    replicate, shard, sp = cfg.mesh_shape(config.parallel, dist.get_world_size())
    mesh = init_device_mesh(device.type, (replicate, shard, sp), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    fsdp_mesh = init_device_mesh(device.type, (replicate, shard * sp), mesh_dim_names=("replicate", "shard"))

    # data: every rank makes its own shard of its group's samples
    task = create_task(config, mesh["sp"], device)
    open_data(task)
    show = create_show(task)
    show.ready()
    if (count := task.validation_samples) % (dp := replicate * shard):
        raise UserError(
            f"eval: {count} validation samples are not a multiple of {dp} data-parallel groups: "
            "change their number under eval, or parallel.dp_shard"
        )

    # model: shapes only, on the meta device; weights come last
    model, objective, stages = without_weights(config, task)
    route = dsp.Route(config.parallel.route, hardware=hardware).at(mesh["sp"])  # auto: by measured links
    overlap = user_error(overlap_in, config, mesh["sp"] if sp > 1 else None, hardware)  # likewise
    plan = make_plan(config, task, objective, sp, route=route, overlap=overlap)
    check_memory(config, task, model, plan, device)
    directory = ranks.on_first_rank(lambda: open_run(config, owner))
    stop.model, stop.folder = model, ranks.on_first_rank(lambda: flight.folder(directory))
    if dist.get_rank() == 0:
        console.keep(directory / "console.log")
        for line in opening(config, task, model, plan, (replicate, shard, sp), device, directory):
            ranks.log0(line)

    # dsp: the objective, for training, computes its loss on shards; the predictor, for samples, gathers its output
    predictor = task.predictor(model)
    method, sent = config.parallel.method, {"wire": config.parallel.wire, "route": route, "overlap": overlap}
    user_error(dsp.embedded.parallelize, objective, mesh["sp"], method, gather_output=False, **sent)
    cut = {p for p in model.parameters() if isinstance(p.data, DTensor)}  # sharded over sp, also in sampling
    user_error(dsp.embedded.parallelize, predictor, mesh["sp"], method if cut else "dsp", **sent)

    # fsdp: weights are gathered a stage at a time; averaging gradients over all ranks gives the exact gradient.
    # Parameters that the method has sharded over sp are ignored
    weights_over = fsdp_mesh if replicate > 1 else fsdp_mesh["shard"]
    policy = MixedPrecisionPolicy(compute_dtype(config), torch.float32, cast_forward_inputs=False)
    kept_at = CPUOffloadPolicy(pin_memory=device.type == "cuda") if config.train.offload else OffloadPolicy()
    share = partial(fully_shard, mesh=weights_over, offload_policy=kept_at, ignored_params=cut)
    for stage in stages:
        share(stage, mp_policy=replace(policy, cast_forward_inputs=True))
    share(model, mp_policy=policy)
    # FSDP warns of outputs that are views, into which nothing may write in place: nothing here does
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    initialize(model, task, device, torch.device("cpu") if config.train.offload else None)

    # optimizer, and the moving average of the weights, for validation and samples
    updates = optimizers(model, config.optim, fused=bool(config.train.ahead) or config.train.offload)
    average = MovingAverage(model, config.train.ema) if config.train.ema else None

    guard = Guard(config.train)
    saver = Saver(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.asynchronous)
    return Run(
        config, device, stop, task, show, mesh, model, objective, predictor, updates, average, directory, {0: plan},
        guard, saver, Profiler(config.profile, directory, device), route, overlap,
        runs_ahead(config.train.ahead, updates),
    )  # fmt: skip


def resume(run: Run) -> None:
    """Continue from the latest checkpoint, if that is wanted, and open the records."""
    config, directory, before = run.config, run.directory / "checkpoints", {}
    changed: list[str] = []
    if config.resume:
        state = checkpoint.load(directory, contents(run), report=ranks.log0)
        if state:
            run.start, before = state["step"], state["extra"]
            run.guard = Guard(config.train, before.get("guard"))
        ranks.log0(resumed(run.start, before) if state else f"no checkpoint in {directory} yet: starting anew")
        changed = changes(run.directory, config) if state else []
        for change in changed:
            ranks.log0(f"  with another {change}")
    room = checkpoint.expected_size(run.model, run.average) * max(
        1, config.checkpoint.keep + 1 - len(checkpoint.finished(directory))
    )
    ranks.on_first_rank(lambda: checkpoint.check_space(run.directory, room))  # fail now rather than hours later
    if dist.get_rank() == 0:
        names = run.task.names()
        run.tracker = Tracker(run.directory, config, step=run.start, before=before, plan=run.plans[0], names=names)
        if run.start:
            run.tracker.log(run.start, resumed=dist.get_world_size(), changes=changed)


def loop(run: Run) -> bool:
    """Train to the last step; return False if a signal ended the run before."""
    config, steps = run.config, run.config.train.steps
    group, groups = data_parallel(run)
    wanted = ((step, micro) for step in range(run.start, steps) for micro in range(config.train.accumulation))
    batch = partial(user_error, run.task.batch, run.objective, group=group, groups=groups, alone=True)
    before = ranks.on_first_rank(lambda: run.tracker.elapsed if run.tracker else 0.0)
    meter = Meter(config, dist.get_world_size(), run.device, before)
    loaded = meter.waiting(batches(run.task, batch, wanted, config.train.workers, config.train.prefetch))
    step = saved = run.start
    try:
        assess(run, step)
        for step in range(run.start + 1, steps + 1):
            run.stop.doing, bucket = f"step {step}", run.task.bucket(step - 1, groups)
            tokens, plan = run.task.batch_tokens(bucket), plan_of(run, bucket)
            each = config.train.accumulation * groups
            with run.profiler.step(step), meter.step(tokens * each, plan.flops_model * each):
                values, stopping = train_step(run, step, loaded)
            if step % config.log.every == 0 or step in (run.start + 1, steps):
                values |= meter.read(steps - step) | run.profiler.shares | {"comm_bytes": step_bytes(config, plan)}
                ranks.log0(log_line(step, steps, values))
                if run.tracker:
                    run.tracker.log(step, **values)
            wanted_now = is_due(config.checkpoint.every, step, steps) and not run.guard.in_row
            if stopping or wanted_now or step == steps:
                save(run, step)
                saved = step
            if stopping:
                raise ranks.Interrupted
            assess(run, step)
    except ranks.Interrupted:
        if saved != step:
            save(run, step)
        run.saver.wait()
        ranks.log0(f"stopped by a signal after step {step}; resume=true continues")
        return False
    except Diverged as error:
        sound = run.saver.leave_sound(run.guard, partial(snapshot, run))
        raise UserError(f"{error}; {sound}. A lower optim.lr or a longer optim.warmup may help") from None
    finally:
        loaded.close()
        run.saver.abandon()
    run.saver.wait()
    for line in closing(run) if run.tracker else ():
        ranks.log0(line)
    return True


def train_step(run: Run, step: int, batches: Iterator[Inputs]) -> tuple[dict[str, float], bool]:
    """Update the weights once; return the values to log, and whether any rank was asked to stop."""
    options, accumulation = run.config.train, run.config.train.accumulation
    lr = learning_rate(run.config.optim, step, options.steps)
    for optimizer in run.optimizers:
        set_learning_rate(optimizer, lr)
    torch.manual_seed(hash_seed("dropout", options.seed, step, data_parallel(run)[0]))  # a resumed run draws the same
    run.objective.train()
    losses: dict[str, Any] = {}
    for micro in range(accumulation):
        run.model.set_requires_gradient_sync(micro == accumulation - 1)
        terms = mean_losses(run.objective(**place(next(batches), run.device)))
        torch.stack(list(terms.values())).sum().div(accumulation).backward()
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + term.detach() / accumulation
    average_sharded_gradients(run.model, run.mesh)
    norm = clip_gradients(run.model, options.clip or math.inf)
    result = StepResult(step, lr, losses, norm, run.guard.limit(step, run.ahead), run.stop.requested)
    if run.ahead and not wanted_now(run, step):
        update(run, result.step_mask)
        run.waiting.append(result)
        last = judge(run, backlog=1)
    else:
        judge(run)  # the earlier steps: their updates are done, that of this one is not
        run.waiting.append(result)
        last = judge(run)
        if run.guard.last_update == step:
            update(run)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    if last.stopping:
        last = judge(run)
    values = {"loss": last.loss, **loss_records(last.losses), "grad_norm": last.norm, "lr": last.lr}
    return values | {"skipped": run.guard.skipped}, last.stopping


def judge(run: Run, backlog: int = 0) -> StepResult:
    """Judge the steps whose numbers the host has not read yet, all but `backlog`; return the one judged last."""
    try:
        while len(run.waiting) > backlog:
            run.last = result = run.waiting.pop(0)
            if run.guard.wants_copy(result.step, result.loss):  # every rank has the same numbers, and decides alike
                run.guard.snapshot = snapshot(run)
            run.guard.accept(result, run)
    except Diverged:
        with suppress(Diverged):
            judge(run)  # the device may have taken the steps that still wait: they count
        raise
    return run.last


def update(run: Run, mask: Tensor | None = None) -> None:
    """Update the weights; `mask` (0-d): zero if the device is to skip the update."""
    for optimizer in run.optimizers:
        set_skip(optimizer, mask)
        optimizer.step()
    if run.average:
        run.average.update(mask)


def wanted_now(run: Run, step: int) -> bool:
    """Tell whether the numbers of a step are needed before the next step begins."""
    config, steps = run.config, run.config.train.steps
    every = config.log.every, config.checkpoint.every, config.eval.every, config.sample.every, config.train.sound
    return step in (run.start + 1, steps) or any(is_due(number, step, steps) for number in every)


# ------------------------------------------------------------------------------------- validation, samples, checkpoints


def assess(run: Run, step: int) -> None:
    """Validate and sample after `step`, if that is due and not done: a resumed run may have stopped before doing so."""
    config, records = run.config, run.tracker.records if run.tracker else []
    judged = any("val_loss" in record and record["step"] == step for record in records)
    if is_due(config.eval.every, step, config.train.steps) and not ranks.on_first_rank(lambda: judged):
        with ema_weights(run.average):
            losses, by_level = evaluate(run)
        mean = sum(losses.values())
        ranks.log0(f"step {step}: validation loss {mean:.4g}")
        if run.tracker:
            terms = {f"val_{name}": value for name, value in loss_records(losses).items()}
            run.tracker.log(step, val_loss=mean, **terms, val_losses=by_level)
    path = run.directory / "samples" / f"step-{step:08d}.{run.show.media}"
    if is_due(config.sample.every, step, config.train.steps) and not ranks.on_first_rank(path.exists):
        run.model.eval()
        with ema_weights(run.average):
            samples = run.show.sample(run.predictor, run.device, run.stop.poll)
        if run.tracker:
            with naming(path):
                measured = run.show.write(samples, path)
            if measured:
                run.tracker.log(step, **{ascii_key(name): value for name, value in measured.items()})
                shown = {display_name(key): value for key, value in measured.items() if run.show.headline(key)}
                ranks.log0(f"step {step}: " + ", ".join(f"{name} {value:.3g}" for name, value in shown.items()))
            run.tracker.picture(step, path)


@torch.no_grad()
def evaluate(run: Run) -> tuple[dict[str, float], list[float]]:
    """The mean losses over the validation samples: each term over all levels, and the sum of terms at each level."""
    group, groups = data_parallel(run)
    run.objective.eval()
    losses: dict[str, float] = {}
    by_level = [0.0] * run.task.levels
    for level, count, inputs in run.task.validation_batches(run.objective, group, groups):
        run.stop.poll()
        terms = mean_losses(run.objective(**place(inputs, run.device)))
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + term.item() * count / run.task.levels
            by_level[level] += term.item() * count
    scale = run.task.validation_samples * run.mesh["sp"].size()  # every rank of an sp group adds the same mean
    sums = [value / scale for value in ranks.all_sum(*by_level, *losses.values())]
    return dict(zip(losses, sums[len(by_level) :])), sums[: len(by_level)]


def save(run: Run, step: int) -> None:
    run.saver.save(step, contents(run), extra(run, step))


def extra(run: Run, step: int) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors."""
    recorded = ranks.on_first_rank(lambda: run.tracker.flush(step) if run.tracker else {})
    return {**recorded, "guard": run.guard.state(), "ranks": dist.get_world_size()}


def snapshot(run: Run) -> Snapshot:
    """A copy of the current weights, with everything else that a checkpoint of them has."""
    return Snapshot(run.guard.last_update, checkpoint.hold(contents(run)), extra(run, run.guard.last_update))


def contents(run: Run) -> checkpoint.Contents:
    orders = dsp.embedded.rank_order(run.model)
    return checkpoint.Contents(run.model, run.optimizers, run.average, run.task.identity, orders)


# ------------------------------------------------------------------------------------------------------------- helpers


def plan_of(run: Run, bucket: int) -> dsp.Plan:
    """The plan for batches of a bucket, made at its first use."""
    if bucket not in run.plans:
        _, objective, _ = without_weights(run.config, run.task)
        sp = run.mesh["sp"].size()
        run.plans[bucket] = make_plan(run.config, run.task, objective, sp, bucket, run.route, run.overlap)
    return run.plans[bucket]


def data_parallel(run: Run) -> tuple[int, int]:
    """The index of this rank's data-parallel group, and the number of groups."""
    sp = run.mesh["sp"].size()
    return dist.get_rank() // sp, dist.get_world_size() // sp


def main(arguments: list[str]) -> int:
    with Console() as console:
        try:
            if wants_help(arguments):
                print(help_text(arguments), end="")
                return 0
            config, refused = cfg.load_or_error(arguments)
            if config.check:
                with ranks.training(config.train.timeout, cfg.flat(config), refused) as (device, _):
                    return 0 if compare(config, device) else 1
            if not config.dry_run:
                return 0 if train(config, console, refused) else STOPPED
            if environment.first_rank():
                if config.parallel.auto:
                    choice = auto.foreseen(config)
                    print(f"{choice.table}\n")
                    config = choice.applied(config)
                dry_run(config)
            return 0
        except Exception as error:
            return ranks.report_uncaught(error)


def train(config: cfg.Config, console: Console, refused: UserError | None) -> bool:
    """Train; return False if a signal stopped the run. `refused`: the error of a configuration that cannot be used."""
    with ranks.training(config.train.timeout, cfg.flat(config), refused) as (device, stop), Owner() as owner:
        run = setup(config, device, stop, console, owner)
        try:
            with out_of_memory(run.config), worker_ends_named():
                resume(run)
                finished = loop(run)
        finally:
            if run.tracker:
                run.tracker.finish()
        if not finished:
            ranks.all_sum(0)  # wait for all ranks: torchrun ends the others when one exits with a status
    return finished


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
