"""The lines of a run that is about to disappoint, and those that would be misread."""

import re

import pytest

from tests.support.runs import Runs, run_here


@pytest.fixture
def run(trainer, tmp_path):
    return Runs(trainer, tmp_path)


def test_a_patch_of_more_numbers_than_the_model_has_channels(run, capsys):
    short = ["train.steps=1", "eval.every=0", "sample.every=0", "checkpoint.every=0"]
    large = "model.overrides={in_channels: 1, num_classes: 10, patch: [1, 6, 6], hidden: 24, heads: 2}"
    hint = "a patch has 36 numbers and the model 24 channels"
    for name, options in (("velocity", []), ("clean", ["objective.prediction=clean"])):
        run(f"name={name}", *short, large, *options)
        out = capsys.readouterr().out
        assert (hint in out) == (name == "velocity")
        assert ("objective.prediction=clean learns such clips" in out) == (name == "velocity")
    run("name=large", *short, large, "dry_run=true")
    assert hint in capsys.readouterr().out
    run("name=small", *short)
    assert "hint" not in capsys.readouterr().out


def test_two_numbers_of_memory_say_which_is_which(run, capsys):
    run("train.steps=1", "eval.every=0", "sample.every=0", "checkpoint.every=0")
    out = capsys.readouterr().out
    estimated = re.search(r"^memory  ([\d.]+) MiB a rank, estimated: (.*)$", out, re.M)
    measured = re.search(r"^step 1/1 .* memory +([\d.]+) ([MG])iB", out, re.M)
    assert float(estimated[1]) * 10 < float(measured[1]) * (1 if measured[2] == "M" else 1024)
    assert estimated[2].endswith("alone; the lines of steps measure the whole process, with Python and torch")


def test_a_run_resumed_on_other_ranks_says_so(run, whole_world, capsys):
    steps = ["eval.every=0", "sample.every=0", "checkpoint.every=2"]
    whole_world(run_here, 2, run.arguments("train.steps=2", *steps))
    run("train.steps=3", "resume=true", *steps)
    assert "resumed from step 2 of 2 ranks, now 1\n" in capsys.readouterr().out
    run("train.steps=4", "resume=true", *steps)
    assert "resumed from step 3\n" in capsys.readouterr().out
