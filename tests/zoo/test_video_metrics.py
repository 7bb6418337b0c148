"""Metrics of sampled clips: against loops, scipy and transformers' own path through a VideoMAE of random weights."""

import itertools
import warnings

import numpy as np
import pytest
import torch

from tests.support.refusals import refused
from tests.support.runs import Runs
from zoo.data.digits import MovingDigits
from zoo.data.shapes import COLOURS, SHAPES
from zoo.pictures import to_pixels
from zoo.training import config as cfg
from zoo.training import tracking
from zoo.training.task_lookup import create_show, create_task
from zoo.video.metrics import STATISTICS, FrameProbe, VideoFeatures, frechet_distance, statistics


def test_statistics_against_loops():
    clips = torch.randint(256, (2, 3, 4, 5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = statistics(clips)
    for clip, numbers in zip(clips.double().numpy() / 255, found.tolist()):
        frames = [clip[:, t] for t in range(4)]
        steps = [b - a for a, b in itertools.pairwise(frames)]
        expected = {
            "brightness": np.mean([f.mean() for f in frames]),
            "contrast": np.mean([f.std() for f in frames]),
            "sharpness": np.mean([
                (np.abs(f[:, 1:] - f[:, :-1]).mean() + np.abs(f[:, :, 1:] - f[:, :, :-1]).mean()) / 2 for f in frames
            ]),
            "change": np.mean([np.abs(s).mean() for s in steps]),
            "jerk": np.mean([np.abs(b - a).mean() for a, b in itertools.pairwise(steps)]),
            "persistence": np.mean([np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in itertools.pairwise(frames)]),
        }  # fmt: skip
        assert numbers == pytest.approx([expected[name] for name in STATISTICS], abs=1e-9)
    still = clips[:, :, :1].expand(-1, -1, 4, -1, -1)
    assert statistics(still)[:, 3:].tolist() == [[0, 0, pytest.approx(1)]] * 2
    assert statistics(clips[:, :, :1])[:, 3:].tolist() == [[0, 0, 1]] * 2
    assert statistics(torch.zeros_like(clips))[:, 5].tolist() == [1, 1]


def test_frechet_distance_against_scipy():
    linalg = pytest.importorskip("scipy.linalg")
    random = np.random.default_rng(0)
    real, made = random.normal(size=(50, 7)) @ random.normal(size=(7, 7)), random.normal(0.3, 2, size=(40, 7))
    a, b = np.cov(real, rowvar=False), np.cov(made, rowvar=False)
    root = linalg.sqrtm(a @ b).real
    expected = np.square(real.mean(0) - made.mean(0)).sum() + np.trace(a + b - 2 * root)
    real, made = torch.from_numpy(real), torch.from_numpy(made)
    assert frechet_distance(real, made) == pytest.approx(expected, rel=1e-8)
    assert frechet_distance(real, real) == pytest.approx(0, abs=1e-6)
    assert frechet_distance(real[:3], made[:4]) > 0  # fewer clips than features
    refused(r"of two clips at least, got \(1, 7\) and \(40, 7\)", frechet_distance, real[:1], made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A VideoMAE of random weights, as transformers saves one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = transformers.VideoMAEConfig(
            image_size=16, patch_size=8, num_frames=4, hidden_size=12, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=16, initializer_range=0.3,
        )  # fmt: skip
        path = tmp_path_factory.mktemp("videomae")
        transformers.VideoMAEForVideoClassification(config).save_pretrained(path)
    return path


def test_features_are_what_the_classifier_reads(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    clips = torch.randint(256, (3, 1, 7, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    read = VideoFeatures(folder)
    found = read(clips, batch=2)
    whole = transformers.VideoMAEForVideoClassification.from_pretrained(folder).eval()
    seen = []
    whole.classifier.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    frames = clips[:, :, [0, 2, 4, 6]].transpose(1, 2).expand(-1, -1, 3, -1, -1) / 255
    with torch.no_grad():
        whole(pixel_values=(frames - mean) / std)
    assert found.shape == (3, 12)
    torch.testing.assert_close(found, seen[0], rtol=1e-4, atol=1e-5)
    larger = clips.repeat_interleave(2, 3).repeat_interleave(2, 4)
    assert read.prepared(larger).shape == (3, 4, 3, 16, 16)  # scaled to the size it knows
    refused(r"it has no config.json", VideoFeatures, tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    refused(r"cannot be read as a VideoMAE", VideoFeatures, tmp_path)


def test_a_probe_tells_classes():
    data = MovingDigits("train", frames=3, size=(12, 12), digit=9.0)
    probe = FrameProbe(data.clip(i, 0, range(1)) for i in range(400))
    held_out = [MovingDigits("validation", frames=3, size=(12, 12), digit=9.0).clip(i, 0) for i in range(60)]
    x, labels = torch.stack([clip["x"] for clip in held_out]), [clip["label"] for clip in held_out]
    shares = probe.shares(x, labels)
    assert shares["frames recognised"] > 0.8
    assert probe.shares(x, [(label + 1) % 10 for label in labels])["frames recognised"] < 0.2


def test_clips_have_the_names_of_their_classes(tmp_path, monkeypatch):
    """As titles; and the probe finds the classes that the names stand for."""
    monkeypatch.setattr("zoo.training.outputs.video.PROBE_FRAMES", 480)
    (tmp_path / "shapes.yaml").write_text(
        "model: {name: transformer2d, size: test, overrides: {in_channels: 3, num_classes: 16}}\n"
        "data: {name: shapes, frames: 2, height: 18, width: 18, radius: [7, 8], speed: [0, 1]}\n"
    )
    task = create_task(cfg.load([str(tmp_path / "shapes.yaml")]))
    task.model()
    task.open()
    show = create_show(task)
    clips, x, _ = show.real(16)
    assert clips.titles == [f"{colour} {shape}" for shape in SHAPES for colour in COLOURS]
    real = to_pixels(x)
    assert show.measure(real, real, clips.titles)["sample frames recognised"] > 0.5
    assert show.measure(real, real, clips.titles[::-1])["sample frames recognised"] < 0.2


@pytest.mark.slow
def test_a_run_reports_video_metrics(trainer, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("zoo.training.outputs.video.PROBE_FRAMES", 60)
    options = ["sample.metrics=true", "sample.every=1", "train.steps=1", "eval.every=0", "sample.clips=4"]
    runs = Runs(trainer, tmp_path)
    directory = runs(*options, f"sample.features={folder}")
    (found,) = (record for record in tracking.read_metrics(directory / "metrics.jsonl") if "real_contrast" in record)
    for name in ("sample_persistence", "sample_frames_recognised", "frechet_distance_of_statistics"):
        assert name in found
    assert found["frechet_video_distance"] > 0
    assert "Fréchet video distance" in capsys.readouterr().out
    runs("name=other", *options, "sample.features=/nowhere", expect=2)
    assert "sample.features: /nowhere: not the folder of a VideoMAE" in capsys.readouterr().err
