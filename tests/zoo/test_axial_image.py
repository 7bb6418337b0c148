"""The Axial Transformer of images: the authors' numbers, attention by PyTorch's own module, causality, sampling."""

import json

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import zoo
from tests.golden.axial import CASES, DIM, EXTERIOR, HEADS, INNER, LEVELS, OUTER, image, initial
from tests.golden.rule import digest, draw
from tests.support.oracles import randomise
from tests.support.paths import GOLDEN
from zoo.image.autoregressive import BitsPerDim, sample

WANTED = json.loads((GOLDEN / "axial.json").read_text())


def make(dtype=torch.float64, **overrides):
    torch.manual_seed(0)
    model = zoo.create("axial_image", "test", **overrides).to(dtype)
    randomise(model)
    return model


# The authors' code


def official_names(name, scope):
    """The authors' variables that one of our parameters is made of, stacked along its first dim."""
    path = name.split(".")
    suffix = {"weight": "w", "bias": "b"}.get(path[-1])
    if path[0] in ("outer", "exterior", "inner"):
        row = "col" if path[2] == "column" else "row"
        rest = path[2:-1] if path[0] == "inner" else path[3:-1]
        block = f"{'' if path[0] == 'exterior' else scope}{path[0]}_{row}_{path[1]}"
        norms = {"norm_attention": "layernorm_attn", "norm_mlp": "layernorm_mlp"}
        if rest[0] in norms:
            return [f"{block}/{norms[rest[0]]}/{'g' if suffix == 'w' else 'b'}"]
        layers = {"qkv": ["attn/q", "attn/k", "attn/v"], "out": ["attn/proj_out"], "up": ["mlp/proj_in"]}
        return [f"{block}/{layer}/{suffix}" for layer in (layers | {"down": ["mlp/proj_out"]})[rest[1]]]
    return {
        "embed.weight": [f"{scope}embs"],
        "positions.row": [f"{scope}pos_embs_h"],
        "positions.column": [f"{scope}pos_embs_w"],
        "exterior_positions.row": ["pos_embs_h"],
        "exterior_positions.column": ["pos_embs_w"],
        "convolution.linear.weight": ["exterior_input_conv/w"],
        "convolution.linear.bias": ["exterior_input_conv/b"],
        "logits.norm.weight": [f"{scope}final_ln/g"],
        "logits.norm.bias": [f"{scope}final_ln/b"],
        "logits.linear.weight": [f"{scope}final_dense/w"],
        "logits.linear.bias": [f"{scope}final_dense/b"],
    }[name]


def ours(name, value):
    """One of their variables as ours: layers with their outputs first, the convolution as (d, (column row e))."""
    if name.endswith("conv/w"):
        return value.permute(3, 1, 0, 2).flatten(1)
    return value.T if name.endswith("/w") else value


def theirs(name, value):
    if name.endswith("conv/w"):
        return value.unflatten(1, (3, 3, -1)).permute(2, 1, 3, 0)
    return value.T if name.endswith("/w") else value


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_authors_model(case):
    shape = {"hidden": DIM, "heads": HEADS, "exterior": EXTERIOR, "outer": OUTER, "inner": INNER, "levels": LEVELS}
    model = zoo.create("axial_image", "test", channels=CASES[case], height=5, width=7, **shape).double()
    scope = "" if case == "grey" else "transformer2d/"
    state = {}
    for name, param in model.named_parameters():
        parts = official_names(name, scope)
        whole = param.unflatten(0, (len(parts), -1)) if len(parts) > 1 else param[None]
        values = [
            ours(part, torch.from_numpy(initial(f"model/{part}", *theirs(part, like).shape)))
            for part, like in zip(parts, whole)
        ]
        state[name] = torch.cat(values)
    model.load_state_dict(state)
    out = model(torch.from_numpy(image(case)).long())
    assert out.std() > 0.1
    out.backward(torch.from_numpy(draw("gradient", *out.shape)))

    found = {"logits": out.detach()}
    for name, param in model.named_parameters():
        parts = official_names(name, scope)
        for part, grad in zip(parts, param.grad.chunk(len(parts))):
            found[f"model/{part}"] = theirs(part, grad)
    assert found.keys() == WANTED[case].keys()
    for name, values in found.items():
        got, wanted = (torch.tensor(n, dtype=torch.float64) for n in (digest(name, values.numpy()), WANTED[case][name]))
        # the bias of keys has no effect, its gradient is rounding of what the gradient of their weight is made of
        made_of = name.removesuffix("b") + "w" if name.endswith("attn/k/b") else name
        scale = max(map(abs, WANTED[case][made_of]))
        assert (got - wanted).abs().max() < 1e-10 * scale, name


# PyTorch's own attention


# What makes it autoregressive


@pytest.mark.parametrize("overrides", [{}, {"channels": 3}, {"channels": 2, "num_classes": 3}], ids=str)
def test_logits_do_not_see_their_own_value_or_later_ones(overrides):
    model = make(**overrides).eval()
    given = model.example_inputs(2, height=4, width=5)
    pixels = given["image"].flatten(1)
    logits = model(**given).flatten(1, -2)
    for at in range(pixels.shape[1]):
        changed = pixels.clone()
        changed[:, at] = (changed[:, at] + 1) % model.config.levels
        again = model(**{**given, "image": changed.view_as(given["image"])}).flatten(1, -2)
        moved = (again - logits).abs().amax((0, 2))
        assert moved[: at + 1].max() == 0, at
        if at + 1 < pixels.shape[1]:
            assert moved[at + 1] > 1e-6, at  # the next value sees it, be it in the next row or channel
    assert at + 1 == pixels.shape[1]


@pytest.mark.parametrize("overrides", [{}, {"channels": 2, "num_classes": 3}], ids=str)
def test_samples_are_what_the_logits_say(overrides):
    """Every value of a sample is the largest of noise plus logits, the logits of one forward of the whole sample."""
    model = make(**overrides).eval()
    given = model.example_inputs(3, height=3, width=4)
    shape, steps = (*given.pop("image").shape, model.config.levels), []
    noise = -torch.empty(shape, dtype=torch.float64).exponential_().log()
    images = sample(model, noise, on_step=lambda i, n: steps.append((i, n)), **given)
    assert images.shape == shape[:-1]
    assert torch.equal(images, (model(images, **given) + noise).argmax(-1))
    assert steps == [(i + 1, len(steps)) for i in range(12 * shape[1])]


@pytest.mark.parametrize("overrides", [{"num_classes": 3}, {"channels": 3}], ids=str)
def test_what_rows_share_is_computed_once_and_samples_are_the_same(overrides):
    """The paper's sampling draws the same images, 12 x 12 pixels in 31 times fewer FLOPs, with 3 channels 103 times."""
    model = make(**overrides).eval()
    given = model.example_inputs(2, height=6, width=7)
    shape = (*given.pop("image").shape, model.config.levels)
    noise, counted, images = -torch.empty(shape, dtype=torch.float64).exponential_().log(), [], []
    for drawing in (None, model.drawing()):
        with FlopCounterMode(display=False) as counter:
            images.append(sample(model, noise, drawing=drawing, **given))
        counted.append(counter.get_total_flops())
    assert torch.equal(*images)
    assert counted[0] > {1: 10, 3: 30}[model.config.channels] * counted[1]


def test_bits_are_those_of_cross_entropy():
    model = make(channels=2)
    image = model.example_inputs(2, height=4, width=5)["image"]
    bits, weight = BitsPerDim(model)(image)
    assert bits.shape == weight.shape == image.shape
    assert (weight == 1).all()
    wanted = F.cross_entropy(rearrange(model(image), "b c h w k -> (b c h w) k").float(), image.flatten())
    torch.testing.assert_close(bits.mean() * torch.log(torch.tensor(2.0)), wanted)
    fresh = zoo.create("axial_image", "test", levels=16)  # which gives all levels the same chance
    torch.testing.assert_close(BitsPerDim(fresh)(fresh.example_inputs()["image"])[0].mean(), torch.tensor(4.0))


# What every model owes


def test_wrong_inputs_are_refused():
    model = make()
    with pytest.raises(ValueError, match=r"an image of 2 channels of 5 x 13 pixels: .* height=12, width=12"):
        model(torch.zeros(1, 2, 5, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="a model built with num_classes=None takes no label"):
        model(torch.zeros(1, 1, 5, 5, dtype=torch.long), torch.zeros(1, dtype=torch.long))


def test_published_sizes_and_fresh_weights():
    for size, pixels in (("imagenet32", 32), ("imagenet64", 64)):
        with torch.device("meta"):
            model = zoo.create("axial_image", size)
            inputs = model.example_inputs(2)
            assert model(**inputs).shape == (2, 3, pixels, pixels, 256)
        assert not list(model.buffers())
    with torch.device("meta"):
        model = zoo.create("axial_image", "test", channels=3)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, torch.nan)
    model.init_weights()
    fresh = zoo.create("axial_image", "test", channels=3)
    for (name, param), other in zip(model.named_parameters(), fresh.parameters()):
        torch.testing.assert_close(param.std(), other.std(), rtol=0.5, atol=1e-9, msg=name)
    assert abs(model.positions.row.std() - 5 / 4) < 0.3
    assert model.inner[0].attention.out.weight.std() < 1e-5
