"""Published families of video models, verb by verb, with tiny random weights on one to three ranks.

Sampling is compared with diffusers' pipelines in test_published.py. What each family does is the table of docs/zoo.md.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import dsp
import zoo
from tests.support.clips import gif
from tests.support.latent_folders import latent_folder
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.runs import Runs, one_of, run_here
from tests.support.slow import keep_short, long, slow
from zoo import registry
from zoo.contract import Conditions
from zoo.data.latents import Latents
from zoo.training import adapter, export, init_weights
from zoo.training import config as cfg
from zoo.training.lora import adapt, plain_name
from zoo.training.sections import Lora
from zoo.training.task_lookup import create_task
from zoo.video import encode
from zoo.video.diffusion import RectifiedFlow
from zoo.video.stdit_weights import open_sora_names
from zoo.video.tiny_encoders import save_pipeline

diffusers = pytest.importorskip("diffusers")
peft = pytest.importorskip("peft")

CLIPS = {(5, 4, 6): 4, (3, 6, 4): 3}
# what a folder of latents has, for any family
FACTS: dict[str, Any] = {
    "channels": 4, "text_channels": 64, "causal": True, "pooled": "CLIPTextModel", "pooled_channels": 32,
    "image": "CLIPVisionModel", "image_channels": 32, "start": True,
}  # fmt: skip
CONFIG = """
model: {name: wan, size: test}
data: {name: latent_folder, path: null, validation: 0.3}
objective: {label_dropout: 0.3}
optim: {lr: 1e-3, warmup: 0}
train: {steps: 2, batch: 2}
eval: {every: 2, clips: 2, levels: 2}
log: {every: 1}
profile: {every: 0}
wandb: {mode: disabled}
"""


@dataclass(frozen=True)
class Family:
    """A family: its name in the zoo, the settings of a tiny model, its pipeline in tiny_encoders, further options."""

    model: str
    overrides: dict[str, Any] = field(default_factory=dict)
    pipeline: str = ""
    options: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {"in_channels": 4, "caption_channels": 64, **self.overrides}

    @property
    def arguments(self) -> list[str]:
        return [
            f"model.name={self.model}",
            *(f"model.overrides.{key}={value}" for key, value in self.settings.items()),
            *self.options,
        ]


WAN: dict[str, Any] = {"hidden": 72, "heads": 6, "mlp": 96}
IDDPM = ("objective.name=iddpm",)
CLEAN = ("objective.first_frame=0.4", "objective.random_frames=0.3")
HIGH = ("objective.range=[0.9,1]",)  # the levels of the expert in transformer/
FAMILIES = {
    "Wan 2.1, text": Family("wan", WAN, "wan"),
    "Wan 2.1, image": Family(
        "wan", WAN | {"in_channels": 12, "condition_channels": 8, "image_channels": 32}, "wan-i2v"
    ),
    "Wan 2.2, image": Family("wan", WAN | {"in_channels": 12, "condition_channels": 8}, "wan-2.2-i2v", HIGH),
    "Wan 2.2 5B": Family("wan", WAN | {"frame_times": True}, "wan-ti2v", CLEAN),
    "HunyuanVideo": Family(
        "hunyuan",
        {"hidden": 64, "heads": 2, "depth": 1, "single": 1, "refiner": 1, "pooled_channels": 32},
        "hunyuan",
    ),
    "HunyuanVideo, image": Family(
        "hunyuan",
        {
            **{"hidden": 64, "heads": 2, "depth": 1, "single": 1, "refiner": 1, "pooled_channels": 32},
            **{"in_channels": 9, "condition_channels": 5, "guidance": False},
        },
    ),
    "Latte-1": Family(
        "latte", {"hidden": 64, "depth": 2, "conditioning": "text", "sample_size": 16}, "latte", IDDPM
    ),
    "STDiT v1": Family("stdit", {"version": "v1"}, "", IDDPM),
    "STDiT v2": Family("stdit", {"version": "v2"}, "", (*IDDPM, *CLEAN)),
    "STDiT v3": Family("stdit", {"version": "v3"}, "", CLEAN),
}  # fmt: skip


FROM_IMAGE = ("Wan 2.1, image", "Wan 2.2, image", "Wan 2.2 5B")
SAMPLED = [name for name in FAMILIES if name != "HunyuanVideo, image"]
PAGE = ROOT / "docs/zoo.md"


class Folder(Runs):
    """Runs of a family on a folder of latents that has everything."""

    def __init__(self, trainer: Any, directory: Path, family: Family):
        path = latent_folder(directory / "clips", CLIPS, fps=(24.0, 8.0), **FACTS)
        super().__init__(trainer, directory, CONFIG.replace("path: null", f"path: '{path}'"))
        self.family = family

    def arguments(self, *overrides: str) -> list[str]:
        return super().arguments(*self.family.arguments, *overrides)


@pytest.fixture
def folder(request: Any, trainer: Any, tmp_path: Path) -> Folder:
    return Folder(trainer, tmp_path, FAMILIES[request.param])


def objective_of(config: Any, over: DeviceMesh | None) -> tuple[Any, Any]:
    task = create_task(config, over)
    task.open()
    torch.manual_seed(1)
    objective = task.objective(task.model())
    for p in objective.parameters():  # nothing starts as nothing
        torch.nn.init.normal_(p, std=0.2)
    return task, objective


def gradients(mesh: DeviceMesh, arguments: list[str]) -> tuple[float, float]:
    """The largest difference of losses and gradients between these ranks and one process, and the largest gradient."""
    sys.path.insert(0, str(ROOT))
    importlib.import_module("train")
    found: list[list[torch.Tensor]] = []
    for over in (None, mesh):
        task, objective = objective_of(cfg.load(arguments), over)
        objective.double()  # with these weights, float32 is off by 1e-2 in one process
        if over:
            dsp.parallelize(objective, mesh, gather_output=False)
        batch = task.batch(objective, 0, 0, 0, 1).items()
        loss = dsp.mean(*objective(**{k: v.double() if v.is_floating_point() else v for k, v in batch}))
        loss.backward()
        found.append(
            [loss.detach(), *(p.grad if p.grad is not None else torch.zeros(()) for p in objective.parameters())]
        )
    for gradient in found[1][1:]:
        torch.distributed.all_reduce(gradient.div_(mesh.size()))
    worst = max((a - b).abs().max().item() for a, b in zip(*found))
    return worst, max(g.abs().max().item() for g in found[0])


@pytest.mark.parametrize("folder", ["STDiT v1"], indirect=True)
def test_the_plan_of_a_training_objective_is_the_cheapest(folder: Folder) -> None:
    """The search does not stop early, although inputs arrive in shards and many terms of the loss read each."""
    task, objective = objective_of(cfg.load(folder.arguments()), None)
    batch = task.batch(objective, 0, 0, 0, 1)
    given = {name: Shard(dim) for name, dim in task.sharded_inputs.items() if name in batch}
    assert dsp.plan(objective, kwargs=batch, size=2, gather_output=False, given=given).exact


@pytest.mark.parametrize("n", [long(2), 3])
@pytest.mark.parametrize("folder", keep_short(FAMILIES, only={*FAMILIES} - {"STDiT v1", "STDiT v2"}), indirect=True)
def test_ranks_train_as_one_process(folder: Folder, whole_world: Any, n: int) -> None:
    for worst, largest in whole_world(gradients, n, folder.arguments()):
        assert largest > 1e-2
        assert worst < 1e-5 * largest


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_batch_has_what_a_forward_wants(folder: Folder) -> None:
    task = create_task(cfg.load(folder.arguments()), one_of(1, 0))
    task.open()
    with torch.device("meta"):
        objective = task.objective(task.model())
    batch = task.batch(objective, 0, 0, 0, 1)
    example = task.example(objective, task.bucket(0, 1))
    assert {k: (v.shape, v.dtype) for k, v in example.items()} == {k: (v.shape, v.dtype) for k, v in batch.items()}
    wants = Conditions.of(objective.model)
    assert wants.wanted - {"x_mask"} <= batch.keys()
    if wants.start:
        start, x = batch["start"], batch["x"]
        mask = start[:, : wants.start - 4] if wants.first[0] == "mask" else start[:, 4:]
        latent = start[:, wants.start - 4 :] if wants.first[0] == "mask" else start[:, :4]
        assert torch.equal(mask, (torch.arange(x.shape[2]) == 0).float()[:, None, None].expand_as(mask))
        assert torch.equal(latent[:, :, 0], x[:, :, 0]) == ("frame" in wants.first)
        assert bool(latent[:, :, 1:].any()) == ("frames" in wants.first)


@pytest.mark.parametrize("folder", ["Wan 2.1, image", "HunyuanVideo"], indirect=True)
def test_a_run_trains_and_ends(folder: Folder) -> None:
    folder("sample.every=0")


def test_data_without_what_a_model_wants(trainer: Any, tmp_path: Path, capsys: Any) -> None:
    plain = latent_folder(tmp_path / "plain", CLIPS, channels=4, text_channels=64)
    for family, said in (
        ("Wan 2.1, image", "Encode the clips with --image FOLDER, the folder of the model's pipeline"),
        ("HunyuanVideo", "model hunyuan needs pooled, which this data does not have. zoo.video.encode writes it"),
        ("HunyuanVideo, image", "begins clips with an image: 5 of its channels are a mask and the image's latent"),
    ):
        (tmp_path / family).mkdir()
        Folder(trainer, tmp_path / family, FAMILIES[family])(f"data.path={plain}", expect=2)
        assert said in capsys.readouterr().err


# Adapters


def adapted(family: Family, rank: int, alpha: float) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A model, the published one with its weights (None: there is no such class) and inputs of both; then adapters."""
    settings = family.settings
    torch.manual_seed(0)
    model = zoo.create(family.model, "test", **settings)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    convert = getattr(registry.weights_module(family.model), "to_diffusers", None)
    theirs = None if convert is None else convert(model, 5).eval()
    inputs = model.example_inputs(2, tokens=512 if model.config.__dict__.get("image_channels") else 7)
    if "context_mask" in inputs:
        inputs["context_mask"][:] = True
    adapt(model, Lora(rank=rank, alpha=alpha))
    for name, p in model.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(p, std=0.2)
    return model.eval(), theirs, inputs


def call_diffusers(theirs: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    names = {
        "x": "hidden_states", "timestep": "timestep", "context": "encoder_hidden_states",
        "image": "encoder_hidden_states_image", "pooled": "pooled_projections", "guidance": "guidance",
    }  # fmt: skip
    given = {names[name]: value for name, value in inputs.items() if name in names}
    if "Hunyuan" in type(theirs).__name__:
        given["encoder_attention_mask"] = inputs["context_mask"]
    if "Latte" in type(theirs).__name__:
        given["enable_temporal_attentions"] = True
    if given["timestep"].ndim == 2:  # a timestep for each token
        given["timestep"] = given["timestep"].repeat_interleave(16, 1)
    return theirs(**given).sample


def load_adapter(theirs: Any, file: Path) -> None:
    """Give diffusers' model the adapters of a file: by its own method, or by peft where it has none."""
    if hasattr(theirs, "load_lora_adapter"):
        theirs.load_lora_adapter(load_file(file), prefix="transformer")
        return
    state = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
    rank = next(len(value) for key, value in state.items() if ".lora_A." in key)
    targets = sorted({key.partition(".lora_")[0] for key in state})
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), theirs)
    assert not peft.set_peft_model_state_dict(theirs, state).unexpected_keys


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_adapters_out_and_in(name: str, tmp_path: Path) -> None:
    """diffusers adds what our adapters add; read back they add the same, merged or as adapters of a higher rank."""
    family = FAMILIES[name]
    model, theirs, inputs = adapted(family, 3, 7.0)
    expected = model(**inputs)
    file = adapter.write(tmp_path, model, 7 / 3)
    close = {"rtol": 1e-4, "atol": 1e-4 * expected.abs().max().item()}
    if theirs is not None:
        assert (call_diffusers(theirs, inputs) - expected).abs().max() > 0.1
        load_adapter(theirs, file)
        torch.testing.assert_close(call_diffusers(theirs, inputs), expected, **close)

    base = {plain_name(key): value for key, value in model.state_dict().items() if plain_name(key)}
    for rank in (0, 3, 5):
        again = zoo.create(family.model, "test", **family.settings)
        again.load_state_dict(base)
        adapt(again, Lora(rank=rank, alpha=2.0))
        if rank:
            adapter.fill(again, tmp_path, 2.0 / rank)
        else:
            adapter.merge(again, file)
        torch.testing.assert_close(again.eval()(**inputs), expected, **close)


@torch.no_grad()
def test_adapters_of_diffusers_in(tmp_path: Path) -> None:
    """Adapters that diffusers trains for queries, keys and values each, saved by its own function with their alpha."""
    model, theirs, inputs = adapted(FAMILIES["Wan 2.1, text"], 1, 1.0)
    base = {plain_name(key): value for key, value in model.state_dict().items() if plain_name(key)}
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.2"]
    theirs.add_adapter(peft.LoraConfig(r=2, lora_alpha=5, target_modules=targets))
    for key, p in theirs.named_parameters():
        if ".lora_" in key:
            torch.nn.init.normal_(p, std=0.2)
    theirs.save_lora_adapter(tmp_path)
    expected = call_diffusers(theirs, inputs)
    for rank in (0, 6):
        again = zoo.create("wan", "test", **{"in_channels": 4, "caption_channels": 64, **WAN})
        again.load_state_dict(base)
        adapt(again, Lora(rank=rank, alpha=2.0))
        adapter.fill(again, tmp_path, 2.0 / rank) if rank else adapter.merge(again, tmp_path)
        torch.testing.assert_close(again.eval()(**inputs), expected, rtol=1e-4, atol=1e-4)
    again = adapt(zoo.create("wan", "test", **{"in_channels": 4, "caption_channels": 64, **WAN}), Lora(rank=5))
    refused(r"needs lora\.rank=6 for blocks\.0\.queries\.qkv \(configured: 5\)", adapter.fill, again, tmp_path, 1.0)
    few = zoo.create("wan", "test", **{"in_channels": 4, "caption_channels": 64, **WAN, "depth": 1})
    refused("adapters are of layers that the model does not have, such as blocks.1", adapter.merge, few, tmp_path)
    refused("no such file, or a folder without", adapter.merge, few, tmp_path / "none")
    save_file({"a.alpha": torch.ones(1)}, tmp_path / "odd.safetensors")
    refused("is not a matrix of an adapter", adapter.merge, few, tmp_path / "odd.safetensors")


# The experts of Wan 2.2


@pytest.mark.parametrize("shift", [1.0, 5.0])
@pytest.mark.parametrize("uniform", [True, False])
def test_levels_of_an_expert_are_those_of_the_whole_in_its_range(shift: float, uniform: bool) -> None:
    draws = (torch.arange(20000) + 0.5) / 20000
    how: dict[str, Any] = {"shift": shift, "uniform": uniform, "loc": 0.2, "scale": 1.3}
    whole = RectifiedFlow(torch.nn.Identity(), **how).sample_timestep(draws)
    for low, high in ((0.875, 1.0), (0.0, 0.875), (0.3, 0.6)):
        own = RectifiedFlow(torch.nn.Identity(), **how, within=(low, high)).sample_timestep(draws)
        assert low <= own.min() <= own.max() <= high
        expected = whole[(whole >= low) & (whole <= high)]
        shares = torch.linspace(0.01, 0.99, 50)
        torch.testing.assert_close(own.quantile(shares), expected.quantile(shares), rtol=0, atol=2e-3)


# Fine-tuning, adapters, exports


def publish(name: str, folder: Path) -> Path:
    """Write a family's weights as they are published: the folder of a pipeline, else of a transformer."""
    family, draw = FAMILIES[name], torch.Generator().manual_seed(0)
    if family.pipeline:
        save_pipeline(folder, family.pipeline)
        return folder
    torch.manual_seed(0)
    model = zoo.create(family.model, "test", **family.settings)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=draw) * 0.1)
    if family.model == "hunyuan":
        registry.weights_module("hunyuan").to_diffusers(model).save_pretrained(folder)
        return folder
    folder.mkdir()
    version, state = family.overrides["version"], dict[str, torch.Tensor]()
    for key, value in model.state_dict().items():
        names = open_sora_names(key, version)
        state |= {theirs: part.clone() for theirs, part in zip(names, value.chunk(len(names)))}
    state["x_embedder.proj.weight"] = state["x_embedder.proj.weight"].reshape(-1, 4, 1, 2, 2)
    save_file(state, folder / "model.safetensors")
    config = {
        "model_type": {"v1": "STDiT", "v2": "STDiT2", "v3": "STDiT3"}[version], "hidden_size": 48, "depth": 2,
        "num_heads": 4, "patch_size": [1, 2, 2], "in_channels": 4, "pred_sigma": True, "caption_channels": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | ({} if version == "v1" else {"input_sq_size": 512})))
    return folder


def published_model(name: str, weights: Path) -> Any:
    """diffusers' model of published weights; None where it has no such class."""
    part = weights / "transformer" if FAMILIES[name].pipeline else weights
    kind = json.loads((part / "config.json").read_text()).get("_class_name")
    return None if kind is None else getattr(diffusers, kind).from_pretrained(part).eval()


@pytest.mark.parametrize("n", [1, long(2), long(3)])
@pytest.mark.parametrize("name", keep_short(FAMILIES, only=["Wan 2.1, image"]))
def test_published_weights_are_tuned_exported_and_read_back(
    name: str, n: int, trainer: Any, tmp_path: Path, whole_world: Any
) -> None:
    """Adapters, then all weights: what each begins with, ends with, writes and reads, as diffusers has it."""
    family, weights = FAMILIES[name], publish(name, tmp_path / "published")
    folder = Folder(trainer, tmp_path, family)

    def run(*more: str) -> Path:
        if n == 1:
            return folder(*more)
        whole_world(run_here, n, folder.arguments(*more))
        return folder.directory / "runs" / more[0].removeprefix("name=")

    # what a run begins with is what was published
    task = create_task(cfg.load(folder.arguments(f"init.weights={weights}")))
    task.open()
    begun, theirs = init_weights.source(task).eval(), published_model(name, weights)
    inputs = begun.example_inputs(2, tokens=512 if begun.config.__dict__.get("image_channels") else 7, frames=5)
    if "context_mask" in inputs:
        inputs["context_mask"][:] = True
    with torch.no_grad():
        if theirs is not None:
            torch.testing.assert_close(begun(**inputs), call_diffusers(theirs, inputs), rtol=1e-4, atol=1e-4)

    # adapters: trained on n ranks, written, and added to the published weights by diffusers and by a further run
    lora = [f"init.weights={weights}", "lora.rank=2", "optim.lr=0.1"]
    tuned = run("name=tuned", *lora)
    assert export.main([str(tuned), "--layout", "adapter", "--out", str(tmp_path / "adapter")]) == 0
    ours = export.weights_of(tuned).eval()
    with torch.no_grad():
        expected = ours(**inputs)
        assert (expected - begun(**inputs)).abs().max() > 1e-3
        if theirs is not None:
            load_adapter(theirs, tmp_path / "adapter" / adapter.FILE)
            torch.testing.assert_close(call_diffusers(theirs, inputs), expected, rtol=1e-3, atol=1e-3)
    whole = [f"init.weights={weights}", f"init.adapter={tmp_path / 'adapter'}", "optim.lr=0"]
    merged, further = run("name=merged", *whole), run("name=further", *whole, "lora.rank=3")
    for directory in (merged, further):
        with torch.no_grad():
            torch.testing.assert_close(export.weights_of(directory).eval()(**inputs), expected, rtol=1e-3, atol=1e-3)

    # all weights: exported in both layouts, and read back
    assert export.main([str(merged), "--out", str(tmp_path / "plain")]) == 0
    with torch.no_grad():
        torch.testing.assert_close(zoo.from_export(tmp_path / "plain").eval()(**inputs), expected, rtol=1e-3, atol=1e-3)
        if theirs is not None:
            there = ["--layout", "diffusers", "--out", str(tmp_path / "there"), "--frames", "5"]
            assert export.main([str(merged), *there]) == 0
            again = type(theirs).from_pretrained(tmp_path / "there").eval()
            torch.testing.assert_close(call_diffusers(again, inputs), expected, rtol=1e-3, atol=1e-3)


# From clips to a tuned model and its clips


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Wan 2.1, image", "HunyuanVideo", "Wan 2.2 5B"])
def test_clips_are_encoded_trained_on_and_drawn(name: str, trainer: Any, tmp_path: Path, capsys: Any) -> None:
    weights = publish(name, tmp_path / "published")
    for i in range(3):
        gif(tmp_path / f"clips/{i}.gif", 5, 32, 48)
        (tmp_path / f"clips/{i}.txt").write_text(f"clip {i}")
    source, out = [str(tmp_path / "clips"), "--out", str(tmp_path / "latents")], ["--bucket", "5x32x48"]
    image = ["--image", str(weights)] * (name in FROM_IMAGE)
    assert encode.main([*source, *out, "--vae", str(weights), "--text", str(weights), *image]) == 0
    latents = Latents(tmp_path / "latents")
    more = {"Wan 2.1, image": ("image", "start"), "HunyuanVideo": ("pooled",), "Wan 2.2 5B": ("start",)}[name]
    assert latents.manifest.more == more
    if "start" in more:  # the first frame is encoded alone: in both it is the same
        entry = latents.entries[0]
        first = latents.latent(entry, range(1), "start")
        torch.testing.assert_close(first, latents.latent(entry, range(1)), rtol=1e-4, atol=1e-4)
    folder = Folder(trainer, tmp_path, FAMILIES[name])
    data = [f"data.path={tmp_path / 'latents'}", f"init.weights={weights}"]
    run = folder(*data, "sample.every=2", "sample.clips=1", "sample.steps=2", "objective.random_frames=0")
    infer = importlib.import_module("infer")
    Image.fromarray((torch.rand(32, 48, 3) * 255).byte().numpy()).save(tmp_path / "first.png")
    begin = ["--first-frame", str(tmp_path / "first.png")] * (name in FROM_IMAGE)
    asked = [str(run), "--prompt", "a boat", "--steps", "2", "--guidance", "3", "--out", str(tmp_path / "drawn")]
    assert infer.main([*asked, *begin]) == 0
    assert (tmp_path / "drawn/seed-0.gif").is_file()
    if name == "Wan 2.1, image":
        capsys.readouterr()
        assert infer.main(asked) == 2
        assert "begins clips with an image: pass --first-frame FILE" in capsys.readouterr().err


def test_an_expert_is_trained_on_its_own_levels(trainer: Any, tmp_path: Path, capsys: Any) -> None:
    save_pipeline(tmp_path / "both", "wan-2.2")
    folder = Folder(trainer, tmp_path, FAMILIES["Wan 2.1, text"])
    high, low = "[0.875, 1]", "[0, 0.875]"
    for part, wrong, wanted in (("", "[0, 1]", high), ("transformer", "[0, 0.9]", high), ("transformer_2", high, low)):
        weights = f"init.weights={tmp_path / 'both' / part}"
        folder(weights, f"objective.range={wrong}", expect=2)
        assert f"Write objective: {{range: {wanted}}}; the other one is" in capsys.readouterr().err
    run = folder(weights, f"objective.range={wanted}")
    assert importlib.import_module("infer").main([str(run)]) == 2
    assert "trained on noise levels 0 to 0.875 (objective.range) and draws nothing alone" in capsys.readouterr().err
    folder("objective.range=[0.5, 0.2]", expect=2)
    assert "two numbers from 0 to 1, the smaller one first" in capsys.readouterr().err


# Sampling on ranks, and the table


def sampled_folder(name: str, folder: Path) -> Path:
    """The folder of a pipeline of a family; for Open-Sora's, the encoders of another beside its own transformer."""
    if FAMILIES[name].pipeline:
        return publish(name, folder)
    save_pipeline(folder, "latte")
    for part in ("transformer", "scheduler"):
        shutil.rmtree(folder / part)
    (folder / "model_index.json").unlink()
    publish(name, folder / "transformer")
    return folder


def draw(mesh: DeviceMesh | None, weights: Path, image: torch.Tensor | None) -> torch.Tensor | None:
    pipe = zoo.pipeline(weights, dtype="fp32")
    try:
        size = {"frames": 5, "height": 32, "width": 48, "steps": 2, "guidance": 3.0}
        return pipe.sample(["a boat", "snow"], negative_prompt="blurred", first_frame=image, seed=3, **size)
    finally:
        pipe.close()


def on_ranks(mesh: DeviceMesh, weights: Path, image: torch.Tensor | None, one: torch.Tensor) -> None:
    clips = draw(mesh, weights, image)
    assert (clips is None) == (mesh.get_rank() > 0)
    if clips is not None:
        assert (clips.int() - one.int()).abs().max() <= 1


@pytest.mark.parametrize("n", [slow(2), long(3)])
@pytest.mark.parametrize("name", SAMPLED)
def test_ranks_sample_as_one_process(name: str, n: int, tmp_path: Path, whole_world: Any) -> None:
    weights = sampled_folder(name, tmp_path / "published")
    image = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(1)) * 2 - 1 if name in FROM_IMAGE else None
    one = draw(None, weights, image)
    assert one is not None
    assert one.float().std() > 1
    whole_world(on_ranks, n, weights, image, one)


# verb: the families of its tests, on 1, 2 and 3 ranks
VERBS = {
    "sample": SAMPLED, "train": [*FAMILIES], "fine-tune": [*FAMILIES], "LoRA": [*FAMILIES],
    "export, reload": [*FAMILIES], "adapter out": [*FAMILIES], "adapter in": [*FAMILIES],
}  # fmt: skip
NOTES = {
    "HunyuanVideo, image": "its pipeline embeds image and caption together by a LLaVA, which is not here",
}


def table() -> str:
    """The families and what they do, as Markdown."""
    lines = ["| family | " + " | ".join(VERBS) + " |", "|---" * (len(VERBS) + 1) + "|"]
    rows: dict[str, list[str]] = {}
    for name in FAMILIES:
        rows.setdefault(" | ".join("1, 2, 3" if name in can else "no" for can in VERBS.values()), []).append(name)
    lines += [f"| {'; '.join(names)} | {row} |" for row, names in rows.items()]
    without = {name: [verb for verb, can in VERBS.items() if name not in can] for name in FAMILIES}
    notes = [f"{name}, no {', '.join(verbs)}: {NOTES[name]}." for name, verbs in without.items() if verbs]
    return "\n".join([*lines, "", *notes])


def test_the_table_stands_in_the_page() -> None:
    """The output of `python -m tests.zoo.test_families` stands in docs/zoo.md."""
    assert table() in PAGE.read_text()


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition("<!-- families -->\n")
    PAGE.write_text(before + begin + table() + "\n" + rest[rest.index("<!-- end -->") :])
