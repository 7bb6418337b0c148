"""Latte's variant 1 against the authors' code, by the numbers that tests/golden/latte.py took from it.

Compared at commit b27c24a17487e3c33ae4e92364521303d0f14845, in float64: output, gradient of the input and gradients of
some parameters, unconditional and class-conditional, with the weights that ``from_reference`` carries over.
"""

import json
import math

import pytest
import torch
from einops import rearrange

import zoo
from tests.golden.latte import CASES, CHANNELS, CLASSES, DEPTH, FRAMES, HEADS, LABEL, SIDE, TIMESTEP, WIDTH
from tests.golden.rule import digest, draw, weight
from tests.support.paths import GOLDEN
from zoo import layers
from zoo.video.latte import Latte, diffusers_names, official_names

WANTED = json.loads((GOLDEN / "latte.json").read_text())


def official(case):
    """A state dict of the authors' model, float64."""
    with torch.device("meta"):
        options = {"num_classes": CLASSES} if case == "class" else {}
        shape = {"hidden": WIDTH, "heads": HEADS, "depth": DEPTH, "in_channels": CHANNELS}
        model = zoo.create("latte", "test", conditioning=case, **shape, **options)
    shapes = {official_names(name)[0]: param.shape for name, param in model.named_parameters()}
    shapes["x_embedder.proj.weight"] = (WIDTH, CHANNELS, 2, 2)
    state = {name: torch.from_numpy(weight(name, *shape)) for name, shape in shapes.items()}
    tables = {"pos_embed": (SIDE // 2) ** 2, "temp_embed": FRAMES}
    return state | {name: torch.zeros(1, n, WIDTH) for name, n in tables.items()}


def sinusoids(x, count):
    """`zoo.layers.sinusoids` in float64: the exponential of float32 is not the same on every CPU."""
    steps = torch.arange(count // 2, dtype=torch.float64)
    angles = x.double()[..., None] * torch.exp(-math.log(10000) * steps / (count // 2))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.mark.parametrize("case", CASES)
def test_variant_1_is_the_authors_model(monkeypatch, case):
    state = official(case)
    timestep = torch.tensor(TIMESTEP)
    assert (layers.sinusoids(timestep, 256) - sinusoids(timestep, 256)).abs().max() < 1e-6 * max(TIMESTEP)
    monkeypatch.setattr(layers, "sinusoids", sinusoids)
    torch.set_default_dtype(torch.float64)  # so that the weights are carried over as they are
    try:
        model = zoo.from_reference("latte", state, heads=HEADS)
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.from_numpy(draw("x", 2, FRAMES, CHANNELS, SIDE, SIDE)).requires_grad_()
    given = {"label": torch.tensor(LABEL)} if case == "class" else {}
    out = model(rearrange(x, "b t i h w -> b i t h w"), timestep, **given)
    out = rearrange(out, "b o t h w -> b t o h w")
    assert out.std() > 0.1
    out.backward(torch.from_numpy(draw("gradient", *out.shape)))

    assert x.grad is not None
    found = {"output": out.detach(), "x": x.grad}
    for name, param in model.named_parameters():
        (theirs,) = official_names(name)
        if theirs in WANTED[case]:
            assert param.grad is not None
            found[theirs] = param.grad.reshape(state[theirs].shape)
    assert found.keys() == WANTED[case].keys()
    for name, values in found.items():
        got, wanted = (torch.tensor(n, dtype=torch.float64) for n in (digest(name, values.numpy()), WANTED[case][name]))
        assert (got - wanted).abs().max() < 1e-10 * wanted.abs().max(), name


def test_config_is_read_off_the_weights():
    state = official("class")
    config = zoo.from_reference("latte", state, heads=HEADS).config
    assert (config.hidden, config.depth, config.patch, config.in_channels) == (WIDTH, DEPTH, (1, 2, 2), CHANNELS)
    assert (config.conditioning, config.num_classes, config.sample_size) == ("class", CLASSES, SIDE)
    assert config.learn_sigma
    assert zoo.from_reference("latte", official("none"), heads=HEADS).config.conditioning == "none"
    with pytest.raises(ValueError, match="neither the authors' nor diffusers' Latte"):
        zoo.from_reference("latte", {"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unknown: text_embedding_projection\.1\.weight"):
        zoo.from_reference("latte", {**state, "text_embedding_projection.1.weight": torch.zeros(1)}, heads=HEADS)


def test_heads_are_those_of_the_published_width():
    with torch.device("meta"):
        model = zoo.create("latte", "S/2", depth=2)
        state = {official_names(name)[0]: param for name, param in model.named_parameters()}
        state["x_embedder.proj.weight"] = torch.empty(384, 4, 2, 2)
        state["pos_embed"], state["temp_embed"] = torch.empty(1, 256, 384), torch.empty(1, 16, 384)
        assert zoo.from_reference("latte", state).config == zoo.create("latte", "S/2", depth=2).config
        wider = zoo.create("latte", "S/2", depth=2, hidden=392, heads=7)
        state = {official_names(name)[0]: param for name, param in wider.named_parameters()}
        state["x_embedder.proj.weight"] = torch.empty(392, 4, 2, 2)
        state["pos_embed"] = torch.empty(1, 256, 392)
        with pytest.raises(ValueError, match=r"no Latte of hidden=392 was published: say how many heads"):
            zoo.from_reference("latte", state)


def test_weights_in_the_layout_of_diffusers():
    torch.manual_seed(0)
    model = zoo.create("latte", "test", conditioning="text", caption_channels=20, sample_size=64, depth=2)
    state = {}
    for name, param in model.named_parameters():
        torch.nn.init.normal_(param, std=0.1)
        theirs = diffusers_names(name)
        state.update(zip(theirs, param.detach().chunk(len(theirs))))
    state["pos_embed.proj.weight"] = state["pos_embed.proj.weight"].unflatten(1, (4, 2, 2))
    with pytest.raises(ValueError, match="how many cells a side it was trained, sample_size="):
        zoo.from_reference("latte", state, heads=4)
    again = zoo.from_reference("latte", state, heads=4, sample_size=64)
    assert isinstance(again, Latte)
    assert again.config == model.config
    inputs = model.example_inputs()
    assert torch.equal(model(**inputs), again(**inputs))
