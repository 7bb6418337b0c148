"""Files from outside, read at one place: special files, JSON without end, tables that lack or mistake their values."""

import ast
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zoo
from tests.support.paths import ROOT, STRUCTURES
from tests.support.refusals import refused
from zoo import files, reference
from zoo.data.latent_manifest import LatentError, Manifest, read_manifest
from zoo.data.latents import encoded
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.structure import read_structure
from zoo.training import UserError, adapter, config, init_weights, verify
from zoo.video import latte_weights, published, wan_weights
from zoo.video.clips import ClipError, captions
from zoo.video.codec import Autoencoder
from zoo.video.encoders import TextEncoder
from zoo.video.metrics import VideoFeatures
from zoo.video.pretrained import CodecError, settings_of, tokenizer


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """End what hangs in an error."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table_of_captions(path: Path) -> None:
    captions(path.parent, path, {"a.mp4": path.parent / "a.mp4"})


def shard(path: Path) -> None:
    write_manifest(path.parent)
    encoded(path.parent)


MANIFEST = Manifest(
    "AutoencoderKL", "vae", "0", 4, (1, 8, 8), False, 0.0, (1.0, 1.0, 1.0, 1.0), "T5", "text", "0", 64, 300
)


def write_manifest(folder: Path, **values: Any) -> None:
    (folder / "manifest.json").write_text(json.dumps({"format": "1", **vars(MANIFEST), **values}))


READERS: dict[str, Callable[[Path], Any]] = {
    "a.safetensors": reference.read_safetensors,
    "a.safetensors.index.json": reference.read_safetensors,
    "settings.json": settings_of,
    "a.cif": read_structure,
    "a.pdb": read_structure,
    "a.a3m": read_alignment,
    "a.sto": read_alignment,
    "a.csv": table_of_captions,
    "a.jsonl": table_of_captions,
    "shard-0.safetensors": shard,
    "manifest.json": lambda path: read_manifest(path.parent),
    ".metadata": lambda path: verify.read_metadata(path, set()),
}


@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "device"])
@pytest.mark.parametrize("name", READERS)
def test_irregular_files_are_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "there").mkdir(parents=True)
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        held = socket.socket(socket.AF_UNIX)
        held.bind(os.path.relpath(path))
        held.close()
    with within(20), pytest.raises((ValueError, OSError, verify.Damaged)) as error:
        READERS[name](path)
    assert path.name in str(error.value) or path.parent.name in str(error.value) or "No such device" in str(error.value)


# JSON


DEEP = '{"a": ' * 9000 + "1" + "}" * 9000


def export_of(folder: Path, text: str) -> None:
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(text)


def as_initial(folder: Path) -> None:
    init_weights.description(folder, "latte")


def latte_of(folder: Path) -> None:
    latte_weights.from_diffusers(folder)


JSON: dict[str, Callable[[Path], Any]] = {
    "an export": zoo.from_export,
    "initial weights": as_initial,
    "weights of a folder": reference.read_safetensors,
    "Latte of diffusers": latte_of,
    "an autoencoder": Autoencoder.load,
    "a text encoder": TextEncoder.load,
    "features of clips": VideoFeatures,
}


@pytest.mark.parametrize("reader", JSON)
@pytest.mark.parametrize("text", [DEEP, "[1]", "3", '"zoo"', "{", "null"], ids="deep list number text cut null".split())
def test_a_config_that_is_no_table_is_one_error(reader: str, text: str, tmp_path: Path) -> None:
    export_of(tmp_path, text)
    refused(r"config\.json: damaged|cannot be read as a VideoMAE", JSON[reader], tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        {"zoo": "wan"},
        {"zoo": "wan", "config": 3},
        {"zoo": ["wan"], "config": {}},
        {"zoo": "os:path", "config": {}},
        {"zoo": "wan", "config": {"name": "wan"}},
        {"zoo": "wan", "config": {"hidden": "x"}},
        {"zoo": "wan", "config": {}, "objective": 1},
        {"zoo": "transformer2d", "config": {"hidden": 12, "depth": 2, "heads": 2}},
    ],
)
def test_an_export_whose_config_lacks_or_mistakes_values(table: dict[str, Any], tmp_path: Path) -> None:
    """The last is whole, and its weights are not: no code is run that a config names, and no error is torch's own."""
    export_of(tmp_path, json.dumps(table))
    refused("config.json|takes hidden|of another model", zoo.from_export, tmp_path)


def test_settings_of_initial_weights(tmp_path: Path) -> None:
    for table, said in (
        ({"zoo": "latte"}, "has no table config"),
        ({"_class_name": "LatteTransformer3DModel"}, "of a LatteTransformer3DModel has no 'num_attention_heads'"),
        ({"_class_name": "LatteTransformer3DModel", "num_attention_heads": []}, "has no 'attention_head_dim'"),
    ):
        export_of(tmp_path, json.dumps(table))
        refused(said, init_weights.description, tmp_path, "latte")
    export_of(tmp_path, json.dumps({"objective": []}))
    options = config.defaults("digits")
    options.init.weights = str(tmp_path)
    init_weights.refuse_other_prediction(options)
    export_of(tmp_path, DEEP)
    refused("config.json: damaged: nested too deeply", init_weights.refuse_other_prediction, options, error=UserError)


LATTE_OF_DIFFUSERS = {
    "num_attention_heads": 2, "attention_head_dim": 8, "norm_type": "ada_norm_single", "attention_bias": True,
    "activation_fn": "gelu-approximate", "norm_elementwise_affine": False, "norm_eps": 1e-6, "cross_attention_dim": 16,
    "in_channels": 4, "out_channels": 8, "patch_size": 2, "num_layers": 2, "caption_channels": 8, "sample_size": 64,
}  # fmt: skip
WAN_OF_DIFFUSERS = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "num_layers": 2,
    "ffn_dim": 32, "patch_size": [1, 2, 2], "text_dim": 8, "image_dim": None, "freq_dim": 256, "eps": 1e-6,
}  # fmt: skip
OPTIONAL = ("out_channels", "image_dim", "freq_dim", "eps")


@pytest.mark.parametrize("sound", [LATTE_OF_DIFFUSERS, WAN_OF_DIFFUSERS], ids=["latte", "wan"])
@pytest.mark.parametrize("change", [None, "x", [], {}, 1.5])
def test_each_value_of_a_config_of_diffusers_may_be_absent_or_of_another_type(sound: Any, change: Any) -> None:
    """No error but ValueError, and that for each value that a Config has."""
    read = (latte_weights if sound is LATTE_OF_DIFFUSERS else wan_weights).published_settings
    read(sound)
    for key in sound:
        for table in (sound | {key: change}, {name: value for name, value in sound.items() if name != key}):
            with suppress(ValueError) if key in OPTIONAL else pytest.raises(ValueError):
                read(table)


def test_a_scheduler_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    path = tmp_path / "scheduler/scheduler_config.json"
    for changes, said in (
        ({"num_train_timesteps": 10**12}, "num_train_timesteps is 1000000000000: expected a number from 1 to "),
        ({"num_train_timesteps": "many"}, "num_train_timesteps is 'many'"),
        ({"beta_schedule": 7}, "a DDIMScheduler cannot be built of it"),
        ({"beta_start": []}, "a DDIMScheduler cannot be built of it"),
        (None, "damaged: nested too deeply"),
    ):
        path.write_text(DEEP if changes is None else json.dumps({"_class_name": "DDIMScheduler", **changes}))
        refused(said, published.scheduler, tmp_path, error=CodecError)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora_alpha": "2"}, "lora_alpha '2', where a number is expected"),
        ({"lora_alpha": [2]}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha 'nan'"),
        ([1], "no table"),
        (None, "nested too deeply"),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_settings_of_an_adapter(settings: Any, said: str, beside: bool, tmp_path: Path) -> None:
    """In the header of its file, as diffusers writes them, or in a file beside it, as peft does."""
    text = DEEP if settings is None else json.dumps(settings)
    state = {f"transformer.a.lora_{part}.weight": torch.ones(2, 2) for part in "AB"}
    save_file(state, tmp_path / adapter.FILE, None if beside else {adapter.METADATA: text})
    if beside:
        (tmp_path / "adapter_config.json").write_text(text)
        said = said.replace("no table", "a table of settings is expected")
    refused(said, adapter.read, tmp_path)


def test_an_adapter_of_no_rank(tmp_path: Path) -> None:
    state = {"transformer.a.lora_A.weight": torch.ones(0, 2), "transformer.a.lora_B.weight": torch.ones(2, 0)}
    save_file(state, tmp_path / adapter.FILE, {adapter.METADATA: '{"lora_alpha": 2}'})
    refused("a has an empty lora_A", adapter.read, tmp_path)


# Tables, tokenizers


def test_long_and_broken_tables_of_captions(tmp_path: Path) -> None:
    path, videos = tmp_path / "a.csv", {"a.mp4": tmp_path / "a.mp4"}
    path.write_text("path,notes,text\na.mp4," + "x" * 300_000 + ",a boat\n")
    assert captions(tmp_path, path, videos)[0] == {"a.mp4": "a boat"}
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"path": "a.mp4", "text": "a"}}\n{DEEP}\n')
    refused(r"a.jsonl, line 2 is not JSON: nested too deeply", captions, tmp_path, path, videos, error=ClipError)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text_length", None), ("text_length", "300"), ("text_length", 0), ("text_length", True), ("channels", 4.0),
        ("factor", [1, 8]), ("factor", 8), ("shift", None), ("shift", [None]), ("scale", float("nan")), ("vae", 3),
        ("causal", 1), ("text_hash", ["0"]),
    ],
)  # fmt: skip
def test_a_manifest_whose_values_are_of_another_type(name: str, value: Any, tmp_path: Path) -> None:
    write_manifest(tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    write_manifest(tmp_path, **{name: value})
    refused(rf"manifest.json: damaged: {name} is ", read_manifest, tmp_path, error=LatentError)


@pytest.mark.parametrize("pattern", ["(a", "^(a+)+$"])
def test_a_tokenizer_whose_expressions_fail(pattern: str, tmp_path: Path) -> None:
    """At its reading, or at a caption: tokenizers then raises what is no Exception."""
    tokenizers = pytest.importorskip("tokenizers")
    sound = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    table = json.loads(sound.to_str())
    table["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))

    def numbers() -> None:
        tokenizer([tmp_path])[0]("a" * 300 + "b")

    refused("tokenizer.json: damaged: .*(Onig|end pattern)", numbers, error=CodecError)


# One place


def test_values_have_the_annotated_type() -> None:
    several, few = tuple[float, ...], tuple[int, int]
    for value, hint in ((1, int), (1, float), ([1, 2], few), ([1.0], float | several), (None, int | None)):
        assert files.fits(value, hint)
    for value, hint in ((True, int), ("1", float), ([1], few), (["1"], several), (1.0, int), (1, bool)):
        assert not files.fits(value, hint)


def test_files_are_opened_at_one_place() -> None:
    """Files of others are opened by zoo/files.py, or their names are given to a library once they are regular."""
    found = []
    for path in sorted((ROOT / "zoo").rglob("*.py")):
        inside = path.relative_to(ROOT / "zoo")
        if inside.name in ("files.py", "make_embedded.py") or inside == Path("cli/train.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, owner = node.func.attr, ast.unparse(node.func.value)
                if name in ("read_text", "read_bytes") or (owner == "json" and name.startswith("load")):
                    found.append(f"{inside}: {ast.unparse(node)}")
    assert found == []
    assert read_structure(STRUCTURES / "1A8O.cif.gz").sequence
