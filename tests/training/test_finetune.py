"""Weights from elsewhere and to elsewhere, adapters, and what is held out."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

import zoo
from tests.support.clips import gif
from tests.support.latent_folders import latent_folder
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.runs import TINY, Runs, metrics, run_here
from zoo.data.latent_folder import LatentFolder, video_of
from zoo.training import UserError, export, init_weights
from zoo.training import config as cfg
from zoo.training.lora import plain_name
from zoo.training.task_lookup import create_task
from zoo.video import hunyuan_weights, latte_weights, tiny_encoders
from zoo.video.sampling import euler
from zoo.video.stdit_weights import open_sora_names

SHORT = ["sample.every=0", "eval.every=0", "train.steps=2"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_no_video_is_on_both_sides(tmp_path):
    folder = LatentFolder(latent_folder(tmp_path / "clips"))
    count = iter(range(100))
    folder.clips = [[replace(e, name=f"film{next(count) % 5}.mp4#{e.name}") for e in clips] for clips in folder.clips]
    whole = {e.name for clips in folder.clips for e in clips}
    for share in (0.01, 0.3, 0.7):
        sides = [{e.name: video_of(e) for clips in part.clips for e in clips} for part in folder.split(share)]
        assert sides[0].keys() | sides[1].keys() == whole
        if sides[0] != sides[1]:
            assert not set(sides[0].values()) & set(sides[1].values())
    train, held_out = folder.split(0.3)
    assert all(train.clips)
    assert 0 < len(held_out) < len(train)
    folder.clips = [[replace(e, name=f"film.mp4#{e.name.replace('#', '-')}") for e in clips] for clips in folder.clips]
    train, held_out = folder.split(0.3)  # of one film nothing can be held out
    assert train.clips == held_out.clips


@pytest.mark.slow
def test_a_run_to_files_and_from_them(run, trainer, tmp_path, capsys):
    first = run("name=first", *SHORT, "train.ema=0.5")
    assert export.main([str(first)]) == 0
    out = first / "export"
    assert f"wrote {out / 'model.safetensors'}" in capsys.readouterr().out
    averaged, last = export.weights_of(first), export.weights_of(first, averaged=False)
    assert not same(averaged.state_dict(), last.state_dict())
    told = json.loads((out / "config.json").read_text())
    assert (told["zoo"], told["config"]["num_classes"]) == ("transformer2d", 10)
    saved = (first / "config.yaml").read_text()
    other = saved.replace("name: digits", "name: absent:Data").replace("task: null", "task: absent.module")
    (first / "config.yaml").write_text(other)
    assert "absent:Data" in other
    assert same(export.weights_of(first).state_dict(), averaged.state_dict())  # no code of the user's is needed
    (first / "config.yaml").write_text(saved)
    task = create_task(cfg.load(run.arguments(f"init.weights={out}")))
    task.open()
    assert same(init_weights.source(task).state_dict(), averaged.state_dict())
    second = run("name=second", *SHORT, f"init.weights={out}", "optim.lr=0")
    assert same(export.weights_of(second).state_dict(), averaged.state_dict())

    for wrong, said in (
        ([f"init.weights={first}"], f"is a run: python -m zoo.training.export {first}"),
        ([f"init.weights={tmp_path / 'none'}"], "no such file or folder (nothing is downloaded)"),
        (
            [f"init.weights={out}", "model.overrides.hidden=24"],
            "of a model with hidden=48 (configured: 24). Write model: "
            "{name: transformer2d, size: test, overrides: {in_channels: 1, num_classes: 10, hidden: 48}}",
        ),
        ([f"init.weights={out}", "model.overrides.in_channels=3"], "of a model with in_channels=1 (configured: 3)"),
        ([f"init.weights={tmp_path / 'noise.safetensors'}"], "not readable as safetensors"),
    ):
        (tmp_path / "noise.safetensors").write_bytes(b"noise")
        run("name=wrong", *SHORT, *wrong, expect=2)
        err = capsys.readouterr().err
        assert said in err
        assert err.startswith("error: ")
    assert export.main([str(first), "--layout", "diffusers"]) == 2
    assert "diffusers has no model for Transformer2D" in capsys.readouterr().err


@pytest.mark.slow
def test_an_export_knows_what_its_model_predicts(run, capsys):
    """Sampled from its export, a model that predicts clips draws what the run draws; its weights begin no other run."""
    for prediction in ("clean", "velocity"):
        first = run(f"name={prediction}", *SHORT, *(["objective.prediction=clean"] if prediction == "clean" else []))
        assert export.main([str(first)]) == 0
        model, task = zoo.from_export(first / "export").eval(), create_task(cfg.load([f"{first}/config.yaml"]))
        assert (model.predicts_clean, model.objective["prediction"]) == (prediction == "clean", prediction)
        task.model()
        noise, label = torch.randn(2, 1, *task.clip), torch.tensor([3, 7])
        drawn = task.sampler(task.clip)(export.weights_of(first).eval(), noise, 3, label=label)
        assert torch.equal(euler(model, noise, 3, label=label), drawn)
        assert not torch.equal(euler(model, noise, 3, label=label, predicts_clean=not model.predicts_clean), drawn)
    capsys.readouterr()
    run("name=wrong", *SHORT, f"init.weights={first.parent / 'clean/export'}", expect=2)
    said = "were trained with objective.prediction=clean (configured: velocity). Write objective: {prediction: clean}"
    assert said in capsys.readouterr().err
    with pytest.raises(ValueError, match="is not an export: expected model"):
        zoo.from_export(first)


class Toy:
    """As much of a task as a source of weights needs."""

    def __init__(self, path, name="latte", **overrides):
        self.config = cfg.defaults("digits")
        self.config.init.weights = str(path)
        self.config.model.name, self.config.model.size, self.config.model.overrides = name, "test", overrides

    def model(self):
        return zoo.create(self.config.model.name, "test", **self.config.model.overrides)


@pytest.mark.parametrize("kind", ["Mine", "Wan"])
def test_a_model_from_outside_is_not_exported(tmp_path, monkeypatch, kind):
    """Whatever its class is called: an export names the model of the zoo that reads it back."""
    name = f"outside_{kind.lower()}"
    source = f"from zoo.video.wan import Config, Wan as Base\n\n\nclass {kind}(Base):\n    pass\n"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    sizes = {"hidden": 48, "depth": 1, "heads": 4, "mlp": 64, "caption_channels": 20}
    monkeypatch.setattr(export, "weights_of", lambda path, averaged: zoo.create(f"{name}:{kind}", **sizes))
    with pytest.raises(UserError, match=rf"^{kind} is not a model of the zoo, .*zoo\.load\(RUN\)\.model"):
        export.export(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# of Open-Sora 1.2 on its hub, at a tiny size
OPEN_SORA = {
    "_name_or_path": "hpcai-tech/OpenSora-STDiT-v3", "architectures": ["STDiT3"], "caption_channels": 20,
    "class_dropout_prob": 0.1, "depth": 2, "drop_path": 0.0, "enable_flash_attn": True, "hidden_size": 48,
    "in_channels": 4, "input_size": [None, None, None], "input_sq_size": 256, "mlp_ratio": 4.0, "model_max_length": 300,
    "model_type": "STDiT3", "num_heads": 4, "only_train_temporal": False, "patch_size": [1, 2, 2], "pred_sigma": True,
    "qk_norm": True, "skip_y_embedder": False,
}  # fmt: skip


def test_weights_of_open_sora_begin_a_run_beside_their_config(tmp_path):
    torch.manual_seed(0)
    model = zoo.create("stdit", "test", input_sq_size=256)
    state = {"y_embedder.y_embedding": torch.randn(300, 20)}
    for name, value in model.state_dict().items():
        names = open_sora_names(name, "v3")
        state |= {n: part.clone() for n, part in zip(names, value.chunk(len(names)))}
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].reshape(-1, 4, 1, 2, 2)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OPEN_SORA))
    found = init_weights.source(Toy(tmp_path, "stdit", input_sq_size=256))
    assert same(found.state_dict(), model.state_dict())
    # not in the weights: the side of the frames that positions are stretched over
    with pytest.raises(UserError, match=r"of a model with input_sq_size=256 \(configured: 512\)"):
        init_weights.source(Toy(tmp_path, "stdit"))
    for changes, message in (
        ({"qk_norm": False}, "qk_norm=False in the Open-Sora config: STDiT v3 has True"),
        (
            {"model_type": "PixArt"},
            "is of a PixArt, and model.name=stdit takes weights of STDiT, STDiT2, STDiT3, an ex",
        ),
        ({"zoo": "latte", "config": {}}, "is of a latte, and model.name=stdit"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(OPEN_SORA | changes))
        with pytest.raises(UserError, match=re.escape(message)):
            init_weights.source(Toy(tmp_path, "stdit", input_sq_size=256))


@pytest.mark.parametrize("overrides", [{}, {"in_channels": 9, "condition_channels": 5, "guidance": False}])
def test_a_folder_of_diffusers_hunyuan_begins_a_run(tmp_path, overrides):
    pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = zoo.create("hunyuan", "test", **overrides)
    hunyuan_weights.to_diffusers(model).save_pretrained(tmp_path)
    assert same(init_weights.source(Toy(tmp_path, "hunyuan", **overrides)).state_dict(), model.state_dict())
    settings = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"rope_axes_dim": [8, 12, 12]}, "rope_axes_dim=[8, 12, 12] in the diffusers config: HunyuanVideo has (4, 14,"),
        ({"image_condition_type": "token_replace"}, "HunyuanVideo takes an image as further channels"),
        (
            {"num_attention_heads": 1, "attention_head_dim": 96, "rope_axes_dim": [12, 42, 42]},
            "heads=1 (configured: 3)",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(UserError, match=re.escape(message)):
            init_weights.source(Toy(tmp_path, "hunyuan", **overrides))


def test_a_config_that_says_no_more_than_the_weights_is_not_read(tmp_path):
    """The config.json beside a published Mamba on a hub, whose mixers and norms begin a run."""
    torch.manual_seed(0)
    options = {"bidirectional": False, "head_dim": 64}
    model = zoo.create("st_mamba", "test", **options)
    layers = [{"norm.weight": b.norms[0].weight, **b.mixers[0].state_dict(prefix="mixer.")} for b in model.running()]
    state = {
        f"backbone.layers.{i}.{name.replace('ahead.', '')}": value.detach().clone()
        for i, layer in enumerate(layers) for name, value in layer.items()
    }  # fmt: skip
    for name in [name for name in state if name.endswith("conv1d.weight")]:
        state[name] = state[name][:, None]
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 48}))
    found = init_weights.source(Toy(tmp_path, "st_mamba", **options))
    assert same(found.spatial[0].mixers[0].state_dict(), model.spatial[0].mixers[0].state_dict())
    assert same(found.temporal[1].mixers[0].state_dict(), model.temporal[1].mixers[0].state_dict())


def test_latte_to_diffusers_and_back(tmp_path, monkeypatch):
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    options = {"conditioning": "text", "caption_channels": 20, "sample_size": 8, "depth": 2}
    model = zoo.create("latte", "test", **options)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    monkeypatch.setattr(export, "weights_of", lambda path, averaged: model)
    mask = os.umask(0o027)
    try:
        files = export.export(tmp_path, tmp_path / "out", "diffusers", frames=5)
        files += export.export(tmp_path, tmp_path / "plain")
    finally:
        os.umask(mask)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
    theirs = diffusers.LatteTransformer3DModel.from_pretrained(tmp_path / "out")
    assert (theirs.config.sample_size, theirs.config.video_length) == (8, 5)
    assert same(init_weights.source(Toy(tmp_path / "out", **options)).state_dict(), model.state_dict())
    # what the weights do not tell stands in config.json, and is held against what is configured
    with pytest.raises(UserError, match=r"of a model with sample_size=8 \(configured: 64\)"):
        init_weights.source(Toy(tmp_path / "out", **{**options, "sample_size": 64}))
    wrong = Toy(tmp_path / "out", **{**options, "sample_size": 64, "depth": 4})  # num_layers of diffusers is 1 here
    with pytest.raises(UserError, match=r"of a model with depth=2 \(configured: 4\), .* sample_size: 8, depth: 2}}$"):
        init_weights.refuse_described(wrong)
    (tmp_path / "out" / "config.json").unlink()
    for overrides in (options, {**options, "heads": asdict(model.config)["heads"]}):
        if "heads" not in overrides:
            with pytest.raises(UserError, match="heads="):
                init_weights.source(Toy(tmp_path / "out", **overrides))
        else:
            assert same(init_weights.source(Toy(tmp_path / "out", **overrides)).state_dict(), model.state_dict())


@pytest.mark.slow
def test_a_folder_of_clips_to_a_tuned_latte_of_diffusers(tmp_path, monkeypatch):
    """The commands of docs/finetune.md as they stand there, on two ranks, with a small Latte and small clips."""
    diffusers = pytest.importorskip("diffusers")
    page = [block.text for block in blocks(ROOT / "docs/finetune.md")]
    (tmp_path / "fine.yaml").write_text(next(text for text in page if "iddpm" in text))
    small = {"hidden": 32, "depth": 2, "heads": 2, "caption_channels": 16, "sample_size": 8}
    more = {
        "zoo.video.encode": ["--bucket", "16x16x24"],
        "train.py": [*(f"model.overrides.{k}={v}" for k, v in small.items()), "train.steps=3", "optim.warmup=0"],
        "zoo.training.export": [],
    }
    monkeypatch.chdir(tmp_path)
    for i in range(4):
        gif(Path(f"clips/{i}.gif"), 16, 24, 40)
        Path(f"clips/{i}.txt").write_text(f"clip {i}")
    tiny_encoders.save_autoencoder(Path("LATTE/vae"))
    tiny_encoders.save_text_encoder(Path("LATTE"), channels=16)
    torch.manual_seed(0)
    begun = latte_weights.to_diffusers(zoo.create("latte", "T2V", **small))
    begun.save_pretrained("LATTE/transformer", safe_serialization=True)

    commands = next(text for text in page if "encode clips" in text).splitlines()
    assert len(commands) == 3
    for words in map(shlex.split, commands):
        if words[:2] == ["python", "-m"]:
            assert importlib.import_module(words[2]).main([*words[3:], *more[words[2]]]) == 0
            continue
        launcher, script, *arguments = words[:3], *words[3:]
        assert (launcher[0], script) == ("dsp-launch", "train.py")
        command = [sys.executable, "-m", "dsp.cluster.launch", *launcher[1:], str(ROOT / script)]
        subprocess.run([*command, *arguments, *more[script]], check=True, env=None)

    assert list(metrics(Path("runs/fine"), "loss")) == [1, 3]
    tuned = diffusers.LatteTransformer3DModel.from_pretrained("tuned").eval()
    assert all(tuned.config[key] == value for key, value in begun.config.items() if not key.startswith("_"))
    moved = [(a - b).abs().max() for a, b in zip(tuned.parameters(), begun.parameters())]
    assert 0 < max(moved) < 1e-4  # three steps of 1e-5 from where it began
    x, t, text = torch.randn(2, 4, 16, 4, 6), torch.tensor([3, 500]), torch.randn(2, 7, 16)
    ours = export.weights_of(Path("runs/fine")).eval()
    with torch.no_grad():
        theirs = tuned(x, timestep=t, encoder_hidden_states=text, enable_temporal_attentions=True).sample
        torch.testing.assert_close(ours(x, t, context=text), theirs, rtol=1e-4, atol=1e-4)


def test_adapters_without_the_package(run, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    run(*SHORT, "lora.rank=2", expect=2)
    assert "lora.rank needs a package: pip install peft" in capsys.readouterr().err
    run(*SHORT, "lora.rank=2", "parallel.method=ulysses", expect=2)
    assert "needs parallel.method=dsp" in capsys.readouterr().err
    assert plain_name("a.base_layer.weight") == "a.weight"


@pytest.mark.slow
def test_adapters_are_all_that_is_trained(run, capsys):
    pytest.importorskip("peft")
    run("name=odd", *SHORT, "lora.rank=2", "lora.targets=[nothing]", expect=2)
    assert "no linear layer is called 'nothing'; there are " in capsys.readouterr().err
    base = run("name=base", *SHORT)
    assert export.main([str(base)]) == 0
    capsys.readouterr()
    options = ["name=tuned", *SHORT, f"init.weights={base / 'export'}", "lora.rank=2", "lora.targets=['*.qkv']"]
    tuned = run(*options, "train.steps=4", "checkpoint.every=2")
    assert "parameters (144,868), of which 1.54k are trained" in capsys.readouterr().out
    losses = metrics(tuned, "loss", "grad_norm")
    before, after = (export.weights_of(d).state_dict() for d in (base, tuned))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("qkv.weight") for name in changed)
    (tuned / "checkpoints" / "step-00000004").rename(tuned / "checkpoints" / "gone")
    run(*options, "train.steps=4", "checkpoint.every=2", "resume=true")
    assert metrics(tuned, "loss", "grad_norm") == losses
    run(*options, "train.steps=4", "resume=true", "lora.rank=3", expect=2)
    assert "lora.rank: 2 in the checkpoint, 3 here" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_of_adapters_hold_them_alone(run, whole_world, capsys):
    """On two ranks in bf16, with averages; resumed and exported by one, in float32, from the base they belong to."""
    pytest.importorskip("peft")
    bases = [run(f"name=base{seed}", *SHORT, f"train.seed={seed}") for seed in (0, 1)]
    assert all(export.main([str(base)]) == 0 for base in bases)
    lora = ["lora.rank=2", "lora.targets=['*.qkv']", "train.ema=0.5", "train.precision=bf16"]
    options = ["name=tuned", *SHORT, f"init.weights={bases[0] / 'export'}", *lora]
    whole_world(run_here, 2, run.arguments(*options, "train.steps=2"))
    (checkpoint,) = (run.directory / "runs/tuned/checkpoints").glob("step-*")
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert {key.partition(".")[0] for key in stored} == {"model", "average", "optimizer"}
    assert all(".lora_" in key for key in stored)
    assert sum(entry.size.numel() for key, entry in stored.items() if key.startswith("model.")) == 1536
    tuned = run.directory / "runs/tuned"
    before, after = (export.weights_of(d).state_dict() for d in (bases[0], tuned))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith("qkv.weight") for name in changed)
    run(*options, "train.steps=4", "resume=true")
    capsys.readouterr()
    run(*options, "train.steps=5", "resume=true", f"init.weights={bases[1] / 'export'}", expect=2)
    assert "lora.base: " in capsys.readouterr().err


@pytest.mark.slow
def test_wan_to_diffusers_and_back(trainer, tmp_path):
    """A trained Wan is what diffusers reads, and a run that begins with that folder has the same weights."""
    diffusers = pytest.importorskip("diffusers")
    wan = "{name: wan, size: test, overrides: {in_channels: 1, caption_channels: 26}}"
    runs = Runs(trainer, tmp_path, re.sub(r"model: .*", f"model: {wan}", TINY))
    first = runs("name=first", *SHORT, "sample.guidance=1")
    (first / "export").mkdir()  # with what is left of an earlier export, which was in shards
    (first / "export/diffusion_pytorch_model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}')
    assert export.main([str(first), "--layout", "diffusers"]) == 0
    theirs = diffusers.WanTransformer3DModel.from_pretrained(first / "export")
    second = runs("name=second", *SHORT, "sample.guidance=1", f"init.weights={first / 'export'}", "optim.lr=0")
    weights = export.weights_of(second)
    assert same(weights.state_dict(), export.weights_of(first).state_dict())
    x, t, text = torch.randn(1, 1, 3, 4, 4), torch.tensor([300.0]), torch.randn(1, 5, 26)
    with torch.no_grad():
        torch.testing.assert_close(weights(x, t, context=text), theirs(x, t, text).sample, rtol=1e-4, atol=1e-5)
