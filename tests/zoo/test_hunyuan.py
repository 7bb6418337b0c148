"""HunyuanVideo against diffusers' HunyuanVideoTransformer3DModel."""

import pytest
import torch

import zoo
from tests.support.oracles import agree, copy_weights, diffusers, randomise
from tests.support.slow import slow
from zoo.video.hunyuan import diffusers_names, from_reference, to_diffusers


def oracle(**overrides):
    config = {
        "num_attention_heads": 3,
        "attention_head_dim": 32,
        "in_channels": 3,
        "out_channels": 3,
        "num_layers": 2,
        "num_single_layers": 2,
        "text_embed_dim": 20,
        "pooled_projection_dim": 6,
        "rope_axes_dim": (4, 14, 14),
    }
    model = diffusers.HunyuanVideoTransformer3DModel(**{**config, **overrides})
    randomise(model)
    return model


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), slow(torch.float32, 1e-4)])
@pytest.mark.parametrize(
    ("options", "frames", "height", "width"),
    [({}, 3, 6, 10), slow({"guidance_embeds": False}, 1, 4, 4), slow({"in_channels": 7, "num_layers": 1}, 2, 4, 6)],
)
def test_agrees_with_diffusers(options, frames, height, width, dtype, tolerance):
    torch.manual_seed(0)
    theirs = oracle(**options).to(dtype)
    model = zoo.from_reference("hunyuan", theirs.state_dict()).to(dtype)
    copy_weights(model, theirs, diffusers_names)  # in full precision
    guided = model.config.guidance
    channels = model.config.in_channels
    assert (channels, model.config.out_channels) == (options.get("in_channels", 3), 3)
    x, context = torch.randn(2, channels, frames, height, width, dtype=dtype), torch.randn(2, 7, 20, dtype=dtype)
    timestep, mask = torch.tensor([61.5, 999.0]), torch.arange(7) < torch.tensor([[4], [7]])
    pooled, guidance = torch.randn(2, 6, dtype=dtype), torch.tensor([6000.0, 1000.0]) if guided else None

    agree(
        model,
        theirs,
        diffusers_names,
        lambda model, x: model(x, timestep, context, mask, pooled, guidance),
        lambda theirs, x: theirs(x, timestep, context, mask.int(), pooled, guidance).sample,
        x,
        tolerance,
    )


def test_an_empty_caption_is_a_text_of_nothing():
    torch.manual_seed(0)
    model = zoo.create("hunyuan", "test")
    randomise(model)
    inputs = model.example_inputs(2)
    inputs["context_mask"][1] = False
    assert model(**inputs).isfinite().all()


def test_weights_of_another_model_are_refused():
    state = oracle().state_dict()
    with pytest.raises(ValueError, match=r"missing: norm_out\.linear\.bias"):
        zoo.from_reference("hunyuan", {k: v for k, v in state.items() if k != "norm_out.linear.bias"})
    with pytest.raises(ValueError, match=r"not diffusers' HunyuanVideo: no x_embedder\.proj\.weight"):
        zoo.from_reference("hunyuan", {})
    with pytest.raises(ValueError, match="hidden=96 in heads=4: a head needs a multiple of 32 channels"):
        zoo.from_reference("hunyuan", state, heads=4)


@pytest.mark.parametrize("size", ["13B", slow("i2v-13B")])
def test_parameters_are_those_of_diffusers(size):
    with torch.device("meta"):
        model = zoo.create("hunyuan", size)
        theirs = diffusers.HunyuanVideoTransformer3DModel(in_channels=model.config.in_channels)
    ours = {name: param.numel() for name, param in model.named_parameters()}
    numbers = {name: param.numel() for name, param in theirs.named_parameters()}
    assert {n for name in ours for n in diffusers_names(name)} == set(numbers)
    assert all(sum(numbers[n] for n in diffusers_names(name)) == count for name, count in ours.items())
    assert f"{sum(ours.values()):,}" in zoo.video.hunyuan.__doc__


def test_diffusers_takes_a_model_back():
    torch.manual_seed(0)
    model = zoo.create("hunyuan", "test")
    randomise(model)
    again = from_reference(to_diffusers(model).state_dict())
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
