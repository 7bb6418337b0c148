"""infer.py on the checkpoints of a tiny run."""

import argparse
import shutil
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops

from tests.support.inference import frames, infer, infer_here, tiny_run  # noqa: F401
from tests.support.runs import Runs
from tests.support.slow import slow
from zoo.training import UserError
from zoo.training.outputs.options import checked
from zoo.training.trained import log_written, progress


@pytest.mark.parametrize(
    "options", [["--label", 3, 7, "--frames", 7, "--steps", 3], slow(["--clips", 3, "--height", 8])]
)
def test_samples_do_not_depend_on_the_ranks(run, tmp_path, whole_world, options, capsys):
    assert infer(run, *options, "--out", tmp_path / "one") == 0
    assert "weights of step 4" in capsys.readouterr().out
    whole_world(infer_here, 4, (run / "checkpoints", *options, "--out", tmp_path / "four"))
    one, four = (list(frames(tmp_path / name / "seed-0.gif")) for name in ("one", "four"))
    assert len(one) == len(four) == (7 if "--frames" in options else 5)
    if "--label" in options:  # two clips of 6 x 6 pixels, each enlarged 11 times, over its class
        assert one[0].size == (66 + 2 + 66, 66 + 14)
    for a, b in zip(one, four):
        assert max(high for _, high in [ImageChops.difference(a, b).getextrema()]) <= 2


def test_many_files_are_counted_and_few_are_named(tmp_path, capsys):
    files = [tmp_path / f"{i}.csv" for i in range(13)]
    log_written(files[:2], {files[1]})
    log_written(files, {files[1]})
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {files[0]}", f"replaced {files[1]}", f"wrote 13 files to {tmp_path}, of which 1 replaced one",
    ]  # fmt: skip


def test_progress_is_told_now_and_then_where_there_is_no_terminal(capsys, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    clock = iter([0.0, 5.0, 30.0, 40.0, 60.0])
    on_step = progress(lambda: next(clock))
    for step in range(1, 5):
        on_step(step, 4)
    assert capsys.readouterr().err.splitlines() == ["2/4  0:30 left ", "4/4  0:00 left "]


def test_a_checkpoint_of_choice(run, tmp_path, capsys):
    assert infer(run / "checkpoints/step-00000002", "--clips", 1, "--out", tmp_path, "--seed", 5) == 0
    assert "weights of step 2" in capsys.readouterr().out
    assert (tmp_path / "seed-5.gif").is_file()


def test_impossible_requests_end_in_one_error(run, tmp_path, capsys):
    def error(*arguments):
        assert infer(*arguments, "--out", tmp_path) == 2
        return capsys.readouterr().err

    assert "--label 12: the classes are 0 to 9" in error(run, "--label", 12)
    assert "--prompt: the data of this run (digits) has no captions; --label names classes" in error(
        run, "--prompt", "seven"
    )
    assert "--first-frame: this model was trained without clean frames" in error(run, "--first-frame", "a.png")
    assert "--frames 0: must be at least 1" in error(run, "--frames", 0)
    assert "no such folder: " in error(tmp_path / "nothing")
    assert "holds no config.yaml" in error(tmp_path)
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "model_1.pt").touch()
    assert "model_1.pt may run code and is not read" in error(pickled)
    assert "is not a checkpoint; beside it there are: step-00000002, step-00000004" in error(
        run / "checkpoints/step-00000003"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(run / "config.yaml", empty)
    assert "holds no checkpoint" in error(empty)
    assert infer() == 2
    assert "usage: infer.py RUN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--nonsense"], 2, "error: unrecognized arguments: --nonsense; infer.py RUN --help explains every option"),
        (["--frames", "many"], 2, "error: argument --frames: invalid int value: 'many'; infer.py RUN --help"),
        (["--help"], 0, "usage: infer.py RUN"),
        (None, 2, "usage: infer.py RUN [options]"),
    ],
    ids=["unknown", "value", "help", "nothing"],
)
def test_the_first_rank_speaks_of_the_command_line_and_all_end_alike(run, monkeypatch, capsys, arguments, code, said):
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        try:
            ended = infer() if arguments is None else infer(run, *arguments)
        except SystemExit as stop:  # argparse's own end of --help
            ended = stop.code
        out, err = capsys.readouterr()
        assert ended == code
        assert (out + err).startswith(said) if rank == 0 else out + err == ""


@pytest.mark.slow
def test_clips_of_pixels_go_on_from_a_frame_and_are_written_as_mp4(trainer, tmp_path, monkeypatch, capsys):
    """Digits on grey pixels: a colour picture is made grey, and the frame held is the one that comes out."""
    runs = Runs(trainer, tmp_path)
    stdit = "model: {name: stdit, size: test, overrides: {version: v3, in_channels: 1, caption_channels: 26}}"
    runs.file.write_text("\n".join([stdit, *runs.file.read_text().splitlines()[2:]]))
    run = runs("sample.every=0", "train.steps=1", "objective.first_frame=0.5")
    Image.new("RGB", (30, 20), (0, 255, 255)).save(tmp_path / "cyan.png")
    asked = [run, "--label", 3, 7, "--first-frame", tmp_path / "cyan.png", "--steps", 2, "--out", tmp_path / "out"]
    assert infer(*asked, "--format", "mp4,gif") == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["seed-0-0.mp4", "seed-0-1.mp4", "seed-0.gif"]
    first, second, *_ = frames(tmp_path / "out/seed-0.gif")
    first, second = (frame.crop((0, 0, first.width, first.height - 14)) for frame in (first, second))  # without titles
    assert first.getextrema()[1] == first.getpixel((5, 5)) == round(255 * 2 / 3)
    assert second.getpixel((5, 5)) != first.getpixel((5, 5))
    capsys.readouterr()

    monkeypatch.setitem(sys.modules, "av", None)
    assert infer(run, "--label", 3, "--format", "mp4", "--out", tmp_path / "none") == 2
    assert "error: writing MP4 needs PyAV: pip install -e '.[video]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"guidance": float("nan")}, "--guidance nan: must be a finite number"),
        ({"fps": float("inf")}, "--fps inf: must be a finite number"),
        ({"clips": 10**9}, "--clips 1000000000: expected 0 to 1,048,576"),
        ({"clips": -1}, "--clips -1"),
        ({"label": [3, 2**70]}, "--label 1180591620717411303424"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**64}, "--seed 18446744073709551616"),
        ({"prompt": ["a\x1b[2J"]}, r"--prompt 'a.x1b.2J': expected printable"),
        ({"out": Path("a\nb\0")}, "--out"),
        ({"clips": 10**6, "frames": 10**6, "height": 64}, "1,000,000 clips of 1,000,000 x 64 x 8 pixels are"),
    ],
)
def test_options_that_cannot_be(given, said):
    with pytest.raises(UserError, match=said):
        checked(argparse.Namespace(**given), (4, 8, 8))
    assert (
        checked(argparse.Namespace(clips=3, seed=7, prompt=["ein Boot\nund See"], guidance=None), (4, 8, 8)).clips == 3
    )
