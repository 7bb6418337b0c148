"""The classifier that judges sampled digits, and its benchmark on a run that has learnt nothing yet."""

import json

import pytest
import torch

from tests.support.runs import Runs
from zoo.data.digits import MovingDigits

SHAPE = {"frames": 5, "size": (12, 12), "digit": 9.0, "speed": (0.3, 1.0)}


@pytest.fixture
def benchmark(script):
    return script("models.digit_recognition")


def test_real_digits_are_recognised_and_noise_is_not(benchmark):
    recognise = benchmark.Recogniser(MovingDigits("train", **SHAPE), clips=2000)
    clips, labels = benchmark.real_clips(MovingDigits("validation", **SHAPE), 297)
    score = benchmark.Score.of(recognise(clips), labels)
    assert score.frames > 0.94
    assert score.clips > 0.96
    assert score.clips > score.agree >= score.every_frame > 0.75
    assert min(score.classes) > 0.85
    wrong = benchmark.Score.of(recognise(clips), (labels + 1) % 10)
    assert wrong.frames < 0.02
    assert wrong.agree == score.agree
    noise = torch.randn(100, 1, 5, 12, 12, generator=torch.Generator().manual_seed(0))
    assert benchmark.Score.of(recognise(noise), torch.arange(100) % 10).frames == pytest.approx(0.1, abs=0.05)


def test_scores_by_hand(benchmark):
    seen = torch.tensor([[3, 3, 3], [4, 4, 9], [5, 6, 6]])
    score = benchmark.Score.of(seen, torch.tensor([3, 4, 5]))
    assert (score.frames, score.clips) == (pytest.approx(6 / 9), pytest.approx(2 / 3))
    assert score.agree == score.every_frame == pytest.approx(1 / 3)
    assert score.classes[3:6] == pytest.approx([1, 2 / 3, 1 / 3])


def test_a_run_is_judged(benchmark, trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "FIT_CLIPS", 300)
    run = Runs(trainer, tmp_path)("sample.every=0", "eval.every=0", "train.steps=1")
    arguments = [str(run), "--clips", "20", "--steps", "2", "--guidance", "1.5", "--out", str(tmp_path / "found.json")]
    assert benchmark.main(arguments) == 0
    out = capsys.readouterr().out
    assert "20 clips of 5 frames, 2 steps, guidance 1.5" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["sampled"]["frames"] < 0.3  # one step has taught it nothing
    assert found["real, held out"]["frames"] > 0.5
    assert f"{found['sampled']['frames']:.1%}" in out
    with pytest.raises(SystemExit):
        benchmark.main([str(run), "--clips", "15"])
    (run / "config.yaml").unlink()
    assert benchmark.main([str(run)]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err
