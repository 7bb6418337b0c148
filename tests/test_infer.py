"""infer.py on the checkpoints of a tiny run."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from test_train import Runs, trainer  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]


def infer(*arguments):
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("infer").main([str(a) for a in arguments])


def infer_here(mesh, arguments):
    assert infer(*arguments) == 0


@pytest.fixture(scope="module")
def run(trainer, tmp_path_factory):  # noqa: F811
    return Runs(trainer, tmp_path_factory.mktemp("infer"))("sample.every=0")


def frames(path):
    with Image.open(path) as gif:
        for i in range(gif.n_frames):
            gif.seek(i)
            yield gif.convert("L")


@pytest.mark.parametrize("options", [["--label", 3, 7, "--frames", 7, "--steps", 3], ["--clips", 3, "--height", 8]])
def test_samples_do_not_depend_on_the_ranks(run, tmp_path, fresh_ranks, options, capsys):
    assert infer(run, *options, "--out", tmp_path / "one") == 0
    assert "weights of step 4" in capsys.readouterr().out
    fresh_ranks(infer_here, 4, (run / "checkpoints", *options, "--out", tmp_path / "four"))
    one, four = (list(frames(tmp_path / name / "seed-0.gif")) for name in ("one", "four"))
    assert len(one) == len(four) == (7 if "--frames" in options else 5)
    if "--label" in options:  # two clips of 6 x 6 pixels, each enlarged 11 times, side by side
        assert one[0].size == (66 + 2 + 66, 66)
    for a, b in zip(one, four):
        assert max(high for _, high in [ImageChops.difference(a, b).getextrema()]) <= 2


def test_a_checkpoint_of_choice(run, tmp_path, capsys):
    assert infer(run / "checkpoints/step-00000002", "--clips", 1, "--out", tmp_path, "--seed", 5) == 0
    assert "weights of step 2" in capsys.readouterr().out
    assert (tmp_path / "seed-5.gif").is_file()


def test_what_cannot_be_done_is_said(run, tmp_path, capsys):
    def error(*arguments):
        assert infer(*arguments, "--out", tmp_path) == 2
        return capsys.readouterr().err

    assert "--label 12: the classes are 0 to 9" in error(run, "--label", 12)
    assert "--frames 0: must be at least 1" in error(run, "--frames", 0)
    assert "holds no config.yaml" in error(tmp_path / "nothing")
    assert "is not a checkpoint; beside it there are: step-00000002, step-00000004" in error(
        run / "checkpoints/step-00000003"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "config.yaml", empty)
    assert "holds no checkpoint" in error(empty)
    assert infer() == 2
    assert "usage: infer.py RUN" in capsys.readouterr().out
