"""Latte against diffusers: the text model whole, the others as its DiT with every second block turned to time."""

import json

import pytest
import torch
from einops import rearrange, repeat
from zoo_oracles import agree, copy_weights, diffusers, frame_table, randomise

from zoo.video.latte import Latte, diffusers_names

DTYPES = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


def text_oracle(frames, sample_size=8, layers=2, **overrides):
    config = {
        "num_attention_heads": 4,
        "attention_head_dim": 12,
        "in_channels": 3,
        "out_channels": 6,
        "num_layers": layers,
        "cross_attention_dim": 48,
        "attention_bias": True,
        "sample_size": sample_size,
        "patch_size": 2,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_single",
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "caption_channels": 20,
        "video_length": frames,
    }
    oracle = diffusers.LatteTransformer3DModel(**{**config, **overrides})
    randomise(oracle)
    return oracle


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


DIT = {
    "embed.proj": "pos_embed.proj",
    "t_embed.mlp.up": "transformer_blocks.0.norm1.emb.timestep_embedder.linear_1",
    "t_embed.mlp.down": "transformer_blocks.0.norm1.emb.timestep_embedder.linear_2",
    "label_embed.table": "transformer_blocks.0.norm1.emb.class_embedder.embedding_table",
    "final.modulation.linear": "proj_out_1",
    "final.linear": "proj_out_2",
}


def dit_names(name):
    if not name.startswith("blocks."):
        layer, _, suffix = name.rpartition(".")
        return [f"{DIT[layer]}.{suffix}"]
    _, i, kind, rest = name.split(".", 3)
    block = 2 * int(i) + (kind == "temporal")
    if rest.startswith("modulation.linear"):
        return [f"transformer_blocks.{block}.norm1.{rest.removeprefix('modulation.')}"]
    return [f"transformer_blocks.{block}.{n.split('.', 2)[2]}" for n in diffusers_names(name)]


def dit_oracle(frames, size, classes, turned=True, layers=4):
    """diffusers' DiT, which hooks make a Latte V1: each odd block sees frames for patches and patches for samples."""
    oracle = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=3,
        out_channels=6,
        num_layers=layers,
        sample_size=size,
        num_embeds_ada_norm=classes,
        norm_eps=1e-6,
    )
    randomise(oracle)
    shared = oracle.transformer_blocks[0].norm1.emb
    shared.time_proj.downscale_freq_shift = 0  # DiT's own frequencies, which diffusers' differ from
    for i, block in enumerate(oracle.transformer_blocks):
        block.norm1.emb = shared
        if turned and i % 2:
            turn(block, frames, (size // 2) ** 2, first=i == 1)
    return oracle.eval()


def turn(block, frames, patches, first):
    def to_time(block, args, kwargs):
        x = rearrange(args[0], "(b t) s c -> (b s) t c", t=frames)
        if first and frames > 1:
            x = x + frame_table(frames, x.shape[-1]).to(x.dtype)
        for key in ("timestep", "class_labels"):
            kwargs[key] = repeat(kwargs[key][::frames], "b -> (b s)", s=patches)
        return (x,), kwargs

    def to_space(block, args, out):
        return rearrange(out, "(b s) t c -> (b t) s c", s=patches)

    block.register_forward_pre_hook(to_time, with_kwargs=True)
    block.register_forward_hook(to_space)


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
