"""Several folders as one data set, in given shares: `data.mix`."""

from collections import Counter

import pytest
import torch

from tests.support.clips import gif
from tests.support.latent_folders import latent_folder
from tests.support.refusals import refused
from tests.support.runs import Runs, alike, metrics, one_of, run_here
from zoo.data.latent_folder import LatentFolder
from zoo.data.latent_manifest import LatentError
from zoo.data.mix import Mix, dealt, shares_of
from zoo.training import config as cfg
from zoo.training.task_lookup import create_task

LATENTS = """
model: {name: stdit, size: test, overrides: {in_channels: 2, caption_channels: 6}}
data: {name: latent_folder, mix: MIX, validation: 0.2}
optim: {lr: 1e-3, warmup: 2}
train: {steps: 6, batch: 2}
eval: {every: 6, clips: 4, levels: 2}
log: {every: 1}
checkpoint: {every: 0}
profile: {every: 0}
wandb: {mode: disabled}
"""
PIXELS = """
model: {name: transformer2d, size: test, overrides: {in_channels: 3}}
data: {name: video_folder, mix: MIX, frames: 4, height: 8, width: 8, validation: 0.3}
train: {steps: 2, batch: 2}
eval: {every: 2, clips: 2, levels: 2}
sample: {every: 2, clips: 1, steps: 2}
checkpoint: {every: 0}
profile: {every: 0}
wandb: {mode: disabled}
"""


@pytest.fixture
def run(trainer, tmp_path):
    many = latent_folder(tmp_path / "many", {(5, 4, 6): 14, (3, 6, 4): 6})
    few = latent_folder(tmp_path / "few", {(5, 4, 6): 5})
    return Runs(trainer, tmp_path, LATENTS.replace("MIX", f"{{'{many}': 1, '{few}': 3}}"))


@pytest.mark.parametrize("places", [(4, 6), (1, 20), (10, 10), (25, 3)])
def test_a_set_goes_through_its_samples_at_its_own_rate(places):
    mix, counts = Mix((10, 7), places), (10, 7)
    taken = [[], []]
    for epoch in range(30):
        visited = [mix.at(index, epoch) for index in range(len(mix))]
        assert [sum(which == i for which, *_ in visited) for i in (0, 1)] == list(places)
        for which, index, own in visited:
            taken[which].append((own, index))
    for i, count in enumerate(counts):
        assert len(set(taken[i])) == len(taken[i])  # no sample twice in an epoch of its set
        whole = Counter(own for own, _ in taken[i])
        assert all(whole[own] == count for own in range(max(whole)))  # and none left out


def test_places_are_dealt_by_shares():
    assert dealt((100, 10), (0.5, 0.5), 110) == [55, 55]
    assert dealt((100, 10, 0), (3, 1, 9), 110) == [82, 28, 0]
    assert dealt((100, 1), (1.0, 1e-6), 101) == [101, 1]
    assert shares_of("a", {}) == {"a": 1.0}
    assert shares_of(None, {}) == {}
    refused("path=a and mix={'b': 1}: set one of them", shares_of, "a", {"b": 1})
    refused("the share of b is 0, and has to be above 0", shares_of, None, {"a": 1, "b": 0})


def test_samples_of_latents_come_in_their_shares(run):
    task = create_task(cfg.load(run.arguments()), one_of(1, 0))
    task.open()
    seen, clips = Counter(), Counter()
    steps = 400
    for step in range(steps):
        bucket, epochs, indices = task._step(step, 1)
        for epoch, index in zip(epochs, indices):
            entry, own = task.train.at(bucket, index, epoch)
            seen[entry.name[0]] += 1
            clips[entry.name, own] += 1
    assert 0.7 < seen["1"] / (2 * steps) < 0.8  # of the second folder, whose share is 3 of 4
    assert max(clips.values()) == 1  # no clip twice in an epoch of its folder
    parts = [
        Counter(entry.name[0] for clips in part.clips for entry in clips) for part in (task.train, task.validation)
    ]
    assert parts[0] + parts[1] == Counter({"0": 20, "1": 5})
    assert min(parts[0].values()) > 0


def test_one_folder_is_read_as_before(run):
    """The mix of one folder is that folder, clip by clip."""
    (folder, _) = [*cfg.load(run.arguments()).data.mix]
    alone, mixed = LatentFolder(folder), LatentFolder({folder: 0.3})
    for bucket, clips in enumerate(alone.clips):
        assert [mixed.at(bucket, i, 3) for i in range(len(clips))] == [(entry, 3) for entry in clips]


def test_ranks_train_alike_on_a_mix(run, whole_world):
    one = run("name=one")
    whole_world(run_here, 2, run.arguments("name=two"))
    alike(one, run.directory / "runs/two")
    assert len(metrics(one, "loss")) == 6


def test_folders_of_other_encoders_do_not_mix(run, tmp_path, capsys):
    other = latent_folder(tmp_path / "other", {(5, 4, 6): 3}, vae_hash="9")
    run(f"data.mix={{'{other}': 1}}", expect=2)
    assert f"{other} was begun with the AutoencoderTiny at there, not with the" in capsys.readouterr().err
    run(f"data.path={other}", expect=2)
    assert "set one of them" in capsys.readouterr().err
    folders = {str(tmp_path / name): 1.0 for name in ("many", "few")}
    for folder in (str(tmp_path / "many"), folders):
        first = LatentFolder(folder)
        for bucket, clips in enumerate(first.clips):
            for entry in clips:
                assert first.latent(entry).shape[1:] == first.buckets[bucket].shape
    refused("no such folder", LatentFolder, {**folders, str(tmp_path / "none"): 1.0}, error=LatentError)


def test_videos_of_several_folders(trainer, tmp_path):
    for name, count in (("a", 6), ("b", 3)):
        for i in range(count):
            gif(tmp_path / name / f"{i}.gif", 6, 16, 16)
    run = Runs(trainer, tmp_path, PIXELS.replace("MIX", f"{{'{tmp_path / 'a'}': 1, '{tmp_path / 'b'}': 1}}"))
    directory = run()
    assert (directory / "samples/step-00000002.gif").is_file()
    train, held_out = cfg.load(run.arguments()).data.datasets(0)
    chosen = Counter(train.mix.at(index, epoch)[0] for epoch in range(20) for index in range(len(train)))
    assert abs(chosen[0] - chosen[1]) <= 20
    assert len(held_out) == 3
    again = train.sets[1].clip(*train.mix.at(len(train) - 1, 4)[1:])
    assert torch.equal(train.clip(len(train) - 1, 4)["x"], again["x"])
    assert len(train.files.paths) == 9
