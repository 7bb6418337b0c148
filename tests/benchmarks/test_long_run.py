"""The long run of benchmarks/models/long_run.py, in little, and its configuration."""

import copy
import json

import pytest
import torch

from tests.support.paths import ROOT
from zoo.training import config as cfg


@pytest.fixture
def benchmark(script):
    return script("models.long_run")


@pytest.mark.long
def test_killed_resumed_and_one_curve(benchmark, tmp_path, capsys):
    little = [
        "data={frames: 5, height: 6, width: 6, digit: 5}",
        "train.steps=120",
        "eval={every: 60, clips: 2, levels: 2}",
    ]
    options = ["--ranks", "2", "--kill-at", "50", "--out", str(tmp_path / "found")]
    assert benchmark.main([*options, f"runs_dir={tmp_path}", "checkpoint.every=20", *little]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["killed_after_step"] >= 50
    assert found["resumed_from_step"] in range(20, 120, 20)
    assert found["trained_twice"] == list(range(found["resumed_from_step"] + 1, found["killed_after_step"] + 1))
    assert found["wandb_parts"] == 2
    assert list(found["val_loss"]) == ["60", "120"]
    assert found["comm_bytes"] > 0
    assert (tmp_path / "found.svg").read_text().startswith("<svg")
    assert "every step is recorded once" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        benchmark.main([f"runs_dir={tmp_path}"])
    assert "is there already" in capsys.readouterr().err


def test_two_curves_are_found_out(benchmark):
    before = [{"step": step, "loss": 1 / step, "grad_norm": 1.0, "lr": 0.1} for step in (1, 2, 3, 4)]
    after = [{**before[i], "step": i + 1} for i in range(4)] + [{"step": 4, "val_loss": 1.0}]
    assert benchmark.compare(before, after, saved=2, steps=4) == [3, 4]
    other = copy.deepcopy(after)
    other[2]["loss"] += 1e-9
    with pytest.raises(SystemExit, match=r"step 3: loss was 0\.3333"):
        benchmark.compare(before, other, saved=2, steps=4)
    with pytest.raises(SystemExit, match="the records are not one curve"):
        benchmark.compare(before, [*after, after[2]], saved=2, steps=4)


def test_the_long_configuration_is_long():
    config = cfg.load([str(ROOT / "configs/long_run.yaml")])
    task = cfg.create_task(config)
    with torch.device("meta"):
        task.model()
    assert task.tokens >= 65_536
    assert config.parallel.sp == 4
