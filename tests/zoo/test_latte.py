"""Latte against diffusers: the text model whole, the others as its DiT with every second block turned to time."""

import json

import pytest
import torch
from einops import repeat

from tests.support.latte_oracles import DTYPES, text_oracle
from tests.support.oracles import agree, copy_weights
from zoo.video.latte import Latte, diffusers_names


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(
    ("batch", "frames", "height", "width", "sample_size", "masked"),
    [
        (2, 7, 8, 8, 8, True),
        (1, 5, 6, 10, 8, True),  # positions stretched over the grid trained on
        (2, 3, 10, 4, 8, False),
        (1, 1, 8, 8, 8, True),  # an image: no temporal positions
        (1, 4, 8, 6, 128, True),  # positions scaled for large frames
    ],
)
def test_text_model_agrees_with_diffusers(batch, frames, height, width, sample_size, masked, dtype, tolerance):
    torch.manual_seed(0)
    oracle = text_oracle(frames, sample_size).to(dtype)
    model = Latte.from_diffusers(oracle.state_dict(), oracle.config).to(dtype)
    copy_weights(model, oracle, diffusers_names)  # in full precision
    x, context = torch.randn(batch, 3, frames, height, width, dtype=dtype), torch.randn(batch, 7, 20, dtype=dtype)
    timestep, mask, bias = torch.rand(batch) * 1000, None, None
    if masked:
        # the second caption is empty in double only: a bias of -10000 costs diffusers half the digits of a float
        mask = torch.arange(7) < torch.tensor([4, 0 if dtype is torch.float64 else 6])[:batch, None]
        bias = repeat((~mask).to(dtype) * -10000, "b l -> (b t) 1 l", t=frames)

    agree(
        model,
        oracle,
        diffusers_names,
        lambda model, x: model(x, timestep, context=context, context_mask=mask),
        lambda oracle, x: oracle(x, timestep, context, bias).sample,
        x,
        tolerance,
    )


def test_weights_load_from_a_diffusers_directory(tmp_path):
    oracle = text_oracle(frames=3, layers=1)
    oracle.save_pretrained(tmp_path)
    model = Latte.from_diffusers(tmp_path)
    assert model.config.depth == 2
    assert model.config.learn_sigma
    again = Latte.from_diffusers(tmp_path / "diffusion_pytorch_model.safetensors", tmp_path / "config.json")
    inputs = model.example_inputs(frames=3)
    out = model(**inputs)
    assert out.std() > 0.1
    assert torch.equal(out, again(**inputs))


def test_weights_of_another_model_are_refused(tmp_path):
    oracle = text_oracle(frames=3, layers=1)
    state, config = oracle.state_dict(), dict(oracle.config)
    with pytest.raises(ValueError, match="unknown: more"):
        Latte.from_diffusers({**state, "more": torch.zeros(1)}, config)
    with pytest.raises(ValueError, match=r"missing: proj_out\.bias"):
        Latte.from_diffusers({k: v for k, v in state.items() if k != "proj_out.bias"}, config)
    with pytest.raises(ValueError, match=r"proj_out\.weight is \(24, 4\), the model's \(24, 48\)"):
        Latte.from_diffusers({**state, "proj_out.weight": torch.zeros(24, 4)}, config)
    with pytest.raises(ValueError, match="activation_fn='geglu' in the diffusers config"):
        Latte.from_diffusers(state, {**config, "activation_fn": "geglu"})
    with pytest.raises(ValueError, match="pass the model's config"):
        Latte.from_diffusers(state)
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(ValueError, match=r"holds no \.safetensors"):
        Latte.from_diffusers(tmp_path)
