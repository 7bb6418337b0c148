"""Captions that a run draws at every sampling: `sample.prompts`."""

import pytest
import torch
from PIL import Image

from tests.support.clips import gif
from tests.support.runs import Runs
from zoo.training import config as cfg
from zoo.training.task_lookup import create_show, create_task
from zoo.video import encode
from zoo.video.tiny_encoders import save_pipeline

CONFIG = """
model:
  name: wan
  size: test
  overrides: {{hidden: 72, heads: 6, mlp: 96, caption_channels: 64}}
data: {{name: latent_folder, path: {data}, validation: 0.3}}
train: {{steps: 2, batch: 2}}
eval: {{every: 0, clips: 2, levels: 1}}
sample: {{every: 1, clips: 3, steps: 1, guidance: 2, prompts: ["a red boat", "snow, at night"]}}
checkpoint: {{every: 0}}
profile: {{every: 0}}
wandb: {{mode: disabled}}
"""
IMAGE = "model.overrides={hidden: 72, heads: 6, mlp: 96, caption_channels: 64, in_channels: 12, condition_channels: 8"


@pytest.fixture(scope="module")
def runs(trainer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    save_pipeline(folder / "models", "wan-i2v")
    for i in range(3):
        gif(folder / f"clips/{i}.gif", 5, 32, 48)
        (folder / f"clips/{i}.txt").write_text(f"clip {i}")
    models = [part for kind in ("vae", "text", "image") for part in (f"--{kind}", str(folder / "models"))]
    made = [str(folder / "clips"), "--out", str(folder / "latents"), "--bucket", "5x32x48", *models]
    assert encode.main(made) == 0
    return Runs(trainer, folder, CONFIG.format(data=folder / "latents"))


def test_the_captions_are_drawn_from_the_same_noise_each_time(runs):
    """Each in a clip of its own, without real clips above, whatever number of clips is configured."""
    run = runs("optim.lr=0")
    shown = []
    for step in (1, 2):
        with Image.open(run / f"samples/step-0000000{step}.gif") as movie:
            assert movie.n_frames == 5
            shown.append(movie.convert("RGB").tobytes())
            width, height = movie.size
    assert shown[0] == shown[1]
    assert width == 2 * (2 * 48) + 2  # two, enlarged twice
    assert height < 2 * (2 * 32 + 1)  # one clip high, and its caption
    task = create_task(cfg.load([str(run / "config.yaml")]))
    task.open()
    task.model()
    show = create_show(task)
    show.ready()
    clips, _, _ = show.real(show.count)
    assert clips.titles == ["a red boat", "snow, at night"]
    expected = show.texts(["snow, at night"], None, "--text", "cpu")
    for name, rows in expected.items():
        assert torch.equal(clips.conditions[name][1], rows[0])
        assert not torch.equal(clips.conditions[name][0], rows[0]) or name == "context_mask"
    empty = task.validation.caption(None)
    assert torch.equal(clips.uncond["context"][1], empty[0])


def test_an_image_model_begins_them_with_the_first_frames_of_held_out_clips(runs):
    run = runs("name=image", IMAGE + ", image_channels: 32}")
    assert (run / "samples/step-00000002.gif").is_file()


def test_prompts_that_cannot_be_drawn_are_refused_at_the_start(runs, capsys):
    for options, said in (
        (["sample.metrics=true"], "compares samples with real clips, which sample.prompts has none of"),
        (["sample.text=/nowhere"], "/nowhere is not there: no such folder"),
        ([f"sample.prompts=[{'a long story ' * 40}]"], "tokens, and 300 are allowed"),
    ):
        runs("name=refused", *options, expect=2)
        assert said in capsys.readouterr().err
    silent = CONFIG.format(data=runs.directory / "latents").replace("model:\n  name: wan", "model:\n  name: latte")
    silent = silent.replace("{hidden: 72, heads: 6, mlp: 96, caption_channels: 64}", "{in_channels: 4}")
    Runs(runs.trainer, runs.directory, silent, "silent.yaml")("name=refused", "sample.guidance=1", expect=2)
    assert "sample.prompts: the model latte takes no text" in capsys.readouterr().err
    assert not (runs.directory / "runs/refused").exists()
