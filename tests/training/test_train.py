"""The trainer: in this process, and under torchrun where ranks matter."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import sklearn.datasets  # noqa: F401 (here, so that ranks are forked with it)
import torch
from PIL import Image
from torch.utils.checkpoint import checkpoint

from tests.support.paths import ROOT
from tests.support.runs import TINY, Runs, alike, metrics, one_of, run_here, stop_at
from tests.support.slow import long, slow
from zoo.pictures import save_gif
from zoo.training import UserError, tracking
from zoo.training import config as cfg
from zoo.training.estimate import saved_for_backward
from zoo.training.model import recomputed_modules, refuse_other_parameters
from zoo.training.optim import is_due
from zoo.training.task_lookup import create_task


@pytest.fixture(scope="module")
def reference(trainer, tmp_path_factory):
    """A run of one process, four samples a step."""
    return Runs(trainer, tmp_path_factory.mktemp("reference"))("train.batch=4")


# --------------------------------------------------------------------------------------------------------------- a run


def test_files_and_lines_of_a_run(run, capsys):
    directory = run("train.accumulation=2")
    out, err = capsys.readouterr()
    assert not err
    assert sorted(p.name for p in directory.iterdir()) == [
        "checkpoints", "config.yaml", "console.log", "metrics.jsonl", "plan.svg", "report.html", "samples",
    ]  # fmt: skip
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == ["step-00000002", "step-00000004"]

    assert (directory / "console.log").read_text() == out
    for start in (
        "model   transformer2d test: ",
        "data    digits: 2 x 2 samples",
        "mesh    dp_replicate=1 x dp_shard=1",
    ):
        assert re.search(f"^{start}", out, re.M), start
    assert re.search(r"^plan    dsp over 1 rank: sends nothing\nmemory  [\d.]+ MiB a rank, estimated", out, re.M)
    assert f"\nrun     {directory}\n" in out
    keys = ("loss", "grad_norm", "lr", "tokens_per_s", "memory_bytes", "comm_bytes")
    timed = metrics(directory, "time", "elapsed", "seconds_per_step", "data_wait")
    assert list(timed) == [1, 2, 3, 4]
    assert all(a < b for one, two in itertools.pairwise(timed.values()) for a, b in zip(one[:2], two[:2]))
    assert all(seconds > 0 and 0 <= wait <= 1 for _, _, seconds, wait in timed.values())
    assert list(metrics(directory, "eta")) == [2, 3, 4]  # of the first step, which also plans, there is none
    train = metrics(directory, *keys)
    assert list(train) == [1, 2, 3, 4]
    for loss, norm, _, speed, memory, comm in train.values():
        assert 0.5 < loss < 5
        assert norm > 0
        assert speed > 0
        assert memory > 1e8
        assert comm == 0  # one rank
    assert [lr for _, _, lr, *_ in train.values()] == pytest.approx([5e-4, 1e-3, 7.5e-4, 2.5e-4])
    validation = metrics(directory, "val_loss", "val_losses")
    assert list(validation) == [2, 4]
    for mean, levels in validation.values():
        assert len(levels) == 2
        assert mean == pytest.approx(sum(levels) / 2)

    lines = [line for line in out.split("\n") if re.match(r"step \d/4  loss", line)]
    assert len(lines) == 4
    assert len({line.index("tokens/s") for line in lines}) == 1  # aligned
    assert all(word in lines[0] for word in ("grad", "lr", "s/step", "data", "memory", "comm", "eta"))
    assert "finished 4 steps" in out
    assert re.search(rf"^on held-out data +model\n  loss +{validation[4][0]:.4g}  lower is better$", out, re.M)
    with Image.open(directory / "samples" / "step-00000004.gif") as gif:
        assert gif.n_frames == 5
    saved = cfg.load([str(directory / "config.yaml")])
    assert saved == cfg.load([*run.arguments("train.accumulation=2")])


@pytest.mark.slow
def test_accumulation_recompute_and_bf16(run, reference):
    """Two batches of 2 are a batch of 4; recomputing changes no bit; bf16 is near."""
    whole = metrics(reference, "loss", "grad_norm", "lr")

    def steps(name, *options):
        alone = "eval.every=0", "sample.every=0", "checkpoint.every=0"
        return metrics(run(f"name={name}", *alone, *options), "loss", "grad_norm", "lr")

    parts = steps("parts", "train.accumulation=2")
    half = steps("half", "train.batch=4", "train.precision=bf16")
    assert steps("again", "train.batch=4", "train.checkpoint_activations=both") == whole
    for step, values in whole.items():
        assert parts[step] == pytest.approx(values, rel=1e-5)
        assert half[step] == pytest.approx(values, rel=2e-2)
        assert half[step] != values


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo hides it, but not from an error filter
@pytest.mark.slow
def test_compile(run, monkeypatch):
    plain = metrics(run("name=plain", "train.steps=2", "eval.every=0", "sample.every=0"), "loss")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    options = ["train.steps=2", "eval.every=0", "sample.every=0", "train.compile=true"]
    compiled = metrics(run("name=compiled", "train.checkpoint_activations=both", *options), "loss")
    for step, loss in plain.items():
        assert compiled[step] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
def test_a_folder_of_videos_with_iddpm(run, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    for i in range(3):
        save_gif(tmp_path / "videos" / f"{i}.gif", torch.rand(1, 3, 7, 8, 8, generator=generator) * 2 - 1)
    (tmp_path / "videos" / "broken.gif").write_bytes(b"GIF89a nothing")
    data = [f"data={{name: video_folder, path: {tmp_path / 'videos'}, frames: 5, height: 8, width: 8}}"]
    run.file.write_text(TINY.replace("data:", "#").replace("1, num_classes: 10", "3, learn_sigma: true"))
    directory = run(*data, "objective.name=iddpm", "sample.guidance=1", "eval.clips=2")
    assert "broken.gif" in "".join(capsys.readouterr())
    assert all(math.isfinite(loss) for (loss,) in metrics(directory, "loss").values())
    with Image.open(directory / "samples" / "step-00000004.gif") as gif:
        assert gif.n_frames == 5
    (tmp_path / "empty").mkdir()
    run(f"data={{name: video_folder, path: {tmp_path / 'empty'}}}", "sample.guidance=1", "name=empty", expect=2)
    assert "no videos under" in capsys.readouterr().err


def test_the_linear_baseline_is_reported(run, capsys, monkeypatch):
    monkeypatch.setattr("zoo.training.outputs.video.BASELINE_CLIPS", 300)
    directory = run("eval.linear_baseline=true", "eval.clips=16")
    (baseline,) = metrics(directory, "baseline_linear")[4]
    assert 0.05 < baseline < 1
    (loss,) = metrics(directory, "val_loss")[4]
    verdict = f"the model is {'ahead' if loss < baseline else 'behind'}"
    out = capsys.readouterr().out
    assert re.search(rf"  loss +{loss:.4g} +{baseline:.4g}  lower is better: {verdict}\n", out)
    assert "  baseline of loss: best linear denoiser on the same data\n" in out


# --------------------------------------------------------------------------------------------------------- stop, resume


def test_a_signal_then_resume_is_bitwise(run, trainer, monkeypatch, capsys):
    keys = ("loss", "grad_norm", "lr")
    whole = run("name=whole", "checkpoint.every=0")
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 3)
        half = run("name=half", "checkpoint.every=0", "train.checkpoint_activations=blocks", expect=trainer.STOPPED)
    assert "stopped by a signal after step 3; resume=true continues" in capsys.readouterr().out
    assert list(metrics(half, *keys)) == [1, 2, 3]
    with (half / "metrics.jsonl").open("a") as file:  # a run that went on past its checkpoint, and was cut off
        file.write('{"step": 4, "loss": 7.0, "grad_norm": 7.0, "lr": 7.0}\n{"step": 5, "lo')
    run("name=half", "checkpoint.every=0", "resume=true", "train.checkpoint_activations=blocks")
    assert "resumed from step 3" in capsys.readouterr().out
    assert metrics(half, *keys) == metrics(whole, *keys)
    assert metrics(half, "val_losses") == metrics(whole, "val_losses")
    gif = "samples/step-00000004.gif"
    assert (half / gif).read_bytes() == (whole / gif).read_bytes()
    (resumed,) = [record for record in tracking.read_metrics(half / "metrics.jsonl") if "resumed" in record]
    assert (resumed["step"], resumed["resumed"], resumed["changes"]) == (3, 1, [])
    assert [len((d / "metrics.jsonl").read_text().splitlines()) for d in (half, whole)] == [7, 6]


@pytest.mark.slow
def test_a_signal_during_validation_is_seen_and_validation_made_up_for(run, trainer, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 1, where="evaluate")
        directory = run(expect=trainer.STOPPED)
    assert "stopped by a signal after step 2" in capsys.readouterr().out
    assert metrics(directory, "val_loss") == {}
    run("resume=true")
    assert list(metrics(directory, "val_loss")) == [2, 4]
    assert "another" not in capsys.readouterr().out
    run("resume=true", "log.every=3")  # nothing is left to do
    out = capsys.readouterr().out
    assert "  with another log.every: 1 -> 3\n" in out
    assert out.count("another") == 1
    assert "finished 4 steps" in out
    assert list(metrics(directory, "val_loss")) == [2, 4]


def test_resume_before_the_first_checkpoint_starts_anew(run, capsys):
    directory = run("resume=true")
    assert "no checkpoint in" in capsys.readouterr().out
    assert list(metrics(directory, "loss")) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_with_a_status(run, trainer):
    """Whatever started them can tell a run that was stopped from one that has finished."""
    processes = run.bare(2, "train.steps=100000", "eval.every=0", "sample.every=0", "log.every=100000")
    metrics_file, deadline = run.directory / "runs/tiny/metrics.jsonl", time.time() + 240
    while not metrics_file.exists() or not metrics_file.read_text():  # the first step is recorded
        assert time.time() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    processes[1].terminate()
    out = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [trainer.STOPPED] * 2, out
    assert "stopped by a signal" in out[0][0]
    assert not out[0][1] + out[1][1]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_is_named_on_the_screen_and_in_the_log(run, monkeypatch, killed):
    """The launcher ends the other ranks at once, and they still tell."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = "train.steps=100000", "eval.every=0", "sample.every=0", "checkpoint.every=2"
    launcher = run.start(["-m", "dsp.cluster.launch", "--nproc-per-node", "2"], options)
    directory, deadline = run.directory / "runs/tiny", time.time() + 240
    while not [*directory.glob("checkpoints/step-000?????")]:
        assert time.time() < deadline
        assert launcher.poll() is None
        time.sleep(0.05)
    owner = json.loads((directory / "owner.json").read_text())["pid"]
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(owner if killed == 0 else next(int(pid) for pid in children if int(pid) != owner), signal.SIGKILL)
    error = launcher.communicate(timeout=60)[1]
    step = max(int(path.name[5:]) for path in directory.glob("checkpoints/step-????????"))
    assert launcher.returncode == 128 + signal.SIGKILL
    named = rf"error: rank {killed} \(process \d+ on {socket.gethostname()}\) "
    said, signalled = error.splitlines()
    assert re.match(named + rf"is gone: .* step \d+.*; resume=true goes on from step {step}\. Of each rank: ", said)
    assert re.fullmatch(named + "was ended by SIGKILL", signalled)
    assert (directory / "console.log").read_text().splitlines()[-1] == said


@pytest.mark.long
def test_a_run_that_loses_a_rank_goes_on_with_fewer_and_the_same_samples(run, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    options = "train.steps=12", "eval.every=0", "sample.every=0", "checkpoint.every=3"
    whole = run("name=whole", *options)
    launch = ["-m", "dsp.cluster.launch", "--nproc-per-node", "3", "--restarts", "1", "--min-ranks", "2"]
    launcher = run.start(launch, ["name=less", *options])
    directory, deadline = run.directory / "runs/less", time.time() + 240
    while not [*directory.glob("checkpoints/step-????????")]:
        assert time.time() < deadline
        assert launcher.poll() is None
        time.sleep(0.02)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    error = launcher.communicate(timeout=240)[1]
    assert launcher.returncode == 0, error
    assert "was ended by SIGKILL\nrestart 1 of 1: on 2 ranks, from the last checkpoint\n" in error
    (resumed,) = [record for record in tracking.read_metrics(directory / "metrics.jsonl") if "resumed" in record]
    assert (resumed["resumed"], resumed["changes"]) == (2, [])
    alike(whole, directory, keys=(("loss", "grad_norm", "lr"),))


@pytest.mark.parametrize("how", [long("torchrun"), long("launcher"), long("bare")])
def test_an_error_of_all_ranks_is_said_once(run, monkeypatch, how):
    """Our launcher adds nothing, and the exit status is the rank's; ranks alone leave together, and one speaks."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run("train.steps=1", "eval.every=0", "sample.every=0")
    launch = ["-m", "dsp.cluster.launch", "--nproc-per-node", "2"]
    started = {
        "torchrun": lambda: [run.torchrun(2)],
        "launcher": lambda: [run.start(launch, [])],
        "bare": lambda: run.bare(2),
    }
    processes = started[how]()
    errors = [process.communicate(timeout=180)[1] for process in processes]
    assert "".join(errors).count("error: ") == 1
    assert re.search(r"error: .* already holds a run \(to step 1\): continue it with resume=true", errors[0])
    if how == "torchrun":
        assert processes[0].returncode != 0
    else:
        assert [process.returncode for process in processes] == [2] * len(processes), errors
        assert "".join(errors).count("\n") == 1


EMA = ["train.ema=0.5", "train.batch=4", "sample.every=0"]


@pytest.mark.slow
def test_averaged_weights(run, trainer, monkeypatch):
    """They are what is judged, and resume bitwise."""
    seen = []
    plain_step, plain_evaluate = trainer.train_step, trainer.evaluate

    def weights(run):
        for module in run.model.modules():
            module.reshard() if hasattr(module, "reshard") else None
        return torch.cat([p.detach().full_tensor().flatten() for p in run.model.parameters()])

    def stepped(run, *args):
        before = weights(run)
        result = plain_step(run, *args)
        seen.append(("step", before, weights(run)))
        return result

    def judged(run):
        seen.append(("judged", weights(run)))
        return plain_evaluate(run)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "train_step", stepped)
        patch.setattr(trainer, "evaluate", judged)
        whole = run(*EMA, "name=whole")
    average = None
    for what, *values in seen:
        if what == "step":
            average = values[0] if average is None else average
            average = average + 0.5 * (values[1] - average)
        elif average is not None:
            torch.testing.assert_close(values[0], average)

    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 3)
        half = run(*EMA, "name=half", expect=trainer.STOPPED)
    run(*EMA, "name=half", "resume=true")
    for keys in (("loss", "grad_norm"), ("val_loss",)):
        assert metrics(half, *keys) == metrics(whole, *keys)


@pytest.mark.slow
def test_averaged_weights_of_other_runs(run, whole_world):
    """They do not depend on the mesh, and an old checkpoint starts them."""
    whole = run(*EMA, "name=whole")
    whole_world(run_here, 4, run.arguments(*EMA, "name=mesh", "parallel={dp_shard: 2, sp: 2}", "train.batch=2"))
    expected, got = metrics(whole, "val_loss"), metrics(run.directory / "runs/mesh", "val_loss")
    assert {k: pytest.approx(v, rel=1e-5) for k, v in expected.items()} == got

    run("train.batch=4", "sample.every=0", "train.steps=2", "name=late")
    late = run(*EMA, "name=late", "resume=true")
    assert list(metrics(late, "loss")) == [1, 2, 3, 4]
    assert metrics(late, "val_loss")[4] != metrics(whole, "val_loss")[4]


# --------------------------------------------------------------------------------------------------------- many ranks


@pytest.mark.parametrize(
    "options",
    [
        long(["parallel={dp_replicate: 2, sp: 2}", "train.batch=2"]),
        ["parallel={dp_shard: 2, sp: 2}", "train.batch=2", "train.checkpoint_activations=stages"],
        long(["parallel={dp_replicate: 2, dp_shard: 2}", "train.batch=1"]),
        long(["parallel={sp: 4}", "train.batch=2", "train.accumulation=2"]),
        slow(["parallel={dp_shard: 2, sp: 2}", "train.batch=2", "train.checkpoint_activations=blocks"]),
        long(["parallel={sp: 4}", "train.batch=4", "train.checkpoint_activations=both", "train.precision=bf16"]),
    ],
    ids=["replicate", "shard", "no-sp", "sp", "blocks", "both-bf16"],
)
def test_every_mesh_trains_alike(run, whole_world, reference, options):
    """Four samples a step on every mesh of four ranks: one curve, one validation loss, the same pictures."""
    alone = run("train.batch=4", "train.precision=bf16", "name=alone") if "bf16" in options[-1] else reference
    sent = whole_world(run_here, 4, run.arguments("name=mesh", *options))
    mesh = run.directory / "runs/mesh"
    tolerance = 5e-3 if "train.precision=bf16" in options else 1e-5
    alike(alone, mesh, tolerance)
    with Image.open(alone / "samples/step-00000004.gif") as a, Image.open(mesh / "samples/step-00000004.gif") as b:
        assert max(abs(p - q) for p, q in zip(a.convert("L").tobytes(), b.convert("L").tobytes())) <= 8

    # recorded is what the busiest rank sends in each phase, but for the sums of the loss and of its weights.
    # Recomputing a stage sends nothing, recomputing a block what it sent.
    (recorded,) = {comm for (comm,) in metrics(mesh, "comm_bytes").values()}
    busiest = sum(max(phase) for phase in zip(*(steps[1] for steps in sent)))
    assert 0 <= busiest - recorded <= 2 * 24
    blocks = any(option.endswith(("=blocks", "=both")) for option in options)
    assert any(recompute for steps in sent for _, _, recompute in steps) == blocks


# ------------------------------------------------------------------------------------------------------------ bad input


def test_an_occupied_directory_is_refused(run, capsys):
    directory = run("train.steps=2")
    before = (directory / "metrics.jsonl").read_bytes()
    run(expect=2)
    err = capsys.readouterr().err
    assert f"{directory} already holds a run (to step 2)" in err
    assert "resume=true" in err
    assert "Traceback" not in err
    assert (directory / "metrics.jsonl").read_bytes() == before
    run("resume=true", "model.overrides.hidden=24", expect=2)
    err = capsys.readouterr().err
    assert "checkpoint of another model" in err
    assert "config.hidden: 48 in the checkpoint, 24 here" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.sp=3"], "dp_replicate=1 x dp_shard=1 x sp=3 = 3 != world 1"),
        (["train.stps=3"], "command line: unknown key 'train.stps': did you mean 'steps'?"),
        (["model.overrides.hiden=3"], "did you mean 'hidden'"),
        (["optim.lr=1e30", "optim.warmup=0"], "training diverged"),
    ],
)
def test_errors_are_one_message(run, capsys, arguments, message):
    run(*arguments, expect=2)
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_a_full_disk_is_named_at_the_start(run, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    directory = run(expect=2)
    assert "checkpoints take 0.005 GB and 0.001 GB are free" in capsys.readouterr().err
    assert not (directory / "metrics.jsonl").exists()


def test_help(trainer, run, capsys):
    assert trainer.main(["help=1"]) == 0
    assert "steps: 1000" in capsys.readouterr().out
    assert trainer.main([str(run.file), "help=1", "train.steps=3"]) == 0
    assert re.search(r"  steps: 3 +# optimizer steps", capsys.readouterr().out)


# ------------------------------------------------------------------------------------------------------- dry run, wandb


@pytest.mark.parametrize("config", ["transformer2d-720m", long("latte-xl")])
def test_dry_run_of_a_cluster_on_one_process(trainer, tmp_path, monkeypatch, capsys, config):
    monkeypatch.chdir(tmp_path)
    assert trainer.main([str(ROOT / f"configs/{config}.yaml"), "dry_run=true"]) == 0
    out, progress = capsys.readouterr()
    assert "building the model without weights ...\nplanning a step over" in progress
    assert "ranks ...\ntracing a step for what backward keeps ...\n" in progress
    size = {"transformer2d-720m": "sp=8 = 16 ranks", "latte-xl": "sp=4 = 8 ranks"}[config]
    assert size in out
    assert "blocks.0.temporal" in out or "blocks.*.temporal" in out
    for what in ("parameters", "gradients", "AdamW moments", "gathered weights", "activations", "total"):
        assert re.search(rf"^  {what} +\d[\d.]* [MG]iB", out, re.M), what
    assert re.search(r"^sequence parallelism sends \d[\d.]* [MG]iB a rank and step", out, re.M)
    assert "largest activations, of which a rank holds 1/" in out
    said = {
        "transformer2d-720m": r"is 2: 49 GiB; sp=8 needs",
        "latte-xl": r"is 1: [\d.]+ GiB; sp=4 needs [\d.]+ GiB; one rank is enough at this size",
    }[config]
    assert re.search(f"^the smallest sp that fits 80 GiB a device {said}", out, re.M)
    assert not list(tmp_path.iterdir())  # nothing is written


@pytest.mark.long
def test_dry_run_says_how_long_a_step_takes(trainer, run, capsys):
    mesh = ["parallel.sp=2", "parallel.dp_shard=2", "dry_run=true", "model.overrides.depth=1"]
    assert trainer.main([*run.arguments(), *mesh, "hardware.device=h100", "hardware.network=ethernet-10g"]) == 0
    out = capsys.readouterr().out
    assert "a step on h100 (products at 50% of the peak), nvlink4 in nodes of 8, ethernet-10g between" in out
    for method in ("dsp", "ulysses", "ring", "megatron_sp", "megatron_lm"):
        found = re.search(rf"^ +{method} +[\d.]+ .?s +([\d.]+)% +([\d.]+)% +([\d.]+)% +\S+ +[\d.]+ .iB$", out, re.M)
        assert found, method
        assert sum(map(float, found.groups())) == pytest.approx(100, abs=0.2)
    # so little is not worth sending
    assert re.search(r"the most tokens/s on 4 ranks: dp=4 x sp=1, [\d.]+ .?s a step", out)
    assert trainer.main([*run.arguments(), *mesh, "hardware.device=h100", "parallel.memory=1e-6"]) == 0
    out = capsys.readouterr().out
    assert "too much" in out
    assert "no dp x sp of 4 ranks fits" in out
    for wrong, said in (
        ("hardware.device=h1000", "hardware: no accelerator 'h1000' in the table; it has a100, h100"),
        ("hardware.link=nvlink9", "hardware: no link 'nvlink9' in the table; it has nvlink3"),
    ):
        assert trainer.main([*run.arguments(), *mesh, "hardware.device=h100", wrong]) == 2
        told = capsys.readouterr()
        assert f"error: {said}" in told.err
        assert not told.out  # no plan before it


def test_running_out_of_memory_says_what_would_fit(run, trainer, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(trainer, "train_step", full)
    run("parallel.memory=1e-3", expect=2)
    error = capsys.readouterr().err
    assert error.startswith("error: out of memory: the smallest sp that fits 1.02 MiB a device is ")
    assert "; sp=1 needs " in error
    assert re.search(r"; train.checkpoint_activations=both needs \d.* [KM]iB$", error.split("\n")[0])
    assert "x [2, 5, 9, 48] float32 in model.blocks" in error


def test_the_estimate_of_activations_is_what_is_kept(run):
    """Count, in a real forward, the storages that autograd keeps; stages alike may run once."""
    config = cfg.load(run.arguments())
    task = create_task(config)
    estimates = saved_for_backward(task, torch.float32)
    every = saved_for_backward(task, torch.float32, twins=False)
    for way, estimate in estimates.items():
        assert estimate.bytes == every[way].bytes
        assert estimate.largest(9) == every[way].largest(9)

    objective = task.objective(task.model())
    weights = {p.untyped_storage().data_ptr() for p in objective.parameters()}

    def kept(way):
        """Bytes that a forward keeps, in a real one."""
        for module in recomputed_modules(objective.model)[way]:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
        found, alive = {}, []

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                found[storage.data_ptr()] = storage.nbytes()
                alive.append(tensor)
            return tensor

        inputs = {k: torch.zeros_like(v) for k, v in task.example(objective).items()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            objective(**inputs)
        for module in objective.modules():
            module.__dict__.pop("forward", None)
        return sum(found.values())

    for way, estimate in estimates.items():
        always = sum(saved.bytes for saved in estimate.always)
        assert always == pytest.approx(kept(way), rel=0.02)
    none, by_stage, by_block, both = (estimate.bytes for estimate in estimates.values())
    assert both < by_stage < none
    assert both < by_block < none


@pytest.mark.slow
def test_wandb_offline_holds_the_same(run):
    directory = run("wandb.mode=offline", "train.steps=2", "sample.every=2")
    run("wandb.mode=offline", "train.steps=3", "sample.every=2", "resume=true")
    logs = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert len(logs) == 2
    assert logs[0].name == logs[1].name  # the id is kept in the checkpoint
    records = []
    for log in logs:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        records += [json.loads(line) for line in out.splitlines()]
    config = next(r["run"]["config"]["update"] for r in records if r["type"] == "run")
    assert config["train"]["batch"] == 2
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    losses = {item["train/step"]: item["train/loss"] for item in history if "train/loss" in item}
    assert losses == {step: loss for step, (loss,) in metrics(directory, "loss").items()}
    assert any("val/loss" in item for item in history)
    assert any(key.startswith("samples") for item in history for key in item)
    assert any(key.startswith("plan") for item in history for key in item)
    assert list(directory.glob("wandb/*/files/media/videos/*.gif"))
    table = json.loads(next(directory.glob("wandb/*/files/media/table/plan*.json")).read_text())
    assert table["columns"]
    assert table["data"]


@pytest.mark.slow
def test_every_option_is_read(run, trainer, tmp_path, monkeypatch):
    """A key that nothing reads would be a promise that nothing keeps."""
    save_gif(tmp_path / "videos" / "0.gif", torch.rand(1, 3, 7, 8, 8) * 2 - 1)
    seen, real = set(), cfg.load
    video = [cfg.defaults(data) for data in ("digits", "video_folder")]
    sections = {type(v) for config in video for v in vars(config).values() if hasattr(v, "__dict__")}

    def load(arguments):
        config = real(arguments)
        for section in {cfg.Config, *sections}:
            plain = section.__getattribute__

            def watched(self, name, plain=plain):
                seen.add((type(self), name))
                return plain(self, name)

            monkeypatch.setattr(section, "__getattribute__", watched)
        return config

    monkeypatch.setattr(trainer.cfg, "load", load)
    monkeypatch.setattr("zoo.training.tracking.to_dict", lambda config: {})
    monkeypatch.setattr(tracking, "to_yaml", lambda config: "")
    monkeypatch.setattr("zoo.training.outputs.video.BASELINE_CLIPS", 30)
    run("wandb.mode=offline", "eval.linear_baseline=true")
    run.file.write_text(TINY.replace("data:", "#").replace("1, num_classes: 10", "3"))
    data = f"data={{name: video_folder, path: {tmp_path / 'videos'}, frames: 5, height: 8, width: 8}}"
    run(data, "sample.guidance=1", "train.steps=1", "name=folder")
    names = {section: section for section in sections}
    for section in names:
        for f in cfg.fields(section):
            assert (section, f.name) in seen or f.name == "name", f"{section.__name__}.{f.name} is never read"
    for f in cfg.fields(cfg.Config):
        assert (cfg.Config, f.name) in seen, f"{f.name} is never read"


# ---------------------------------------------------------------------------------------------------------- small parts


def test_due():
    assert [step for step in range(11) if is_due(4, step, 10)] == [4, 8, 10]
    assert not any(is_due(0, step, 10) for step in range(11))


def test_parts_of_a_batch_are_those_of_the_whole(run):
    """Ranks of one group see parts of the same samples, groups see others, whatever the number of groups."""
    config = cfg.load(run.arguments("train.batch=2", "train.accumulation=2"))
    whole = create_task(config)
    whole.open()
    with torch.device("meta"):
        model = whole.model()
    objective = whole.objective(model)
    parts = [create_task(config, one_of(3, rank)) for rank in range(3)]
    for part in parts:
        part.open()
        part.num_classes, part.takes = whole.num_classes, whole.takes
    batch = whole.batch(objective, 3, 1, 0, 1)
    pieces = [part.batch(objective, 3, 1, 0, 1) for part in parts]
    for name in ("x", "noise"):
        assert torch.equal(torch.cat([p[name].to_local() for p in pieces], 2), batch[name])
        assert [p[name].to_local().shape[2] for p in pieces] == [2, 2, 1]
    for name in ("timestep", "label"):
        assert all(torch.equal(p[name], batch[name]) for p in pieces)
    # two micro-batches of one group are one micro-batch of two groups
    config.train.accumulation = 1
    other = whole.batch(objective, 3, 0, 1, 2)
    assert torch.equal(other["x"], batch["x"])
    assert torch.equal(other["noise"], batch["noise"])
    assert not torch.equal(whole.batch(objective, 3, 0, 0, 2)["x"], batch["x"])


def test_amounts():
    assert [tracking.human_bytes(v) for v in (0, 1000, 1024, 882.5 * 2**20)] == ["0 B", "1000 B", "1 KiB", "882 MiB"]
    assert [tracking.human_count(v) for v in (0, 7, 999.9, 1208, 45_300_000, 2e12)] == [
        "0", "7", "1k", "1.21k", "45.3M", "2T",
    ]  # fmt: skip
    assert [tracking.duration(v) for v in (7, 754, 12000)] == ["0:07", "12:34", "3:20:00"]


def test_an_objective_has_the_models_parameters_alone():
    """Others would keep no values: weights are given to the model."""
    model = torch.nn.Linear(2, 2)
    refuse_other_parameters(torch.nn.Sequential(model), model)
    with pytest.raises(UserError, match=r"Sequential has parameters that are not the model's: 1\.weight, 1\.bias\. "):
        refuse_other_parameters(torch.nn.Sequential(model, torch.nn.Linear(2, 2)), model)
