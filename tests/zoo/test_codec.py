"""Autoencoders and text encoders against diffusers and transformers called by hand; tiles; what cannot be loaded."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate

from tests.support.refusals import refused
from zoo.video import codec, tiny_encoders
from zoo.video.codec import Autoencoder, CodecError
from zoo.video.encoders import TextEncoder

wrong = partial(refused, error=CodecError)
CLASSES = list(tiny_encoders.AUTOENCODERS)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Every autoencoder by its name, and a pipeline's folder."""
    root = tmp_path_factory.mktemp("encoders")
    for seed, name in enumerate(CLASSES):
        tiny_encoders.save_autoencoder(root / name, name, seed=seed)
    tiny_encoders.save_autoencoder(root / "pipeline/vae")
    tiny_encoders.save_text_encoder(root / "pipeline")
    return root


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def by_hand(name, folder):
    import diffusers

    return getattr(diffusers, name).from_pretrained(folder, low_cpu_mem_usage=False).eval()


def test_all_classes_are_tried():
    assert set(CLASSES) == set(codec.AUTOENCODERS)


@pytest.mark.parametrize("name", CLASSES)
def test_an_autoencoder_is_that_of_diffusers(saved, tmp_path, name):
    """Latents as its own pipelines normalise them, and pixels."""
    folder = shutil.copytree(saved / name, tmp_path / name)
    if name == "AutoencoderKL":  # as Flux has it
        configure(folder, shift_factor=0.25, scaling_factor=0.5)
    vae, module = Autoencoder.load(folder), by_hand(name, folder)
    if name == "AutoencoderKLLTXVideo":  # these are among its weights
        module.latents_mean += torch.tensor([0.1, 0.2, 0.3, 0.4])
        module.latents_std *= torch.tensor([1.1, 1.2, 1.3, 1.4])
        module.save_pretrained(folder)
        vae = Autoencoder.load(folder)
    frames = 1 + 2 * vae.step
    x = torch.rand(3, frames, 32, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    latent = vae.encode(x)
    assert latent.shape == vae.latent_shape(frames, 32, 64)
    assert vae.pixel_shape(*latent.shape[1:]) == (frames, 32, 64)
    config, images = module.config, name == "AutoencoderKL"
    scale, shift = torch.tensor(config.get("scaling_factor") or 1), torch.tensor(config.get("shift_factor") or 0.0)
    if name in ("AutoencoderKLWan", "AutoencoderKLMochi"):
        shift, scale = torch.tensor(config["latents_mean"]), scale / torch.tensor(config["latents_std"])
    elif name == "AutoencoderKLLTXVideo":
        shift, scale = module.latents_mean, scale / module.latents_std
    shift, scale = (v.view(-1, 1, 1, 1) for v in (shift, scale))
    with torch.no_grad():
        z = module.encode(x.transpose(0, 1) if images else x[None]).latent_dist.mode()
        expected = ((z.transpose(0, 1) if images else z[0]) - shift) * scale
        z = expected / scale + shift
        pixels = module.decode(z.transpose(0, 1) if images else z[None]).sample
        pixels = pixels.transpose(0, 1) if images else pixels[0]
    torch.testing.assert_close(latent, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(vae.decode(latent), pixels.clamp(-1, 1), rtol=1e-4, atol=1e-5)
    assert torch.equal(vae.encode(x), latent)


@pytest.mark.parametrize("name", CLASSES)
def test_sizes_that_do_not_fit_name_those_that_do(saved, name):
    vae = Autoencoder.load(saved / name)
    side = vae.factor[1]
    message = f"{2 * side + 1} rows .take {2 * side} or {3 * side}., 3 columns .take {side}."
    wrong(message, vae.latent_shape, 1, 2 * side + 1, 3)
    if vae.step > 1:
        frames = 2 * vae.step
        message = f"{frames} frames .take {frames + 1 - vae.step} or {frames + 1}."
        wrong(message, vae.encode, torch.zeros(3, frames, side, side))
    wrong(r"expected frames \[3, t, h, w\]", vae.encode, torch.zeros(1, 1, side, side))
    wrong(r"expected a latent \[4, t, h, w\]", vae.decode, torch.zeros(3, 1, 1, 1))


def test_frames_that_cogvideox_cannot_give_back_are_refused(saved):
    vae = Autoencoder.load(saved / "AutoencoderKLCogVideoX")
    assert [vae.latent_shape(frames, 8, 8)[1] for frames in (1, 9, 17)] == [1, 3, 5]
    wrong(r"cannot decode 4 latent frames .take 3 or 5.", vae.decode, torch.zeros(4, 4, 1, 1))


def test_images_are_taken_a_few_at_a_time(saved, monkeypatch):
    vae = Autoencoder.load(saved / "AutoencoderKL")
    x = torch.rand(3, 5, 16, 20) * 2 - 1
    latent, steps = vae.encode(x), []
    pixels = vae.decode(latent)
    monkeypatch.setattr(codec, "PIXELS", 2 * 16 * 20)
    torch.testing.assert_close(vae.encode(x), latent)
    torch.testing.assert_close(vae.decode(latent, on_step=lambda *step: steps.append(step)), pixels)
    assert steps == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("size", [(4, 4), (11, 5), (9, 23), (16, 3)])
def test_tiles_blend_to_the_whole_where_they_agree(saved, size):
    """A map of every cell by itself comes out the same, whatever the tiles; none is larger than asked for."""
    vae, seen = Autoencoder.load(saved / "AutoencoderKL"), []

    def enlarge(z):
        seen.append(tuple(z.shape[-2:]))
        return interpolate(z, scale_factor=4)

    def note(steps, *step):
        steps.append(step)

    z = torch.randn(4, 3, *size)
    for tile in (16, 20, 32, 1000):
        steps: list[tuple[int, int]] = []
        y = vae._in_tiles(enlarge, z, False, tile, partial(note, steps))
        torch.testing.assert_close(y, interpolate(z.transpose(0, 1), scale_factor=4).transpose(0, 1))
        assert steps[-1][0] == steps[-1][1] == len(steps) == len(seen)
        assert max(max(s) for s in seen) <= tile // 4
        seen.clear()
        x = vae._in_tiles(lambda x: avg_pool2d(x, 4), y, True, tile, None)
        torch.testing.assert_close(x, z)


def test_tiles_of_an_autoencoder(saved):
    """One tile: bit for bit the whole. Several: seams are far below the picture's contrast.

    Without group norms, whose statistics are those of the tile: with random weights they alone decide the picture.
    """
    vae = Autoencoder.load(saved / "AutoencoderKL")
    for module in list(vae.module.modules()):
        for key, child in module.named_children():
            if isinstance(child, torch.nn.GroupNorm):
                setattr(module, key, torch.nn.Identity())
    z = torch.randn(4, 1, 40, 24, generator=torch.Generator().manual_seed(0)) * 0.2
    whole = vae.decode(z, tile=None)
    assert torch.equal(vae.decode(z, tile=160), whole)
    tiled = vae.decode(z, tile=80)
    assert not torch.equal(tiled, whole)
    assert (tiled - whole).std() < 0.1 * whole.std()
    x = whole.clone()
    assert (vae.encode(x, tile=80) - vae.encode(x)).std() < 0.1 * vae.encode(x).std()


# Text

CAPTIONS = ["a man rides a bicycle", "", "Übergröße, 東京 🎈", "a man rides"]


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_a_text_encoder_is_that_of_transformers(tmp_path, kind):
    """A padded batch by hand: the valid tokens are what comes out, one by one."""
    import transformers

    tiny_encoders.save_text_encoder(tmp_path, kind=kind)
    text = TextEncoder.load(tmp_path)
    module = getattr(transformers, f"{kind}EncoderModel").from_pretrained(tmp_path / "text_encoder").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    batch = tokens(CAPTIONS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = module(batch.input_ids, batch.attention_mask).last_hidden_state
    found = text.encode(CAPTIONS)
    assert (text.name, text.channels) == (f"{kind}EncoderModel", 64)
    for states, whole, mask, caption in zip(found, expected, batch.attention_mask, CAPTIONS):
        assert states.shape == (len(caption.encode()) + 1, 64)
        torch.testing.assert_close(states, whole[mask.bool()], rtol=1e-4, atol=1e-5)


def test_the_tokenizer_t5_is_published_with(tmp_path):
    """spiece.model, against transformers' own reading of it."""
    spm, transformers = pytest.importorskip("sentencepiece"), pytest.importorskip("transformers")
    tiny_encoders.save_text_encoder(tmp_path)
    shutil.rmtree(tmp_path / "tokenizer")
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(f"a man rides bicycle number {i} in the rain" for i in range(200)),
        model_prefix=str(tmp_path / "text_encoder/spiece"), vocab_size=40, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        minloglevel=2,
    )  # fmt: skip
    text = TextEncoder.load(tmp_path)
    theirs = transformers.T5Tokenizer.from_pretrained(tmp_path / "text_encoder")
    for caption in ("a man rides", "", "the  rain, again"):
        assert text.tokens(caption) == theirs(caption).input_ids


def test_a_caption_is_never_cut(saved):
    text = TextEncoder.load(saved / "pipeline", length=6)
    assert text.encode(["12345"])[0].shape == (6, 64)
    wrong("a caption of 7 tokens, and 6 are allowed: '123456'", text.encode, ["123", "123456"])


# Folders


def test_a_pipeline_s_folder_and_its_parts(saved):
    pipeline = saved / "pipeline"
    a, b = Autoencoder.load(pipeline), Autoencoder.load(pipeline / "vae")
    assert a.path == b.path == pipeline / "vae"
    assert a.fingerprint == b.fingerprint != Autoencoder.load(saved / "AutoencoderKLWan").fingerprint
    assert TextEncoder.load(pipeline).fingerprint == TextEncoder.load(pipeline / "text_encoder").fingerprint


@pytest.mark.parametrize("file", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_the_fingerprint_is_of_configuration_and_weights(saved, tmp_path, file):
    shutil.copytree(saved / "pipeline/vae", tmp_path / "vae")
    before = Autoencoder.load(tmp_path).fingerprint
    if file == "config.json":
        configure(tmp_path / "vae", scaling_factor=0.3)
    else:
        tiny_encoders.save_autoencoder(tmp_path / "vae", seed=1)
    assert Autoencoder.load(tmp_path).fingerprint != before


def test_unusable_autoencoders_are_refused(saved, tmp_path, monkeypatch):
    wrong(r"no config.json in it, nor in its vae/", Autoencoder.load, tmp_path)
    vae = shutil.copytree(saved / "AutoencoderKL", tmp_path / "vae")
    weights = vae / "diffusion_pytorch_model.safetensors"
    sound, plain = weights.read_bytes(), json.loads((vae / "config.json").read_text())
    for changes, message in (
        ({"_class_name": "UNet2DModel"}, "unknown autoencoder UNet2DModel; known are AutoencoderKL, "),
        ({"latent_channels": 8}, "AutoencoderKL cannot be loaded"),
        ({"latents_mean": [1.0, 2.0]}, "must have 4 values"),
        ({"layers_per_block": 2}, "weights of AutoencoderKL are not in its files"),
    ):
        configure(vae, **changes)
        wrong(message, Autoencoder.load, vae)
        (vae / "config.json").write_text(json.dumps(plain))
    weights.write_bytes(sound[: len(sound) // 2])
    wrong("AutoencoderKL cannot be loaded", Autoencoder.load, vae)
    weights.rename(vae / "diffusion_pytorch_model.bin")
    wrong("only safetensors are read", Autoencoder.load, vae)
    (vae / f"{weights.name}.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')
    wrong(r"names ../other.safetensors, which is not in this folder", Autoencoder.load, vae)
    (vae / "config.json").write_text("{")
    wrong(r"config.json: damaged", Autoencoder.load, vae)
    ltx = shutil.copytree(saved / "AutoencoderKLLTXVideo", tmp_path / "ltx")
    configure(ltx, timestep_conditioning=True)
    wrong("decodes with noise and a time step", Autoencoder.load, ltx)
    monkeypatch.setitem(sys.modules, "diffusers", None)
    wrong(r"needs diffusers: pip install -e '.\[video\]'", Autoencoder.load, saved / "AutoencoderKL")


def test_unusable_text_encoders_are_refused(saved, tmp_path):
    folder = shutil.copytree(saved / "pipeline", tmp_path / "pipeline")
    configure(folder / "text_encoder", model_type="clip_text_model")
    wrong("of type 'clip_text_model'; known here: t5, umt5", TextEncoder.load, folder)
    configure(folder / "text_encoder", model_type="t5")
    tokens = folder / "tokenizer/tokenizer.json"
    found = json.loads(tokens.read_text())
    found["model"]["vocab"] |= {f"more {i}": 300 + i for i in range(200)}
    tokens.write_text(json.dumps(found))
    wrong("this is not its tokenizer", TextEncoder.load, folder)
    tokens.write_text("{")
    wrong(r"tokenizer.json: damaged", TextEncoder.load, folder)
    tokens.unlink()
    wrong(r"neither tokenizer.json nor spiece.model", TextEncoder.load, folder)


def test_no_code_of_a_folder_is_run(saved, tmp_path):
    """Configurations that name code beside them, as remote code does: it stays unread."""
    folder = shutil.copytree(saved / "pipeline", tmp_path / "pipeline")
    bomb = "raise SystemExit('run')"
    for part, auto in (("vae", {"AutoModel": "bomb.Bomb"}), ("text_encoder", {"AutoModel": "bomb.Bomb"})):
        (folder / part / "bomb.py").write_text(bomb)
        configure(folder / part, auto_map=auto)
    settings = folder / "tokenizer/tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "Bomb", "auto_map": {"AutoTokenizer": ["bomb.Bomb", None]}}))
    (folder / "tokenizer/bomb.py").write_text(bomb)
    Autoencoder.load(folder)
    assert len(TextEncoder.load(folder).encode(["a"])) == 1
