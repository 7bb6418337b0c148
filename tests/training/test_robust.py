"""A run of weeks: bad steps, slow disks, slow data; and schedules and optimizers, exact as ever."""

import importlib
import math
import os
import re
import signal
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.fsdp import fully_shard

from tests.support.paths import ROOT
from tests.support.runs import metrics, one_of, stop_at
from zoo.training import UserError, checkpoint, loader
from zoo.training import config as cfg
from zoo.training.guard import FEWEST, Diverged, Guard
from zoo.training.loader import Failed, WorkerBatches, batches, place
from zoo.training.optim import learning_rate, optimizers
from zoo.training.sections import Optim, Train
from zoo.training.task_lookup import create_task
from zoo.training.tasks.video import Task

KEYS = ("loss", "grad_norm", "lr")


# ----------------------------------------------------------------------------------------------------- schedules, guard


def test_schedules():
    def rates(**options):
        return [learning_rate(Optim(lr=1.0, warmup=2, **options), step, 10) for step in range(1, 11)]

    cosine = rates(final=0.1)
    assert cosine[:2] == [0.5, 1.0]
    assert cosine[2:] == pytest.approx([0.1 + 0.45 * (1 + math.cos(math.pi * i / 9)) for i in range(1, 9)])
    assert learning_rate(Optim(lr=1.0, warmup=50), 20, 20) == 0.4  # shorter than its warmup
    assert rates(schedule="constant") == [0.5] + [1.0] * 9
    linear = rates(schedule="linear", final=0.1)
    assert linear[:2] == [0.5, 1.0]
    assert linear[2:] == pytest.approx([0.1 + 0.9 * (9 - i) / 9 for i in range(1, 9)])
    wsd = rates(schedule="wsd", decay=0.3, final=0.0)
    assert wsd == pytest.approx([0.5] + [1.0] * 6 + [0.75, 0.5, 0.25])
    assert rates(schedule="wsd", decay=1.0) == pytest.approx(rates(schedule="linear"))
    assert rates(schedule="wsd", decay=0.0) == rates(schedule="constant")


def test_the_guard_judges_alike_after_a_resume():
    options = Train(skip=1, spike=5.0)
    norms = [1.0 + 0.01 * i for i in range(FEWEST)] + [100.0, 1.0, math.nan, math.inf]
    whole, parts = Guard(options), Guard(options)
    for step, norm in enumerate(norms, 1):
        parts = Guard(options, parts.state())  # saved and taken up again at each step
        why = whole.reason(step, 0.5 if norm == 100.0 else norm, norm, whole.limit(step))
        assert parts.reason(step, 0.5 if norm == 100.0 else norm, norm, parts.limit(step)) == why
        assert parts.state() == whole.state()
        assert bool(why) == (norm > 50 or norm != norm)
        if step == FEWEST + 1:
            assert why.startswith("gradient norm 100, 95.")
    assert (whole.skipped, whole.in_row, whole.last_finite) == (3, 2, FEWEST + 2)
    with pytest.raises(Diverged, match=r"the last 2 steps were skipped .* weights before step 12 still gave a finite"):
        whole.check(14, "loss inf", last=False)
    assert (whole.last_update, whole.wants_copy(12, 0.5), whole.wants_copy(12, math.nan)) == (12, False, False)


def poison(trainer, monkeypatch, *steps):
    """At these steps the norm of the gradients is no number."""
    real, train_step, at = trainer.clip_gradients, trainer.train_step, []

    def watched(run, step, *args):
        at[:] = [step]
        return train_step(run, step, *args)

    monkeypatch.setattr(trainer, "train_step", watched)
    monkeypatch.setattr(trainer, "clip_gradients", lambda *a: real(*a) * (math.nan if at[0] in steps else 1))


def test_a_bad_step_is_skipped_and_the_run_goes_on(run, trainer, monkeypatch, capsys):
    short = ["sample.every=0", "train.steps=5"]
    poison(trainer, monkeypatch, 3)
    whole = run("name=whole", *short)
    out = capsys.readouterr().out
    assert "step 3 is skipped: loss " in out
    assert "finished 5 steps, 1 of them skipped" in out
    assert list(metrics(whole, "skipped").values()) == [(0,), (0,), (1,), (1,), (1,)]
    assert list(metrics(whole, "skipped_because")) == [3]
    assert metrics(whole, "grad_norm")[3] == (None,)
    assert metrics(whole, "val_loss")[2] == pytest.approx(metrics(whole, "val_loss")[4], rel=0.2)
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 3)
        half = run("name=half", *short, expect=trainer.STOPPED)
    run("name=half", *short, "resume=true")
    assert metrics(half, *KEYS, "skipped") == metrics(whole, *KEYS, "skipped")


AHEAD = ["train.ahead=true", "train.ema=0.5", "sample.every=0", "eval.every=0", "checkpoint.every=0", "log.every=4"]


def test_a_step_taken_before_its_numbers_are_read_is_the_same(run, trainer, monkeypatch, capsys):
    """With a log line for each step the host reads every one at once; with one for four steps it does not."""
    poison(trainer, monkeypatch, 3, 6)
    options = ["train.steps=8", *AHEAD]
    runs = [run(f"name=every-{every}", *options, f"log.every={every}") for every in (1, 4)]
    assert capsys.readouterr().out.count("step 6 is skipped: loss ") == 2
    logged = [metrics(directory, *KEYS, "skipped") for directory in runs]
    assert list(logged[1]) == [1, 4, 8]
    assert all(logged[0][step] == values for step, values in logged[1].items())
    weights = [checkpoint_tensors(directory / "checkpoints" / "step-00000008") for directory in runs]
    assert weights[0].keys() == weights[1].keys()
    assert any(name.startswith("average.") for name in weights[0])
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=0, msg=name)


def checkpoint_tensors(path):
    tensors = {}
    for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # that it is one process
        dcp.load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    return tensors


@pytest.mark.slow
def test_a_signal_is_seen_a_step_later_and_resuming_is_bitwise(run, trainer, monkeypatch):
    options = ["train.steps=8", "train.spike=50", *AHEAD]
    whole = run("name=whole", *options)
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 6)
        half = run("name=half", *options, expect=trainer.STOPPED)
    assert [p.name for p in (half / "checkpoints").iterdir()] == ["step-00000007"]
    assert metrics(run("name=half", *options, "resume=true"), *KEYS)[8] == metrics(whole, *KEYS)[8]


@pytest.mark.slow
def test_steps_taken_on_the_device_count_when_a_run_diverges(run, trainer, monkeypatch, capsys):
    poison(trainer, monkeypatch, 6)
    directory = run("train.steps=8", *AHEAD, "train.skip=0", "checkpoint.every=4", expect=2)
    assert "step 6: loss" in (said := capsys.readouterr().err)
    assert "weights before step 7 still gave a finite loss" not in said
    assert f"known to be sound is {directory}/checkpoints/step-00000004" in said


def test_too_many_bad_steps_end_the_run_and_leave_the_last_sound_weights(run, trainer, monkeypatch, capsys):
    poison(trainer, monkeypatch, 2, 3)
    directory = run("sample.every=0", "eval.every=0", "checkpoint.every=0", "train.skip=1", expect=2)
    said = capsys.readouterr().err
    assert "training diverged, and the last 2 steps were skipped (train.skip allows 1)" in said
    assert f"known to be sound is {directory}/checkpoints/step-00000001. A lower" in said
    assert [p.name for p in (directory / "checkpoints").iterdir()] == ["step-00000001"]


@pytest.mark.slow
def test_weights_that_an_update_has_broken_are_those_before_it(run, trainer, monkeypatch, capsys):
    """The copy that is kept is of the last step but one: an update of 10^30 is seen by the loss after it."""
    options = ["sample.every=0", "eval.every=0", "checkpoint.every=3", "train.skip=0"]
    whole = run("name=whole", *options)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "learning_rate", lambda o, step, n: 1e30 if step == 3 else 1e-3)
        directory = run("name=bad", *options, "train.sound=1", expect=2)
    assert "known to be sound is" in capsys.readouterr().err
    assert [p.name for p in (directory / "checkpoints").iterdir()] == ["step-00000002"]
    run("name=bad", *options, "resume=true")
    assert "damaged" not in capsys.readouterr().out
    assert list(metrics(directory, "loss")) == list(metrics(whole, "loss"))


def _last_rank_is_bad(mesh, arguments):
    """A run whose third batch has noise that is no number, on the last rank alone."""
    sys.path.insert(0, str(ROOT))
    trainer, steps = importlib.import_module("train"), []

    def placed(inputs, device):
        steps.append(1)
        bad = len(steps) == 3 and mesh.get_local_rank() == mesh.size() - 1
        return place(inputs, device) | ({"noise": inputs["noise"] * math.nan} if bad else {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "place", placed)
        assert trainer.main(arguments) == 0


@pytest.mark.slow
def test_all_ranks_skip_a_step_that_one_finds_bad(run, whole_world):
    """And their weights stay one: the curve is that of one process, which skips the same step."""
    for n in (1, 2):
        options = [f"name=on-{n}", f"parallel.sp={n}", "train.steps=6", "sample.every=0", "eval.every=0"]
        whole_world(_last_rank_is_bad, n, run.arguments(*options))
    one, two = (run.directory / f"runs/on-{n}" for n in (1, 2))
    assert list(metrics(two, "skipped").values()) == [(0,), (0,), (1,), (1,), (1,), (1,)]
    for step, values in metrics(one, "loss", "grad_norm").items():
        if step != 3:
            assert metrics(two, "loss", "grad_norm")[step] == pytest.approx(values, rel=1e-5)


# ------------------------------------------------------------------------------------------- asynchronous checkpoints


@pytest.mark.slow
def test_saved_in_the_background_read_in_processes_it_is_the_same_run(run, trainer, monkeypatch, capsys):
    options = ["checkpoint.every=1", "sample.every=0"]
    plain = run("name=plain", *options)
    quick = [*options, "name=quick", "checkpoint.asynchronous=true", "train.workers=2", "train.prefetch=2"]
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 3)
        run(*quick, expect=trainer.STOPPED)
    other = run(*quick, "resume=true")
    out = capsys.readouterr().out
    assert "resumed from step 3" in out
    assert "written in" in out
    for keys in (KEYS, ("val_losses",)):
        assert metrics(other, *keys) == metrics(plain, *keys)
    for name in ("step-00000003", "step-00000004"):
        mine, theirs = (d / "checkpoints" / name / "__0_0.distcp" for d in (other, plain))
        assert mine.read_bytes() == theirs.read_bytes()


def test_a_held_copy_does_not_change_and_a_failed_save_raises(tmp_path):
    from zoo.training.saving import Saver

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        contents = checkpoint.Contents(model, torch.optim.AdamW(model.parameters()))
        saver = Saver(tmp_path, 2, True)
        held = checkpoint.hold(contents)
        with torch.no_grad():
            before = model.weight.full_tensor().clone()
            model.weight.zero_()
        assert torch.equal(held.tensors["model", "weight"].full_tensor(), before)
        saver.save(1, contents, {})
        saver.wait()
        assert (tmp_path / "step-00000001" / "manifest.json").exists()
        (tmp_path / "file").write_text("in the way")
        saver = Saver(tmp_path / "file", 2, True)
        saver.save(2, contents, {})
        with pytest.raises(UserError, match=r"File exists: '.*file'"):
            saver.wait()
        saver.wait()  # once
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------- loader, optimizers


def test_processes_make_what_a_thread_makes(run, trainer):
    config = cfg.load(run.arguments("train.accumulation=2"))
    task = create_task(config, one_of(3, 1))
    task.open()
    with torch.device("meta"):
        objective = task.objective(task.model())

    def make(step, micro):
        if step == 4:
            raise UserError("no sample")
        return task.batch(objective, step, micro, 0, 1) | {"process": os.getpid()}

    wanted = [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    found = {n: batches(task, make, wanted, n, 2) for n in (0, 2)}
    for _ in range(6):
        here, there = next(found[0]), next(found[2])
        assert here.pop("process") == os.getpid() != there.pop("process")
        assert here.keys() == there.keys()
        for name, value in here.items():
            assert type(value) is type(there[name])
            pair = [x.to_local() if hasattr(x, "to_local") else x for x in (value, there[name])]
            assert torch.equal(*pair) if isinstance(pair[0], torch.Tensor) else pair[0] == pair[1]
            assert value.shape == there[name].shape if isinstance(value, torch.Tensor) else True
    for made in found.values():
        with pytest.raises(UserError, match="no sample") as error:
            next(made)
        made.close()
    assert error.value.alone
    assert isinstance(WorkerBatches(create_task(config), make)[4, 0], Failed)


@pytest.mark.slow
def test_processes_keep_up_with_a_step():
    """WorkerBatches that take three times a step are there in time from four processes, and not from a thread."""

    class Slow:
        device, size = torch.device("cpu"), 1

    def waited(workers):
        clock, total = time.perf_counter(), 0.0
        made = batches(Slow(), lambda i: time.sleep(0.06) or {}, [(i,) for i in range(16)], workers, 2)
        next(made)
        for _ in range(15):
            time.sleep(0.02)
            clock = time.perf_counter()
            next(made)
            total += time.perf_counter() - clock
        return total

    assert waited(4) < waited(0) / 2


def _train(mesh, name, sharded):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Conv1d(7, 3, 1))
    if sharded:
        fully_shard(model, mesh=mesh)
    updates = optimizers(model, Optim(name=name, lr=0.05, weight_decay=0.1))
    x = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        hidden = model[1](model[0](x)) if not sharded else None
        y = model[2](hidden.mT) if not sharded else model(_Swap.on(model, x))
        y.square().mean().backward()
        for update in updates:
            update.step()
            update.zero_grad()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}


class _Swap:
    """(the convolution wants channels first)"""

    @staticmethod
    def on(model, x):
        if not model[1]._forward_hooks:
            model[1].register_forward_hook(lambda module, given, out: out.mT)
        return x


def _alike(mesh, name):
    return _train(mesh, name, False), _train(mesh, name, True)


@pytest.mark.parametrize("short", [True, False])
def test_a_data_worker_that_the_kernel_ends_is_named(run, monkeypatch, capsys, short):
    """torch says so in a RuntimeError at any place of the step; memory is the cause only where the kernel counts it."""
    here, plain, kills = os.getpid(), Task.batch, iter([3, 3 + short])

    def batch(task, objective, step, *rest, **more):
        if step == 1 and os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(task, objective, step, *rest, **more)

    monkeypatch.setattr(Task, "batch", batch)
    monkeypatch.setattr(loader, "memory_kills", lambda: next(kills))
    run("train.workers=1", "sample.every=0", "eval.every=0", expect=2)
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"error: .*data worker \(process \d+\) (was ended by a signal \(Killed\)|is gone)", line)
    assert ("because memory ran out" in line) == short
    assert "train.workers" in line


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_an_optimizer_on_shards_is_that_of_whole_weights(ranks, name):
    for whole, sharded in ranks(_alike, 2, name):
        for key, value in whole.items():
            scale = 0.05 * 3  # what three steps at this rate move a weight by; muon multiplies in bfloat16
            torch.testing.assert_close(sharded[key], value, rtol=1e-4, atol=scale * (2e-2 if name == "muon" else 1e-4))


@pytest.mark.slow
def test_a_run_with_another_optimizer_resumes_bitwise(run, trainer, monkeypatch):
    options = ["optim.name=muon", "optim.schedule=wsd", "optim.lr=1e-2", "sample.every=0", "eval.every=0"]
    whole = run("name=whole", *options)
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 3)
        run("name=half", *options, expect=trainer.STOPPED)
    assert metrics(run("name=half", *options, "resume=true"), *KEYS) == metrics(whole, *KEYS)
    losses = [loss for (loss,) in metrics(whole, "loss").values()]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_weights_in_host_memory_are_trained_alike(run):
    """On a CPU all of it is there already: the way is that of a GPU, but for what it is there for."""
    options = ["sample.every=0", "train.ema=0.5"]
    plain, kept = run("name=plain", *options), run("name=kept", *options, "train.offload=true", "train.steps=2")
    kept = run("name=kept", *options, "train.offload=true", "resume=true")
    assert metrics(kept, *KEYS, "val_loss") == metrics(plain, *KEYS, "val_loss")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torchao's own, as it is imported and compiles
def test_moments_in_8_bits_resume_bitwise_and_are_stored_whole(run, trainer, monkeypatch):
    """On a run that was not stopped the moments are those that the stopped one took from its checkpoint."""
    pytest.importorskip("torchao")
    options = ["optim.name=adamw8bit", "model.overrides.hidden=64", "sample.every=0", "eval.every=0"]
    whole, plain = run("name=whole", *options), run("name=plain", *options, "optim.name=adamw")
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 2)
        half = run("name=half", *options, expect=trainer.STOPPED)
    stored = checkpoint_tensors(half / "checkpoints" / "step-00000002")
    assert {t.dtype for t in stored.values()} == {torch.float32}
    packed = [t for name, t in stored.items() if name.endswith("exp_avg") and t.numel() >= 4096]
    assert packed
    assert all(len(block.unique()) <= 256 for t in packed for block in t.flatten().split(256))
    resumed = metrics(run("name=half", *options, "resume=true"), *KEYS)
    assert resumed == metrics(whole, *KEYS)
    losses = [metrics(directory, "loss")[4][0] for directory in (whole, plain)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [{"norm": 3}, {"spike": 12}])
def test_the_time_of_reading_on_the_host_changes_nothing(run, trainer, monkeypatch, capsys, bad):
    """A step that is bad beside one that is logged, with log lines for every step and for every fourth."""
    real, train_step, at = trainer.clip_gradients, trainer.train_step, []

    def watched(run, step, *args):
        at[:] = [step]
        return train_step(run, step, *args)

    def clipped(*args):
        norm = real(*args)
        return norm * (math.nan if at[0] == bad.get("norm") else 1000 if at[0] == bad.get("spike") else 1)

    monkeypatch.setattr(trainer, "train_step", watched)
    monkeypatch.setattr(trainer, "clip_gradients", clipped)
    if "norm" in bad:  # it ends the run at a step that is logged: what the step before it left is kept
        for ahead in ("false", "true"):
            directory = run(f"name=ahead-{ahead}", *AHEAD, "train.skip=0", f"train.ahead={ahead}", expect=2)
            assert [p.name for p in (directory / "checkpoints").iterdir()] == ["step-00000002"]
        return
    options = ["train.steps=14", "train.spike=10", *AHEAD]
    runs = [run(f"name=every-{every}", *options, f"log.every={every}") for every in (1, 4, 100)]
    assert capsys.readouterr().out.count("step 12 is skipped: gradient norm") == 3
    weights = [checkpoint_tensors(directory / "checkpoints" / "step-00000014") for directory in runs]
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])
