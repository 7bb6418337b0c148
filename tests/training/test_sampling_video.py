"""Sampling from models on latents: tiny encoders, a tiny run, infer.py on it, alone and shared by ranks."""

import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

import dsp
from tests.support.clips import played
from tests.support.inference import frames, infer
from tests.support.runs import Runs
from tests.support.slow import long, slow
from zoo.data.latent_manifest import Manifest, write_manifest
from zoo.data.latents import Entry, Writer
from zoo.pictures import title, to_pixels
from zoo.training import config as cfg
from zoo.training.outputs.clips import Pixels, decode
from zoo.training.task import share
from zoo.training.task_lookup import create_infer, create_show, create_task
from zoo.video.codec import Autoencoder
from zoo.video.encoders import TextEncoder
from zoo.video.tiny_encoders import save_autoencoder, save_text_encoder

CAPTIONS = ["a red boat", "rain", "two dogs run", "snow", "a lamp", "night"]
LENGTH = 24  # tokens a caption has at most


def encoders(folder, vae="AutoencoderKL", seed=0):
    save_autoencoder(folder / "vae", vae, seed=seed)
    save_text_encoder(folder, channels=16, seed=seed)
    return folder


def pixels(i, t=5, h=16, w=24):
    random = torch.Generator().manual_seed(i)
    return torch.rand(3, 1, 1, 1, generator=random) * 2 - 1 + 0.2 * torch.rand(3, t, h, w, generator=random)


def encoded_folder(folder, models):
    """Six clips of 5 frames of 16 x 24 pixels and one of 3 frames of 16 x 16, of the encoders at `models`."""
    vae, text = Autoencoder.load(models / "vae"), TextEncoder.load(models, length=LENGTH)
    facts = Manifest(
        vae.name, str(models / "vae"), vae.fingerprint, vae.channels, vae.factor, vae.causal, vae.shift, vae.scale,
        text.name, str(models), text.fingerprint, text.channels, LENGTH,
    )  # fmt: skip
    write_manifest(folder, facts, *text.encode([""]))
    clips = [(pixels(i).clamp(-1, 1), caption) for i, caption in enumerate(CAPTIONS)]
    if not vae.causal:
        clips += [(pixels(9, 3, 16, 16).clamp(-1, 1), "small")]
    with Writer(folder) as writer:
        for i, (x, caption) in enumerate(clips):
            latent, (embedding,) = vae.encode(x), text.encode([caption])
            sizes, shape = x.shape[1:], tuple(latent.shape)
            writer.add(Entry(f"{i}.mp4", caption, *sizes, 12.0, shape, len(embedding)), latent, embedding)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return encoders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def data(models, tmp_path_factory):
    return encoded_folder(tmp_path_factory.mktemp("latents") / "data", models)


CONFIG = """
model: {{name: stdit, size: test, overrides: {{version: v3, in_channels: 4, caption_channels: 16}}}}
data: {{name: latent_folder, path: {data}, validation: 0.3}}
objective: {{first_frame: 0.4, random_frames: 0.2}}
optim: {{lr: 1e-2, warmup: 1}}
train: {{steps: 2, batch: 2, ema: 0.5}}
eval: {{every: 0, clips: 2, levels: 1}}
sample: {{every: 2, clips: 3, steps: 2, guidance: 2}}
checkpoint: {{every: 0}}
wandb: {{mode: disabled}}
"""


@pytest.fixture(scope="module")
def runs(trainer, data, tmp_path_factory):
    return Runs(trainer, tmp_path_factory.mktemp("runs"), CONFIG.format(data=data))


@pytest.fixture(scope="module")
def run(runs):
    return runs()


def refused(capsys, *arguments):
    """The one line that says why."""
    assert infer(*arguments) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    return err


# -------------------------------------------------------------------------------------------------------- in training


@pytest.mark.slow
def test_a_run_shows_samples_under_real_clips(run, data):
    """Clips of the largest shape, decoded, with their captions."""
    with Image.open(run / "samples/step-00000002.gif") as gif:
        assert gif.n_frames == 5
        assert gif.info["duration"] == round(1000 / 12 / 10) * 10
        gif.seek(2)
        shown = torch.from_numpy(np.asarray(gif.convert("RGB")).astype(int))
    high, wide = 2 * 16 + 1, 24  # of a pair, enlarged three times
    full = 3 * (3 * wide) + 2 * 2
    top, captions = title(["real clips, and under each a sample"], full).shape[1], title(CAPTIONS, 3 * wide).shape[1]
    assert shown.shape[:2] == (top + 3 * high + captions, full)
    shown = shown[top:]
    task = create_task(cfg.load([str(run / "config.yaml")]))
    task.model()
    task.open()
    show = create_show(task)
    clips, x, fps = show.real(3)
    assert (clips.size, fps) == ((5, 4, 6), 12)
    assert set(clips.titles) <= set(CAPTIONS)
    vae = show.codec(None, torch.device("cpu"))
    assert vae is show.codec(None, torch.device("cpu"))
    for i in range(3):
        real = to_pixels(vae.decode(x[i]))[:, 2].permute(1, 2, 0).int()
        left = i * (3 * wide + 2)
        there = shown[: 3 * 16 : 3, left : left + 3 * wide : 3]
        assert (there - real).abs().float().mean() < 12  # 256 colours
        sampled = shown[3 * 17 : 3 * high : 3, left : left + 3 * wide : 3]
        assert (sampled - real).abs().float().mean() > 12
    again, x_again, _ = show.real(3)
    assert torch.equal(x, x_again)
    assert again.titles == clips.titles


@pytest.mark.slow
def test_a_run_that_could_not_decode_does_not_begin(runs, models, tmp_path, capsys, monkeypatch):
    runs("name=a", "sample.vae=/nowhere", expect=2)
    assert re.search(
        r"error: sample.every=2: /nowhere is not there: no such folder .*; sample.vae names its folder, and "
        r"sample.every=0 samples nothing\n$",
        capsys.readouterr().err,
    )
    other = encoders(tmp_path, seed=1)
    runs("name=b", f"sample.vae={other}", expect=2)
    assert "is not the AutoencoderKL that encoded the training data" in capsys.readouterr().err
    shutil.copytree(models / "vae", tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    run = runs("name=c", "sample.vae=moved", "train.steps=1", "sample.every=1")
    monkeypatch.chdir("/")  # where infer.py finds it, too
    (models / "vae").rename(models / "gone")
    try:
        assert infer(run, "--steps", 1, "--out", tmp_path / "made") == 0
    finally:
        (models / "gone").rename(models / "vae")


# --------------------------------------------------------------------------------------------------------- in infer.py


def test_prompts_make_clips(run, tmp_path, capsys):
    asked = ["--prompt", "a red boat", "snow", "--guidance", 3, "--steps", 3, "--format", "gif,mp4", "--seed", 4]
    assert infer(run, *asked, "--out", tmp_path) == 0
    out = capsys.readouterr().out
    assert "averaged weights of step 2" in out
    assert re.search(
        r"took [\d.]+ s on 1 rank: loading [\d.]+ s, text [\d.]+ s, sampling [\d.]+ s \([\d.e-]+ s a step\), "
        r"decoding [\d.]+ s, writing [\d.]+ s; 2 x 30 tokens\n",
        out,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed-4-0.mp4", "seed-4-1.mp4", "seed-4.gif"]
    one, two = (played(tmp_path / f"seed-4-{i}.mp4") for i in range(2))
    for movie, rate, codec, _ in (one, two):
        assert (movie.shape, rate, codec) == ((5, 64, 96, 3), 12, "h264")
    assert (one[0].int() - two[0].int()).abs().float().mean() > 20


def drawn(mesh, config, arguments):
    """The clips that one rank of the mesh draws and decodes: latents, and pixels on the first."""
    from argparse import ArgumentParser

    task = create_task(cfg.load([config]))
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():
        for parameter in model.parameters():  # the last layer begins as nothing
            parameter.add_(0.05 * torch.randn(parameter.shape))
    dsp.parallelize(model, mesh)
    parser = ArgumentParser()
    infer = create_infer(task)
    infer.arguments(parser)
    options = parser.parse_args(arguments)
    codec = Autoencoder.load(task.manifest.vae_path)
    clips, _ = infer.requested_clips(options, codec, torch.device("cpu"))
    clips.first = torch.linspace(-1, 1, 4 * 4 * 6).view(4, 1, 4, 6)
    made = infer.show.draw(model, clips, 7, 3, options.guidance, torch.device("cpu"), lambda *_: None)
    return made, decode(made, codec, mesh.get_group())


@pytest.mark.parametrize("n", [long(2), slow(3), long(4)])
def test_the_same_seed_gives_the_same_clips_on_any_number_of_ranks(run, ranks, n):
    """In float32: latents to 1e-5 of unit variance, pixels to one level of 256. Uneven: 5 frames."""
    arguments = ["--clips", "3", "--guidance", "2"]
    ((alone, pixels),) = ranks(drawn, 1, str(run / "config.yaml"), arguments)
    assert alone.std() > 0.3
    results = ranks(drawn, n, str(run / "config.yaml"), arguments)
    for made, _ in results:
        assert torch.equal(made, results[0][0])  # every rank has the same bits
    torch.testing.assert_close(results[0][0], alone, atol=1e-5, rtol=1e-5)
    assert (results[0][1].int() - pixels.int()).abs().max() <= 1
    assert all(theirs is None for _, theirs in results[1:])


def test_last_weights_are_other_weights(run, tmp_path, capsys):
    asked = ["--prompt", "rain", "--steps", 2]
    assert infer(run, *asked, "--out", tmp_path / "averaged") == 0
    assert infer(run, *asked, "--weights", "last", "--out", tmp_path / "last") == 0
    out = capsys.readouterr().out
    assert "averaged weights of step 2" in out
    assert "\nweights of step 2" in out
    one, two = (list(frames(tmp_path / name / "seed-0.gif")) for name in ("averaged", "last"))
    assert any(a.tobytes() != b.tobytes() for a, b in zip(one, two))


def test_a_negative_prompt_takes_the_place_of_the_empty_caption(run, tmp_path):
    def made(*options):
        assert infer(run, "--prompt", "rain", "--guidance", 4, "--steps", 2, *options, "--out", tmp_path) == 0
        return [frame.tobytes() for frame in frames(tmp_path / "seed-0.gif")]

    plain = made()
    assert made("--negative-prompt", "") == plain
    assert made("--negative-prompt", "snow") != plain


def test_guidance_is_the_formula_by_hand(run, data):
    """One Euler step: x + u, u = empty + g (told - empty), with the embeddings as training reads them."""
    from argparse import Namespace

    task = create_task(cfg.load([str(run / "config.yaml")]))
    torch.manual_seed(0)
    model = task.model()
    torch.nn.init.normal_(model.final.linear.weight, std=0.1)
    task.open()
    entry = next(entry for entry in task.train.clips[0] if entry.caption == task.train.clips[0][0].caption)
    codec = Autoencoder.load(task.manifest.vae_path)
    options = Namespace(prompt=[entry.caption], negative_prompt=None, clips=1, guidance=3.0, text=None)
    infer = create_infer(task)
    clips, fps = infer.requested_clips(options, codec, torch.device("cpu"))
    assert (clips.size, fps) == ((5, 4, 6), 12)
    told, none = (task.conditions_of_clips(task.train, [entry], [drop]) for drop in (False, True))
    for ours, theirs in ((clips.conditions, told), (clips.uncond, none)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, msg=name)
    made = infer.show.draw(model, clips, 3, 1, 3.0, torch.device("cpu"), lambda *_: None)
    from zoo.video.noise import seeded_noise

    noise = seeded_noise(3, 0, [0], range(5), (4, 4, 6))
    with torch.no_grad():
        one, free = (model(noise, torch.tensor([1000.0]), **given)[:, :4] for given in (told, none))
    torch.testing.assert_close(made, noise + free + 3 * (one - free), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_clips_go_on_from_a_frame(run, models, tmp_path, capsys):
    """The frame given is held: its latent comes back, so the first frame is its reconstruction."""
    picture = to_pixels(pixels(1)[:, 0]).permute(1, 2, 0)
    Image.fromarray(picture.numpy()).save(tmp_path / "first.png")
    asked = ["--prompt", "rain", "--steps", 2, "--out", tmp_path, "--format", "mp4"]
    assert infer(run, *asked, "--first-frame", tmp_path / "first.png") == 0
    movie, *_ = played(tmp_path / "seed-0.mp4")
    vae = Autoencoder.load(models / "vae")
    x = picture.permute(2, 0, 1)[:, None].float() / 127.5 - 1
    again = to_pixels(vae.decode(vae.encode(x)))[:, 0].permute(1, 2, 0)
    again = again.repeat_interleave(4, 0).repeat_interleave(4, 1)
    error = (movie.int() - again.int()).abs().float().mean((1, 2, 3))
    assert error[0] < 8
    assert error[1:].min() > 2 * error[0]

    other = [*asked[:-2], "--format", "gif,mp4", "--seed", 1]
    assert infer(run, *other, "--first-frame", tmp_path / "seed-0.mp4", "--hold", 2) == 0  # a video
    onward, *_ = played(tmp_path / "seed-1.mp4")
    assert onward.shape == movie.shape
    capsys.readouterr()
    for options, message in (
        (
            ("--first-frame", tmp_path / "seed-0.mp4"),
            "5 of 5 frames are given, which leaves none to make; use --hold",
        ),
        (("--first-frame", tmp_path / "first.png", "--hold", 2), "has 1 frames, fewer than --hold 2"),
        (("--first-frame", tmp_path / "nothing.png"), "no such file"),
        (("--first-frame", run / "config.yaml"), "cannot be read as an image or video"),
    ):
        assert message in refused(capsys, run, *asked, *options)


def test_sizes_are_in_pixels(run, tmp_path):
    sizes = ["--frames", 3, "--height", 20, "--width", 32, "--fps", 6, "--format", "mp4", "--clips", 1, "--steps", 1]
    assert infer(run, *sizes, "--out", tmp_path) == 0
    movie, rate, *_ = played(tmp_path / "seed-0.mp4")
    assert movie.shape == (3, 80, 128, 3)  # enlarged four times
    assert rate == 6


@pytest.mark.slow
def test_impossible_clips_end_in_one_error(runs, run, models, tmp_path, capsys):
    prompt = (run, "--prompt", "rain", "--out", tmp_path)
    assert "cannot encode 18 rows (take 16 or 20), 9 columns (take 8 or 12)" in refused(
        capsys, *prompt, "--height", 18, "--width", 9
    )
    assert f"a caption of 41 tokens, and {LENGTH} are allowed: 'xxxxx" in refused(capsys, run, "--prompt", "x" * 40)
    other = encoders(tmp_path / "other", seed=1)
    for option, kind in (("--vae", "AutoencoderKL"), ("--text", "T5EncoderModel")):
        message = refused(capsys, *prompt, option, other)
        assert re.search(rf"the {kind} at .* is not the {kind} that encoded the training data \(then at", message)
        assert "is not there: no such folder" in refused(capsys, *prompt, option, tmp_path / "none")
    assert "--negative-prompt is what guidance leads away from" in refused(
        capsys, *prompt, "--negative-prompt", "rain", "--guidance", 1
    )
    assert "--format avi: unknown format 'avi'; expected one of gif, mp4" in refused(capsys, *prompt, "--format", "avi")
    assert "--steps 0: must be at least 1" in refused(capsys, *prompt, "--steps", 0)
    assert "--fps 0.0: must be above 0" in refused(capsys, *prompt, "--fps", 0)
    assert not list(tmp_path.glob("seed*"))
    plain = runs("name=plain", "objective={first_frame: 0, random_frames: 0}", "train.steps=1", "sample.every=0")
    assert "--first-frame: this model was trained without clean frames" in refused(
        capsys, plain, "--prompt", "rain", "--first-frame", tmp_path / "a.png"
    )


# ------------------------------------------------------------------------------------------------------ shared decoding


class Counting:
    """A codec that notes what it decodes: three channels, twice the size."""

    def __init__(self, causal):
        self.causal, self.asked = causal, []

    def pixel_shape(self, t, h, w):
        return (1 + 2 * (t - 1) if self.causal else t), 2 * h, 2 * w

    def decode(self, latent, tile=None):
        self.asked.append(latent.shape[1])
        frames, height, width = self.pixel_shape(*latent.shape[1:])
        x = latent.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return x[:, torch.arange(frames) // (2 if self.causal else 1)].expand(3, frames, height, width)


def decode_here(mesh, causal, n, t):
    x = torch.linspace(-1, 1, n * t * 2 * 3).view(n, 1, t, 2, 3)
    codec = Counting(causal)
    return decode(x, codec, mesh.get_group()), codec.asked


@pytest.mark.parametrize(("causal", "n", "t"), [(False, 2, 5), (False, 1, 2), (True, 3, 3), (True, 1, 4)])
def test_ranks_share_the_decoding_and_only_the_first_has_the_pixels(ranks, causal, n, t):
    ((whole, _),) = ranks(decode_here, 1, causal, n, t)
    assert whole.shape == (n, 3, 1 + 2 * (t - 1) if causal else t, 4, 6)
    for size in (2, 3, 4):
        results = ranks(decode_here, size, causal, n, t)
        assert torch.equal(results[0][0], whole)
        assert all(pixels is None for pixels, _ in results[1:])
        for rank, (_, asked) in enumerate(results):
            mine = len(share(n if causal else n * t, rank, size))
            assert asked == ([t] * mine if causal else [mine] * (mine > 0))


def test_pixels_are_their_own_codec():
    x = torch.rand(2, 1, 3, 4, 5) * 2 - 1
    assert torch.equal(decode(x, Pixels(1)), to_pixels(x))
    assert Pixels(1).encode(torch.rand(3, 2, 4, 5)).shape == (1, 2, 4, 5)


@pytest.mark.slow
def test_an_autoencoder_of_video(trainer, tmp_path_factory, capsys):
    """Four frames a latent frame, the first its own; clips that do not fit are refused, clips begin with a frame."""
    home = tmp_path_factory.mktemp("wan")
    models = encoders(home, "AutoencoderKLWan")
    data = encoded_folder(home / "data", models)
    run = Runs(trainer, home, CONFIG.format(data=data))("train.steps=1", "sample.clips=2")
    assert infer(run, "--prompt", "rain", "--frames", 9, "--steps", 1, "--format", "mp4", "--out", home / "out") == 0
    movie, *_ = played(home / "out/seed-0.mp4")
    assert len(movie) == 9
    capsys.readouterr()
    assert "cannot encode 6 frames (take 5 or 9)" in refused(capsys, run, "--prompt", "rain", "--frames", 6)
    begin = ("--first-frame", home / "out/seed-0.mp4", "--frames", 9, "--steps", 1, "--out", home / "out")
    assert "cannot encode 3 frames (take 1 or 5)" in refused(capsys, run, *begin, "--hold", 3)
    assert infer(run, *begin, "--hold", 5, "--seed", 2) == 0
    assert len(list(frames(home / "out/seed-2.gif"))) == 9
