"""The lines that a run prints at its start and at its end."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dsp
from zoo.training import UserError
from zoo.training.dry_run import Memory, step_bytes, trainable
from zoo.training.report import write
from zoo.training.task import Baseline, Task
from zoo.training.tracking import display_name, duration, higher_is_better, human_bytes, human_count, number_of

NAMED = 8  # samples that are held out, by name; names.json has all


def opening(
    config: Any, task: Task, model: Any, plan: dsp.Plan, shape: Sequence[int], device: torch.device, directory: Path
) -> Iterator[str]:
    """The lines at the start: model, data, mesh and devices, plan, memory, and the run's directory."""
    replicate, shard, sp = shape
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    named = config.model.name + (f" {config.model.size}" if config.model.size else "")
    batch, accumulated = config.train.batch, config.train.accumulation
    count, trained = (sum(p.numel() for p in which) for which in (model.parameters(), trainable(model)))
    part = f", of which {human_count(trained)} are trained" if trained < count else ""
    yield f"model   {named}: {human_count(count)} parameters ({count:,}){part}"
    times = f"{batch} x {accumulated}" if accumulated > 1 else f"{batch}"
    words = task.describe()
    each = f", each {words}" if words else f", from a data set of {len(task.train)}" if hasattr(task, "train") else ""
    yield f"data    {config.data.name}: {times} samples a step and group{each}"
    if held_out := task.names().get("validation"):
        more = ", ..." * (len(held_out) > NAMED)
        yield f"        {len(held_out)} held out: {', '.join(held_out[:NAMED])}{more}"
    mesh = f"dp_replicate={replicate} x dp_shard={shard} x sp={sp}"
    yield f"mesh    {mesh}: {number_of(replicate * shard * sp, 'rank')}, {kind}, {config.train.precision}"
    calls, sent = sum(plan.calls.values()), human_bytes(step_bytes(config, plan))
    sends = f"{calls} collectives send {sent} a rank and step" if sp > 1 else "sends nothing"
    yield f"plan    {config.parallel.method} over {number_of(sp, 'rank')}: {sends}"
    yield f"memory  {memory(config, task, model, sp, device)}"
    yield f"run     {directory}"
    for hint in task.hints(model):
        yield f"hint    {hint}"


def memory(config: Any, task: Task, model: Any, sp: int, device: torch.device) -> str:
    try:
        size = Memory(config, task, model).total(sp)
    except Exception as error:  # no reason to end the run: a forward that reads values has no estimate
        return f"not known in advance ({type(error).__name__})"
    measured = "what torch has allocated" if device.type == "cuda" else "the whole process, with Python and torch"
    return (
        f"{human_bytes(size)} a rank, estimated: weights, gradients, optimizer and activations alone; "
        f"the lines of steps measure {measured}"
    )


def resumed(step: int, before: Mapping[str, Any]) -> str:
    """The line of a run that goes on after `step`; before: the `extra` of its checkpoint."""
    world = dist.get_world_size()
    then = before.get("ranks", world)  # a checkpoint of an older version does not say
    return f"resumed from step {step}" + ("" if then == world else f" of {number_of(then, 'rank')}, now {world}")


def closing(run: Any) -> Iterator[str]:
    """The lines at the end, on rank 0: the time in all, and the model compared with its baselines."""
    records, directory = run.tracker.records, run.directory
    judged = any("val_loss" in record for record in records)
    baselines: Sequence[Baseline] = run.show.baselines(run.objective) if judged else []
    for baseline in baselines:
        run.tracker.log(run.config.train.steps, **{baseline.key: baseline.loss})
    skipped = sum("skipped_because" in record for record in records)
    extra = f", {skipped} of them skipped" if skipped else ""
    steps, total = number_of(run.config.train.steps, "step"), f"{duration(run.tracker.elapsed)} in all"
    yield f"finished {steps}{extra} in {total}, resumes included; everything is in {directory}"
    yield from table(records, baselines, run.show.headline)
    if pictures := sorted((directory / "samples").glob(f"*.{run.show.media}")):
        yield f"samples {pictures[-1]}"
    try:
        yield f"report  {write([directory], directory / 'report.html')}"
    except (UserError, OSError) as error:  # the run is finished all the same
        yield f"no report: {error}"


def table(
    records: Sequence[Mapping[str, Any]], baselines: Sequence[Baseline], shown: Callable[[str], bool] = lambda key: True
) -> Iterator[str]:
    """The last measures on held-out data that are `shown`, each with its best baseline."""
    last: dict[str, float] = {}
    for record in records:
        last |= {k: v for k, v in record.items() if k.startswith("val_") and isinstance(v, int | float)}
    best: dict[str, Baseline] = {}
    for baseline in baselines:
        known = best.setdefault(baseline.of, baseline)
        if (baseline.loss > known.loss) == higher_is_better(baseline.of) and baseline.loss != known.loss:
            best[baseline.of] = baseline
    keys = sorted(filter(shown, last), key=lambda key: (key != "val_loss", not key.startswith("val_loss"), key))
    if not keys:
        return
    rows, named = (
        [["on held-out data", "model", "baseline" * any(key in best for key in keys), ""]],
        dict[str, list[str]](),
    )
    for key in keys:
        better = "higher" if higher_is_better(key) else "lower"
        row = [f"  {display_name(key)}", f"{last[key]:.4g}", "", f"{better} is better"]
        if key in best:
            beaten = best[key]
            ahead = "ahead" if (last[key] > beaten.loss) == higher_is_better(key) else "behind"
            row[2:] = f"{beaten.loss:.4g}", f"{row[3]}: the model is {'level' if last[key] == beaten.loss else ahead}"
            named.setdefault(beaten.name, []).append(display_name(key))
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for name, value, other, verdict in rows:
        yield f"{name:<{widths[0]}}  {value:>{widths[1]}}  {f'{other:>{widths[2]}}  ' * bool(best)}{verdict}".rstrip()
    for name, measures in named.items():
        yield f"  baseline of {measures[0]}{f' and {len(measures) - 1} more' * (len(measures) > 1)}: {name}"
