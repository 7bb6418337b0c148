"""Training on folders of latents: one curve on every mesh, bitwise resuming, gradients, and what a user gets wrong."""

import re

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support.latent_folders import SHAPES, TEXT, latent_folder
from tests.support.runs import Runs, alike, metrics, one_of, run_here, stop_at
from zoo.data.sampling import hash_seed
from zoo.training import UserError, user_error
from zoo.training import config as cfg
from zoo.training.task_lookup import create_task

TINY = """
model: {name: stdit, size: test, overrides: {in_channels: 2, caption_channels: 6, patch: [1, 2, 2]}}
data: {name: latent_folder, path: null, validation: 0.3}
objective: {label_dropout: 0.3, first_frame: 0.3, random_frames: 0.4}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 8, batch: 4, ema: 0.5}
eval: {every: 4, clips: 8, levels: 2}
log: {every: 1}
checkpoint: {every: 4}
profile: {every: 0}
wandb: {mode: disabled}
"""


class Folder(Runs):
    def __init__(self, trainer, directory, shapes=SHAPES, **changes):
        self.trainer, self.directory, self.file = trainer, directory, directory / "tiny.yaml"
        self.path = latent_folder(directory / "clips", shapes, fps=(24.0, 8.0), **changes)
        self.file.write_text(TINY.replace("path: null", f"path: {self.path}"))

    def task(self, *overrides, rank=0, size=1):
        task = create_task(cfg.load(self.arguments(*overrides)), one_of(size, rank))
        task.open()
        with torch.device("meta"):
            return task, task.objective(task.model())


@pytest.fixture
def run(trainer, tmp_path):
    return Folder(trainer, tmp_path)


@pytest.fixture(scope="module")
def reference(trainer, tmp_path_factory):
    """A run of one process."""
    return Folder(trainer, tmp_path_factory.mktemp("reference"))("name=reference")


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


# --------------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.long
def test_a_mesh_trains_alike(run, whole_world, reference):
    sent = whole_world(run_here, 4, run.arguments("name=mesh", "parallel={dp_shard: 2, sp: 2}", "train.batch=2"))
    mesh = run.directory / "runs/mesh"
    alike(reference, mesh)

    # what is recorded is planned for the bucket of the step, and no rank sends more but for scalars and masks
    recorded = [comm for (comm,) in metrics(mesh, "comm_bytes").values()]
    assert len(set(recorded)) > 1
    for step, planned in enumerate(recorded):
        busiest = max(sum(steps[step][:2]) for steps in sent)
        assert 0.5 * planned <= busiest <= 1.1 * planned + 800, (step, planned, busiest)


def _gradients(mesh, arguments, steps):
    """The largest difference of losses and gradients between these ranks and one process, and the largest gradient."""
    import dsp

    config = cfg.load(arguments)
    results = []
    for step in steps:
        found = []
        for over in (None, mesh):
            task = create_task(config, over)
            task.open()
            torch.manual_seed(1)
            objective = task.objective(task.model())
            for p in objective.parameters():  # nothing starts as nothing
                torch.nn.init.normal_(p, std=0.1)
            if over:
                dsp.parallelize(objective, mesh, gather_output=False)
            loss = dsp.mean(*objective(**task.batch(objective, step, 0, 0, 1)))
            loss.backward()
            found.append([loss.detach(), *(p.grad for p in objective.parameters())])
        for gradient in found[1]:
            torch.distributed.all_reduce(gradient.div_(mesh.size()))
        worst = max((a - b).abs().max().item() for a, b in zip(*found))
        results.append((task.bucket(step, 1), worst, max(g.abs().max().item() for g in found[0])))
    return results


@pytest.mark.slow
def test_gradients_are_those_of_one_process(run, whole_world):
    steps = [next(s for s in range(99) if run.task()[0].bucket(s, 1) == bucket) for bucket in range(3)]
    for rank in whole_world(_gradients, 2, run.arguments(), steps):
        assert [bucket for bucket, *_ in rank] == [0, 1, 2]
        for _, worst, largest in rank:
            assert worst < 2e-5 * largest
            assert largest > 0.1


# ------------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.slow
def test_a_stop_then_resume_is_bitwise(run, trainer, reference, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(trainer, patch, 6)
        half = run("name=half", expect=trainer.STOPPED)
    assert list(metrics(half, "loss")) == [1, 2, 3, 4, 5, 6]
    run("name=half", "resume=true")
    assert "resumed from step 6" in capsys.readouterr().out
    alike(reference, half, tolerance=0)
    assert all(speed > 0 for (speed,) in metrics(half, "tokens_per_s").values())


@pytest.mark.slow
def test_latents_of_another_autoencoder_are_not_gone_on_with(run, capsys):
    run("train.steps=2", "eval.every=0")
    latent_folder(run.directory / "other", vae_hash="9")
    run("resume=true", "eval.every=0", f"data.path={run.directory / 'other'}", expect=2)
    error = capsys.readouterr().err
    assert "latents.vae_hash: 1 in the checkpoint, 9 here" in error
    assert "text_hash" not in error


# -------------------------------------------------------------------------------------------------------------- batches


def test_parts_of_a_batch_are_those_of_the_whole(run):
    whole, objective = run.task("train.accumulation=2", "train.batch=2")
    for step in range(5):
        batch = whole.batch(objective, step, 1, 0, 1)
        frames = whole.buckets[whole.bucket(step, 1)].frames
        pieces = [run.task("train.accumulation=2", "train.batch=2", rank=r, size=3)[0] for r in range(3)]
        pieces = [piece.batch(objective, step, 1, 0, 1) for piece in pieces]
        for name, value in batch.items():
            parts = [piece[name] for piece in pieces]
            if isinstance(parts[0], DTensor):
                (cut,) = {p.placements[0].dim for p in parts}
                assert torch.equal(torch.cat([p.to_local() for p in parts], cut), value)
                assert {p.shape for p in parts} == {value.shape}
            else:
                assert all(torch.equal(p, value) for p in parts)
        assert isinstance(pieces[0]["x"], DTensor) == isinstance(pieces[0]["x_mask"], DTensor) == (frames > 1)
        # two micro-batches of one group are one micro-batch of two groups
        other = run.task("train.batch=2")[0].batch(objective, step, 0, 1, 2)
        assert all(torch.equal(local(other[name]), local(batch[name])) for name in batch)


def test_conditions_of_a_batch(run):
    """Latents, captions and sizes are those of the clips; the empty caption at the share asked for; weights even."""
    task, objective = run.task("objective.label_dropout=0.5")
    entries = {e.name: e for clips in task.train.clips for e in clips}
    by_latent = {task.train.latent(e).sum().item(): e for e in entries.values()}
    empty, dropped, samples = task.train.caption(None), 0, 0
    for step in range(30):
        batch = {name: local(value) for name, value in task.batch(objective, step, 0, 0, 1).items()}
        example = task.example(objective, task.bucket(step, 1))
        assert {k: (v.shape, v.dtype) for k, v in example.items()} == {k: (v.shape, v.dtype) for k, v in batch.items()}
        for i, x in enumerate(batch["x"]):
            entry = by_latent[x.sum().item()]
            assert (batch["height"][i], batch["width"][i]) == (entry.height, entry.width)
            assert batch["fps"][i] == (entry.fps if entry.frames > 1 else 120)
            said = batch["context"][i], batch["context_mask"][i]
            none = torch.equal(said[0], empty[0])
            assert all(torch.equal(a, b) for a, b in zip(said, empty if none else task.train.caption(entry)))
            dropped, samples = dropped + none, samples + 1
        judged = (batch["weight"][:, None] * batch["x_mask"]).sum(1)
        torch.testing.assert_close(judged, torch.full_like(judged, x.shape[1]))
    assert 0.35 < dropped / samples < 0.65


def test_noise_stays_a_clip_s_own_when_others_are_added(run, tmp_path):
    task, objective = run.task()
    step = next(s for s in range(99) if task.bucket(s, 1) == 0)
    batch = task.batch(objective, step, 0, 0, 1)
    _, epochs, indices = task._step(step, 1)
    ids = [hash_seed("clip", task.train.clips[0][i].name, e) for e, i in zip(epochs, indices)]
    again = task._random(objective, step, ids, task.buckets[0].shape)
    assert torch.equal(again["noise"], batch["noise"])
    assert len({n.sum().item() for n in batch["noise"]}) == len(ids)


def test_balance_and_tokens(run):
    task, objective = run.task("data.balance=true", "train.batch=3")
    assert task.batches == [3, 5, 22]
    assert [task.batch_tokens(b) for b in range(3)] == [3 * 5 * 2 * 3, 5 * 3 * 3 * 2, 22 * 4]
    for step in range(12):
        bucket = task.bucket(step, 1)
        batch = task.batch(objective, step, 0, 0, 1)
        assert local(batch["x"]).shape == (task.batches[bucket], 2, *task.buckets[bucket].shape)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_validation_is_the_same_for_any_number_of_groups(run, groups):
    """All groups take as many turns, each of one bucket, and every sample is judged once at every level."""
    task, objective = run.task("eval.clips=12", "train.batch=2")
    turns = [list(task.validation_batches(objective, group, groups)) for group in range(groups)]
    judged = []
    for together in zip(*turns, strict=True):
        assert len({tuple(local(inputs["x"]).shape[2:]) for *_, inputs in together}) == 1
        assert len({level for level, *_ in together}) == 1
        for level, count, inputs in together:
            noise = local(inputs["noise"])
            assert 0 <= count <= len(noise)
            judged += [(level, n.sum().item()) for n in noise[:count]]
    assert len(judged) == len(set(judged)) == 2 * 12
    alone = [
        (level, n.sum().item())
        for level, count, inputs in task.validation_batches(objective, 0, 1)
        for n in local(inputs["noise"])[:count]
    ]
    assert sorted(judged) == sorted(alone)


# -------------------------------------------------------------------------------------------------- models and mistakes


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "{name: stdit, size: test, overrides: {version: v1, in_channels: 2, caption_channels: 6}}",
        "{name: stdit, size: test, overrides: {version: v2, in_channels: 2, caption_channels: 6}}",
        "{name: latte, size: test, overrides: {conditioning: text, in_channels: 2, caption_channels: 6}}",
        "{name: transformer2d, size: test, overrides: {block: stdit, in_channels: 2, caption_channels: 6}}",
        "{name: latte, size: test, overrides: {in_channels: 2}}",
    ],
    ids=["stdit-1", "stdit-2", "latte-text", "transformer2d", "latte"],
)
def test_other_models(run, capsys, model):
    plain = ["objective.first_frame=0", "objective.random_frames=0"] if "v2" not in model else []
    directory = run(f"model={model}", "train.steps=3", "eval.every=3", "objective.name=iddpm", *plain)
    assert len(metrics(directory, "loss")) == 3
    noted = "takes no text: the captions are not used" in capsys.readouterr().out
    assert noted == (model.startswith("{name: latte") and "text" not in model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.overrides.in_channels=4"], "the data has 2 channels and the model takes 4: set model.overrides.in_ch"),
        (["model.overrides.caption_channels=8"], f"captions have {TEXT} channels and the model takes 8"),
        (["data.buckets=[9x9x9]"], "fits the bucket 9x9x9; there are 5x4x6, 3x6x4, 1x4x4"),
        (["data.buckets=[9x9]"], "data.buckets: invalid bucket '9x9'"),
        (["data.path=/nowhere"], "error: data: no such folder: /nowhere"),
        (["data.path=null"], "data.path is not set"),
        (["data.path=null", "dry_run=true"], "data.buckets has to say what the clips are"),
        (["data.validation=1"], "between 0 and 1"),
        (["objective.first_frame=0.7", "objective.random_frames=0.7"], "together at most 1"),
        (["model.overrides.version=v1"], "need a model that accepts given, noise-free frames"),
        (["sample.every=1"], "sample.every=1: there is not there: no such folder"),
        (["model={name: latte, size: test, overrides: {conditioning: class, in_channels: 2}}"], "has no classes"),
        (
            ["model={name: wan, size: test, overrides: {in_channels: 5, condition_channels: 3, caption_channels: 6}}"],
            "model wan begins clips with an image: 3 of its channels are a mask and the image's latent, which",
        ),
    ],
)
def test_errors_are_one_message(run, capsys, arguments, message):
    run(*arguments, "objective.name=rectified_flow", expect=2)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "Traceback" not in error
    assert not (run.directory / "runs").exists()


def test_a_shard_that_goes_in_the_middle_is_named(run):
    task, objective = run.task()
    for shard in run.path.glob("shard-*"):
        shard.unlink()
    with pytest.raises(UserError, match="gone or damaged since the start"):
        user_error(task.batch, objective, 0, 0, 0, 1)


@pytest.mark.slow
def test_a_dry_run_needs_no_folder(run, capsys):
    options = ["data.path=null", "data.buckets=[2x4x4,8x16x16@24]", "parallel.sp=2", "dry_run=true"]
    run(*options)
    out = capsys.readouterr().out
    assert "batch 4 x 8 frames of 16 x 16 latent cells, the largest of 2 shapes" in out
    assert re.search(r"^sequence parallelism sends \d", out, re.M)
    run("dry_run=true")
    assert "batch 4 x 5 frames of 4 x 6 latent cells, the largest of 3 shapes" in capsys.readouterr().out
    assert not (run.directory / "runs").exists()
