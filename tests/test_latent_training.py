"""Training on folders of latents: one curve on every mesh, bitwise resuming, gradients, and what a user gets wrong."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
from latent_folders import CHANNELS, LENGTH, SHAPES, TEXT, latent_folder
from test_train import Runs, _run_here, metrics, stop_at, trainer  # noqa: F401 (`trainer` is a fixture)

from zoo.data.latents import Latents
from zoo.training import config as cfg
from zoo.training.task import Part

ROOT = Path(__file__).parents[1]
TINY = """
model: {name: stdit, size: test, overrides: {in_channels: 2, caption_channels: 6, patch: [1, 2, 2]}}
data: {name: latent_folder, path: null, validation: 0.3}
objective: {label_dropout: 0.3, first_frame: 0.3, random_frames: 0.4}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 8, batch: 4, ema: 0.5}
eval: {every: 4, clips: 8, levels: 2}
log: {every: 1}
checkpoint: {every: 4}
wandb: {mode: disabled}
"""


class Folder(Runs):
    def __init__(self, trainer, directory, shapes=SHAPES, **changes):  # noqa: F811
        self.trainer, self.directory, self.file = trainer, directory, directory / "tiny.yaml"
        self.path = latent_folder(directory / "clips", shapes, fps=(24.0, 8.0), **changes)
        self.file.write_text(TINY.replace("path: null", f"path: {self.path}"))

    def task(self, *overrides, rank=0, size=1):
        task = cfg.create_task(cfg.load(self.arguments(*overrides)), rank, size)
        task.open()
        with torch.device("meta"):
            return task, task.objective(task.model())


@pytest.fixture
def run(trainer, tmp_path):  # noqa: F811
    return Folder(trainer, tmp_path)


@pytest.fixture(scope="module")
def reference(trainer, tmp_path_factory):  # noqa: F811
    """A run of one process."""
    return Folder(trainer, tmp_path_factory.mktemp("reference"))("name=reference")


def local(value):
    return value.local if isinstance(value, Part) else value


def same(a, b, tolerance):
    for keys in (("loss", "grad_norm", "lr"), ("val_loss",)):
        expected, curve = metrics(a, *keys), metrics(b, *keys)
        assert list(curve) == list(expected)
        for step, values in expected.items():
            assert curve[step] == pytest.approx(values, rel=tolerance), (step, keys)


# --------------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("sp", [2, 3])
def test_ranks_that_share_a_clip(run, reference, sp):
    processes = run.bare(sp, f"name=sp{sp}", "train.checkpoint_activations=true")
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * sp, errors
    same(reference, run.directory / f"runs/sp{sp}", tolerance=1e-5)


@pytest.mark.parametrize(
    "options",
    [["parallel={dp_shard: 2, sp: 2}", "train.batch=2"], ["parallel={sp: 4}", "train.batch=2", "train.accumulation=2"]],
    ids=["dp2-sp2", "accumulated"],
)
def test_every_mesh_trains_alike(run, fresh_ranks, reference, options):
    sent = fresh_ranks(_run_here, 4, run.arguments("name=mesh", *options))
    mesh = run.directory / "runs/mesh"
    same(reference, mesh, tolerance=1e-5)

    # what is recorded is planned for the bucket of the step, and no rank sends more
    recorded = [comm for (comm,) in metrics(mesh, "comm_bytes").values()]
    assert len(set(recorded)) > 1
    for step, planned in enumerate(recorded):
        busiest = max(sum(steps[step][:2]) for steps in sent)
        print(step, planned, busiest)
        assert 0.5 * planned <= busiest <= planned + 800, (step, planned, busiest)
