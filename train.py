"""Train a model of the zoo with Dynamic Sequence Parallelism.

    torchrun --nproc-per-node 2 train.py configs/demo.yaml [key=value ...]
    python train.py configs/demo.yaml help=1

One file for every architecture, read from top to bottom: config, mesh, data, model, dsp, fsdp, optimizer, loop.
"""

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import dsp
from zoo.data.sampling import hash_seed
from zoo.training import UserError, checkpoint, ranks, user_error
from zoo.training import config as cfg
from zoo.training.dry_run import dry_run, out_of_memory, step_bytes
from zoo.training.model import compute_dtype, initialize, make_plan, without_weights
from zoo.training.optim import MovingAverage, adamw, ahead, average_cut, clip_gradients, due, learning_rate
from zoo.training.task import Inputs, Show, Task
from zoo.training.tracking import Tracker, changes, duration, log_line, open_run

STOPPED = 75  # exit status of a run that a signal ended: what started it is asked to start it again (EX_TEMPFAIL)


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
    optimizer: torch.optim.Optimizer
    average: MovingAverage | None
    directory: Path
    plans: dict[int, dsp.Plan]  # of the buckets met so far
    start: int = 0
    tracker: Tracker | None = None  # on rank 0


def setup(config: cfg.Config, device: torch.device, stop: ranks.StopSignal) -> Run:
    # mesh: sp innermost, within a node. Every rank holds a share of the weights: FSDP spans dp_shard x sp
    replicate, shard, sp = cfg.mesh_shape(config.parallel, dist.get_world_size())
    mesh = init_device_mesh(device.type, (replicate, shard, sp), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))
    fsdp_mesh = init_device_mesh(device.type, (replicate, shard * sp), mesh_dim_names=("replicate", "shard"))

    # data: every rank makes its own part of its group's samples
    task = cfg.create_task(config, mesh["sp"], device)
    task.open()
    show = cfg.create_show(task)
    show.ready()
    if (count := task.validation_samples) % (dp := replicate * shard):
        raise UserError(f"eval: {count} validation samples are not a multiple of {dp} data-parallel groups")

    # model: shapes alone, weights come last
    model, objective, stages = without_weights(config, task)
    plan = make_plan(config, task, objective, sp)
    directory = ranks.on_first_rank(lambda: open_run(config))

    # dsp: the objective for training, where the loss is taken on shards; what samples are drawn with gathers its output
    predictor = task.predictor(model)
    user_error(dsp.embedded.parallelize, objective, mesh["sp"], config.parallel.method, gather_output=False)
    cut = {p for p in model.parameters() if isinstance(p.data, DTensor)}  # over sp, in sampling, too
    user_error(dsp.embedded.parallelize, predictor, mesh["sp"], config.parallel.method if cut else "dsp")

    # fsdp: weights are gathered a stage at a time; averaging gradients over all ranks gives the exact gradient. Those
    # that a method has cut over sp are none of its business
    weights_over = fsdp_mesh if replicate > 1 else fsdp_mesh["shard"]
    policy = MixedPrecisionPolicy(compute_dtype(config), torch.float32, cast_forward_inputs=False)
    for stage in stages:
        fully_shard(stage, mesh=weights_over, mp_policy=replace(policy, cast_forward_inputs=True), ignored_params=cut)
    fully_shard(model, mesh=weights_over, mp_policy=policy, ignored_params=cut)
    # it warns of outputs that are views, which only in-place operations on them would break: nothing here has any
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    initialize(model, task, device)

    # optimizer: and, beside it, the weights that are judged
    optimizer = adamw(model, config.optim)
    average = MovingAverage(model, config.train.ema) if config.train.ema else None

    return Run(
        config, device, stop, task, show, mesh, model, objective, predictor, optimizer, average, directory, {0: plan}
    )


def resume(run: Run) -> None:
    """Continue from the latest checkpoint, if that is wanted, and open the records."""
    config, directory, wandb_id = run.config, run.directory / "checkpoints", None
    if config.resume:
        state = checkpoint.load(directory, contents(run), report=ranks.say)
        if state:
            run.start, wandb_id = state["step"], state["extra"]["wandb_id"]
        ranks.say(f"resumed from step {run.start}" if state else f"no checkpoint in {directory} yet: starting anew")
        for change in changes(run.directory, config) if state else []:
            ranks.say(f"  with another {change}")
    room = checkpoint.expected_size(run.model, run.average) * max(
        1, config.checkpoint.keep + 1 - len(checkpoint.found(directory))
    )
    ranks.on_first_rank(lambda: checkpoint.check_space(run.directory, room))  # now rather than hours later
    if dist.get_rank() == 0:
        run.tracker = Tracker(run.directory, config, step=run.start, wandb_id=wandb_id, plan=plan_rows(run.plans[0]))


def loop(run: Run) -> bool:
    """Train to the last step. False if a signal ended it before."""
    config, steps = run.config, run.config.train.steps
    group, groups = data_parallel(run)
    wanted = ((step, micro) for step in range(run.start, steps) for micro in range(config.train.accumulation))
    batch = partial(user_error, run.task.batch, run.objective, group=group, groups=groups, alone=True)
    batches = ahead(batch, wanted)
    step = saved = run.start
    began, busy, tokens = time.perf_counter(), 0.0, 0
    try:
        assess(run, step)
        for step in range(run.start + 1, steps + 1):
            clock, bucket = time.perf_counter(), run.task.bucket(step - 1, groups)
            values, stopping = train_step(run, step, batches)
            busy += time.perf_counter() - clock
            tokens += run.task.batch_tokens(bucket) * config.train.accumulation * groups
            if step % config.log.every == 0 or step in (run.start + 1, steps):
                values["tokens_per_s"] = tokens / busy
                values["memory_bytes"] = int(ranks.greatest(ranks.peak_memory(run.device)))
                values["comm_bytes"] = step_bytes(config, plan_of(run, bucket))
                eta = (time.perf_counter() - began) / (step - run.start) * (steps - step)
                ranks.say(log_line(step, steps, values, eta))
                if run.tracker:
                    run.tracker.log(step, **values)
                busy, tokens = 0.0, 0
            if stopping or due(config.checkpoint.every, step, steps) or step == steps:
                save(run, step)
                saved = step
            if stopping:
                raise ranks.Interrupted
            assess(run, step)
    except ranks.Interrupted:
        if saved != step:
            save(run, step)
        ranks.say(f"stopped by a signal after step {step}; resume=true continues")
        return False
    finally:
        batches.close()
    summarize(run, time.perf_counter() - began)
    return True


def train_step(run: Run, step: int, batches: Iterator[Inputs]) -> tuple[dict[str, float], bool]:
    """One update of the weights. Returns what to log, and whether any rank was asked to stop."""
    options, accumulation = run.config.train, run.config.train.accumulation
    lr = learning_rate(run.config.optim, step, options.steps)
    for param_group in run.optimizer.param_groups:
        param_group["lr"] = lr
    torch.manual_seed(hash_seed("dropout", options.seed, step, data_parallel(run)[0]))  # a resumed run draws the same
    run.objective.train()
    losses: dict[str, Any] = {}
    for micro in range(accumulation):
        run.model.set_requires_gradient_sync(micro == accumulation - 1)
        terms = mean_losses(run.objective(**place(next(batches), run.device)))
        torch.stack(list(terms.values())).sum().div(accumulation).backward()
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + term.detach() / accumulation
    average_cut(run.model, run.mesh)
    norm = clip_gradients(run.model, options.clip or math.inf)
    *means, stopping = ranks.total(*(float(v) / dist.get_world_size() for v in losses.values()), run.stop.requested)
    losses = dict(zip(losses, means))
    loss = sum(means)
    if not math.isfinite(loss + norm):  # the same numbers on every rank
        raise UserError(
            f"step {step}: loss {loss}, gradient norm {norm}: training diverged, and this step was not taken. "
            f"Checkpoints are in {run.directory / 'checkpoints'}; a lower optim.lr or a longer optim.warmup may help"
        )
    run.optimizer.step()
    run.optimizer.zero_grad()
    if run.average:
        run.average.update()
    return {"loss": loss, **named(losses), "grad_norm": norm, "lr": lr}, bool(stopping)


# ------------------------------------------------------------------------------------- validation, samples, checkpoints


def assess(run: Run, step: int) -> None:
    """Validate and sample after `step`, if that is due and not done yet: a resumed run may have been stopped before."""
    config, records = run.config, run.tracker.records if run.tracker else []
    judged = any("val_loss" in record and record["step"] == step for record in records)
    if due(config.eval.every, step, config.train.steps) and not ranks.on_first_rank(lambda: judged):
        with averaged(run):
            losses, by_level = evaluate(run)
        mean = sum(losses.values())
        ranks.say(f"step {step}: validation loss {mean:.4g}")
        if run.tracker:
            terms = {f"val_{name}": value for name, value in named(losses).items()}
            run.tracker.log(step, val_loss=mean, **terms, val_losses=by_level)
    path = run.directory / "samples" / f"step-{step:08d}.{run.show.media}"
    if due(config.sample.every, step, config.train.steps) and not ranks.on_first_rank(path.exists):
        run.model.eval()
        with averaged(run):
            samples = run.show.sample(run.predictor, run.device, run.stop.poll)
        if run.tracker:
            if measured := run.show.write(samples, path):
                run.tracker.log(step, **measured)
                ranks.say(f"step {step}: " + ", ".join(f"{key} {value:.3g}" for key, value in measured.items()))
            run.tracker.picture(step, path)


@torch.no_grad()
def evaluate(run: Run) -> tuple[dict[str, float], list[float]]:
    """Mean losses over the validation samples: every term at all levels together, and the whole at each level."""
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
    sums = [value / scale for value in ranks.total(*by_level, *losses.values())]
    return dict(zip(losses, sums[len(by_level) :])), sums[: len(by_level)]


def save(run: Run, step: int) -> None:
    wandb_id = ranks.on_first_rank(lambda: run.tracker and run.tracker.wandb_id)
    directory, keep = run.directory / "checkpoints", run.config.checkpoint.keep
    path = checkpoint.save(directory, step, contents(run), extra={"wandb_id": wandb_id}, keep=keep)
    ranks.say(f"step {step}: checkpoint {path}")


def contents(run: Run) -> checkpoint.Contents:
    orders = dsp.embedded.rank_order(run.model)
    return checkpoint.Contents(run.model, run.optimizer, run.average, run.task.identity, orders)


def summarize(run: Run, seconds: float) -> None:
    """The last lines of a finished run."""
    if not run.tracker:
        return
    records = run.tracker.records
    validation = [record["val_loss"] for record in records if "val_loss" in record]
    ranks.say(f"finished {run.config.train.steps} steps in {duration(seconds)}; everything is in {run.directory}")
    if validation:
        ranks.say(f"validation loss {validation[-1]:.4g}")
    for floor in run.show.floors(run.objective) if validation else ():
        run.tracker.log(run.config.train.steps, **{floor.key: floor.loss})
        ranks.say(f"{floor.name} {floor.loss:.4g}")
    if pictures := sorted((run.directory / "samples").glob(f"*.{run.show.media}")):
        ranks.say(f"samples {pictures[-1]}")


# ------------------------------------------------------------------------------------------------------------- helpers


def plan_of(run: Run, bucket: int) -> dsp.Plan:
    """The plan for batches of a bucket, made when it is first asked for."""
    if bucket not in run.plans:
        _, objective, _ = without_weights(run.config, run.task)
        run.plans[bucket] = make_plan(run.config, run.task, objective, run.mesh["sp"].size(), bucket)
    return run.plans[bucket]


def mean_losses(output: Any) -> dict[str, Tensor]:
    """The terms of the loss, over the whole batch of the sp group, of what an objective returned."""
    terms = output if isinstance(output, dict) else {"loss": output}
    return {name: dsp.mean(error, weight) for name, (error, weight) in terms.items()}


def named(losses: dict[str, float]) -> dict[str, float]:
    """The terms of a loss as they are recorded; a loss of one term is recorded already."""
    return {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}


def plan_rows(plan: dsp.Plan) -> list[dict[str, Any]]:
    """The plan as a table for the records."""
    rows = [asdict(row) for row in plan.stages]
    return [{key: " ".join(v) if isinstance(v, tuple) else v for key, v in row.items()} for row in rows]


def data_parallel(run: Run) -> tuple[int, int]:
    """Which data-parallel group this rank belongs to, and how many there are."""
    sp = run.mesh["sp"].size()
    return dist.get_rank() // sp, dist.get_world_size() // sp


def averaged(run: Run) -> AbstractContextManager[None]:
    """The model as it is judged and shown: with the moving average of its weights, if there is one."""
    return run.average.swapped() if run.average else nullcontext()


def place(inputs: Inputs, device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def main(arguments: list[str]) -> int:
    try:
        if cfg.wants_help(arguments):
            print(cfg.help_text(arguments), end="")
            return 0
        config = cfg.load(arguments)
        if config.dry_run:
            if int(os.environ.get("RANK", 0)) == 0:
                dry_run(config)
            return 0
        with ranks.process_group() as device, ranks.StopSignal() as stop:
            run = setup(config, device, stop)
            try:
                resume(run)
                finished = loop(run)
            except RuntimeError as error:
                if "out of memory" not in str(error) and "can't allocate memory" not in str(error):
                    raise
                raise out_of_memory(config) from error
            finally:
                if run.tracker:
                    run.tracker.finish()
            if not finished:
                ranks.total(0)  # all leave together: torchrun ends the others when one leaves with a status
        return 0 if finished else STOPPED
    except UserError as error:
        ranks.complain(error)
        return 2


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
