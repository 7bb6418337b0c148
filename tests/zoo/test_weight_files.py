"""The weights of a folder that holds several: those that diffusers and transformers load, and no older ones."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.refusals import refused
from zoo.reference import read_safetensors
from zoo.video import tiny_encoders
from zoo.video.codec import Autoencoder, CodecError

LIBRARIES = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}


def model(library, value):
    """A tiny model of a library, each element of its weights `value`."""
    package = pytest.importorskip(library)
    if library == "diffusers":
        module = package.AutoencoderKL(**tiny_encoders.AUTOENCODERS["AutoencoderKL"])
    else:
        sizes = {"vocab_size": 32, "d_model": 16, "d_ff": 512, "d_kv": 4, "num_heads": 4, "num_layers": 2}
        module = package.T5EncoderModel(package.T5Config(**sizes))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


def theirs(library, folder, variant):
    """The weights by name, as the library loads the folder."""
    kind, options = type(model(library, 0)), {"low_cpu_mem_usage": False} if library == "diffusers" else {}
    return dict(kind.from_pretrained(folder, use_safetensors=True, variant=variant, **options).named_parameters())


ONE, FEW, MANY = {}, {"max_shard_size": "60KB"}, {"max_shard_size": "6KB"}
HALF = {"variant": "fp16"}
CASES = {
    "older file beside new shards": ([(1, ONE), (2, FEW)], None),
    "new file beside older shards": ([(1, FEW), (2, ONE)], None),
    "older shards of another count": ([(1, MANY), (2, FEW)], None),
    "a variant beside": ([(1, HALF), (2, ONE)], None),
    "a variant in shards beside": ([(1, HALF | FEW), (2, ONE)], None),
    "the variant": ([(1, ONE), (2, HALF)], "fp16"),
    "the variant in shards": ([(1, FEW), (2, HALF | MANY)], "fp16"),
    "the variant as an older file and in shards": ([(1, HALF), (2, HALF | FEW)], "fp16"),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", CASES)
def test_a_folder_s_weights_are_those_that_its_library_loads(library, case, tmp_path, caplog):
    saves, variant = CASES[case]
    folder = tmp_path / "all"
    for value, options in saves:
        model(library, value).save_pretrained(tmp_path / "one", **options)
        shutil.copytree(tmp_path / "one", folder, dirs_exist_ok=True)
        shutil.rmtree(tmp_path / "one")
    reference, state = theirs(library, folder, variant), read_safetensors(folder, variant)
    assert len({float(value.detach().flatten()[0]) for value in reference.values()}) == 1
    assert state.keys() <= reference.keys()
    for name, value in state.items():
        assert torch.equal(value, reference[name].to(value.dtype)), name
    assert "not read: " in caplog.text


def shards(folder, *keys, stem="model", **values):
    """Write a tensor a shard, and their index."""
    files = {key: f"{stem}-{i + 1:05d}-of-{len(keys):05d}.safetensors" for i, key in enumerate(keys)}
    for key, name in files.items():
        save_file({key: values.get(key, torch.ones(2))}, folder / name)
    index = folder / f"{stem}.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    return index


def test_the_configuration_says_whose_names_count(tmp_path, caplog):
    """Both layouts of an export in one folder: config.json is of the later one."""
    for value, stem in enumerate(LIBRARIES.values()):
        save_file({"a": torch.full((2,), float(value))}, tmp_path / f"{stem}.safetensors")
    for value, config in enumerate(({"_class_name": "WanTransformer3DModel"}, {"zoo": "wan", "config": {}})):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_safetensors(tmp_path)["a"].tolist() == [value, value]
    assert "weights are read from model.safetensors; not read: diffusion_pytorch_model.safetensors" in caplog.text


def test_a_lone_file_counts_by_any_name_and_an_index_by_its_path(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    save_file({"a": torch.zeros(2)}, tmp_path / "STDiT-v3.safetensors")
    assert read_safetensors(tmp_path)["a"].tolist() == [0, 0]
    assert not caplog.text
    index = shards(tmp_path, "a", "b", stem="other")
    refused(r"has no model\.safetensors or .*, only STDiT-v3.safetensors, other-0", read_safetensors, tmp_path)
    assert read_safetensors(index).keys() == {"a", "b"}
    assert read_safetensors(tmp_path / "STDiT-v3.safetensors").keys() == {"a"}


def test_weights_that_are_not_all_there_are_refused(tmp_path):
    index = shards(tmp_path, "a", "b")
    second = tmp_path / "model-00002-of-00002.safetensors"
    save_file({"c": torch.ones(2)}, second)
    refused("places b in model-00002-of-00002.safetensors, which lacks it", read_safetensors, tmp_path)
    refused("has no model.fp16.safetensors or ", read_safetensors, tmp_path, "fp16")
    second.unlink()
    refused("names model-00002-of-00002.safetensors, which is not in this folder", read_safetensors, tmp_path)
    for text in ("[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"a": ' * 90_000):
        index.write_text(text)
        refused("index.json: damaged", read_safetensors, tmp_path)
    index.unlink()
    refused("only model-00001-of-00002.safetensors: ", read_safetensors, tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").rename(tmp_path / "model.fp16.safetensors")
    refused("only model.fp16.safetensors: ", read_safetensors, tmp_path)
    assert read_safetensors(tmp_path, "fp16").keys() == {"a"}


def test_the_fingerprint_of_an_encoder_is_of_the_weights_that_it_has(tmp_path):
    """An older file beside the shards that diffusers loads: it changes nothing, and the shards change the digest."""
    folder, prints = tmp_path / "vae", []
    for value in (1, 2):
        model("diffusers", value).save_pretrained(folder, **FEW)
        shutil.copytree(folder, tmp_path / "old", dirs_exist_ok=True) if value == 1 else None
        model("diffusers", 0).save_pretrained(tmp_path / "one")
        shutil.copy(tmp_path / "one/diffusion_pytorch_model.safetensors", folder)
        vae = Autoencoder.load(folder)
        assert {float(p.detach().flatten()[0]) for p in vae.decoding.parameters()} == {value}
        prints.append(vae.fingerprint)
    assert prints[0] != prints[1]
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    assert Autoencoder.load(folder).fingerprint == prints[1]
    model("diffusers", 3).save_pretrained(folder, variant="fp16")
    vae = Autoencoder.load(folder, variant="fp16")
    assert {float(p.detach().flatten()[0]) for p in vae.decoding.parameters()} == {3.0}
    assert Autoencoder.load(tmp_path / "old", variant="fp16").fingerprint == prints[0]  # which has no variant
    Path(folder / "diffusion_pytorch_model.safetensors.index.json").write_text("{}")
    refused("index.json: damaged", Autoencoder.load, folder, error=CodecError)
