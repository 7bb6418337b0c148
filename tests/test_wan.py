"""Wan against diffusers' WanTransformer3DModel; its training on several ranks against one process."""

import pytest
import torch
from slow import slow
from zoo_oracles import agree, copy_weights, diffusers, randomise

import zoo
from zoo.video.wan import diffusers_names


def oracle(**overrides):
    config = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 3,
        "out_channels": 3,
        "text_dim": 20,
        "ffn_dim": 40,
        "num_layers": 2,
    }
    model = diffusers.WanTransformer3DModel(**{**config, **overrides})
    randomise(model)
    return model


@pytest.fixture
def double_stays_double(monkeypatch):
    """diffusers' Wan computes norms and modulation in float32, whatever its type: let float64 be."""
    to_float = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype is torch.float64 else to_float(x))


@pytest.mark.usefixtures("double_stays_double")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("batch", "frames", "height", "width", "heads"),
    [(2, 7, 6, 10, 4), (1, 1, 8, 8, 3), slow(1, 3, 4, 2, 2)],  # heads of 12, 16 and 24 channels: thirds that are uneven
)
def test_agrees_with_diffusers(batch, frames, height, width, heads, dtype, tolerance):
    torch.manual_seed(0)
    theirs = oracle(num_attention_heads=heads, attention_head_dim=48 // heads).to(dtype)
    model = zoo.from_reference("wan", theirs.state_dict(), heads=heads).to(dtype)
    copy_weights(model, theirs, diffusers_names)  # in full precision
    assert model.config.mlp == 40
    x, context = torch.randn(batch, 3, frames, height, width, dtype=dtype), torch.randn(batch, 7, 20, dtype=dtype)
    timestep, mask = torch.tensor([61.5, 999.0])[:batch], torch.arange(7) < torch.tensor([4, 7])[:batch, None]
    padded = context * mask[..., None]  # as WanPipeline pads short captions

    agree(
        model,
        theirs,
        diffusers_names,
        lambda model, x: model(x, timestep, context=context, context_mask=mask),
        lambda theirs, x: theirs(x, timestep, padded).sample,
        x,
        tolerance,
    )


def test_weights_of_another_model_are_refused():
    state = oracle().state_dict()
    with pytest.raises(ValueError, match=r"missing: proj_out\.bias"):
        zoo.from_reference("wan", {k: v for k, v in state.items() if k != "proj_out.bias"}, heads=4)
    with pytest.raises(ValueError, match=r"no Wan of hidden=48 was published: say how many heads it has, heads="):
        zoo.from_reference("wan", state)
    with pytest.raises(ValueError, match=r"not diffusers' Wan: no patch_embedding\.weight"):
        zoo.from_reference("wan", {})
    with_image = oracle(added_kv_proj_dim=48, image_dim=8).state_dict()
    with pytest.raises(ValueError, match=r"unknown: .*add_k_proj"):
        zoo.from_reference("wan", with_image, heads=4)
    with pytest.raises(ValueError, match="hidden=48 in heads=12: rotary positions in three dims need an even number"):
        zoo.from_reference("wan", state, heads=12)


@pytest.mark.parametrize("size", ["1.3B", slow("14B")])
def test_parameters_are_those_of_diffusers(size):
    with torch.device("meta"):
        model = zoo.create("wan", size)
        config = model.config
        theirs = diffusers.WanTransformer3DModel(
            num_attention_heads=config.heads, attention_head_dim=128, ffn_dim=config.mlp, num_layers=config.depth
        )
    ours = {name: param.numel() for name, param in model.named_parameters()}
    numbers = {name: param.numel() for name, param in theirs.named_parameters()}
    assert {n for name in ours for n in diffusers_names(name)} == set(numbers)
    assert all(sum(numbers[n] for n in diffusers_names(name)) == count for name, count in ours.items())
