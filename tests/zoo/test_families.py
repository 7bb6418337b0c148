"""Published families of video models, verb by verb, with tiny random weights on one to three ranks.

Sampling is compared with diffusers' pipelines in test_published.py. What each family does is the table of docs/zoo.md.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from tests.support.latent_folders import latent_folder
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.runs import Runs, one_of
from tests.support.slow import slow
from zoo import registry
from zoo.contract import Conditions
from zoo.training import adapter
from zoo.training import config as cfg
from zoo.training.lora import adapt, plain_name
from zoo.training.sections import Lora
from zoo.video.diffusion import RectifiedFlow

pytest.importorskip("diffusers")
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
    def arguments(self) -> list[str]:
        overrides = {"in_channels": 4, "caption_channels": 64, **self.overrides}
        return [
            f"model.name={self.model}",
            *(f"model.overrides.{key}={value}" for key, value in overrides.items()),
            *self.options,
        ]


WAN: dict[str, Any] = {"hidden": 72, "heads": 6, "mlp": 96}
IDDPM = ("objective.name=iddpm",)
CLEAN = ("objective.first_frame=0.4", "objective.random_frames=0.3")
FAMILIES = {
    "Wan 2.1, text": Family("wan", WAN, "wan"),
    "Wan 2.1, image": Family(
        "wan", WAN | {"in_channels": 12, "condition_channels": 8, "image_channels": 32}, "wan-i2v"
    ),
    "Wan 2.2, image": Family("wan", WAN | {"in_channels": 12, "condition_channels": 8}, "wan-2.2-i2v"),
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
    task = cfg.create_task(config, over)
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
        if over:
            dsp.parallelize(objective, mesh, gather_output=False)
        loss = dsp.mean(*objective(**task.batch(objective, 0, 0, 0, 1)))
        loss.backward()
        found.append(
            [loss.detach(), *(p.grad if p.grad is not None else torch.zeros(()) for p in objective.parameters())]
        )
    for gradient in found[1][1:]:
        torch.distributed.all_reduce(gradient.div_(mesh.size()))
    worst = max((a - b).abs().max().item() for a, b in zip(*found))
    return worst, max(g.abs().max().item() for g in found[0])


@pytest.mark.parametrize("n", [2, slow(3)])
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_ranks_train_as_one_process(folder: Folder, whole_world: Any, n: int) -> None:
    for worst, largest in whole_world(gradients, n, folder.arguments()):
        assert largest > 1e-2
        assert worst < 1e-4 * largest


@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_a_batch_has_what_a_forward_wants(folder: Folder) -> None:
    task = cfg.create_task(cfg.load(folder.arguments()), one_of(1, 0))
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
    settings = {"in_channels": 4, "caption_channels": 64, **family.overrides}
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
        again = zoo.create(family.model, "test", **{"in_channels": 4, "caption_channels": 64, **family.overrides})
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
