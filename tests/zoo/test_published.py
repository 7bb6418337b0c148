"""Published pipelines by the models of the zoo: the clips of diffusers' own pipelines, on one process and several."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import zoo
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.slow import long, slow
from zoo.training import UserError
from zoo.video.encoders import TextEncoder
from zoo.video.stdit_weights import open_sora_names
from zoo.video.tiny_encoders import PIPELINES, save_pipeline

diffusers = pytest.importorskip("diffusers")

SIZE = {"frames": 5, "height": 32, "width": 48}
PROMPTS = ["a  boat &amp; a lake", "Snow"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("pipelines")
    for name in PIPELINES:
        save_pipeline(home / name, name)
        randomised(home / name)
    return {name: home / name for name in PIPELINES}


def randomised(folder: Path) -> None:
    """Weights as they are initialised leave out what matters: give every parameter a say."""
    for part in ("transformer", "transformer_2"):
        if (folder / part).is_dir():
            config = json.loads((folder / part / "config.json").read_text())
            model = getattr(diffusers, config["_class_name"]).from_pretrained(folder / part)
            draw = torch.Generator().manual_seed(len(part))
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(torch.randn(p.shape, generator=draw) * (0.1 if p.ndim == 1 else p[0].numel() ** -0.5))
            model.save_pretrained(folder / part)


def picture() -> Image.Image:
    pixels = torch.randint(256, (32, 48, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def theirs(folder: Path, steps: int, guidance: float, latent: bool) -> Tensor:
    """The clips of diffusers' pipeline, each by itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = json.loads((folder / "model_index.json").read_text())
        pipe = getattr(diffusers, index["_class_name"]).from_pretrained(folder, local_files_only=True)
        pipe.set_progress_bar_config(disable=True)
        frames = "video_length" if "Latte" in index["_class_name"] else "num_frames"
        image = {"image": picture()} if "Image" in index["_class_name"] else {}
        if image:  # without the package that mends encodings it does not start
            importlib.import_module(type(pipe).__module__).ftfy = SimpleNamespace(fix_text=lambda text: text)
        made = []
        for i, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                made += pipe(
                    prompt=prompt, negative_prompt="blurred", height=32, width=48, **{frames: 5}, **image,
                    num_inference_steps=steps, guidance_scale=guidance, generator=torch.Generator().manual_seed(7 + i),
                    output_type="latent" if latent else "pt",
                ).frames  # fmt: skip
    return torch.stack([torch.as_tensor(clip) for clip in made])


def asked(folder: Path, **more: Any) -> dict[str, Any]:
    image = picture() if "i2v" in folder.name else None
    first = None if image is None else torch.from_numpy(np.array(image)).permute(2, 0, 1) / 127.5 - 1
    return {"prompt": PROMPTS, "negative_prompt": "blurred", "first_frame": first, "seed": 7, **SIZE, **more}


def sampled(folder: Path, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The latents that a pipeline draws, and its clips."""
    pipe, drawn = zoo.pipeline(folder, dtype="fp32"), []
    sample = pipe.published.sample
    pipe.published.sample = lambda *args, **kwargs: drawn.append(sample(*args, **kwargs)) or drawn[-1]
    try:
        clips = pipe.sample(*args, **options)
    finally:
        pipe.close()
    return torch.cat(drawn), clips


@pytest.mark.parametrize("guidance", [4.0, slow(1.0)])
@pytest.mark.parametrize("name", [slow(name) if name == "wan-2.2-i2v" else name for name in PIPELINES])
def test_clips_are_those_of_diffusers(folders: dict[str, Path], name: str, guidance: float) -> None:
    drawn, clips = sampled(folders[name], **asked(folders[name], steps=3, guidance=guidance))
    latents = theirs(folders[name], 3, guidance, True)
    assert latents.std() > 0.1
    torch.testing.assert_close(drawn, latents, rtol=1e-4, atol=1e-4)
    pixels = theirs(folders[name], 3, guidance, False).transpose(1, 2)
    assert clips.shape == pixels.shape == (2, 3, 5, 32, 48)
    assert (clips.float() - pixels * 255).abs().max() <= 1


def on_ranks(mesh: DeviceMesh, folder: Path, one: Tensor, branches: bool) -> None:
    pipe = zoo.pipeline(folder, dtype="fp32", branches=branches)
    clips = pipe.sample(**asked(folder, steps=3, guidance=4.0, batch=2, batched=not branches))
    assert (clips is None) == (mesh.get_rank() > 0)
    if clips is not None:
        assert (clips.int() - one.int()).abs().max() <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n", "branches"),
    [slow("wan-i2v", 3, False), long("wan-2.2", 4, True), ("latte", 2, False), long("wan-ti2v", 3, False)],
)
def test_ranks_share_each_clip(folders: dict[str, Path], whole_world: Any, name: str, n: int, branches: bool) -> None:
    pipe = zoo.pipeline(folders[name], dtype="fp32")
    one = pipe.sample(**asked(folders[name], steps=3, guidance=4.0))
    pipe.close()
    whole_world(on_ranks, n, folders[name], one, branches)


def fewer_bits(mesh: DeviceMesh, folder: Path, one: Any) -> None:
    clips = zoo.pipeline(folder, dtype="fp32", wire="fp8").sample(**asked(folder, steps=3, guidance=4.0))
    if clips is not None:
        off = (clips.int() - one.int()).abs().float()
        assert 0 < off.mean() < 8


@pytest.mark.slow
def test_activations_may_travel_in_fewer_bits(folders: dict[str, Path], whole_world: Any) -> None:
    pipe = zoo.pipeline(folders["latte"], dtype="fp32")
    one = pipe.sample(**asked(folders["latte"], steps=3, guidance=4.0))
    pipe.close()
    whole_world(fewer_bits, 2, folders["latte"], one)


# STDiT


@pytest.fixture(scope="module")
def open_sora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Open-Sora's own weights, which have an embedding that stands for no caption."""
    folder = tmp_path_factory.mktemp("opensora")
    save_pipeline(folder, "latte")
    for part in ("transformer", "scheduler"):
        shutil.rmtree(folder / part)
    (folder / "model_index.json").unlink()
    torch.manual_seed(0)
    model = zoo.create("stdit", "test", version="v3", caption_channels=64)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1 if p.ndim == 1 else p[0].numel() ** -0.5)
    state = {"y_embedder.y_embedding": torch.randn(300, 64)}
    for name, value in model.state_dict().items():
        names = open_sora_names(name, "v3")
        state |= {n: part.clone() for n, part in zip(names, value.chunk(len(names)))}
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].reshape(-1, 4, 1, 2, 2)
    (folder / "transformer").mkdir()
    save_file(state, folder / "transformer" / "model.safetensors")
    (folder / "transformer" / "config.json").write_text(json.dumps({"model_type": "STDiT3", "input_sq_size": 256}))
    return folder


def test_open_sora_is_sampled_as_it_samples(open_sora: Path) -> None:
    """Rectified flow as Open-Sora 1.2 writes it: levels from 1 to 1/steps, shifted by the size of the clip."""
    drawn, _ = sampled(
        open_sora, "a boat", frames=5, height=32, width=48, steps=4, guidance=3.0, seed=7, fps=12.0
    )  # fmt: skip
    (text,) = TextEncoder.load(open_sora).encode(["a boat"])
    state = load_file(open_sora / "transformer/model.safetensors")
    model = zoo.from_reference("stdit", state, input_sq_size=256)
    z = torch.randn(1, 4, 5, 8, 12, generator=torch.Generator().manual_seed(7))
    told = {name: torch.tensor([value]) for name, value in (("height", 32.0), ("width", 48.0), ("fps", 12.0))}
    ratio = (5 * 8 * 12 / 4096) ** 0.5
    levels = [ratio * u / (1 + (ratio - 1) * u) for u in (1, 0.75, 0.5, 0.25, 0)]
    contexts = text[None], state["y_embedder.y_embedding"][None, : len(text)]
    with torch.no_grad():
        for now, then in pairwise(levels):
            cond, free = (model(z, torch.tensor([1000 * now]), context=c, **told)[:, :4] for c in contexts)
            z = z + (now - then) * (free + 3.0 * (cond - free))
    torch.testing.assert_close(drawn, z, rtol=1e-4, atol=1e-4)


# Command line, errors


def infer(*arguments: Any) -> int:
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("infer").main([str(a) for a in arguments])


SHORT = ["--frames", 5, "--height", 32, "--width", 48, "--steps", 2]


def test_the_command_line(folders: dict[str, Path], tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    scheduler = ["--scheduler", "FlowMatchEulerDiscreteScheduler", "--shift", 5]
    assert infer(folders["wan"], "--prompt", "a boat", "snow", *SHORT, "--format", "mp4,gif", *scheduler) == 0
    told = capsys.readouterr().out
    names = ["seed-0-0.mp4", "seed-0-1.mp4", "seed-0.gif"]
    assert sorted(path.name for path in (tmp_path / "samples/wan").iterdir()) == names
    assert all(f"wrote samples/wan/{name}" in told for name in names)
    with pytest.raises(SystemExit):
        infer(folders["latte"], "--help")
    assert "of a clip, in pixels (512)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("wan", ["--first-frame", "a.png"], "--first-frame: this Wan draws only from text"),
        ("wan-i2v", [], "this Wan needs a first image: pass --first-frame FILE"),
        ("wan-i2v", ["--first-frame", "a.png"], "no such file: a.png"),
        ("wan", ["--frames", 6], "6 frames (take 5 or 9)"),
        ("wan", ["--guidance-2", 2], "--guidance-2 is for the second of two transformers"),
        ("wan", ["--scheduler", "os"], "os is not a scheduler of diffusers"),
        ("latte", ["--shift", 3], "--shift: DDIMScheduler has no such setting"),
        ("wan", ["--prompt", "x" * 600], "a caption of 601 tokens, and 512 are allowed"),
        ("wan", ["--format", "avi"], "unknown format 'avi'; expected one of gif, mp4"),
        ("wan", ["--steps", 0], "--steps 0: must be at least 1"),
    ],
)
def test_invalid_sampling_options_are_refused(
    folders: dict[str, Path], name: str, given: list[Any], said: str, capsys: Any, tmp_path: Path
) -> None:
    asked = ["--prompt", "a boat"] * ("--prompt" not in given)
    assert infer(folders[name], *asked, *SHORT, "--out", tmp_path / "out", *given) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_variant_of_the_weights_is_read_in_the_parts_that_have_it(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["wan"], tmp_path / "wan")
    stem = folder / "transformer/diffusion_pytorch_model"
    plain, half = stem.with_suffix(".safetensors"), stem.with_suffix(".fp16.safetensors")
    save_file({name: value + 1 for name, value in load_file(plain).items()}, half)
    weights = []
    for variant in (None, "fp16"):
        pipe = zoo.pipeline(folder, dtype="fp32", variant=variant)
        weights.append([*pipe.published.models[0].parameters()])
        pipe.close()
    for a, b in zip(*weights):
        torch.testing.assert_close(b, a + 1)
    with pytest.raises(UserError, match=r"has no diffusion_pytorch_model.safetensors.index.bf16.json or "):
        zoo.pipeline(folder, variant="bf16")


def test_damaged_pipelines_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    def damaged(change: Any, said: str) -> None:
        shutil.rmtree(tmp_path / "there", ignore_errors=True)
        shutil.copytree(folders["wan"], tmp_path / "there")
        change(tmp_path / "there")
        refused(said, zoo.pipeline, tmp_path / "there", error=UserError)

    config = Path("transformer/config.json")
    named = json.loads((folders["wan"] / config).read_text())
    for changes, said in (
        ({"_class_name": "FluxTransformer2DModel"}, "a FluxTransformer2DModel; known here: Wan"),
        ({"qk_norm": None}, "qk_norm=None in the diffusers config: Wan has 'rms_norm_across_heads'"),
        ({"num_layers": 3}, "these weights are of another model; missing: blocks.2."),
        ({"num_attention_heads": None}, "config.json of a WanTransformer3DModel has a value of another type"),
        ({"num_layers": "2"}, "has a value of another type: depth is '2'"),
    ):
        damaged(lambda home, changes=changes: (home / config).write_text(json.dumps(named | changes)), said)
    damaged(lambda home: (home / config).write_text("{"), "config.json: damaged")
    damaged(lambda home: shutil.rmtree(home / "vae"), "is not the folder of a model")
    damaged(lambda home: shutil.rmtree(home / "scheduler"), "scheduler_config.json is not there")
    damaged(lambda home: shutil.copytree(home / "transformer", home / "transformer_2"), "no boundary_ratio")
    damaged(lambda home: (home / "transformer/diffusion_pytorch_model.safetensors").write_bytes(b"x"), "not readable")
    refused("is not the folder of a pipeline", zoo.pipeline, tmp_path / "nothing", error=UserError)
    with pytest.raises(UserError, match="dtype 'int8': expected one of fp32, bf16, fp16"):
        zoo.pipeline(folders["wan"], dtype="int8")
    with pytest.raises(UserError, match="wire: expected one of same, bf16, fp8, int8"):
        zoo.pipeline(folders["wan"], wire="fp4")
