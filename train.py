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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint as recompute

import dsp
from dsp import twins
from zoo.data.sampling import hash_seed
from zoo.training import UserError, checkpoint, ranks
from zoo.training import config as cfg
from zoo.training.ema import MovingAverage
from zoo.training.estimate import Activations, fitting, memory_table, saved_for_backward, total
from zoo.training.schedule import ahead, due, learning_rate
from zoo.training.stages import recomputed_modules, repeated_stages
from zoo.training.task import Inputs, Part, Task, user_error
from zoo.training.tracking import Tracker, amount, changes, duration, log_line, open_run, size

STOPPED = 75  # exit status of a run that a signal ended: what started it is asked to start it again (EX_TEMPFAIL)


@dataclass
class Run:
    """A run on one rank, ready to go on from step `start`."""

    config: cfg.Config
    device: torch.device
    stop: ranks.StopSignal
    task: Task
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
    task = cfg.create_task(config, rank=mesh["sp"].get_local_rank(), size=sp)
    task.open()
    if (count := task.validation_samples) % (dp := replicate * shard):
        raise UserError(f"eval: {count} validation samples are not a multiple of {dp} data-parallel groups")

    # model: shapes alone, weights come last
    with torch.device("meta"):
        model = task.model()
        objective = task.objective(model)
    stages = compile_and_recompute(config, model)  # before the plan, which counts what is sent again
    with torch.device("meta"):
        plan = make_plan(config, task, objective, sp)
    directory = ranks.on_first_rank(lambda: open_run(config))

    # dsp: the objective for training, where the loss is taken on shards; what samples are drawn with gathers its output
    predictor = task.predictor(model)
    user_error(dsp.embedded.parallelize, objective, mesh["sp"], config.parallel.method, gather_output=False)
    cut: set[nn.Parameter] = {p for p in model.parameters() if isinstance(p, DTensor)}  # over sp, in sampling, too
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

    # optimizer: vectors (biases, scales) are not decayed
    options = config.optim
    groups: list[dict[str, Any]] = []
    for parameters in by_mesh(model.parameters()):
        vectors = [p for p in parameters if p.ndim <= 1]
        groups += [{"params": [p for p in parameters if p.ndim > 1]}, {"params": vectors, "weight_decay": 0.0}]
    betas = (options.betas[0], options.betas[1])
    optimizer = torch.optim.AdamW(groups, options.lr, betas, options.eps, options.weight_decay)

    average = MovingAverage(model, config.train.ema) if config.train.ema else None

    return Run(config, device, stop, task, mesh, model, objective, predictor, optimizer, average, directory, {0: plan})


def resume(run: Run) -> None:
    """Continue from the latest checkpoint, if that is wanted, and open the records."""
    config, directory, wandb_id = run.config, run.directory / "checkpoints", None
    if config.resume:
        state = checkpoint.load(
            directory, run.model, run.optimizer, run.average,
            identity=run.task.identity, orders=dsp.embedded.rank_order(run.model), report=ranks.say,
        )  # fmt: skip
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
        terms = mean_losses(run.objective(**place(next(batches), run.mesh["sp"], run.device)))
        torch.stack(list(terms.values())).sum().div(accumulation).backward()
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + term.detach() / accumulation
    average_cut(run)
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
    path = run.directory / "samples" / f"step-{step:08d}.{run.task.media}"
    if due(config.sample.every, step, config.train.steps) and not ranks.on_first_rank(path.exists):
        run.model.eval()
        with averaged(run):
            samples = run.task.sample(run.predictor, run.device, run.stop.poll)
        if run.tracker:
            if measured := run.task.show(samples, path):
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
        terms = mean_losses(run.objective(**place(inputs, run.mesh["sp"], run.device)))
        for name, term in terms.items():
            losses[name] = losses.get(name, 0.0) + term.item() * count / run.task.levels
            by_level[level] += term.item() * count
    scale = run.task.validation_samples * run.mesh["sp"].size()  # every rank of an sp group adds the same mean
    sums = [value / scale for value in ranks.total(*by_level, *losses.values())]
    return dict(zip(losses, sums[len(by_level) :])), sums[: len(by_level)]


def save(run: Run, step: int) -> None:
    wandb_id = ranks.on_first_rank(lambda: run.tracker and run.tracker.wandb_id)
    path = checkpoint.save(
        run.directory / "checkpoints", step, run.model, run.optimizer, run.average,
        identity=run.task.identity, orders=dsp.embedded.rank_order(run.model),
        extra={"wandb_id": wandb_id}, keep=run.config.checkpoint.keep,
    )  # fmt: skip
    ranks.say(f"step {step}: checkpoint {path}")


def summarize(run: Run, seconds: float) -> None:
    """The last lines of a finished run."""
    if not run.tracker:
        return
    records = run.tracker.records
    validation = [record["val_loss"] for record in records if "val_loss" in record]
    ranks.say(f"finished {run.config.train.steps} steps in {duration(seconds)}; everything is in {run.directory}")
    if validation:
        ranks.say(f"validation loss {validation[-1]:.4g}")
    for floor in run.task.floors(run.objective) if validation else ():
        run.tracker.log(run.config.train.steps, **{floor.key: floor.loss})
        ranks.say(f"{floor.name} {floor.loss:.4g}")
    if pictures := sorted((run.directory / "samples").glob(f"*.{run.task.media}")):
        ranks.say(f"samples {pictures[-1]}")


# --------------------------------------------------------------------------------------------------------- the dry run


def dry_run(config: cfg.Config) -> None:
    """Print the plan, memory and bytes a rank, for the mesh that is configured, on one process and without memory."""
    parallel, dp = config.parallel, config.parallel.dp_replicate * config.parallel.dp_shard
    world = dp * (parallel.sp or max(1, int(os.environ.get("WORLD_SIZE", 1)) // dp))
    replicate, shard, sp = cfg.mesh_shape(parallel, world)
    task = cfg.create_task(config)
    with torch.device("meta"):
        model = task.model()
        objective = task.objective(model)
        compile_and_recompute(config, model)
        plan = make_plan(config, task, objective, sp)
    activations, table, whole = estimate(config, task, model)
    count, batch = amount(sum(p.numel() for p in model.parameters())), f"{config.train.batch} x {task.describe()}"
    print(f"model {config.model.name}, {count} parameters, batch {batch}")
    print(f"mesh dp_replicate={replicate} x dp_shard={shard} x sp={sp} = {world} ranks\n\n{plan}")
    print(
        f"\nmemory a rank in training: weights over {shard * sp} ranks (in the plan's peak they are whole), "
        f"train.checkpoint_activations={config.train.checkpoint_activations}"
    )
    for what, held, note in table(sp):
        print(f"  {what:<24}{size(held):>10}  {note}".rstrip())
    print(f"\nlargest activations, of which a rank holds 1/{sp}" if sp > 1 else "\nlargest activations")
    for held, what in activations.largest(5):
        print(f"  {size(held):>10}  {what}")
    print(f"\n{advise(config, model, table, sp)}")
    print(f"sequence parallelism sends {size(step_bytes(config, plan))} a rank and step")
    if hardware := known_hardware(config):
        print(
            f"\na step on {config.hardware.device} (products at {config.hardware.products:.0%} of the peak), "
            f"{hardware.links}: shares of computing, of sequence parallelism's communication, and of the weights' that "
            "computing does not hide"
        )
        print(steps_on(hardware, config, task, objective, table, whole).table(dp, sp, replicate))


def estimate(config: cfg.Config, task: Task, model: nn.Module) -> tuple[Activations, Callable[..., Any], int]:
    """What a forward keeps, the table of memory a rank for any sp and any way to recompute, and of what a forward
    keeps the bytes that a method needs on every rank which has activations whole."""
    dtype, stages, way = compute_dtype(config), repeated_stages(model), config.train.checkpoint_activations
    kept = saved_for_backward(
        lambda: task.objective(task.model()), task.example, lambda objective: repeated_stages(objective.model),
        lambda objective: recomputed_modules(objective.model), dtype=dtype,
        once=lambda modules, *told: twins.once(twins.alike(modules), *told),
    )  # fmt: skip
    return kept[way], lambda sp, way=way, shard=config.parallel.dp_shard: memory_table(
        model, stages, shards=shard * sp, ema=config.train.ema > 0,
        accumulation=config.train.accumulation, width=dtype.itemsize,
        activations=-(-kept[way].bytes // sp),
    ), total(kept[way].always)  # fmt: skip


def steps_on(
    hardware: dsp.Hardware, config: cfg.Config, task: Task, objective: nn.Module, table: Callable[..., Any], whole: int
) -> dsp.embedded.Steps:
    """How long a step takes there by any method on any mesh, and whether it fits; from plans of the objective."""

    def plan(method: str, sp: int) -> dsp.Plan:
        with torch.device("meta"):
            return make_plan(replace(config, parallel=replace(config.parallel, method=method)), task, objective, sp)

    def held(plan: dsp.Plan, shard: int, sp: int) -> int:
        cut = 16 * plan.cut_weights * (shard - 1) // (shard * sp)  # not over dp: weights, gradients and moments
        return table(sp, shard=shard)[-1][1] + cut + (0 if plan.chosen else whole * (sp - 1) // sp)

    return dsp.embedded.Steps(
        plan, held, hardware, sum(p.numel() for p in objective.parameters()), len(repeated_stages(objective.model)) + 1,
        compute_dtype(config), task.batch_tokens(), config.train.accumulation,
    )  # fmt: skip


def known_hardware(config: cfg.Config) -> dsp.Hardware | None:
    """What the configuration says that it runs on, if it does."""
    options = config.hardware
    if options.device is None:
        return None
    return user_error(
        dsp.hardware.accelerator, options.device, dtype=compute_dtype(config), products=options.products,
        stream=options.stream, link=options.link, network=options.network, node=options.node,
        memory=config.parallel.memory and config.parallel.memory * 2**30, prefix="hardware: ",
    )  # fmt: skip


def advise(config: cfg.Config, model: nn.Module, table: Callable[..., Any], sp: int) -> str:
    hardware = known_hardware(config)
    memory = hardware.memory if hardware else (config.parallel.memory or 80) * 2**30
    needs = {way: lambda n, way=way: table(n, way)[-1][1] for way in recomputed_modules(model)}
    return fitting(needs, config.train.checkpoint_activations, int(memory), sp)


def out_of_memory(config: cfg.Config) -> UserError:
    """What a run that ran out of memory would have needed, from the estimator of the dry run."""
    sp = dist.get_world_size() // (config.parallel.dp_replicate * config.parallel.dp_shard)
    task = cfg.create_task(config)
    with torch.device("meta"):
        model = task.model()
    activations, table, _ = estimate(config, task, model)
    largest = ", ".join(f"{size(held)} of {what}" for held, what in activations.largest(2))
    advice = advise(config, model, table, sp)
    error = UserError(f"out of memory: {advice}\n  largest activations, over {sp} ranks: {largest}")
    error.alone = True  # the other ranks may have had enough
    return error


# ------------------------------------------------------------------------------------------------------------- helpers


def make_plan(config: cfg.Config, task: Task, objective: nn.Module, sp: int, bucket: int = 0) -> dsp.Plan:
    return user_error(
        dsp.embedded.plan, objective, kwargs=task.example(objective, bucket), size=sp, dtype=compute_dtype(config),
        method=config.parallel.method, save_exchanges=config.parallel.save_exchanges,
    )  # fmt: skip


def plan_of(run: Run, bucket: int) -> dsp.Plan:
    """The plan for batches of a bucket, made when it is first asked for."""
    if bucket not in run.plans:
        with torch.device("meta"):
            model = run.task.model()
            objective = run.task.objective(model)
            compile_and_recompute(run.config, model)
            run.plans[bucket] = make_plan(run.config, run.task, objective, run.mesh["sp"].size(), bucket)
    return run.plans[bucket]


def mean_losses(output: Any) -> dict[str, Tensor]:
    """The terms of the loss, over the whole batch of the sp group, of what an objective returned."""
    terms = output if isinstance(output, dict) else {"loss": output}
    return {name: dsp.mean(error, weight) for name, (error, weight) in terms.items()}


def named(losses: dict[str, float]) -> dict[str, float]:
    """The terms of a loss as they are recorded; a loss of one term is recorded already."""
    return {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}


def step_bytes(config: cfg.Config, plan: dsp.Plan) -> int:
    """What sequence parallelism sends in a step: forward, backward, and again where something is recomputed."""
    return sum(plan.bytes.values()) * config.train.accumulation


def plan_rows(plan: dsp.Plan) -> list[dict[str, Any]]:
    """The plan as a table for the records."""
    rows = [asdict(row) for row in plan.stages]
    return [{key: " ".join(v) if isinstance(v, tuple) else v for key, v in row.items()} for row in rows]


def compute_dtype(config: cfg.Config) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[config.train.precision]


def compile_and_recompute(config: cfg.Config, model: nn.Module) -> list[nn.Module]:
    """Compile and recompute the inside of stages, where no switch is; returns the stages.

    Blocks are recomputed with the switches between their stages: a plan made after this counts them.
    """
    stages = repeated_stages(model)
    for stage in stages if config.train.compile else []:
        torch._dynamo.config.recompile_limit = 64  # all stages share one forward, in training and validation
        stage.forward = torch.compile(stage.forward)  # type: ignore[method-assign]
    mode, kept = config.train.checkpoint_activations, config.parallel.save_exchanges
    if kept and mode in ("blocks", "both"):
        raise UserError(f"parallel.save_exchanges needs train.checkpoint_activations=stages, not {mode}")
    options: dict[str, Any] = {"context_fn": dsp.embedded.save_exchanges} if kept else {}
    for module in recomputed_modules(model)[mode]:
        module.forward = partial(recompute, module.forward, use_reentrant=False, **options)  # type: ignore[method-assign]
    return stages


def initialize(model: nn.Module, task: Task, device: torch.device) -> None:
    """Give a model without memory its weights: made on rank 0, so that they do not depend on the number of ranks."""
    model.to_empty(device=device)
    torch.manual_seed(task.config.train.seed)
    source = task.model() if dist.get_rank() == 0 else None
    everywhere = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = source.state_dict() if source else {}
    for name, order in dsp.embedded.rank_order(model).items() if source else ():
        state[name] = state[name][order]
    set_model_state_dict(model, state, options=everywhere)
    for name, buffer in model.named_buffers():  # those that a state dict leaves out too
        if source:
            buffer.copy_(source.get_buffer(name))
        dist.broadcast(buffer, src=0)


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that one operation can take together: a method's cut weights are on the sp axis, others on FSDP's."""
    found: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        found.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(found.values())


def average_cut(run: Run) -> None:
    """Average over data-parallel groups the gradients of weights that FSDP does not know."""
    for axis in ("dp_replicate", "dp_shard"):
        mesh = run.mesh[axis]
        for p in run.model.parameters() if mesh.size() > 1 else ():
            if isinstance(p.grad, DTensor) and p.grad.device_mesh == run.mesh["sp"]:
                grad = p.grad.to_local()
                dist.all_reduce(grad, group=mesh.get_group())
                grad /= mesh.size()


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale all gradients by one factor, so that their norm is `limit` at most. Returns the norm that it was."""
    groups = by_mesh(p for p in model.parameters() if p.grad is not None)
    norms: list[Any] = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = reduce(torch.hypot, (n.full_tensor() for n in norms))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)
    return norm.item()


def data_parallel(run: Run) -> tuple[int, int]:
    """Which data-parallel group this rank belongs to, and how many there are."""
    sp = run.mesh["sp"].size()
    return dist.get_rank() // sp, dist.get_world_size() // sp


def averaged(run: Run) -> AbstractContextManager[None]:
    """The model as it is judged and shown: with the moving average of its weights, if there is one."""
    return run.average.swapped() if run.average else nullcontext()


def place(inputs: Inputs, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Inputs as the objective takes them: a part of a tensor becomes a DTensor over the ranks that hold the others."""
    placed: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, int):
            placed[name] = value
        elif not isinstance(value, Part):
            placed[name] = value.to(device)
        elif mesh.size() == 1:
            placed[name] = value.local.to(device)
        else:
            shape = list(value.local.shape)
            shape[value.dim] = value.length
            whole = torch.empty(shape, device="meta")
            placed[name] = DTensor.from_local(
                value.local.to(device), mesh, [Shard(value.dim)],
                run_check=False, shape=whole.shape, stride=whole.stride(),
            )  # fmt: skip
    return placed


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
