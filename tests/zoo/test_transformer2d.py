"""Transformer-2D against diffusers: the paper's block as its Latte without text, STDiT's as its PixArt plus time."""

import pytest
import torch
from einops import rearrange, repeat
from torch import nn

import zoo
from tests.support.oracles import (
    Attention,
    agree,
    copy_weights,
    diffusers,
    frame_table,
    randomise,
    raw_positions,
    to_frames,
)
from zoo.video.latte import diffusers_names

COMMON = {
    "num_attention_heads": 4,
    "attention_head_dim": 12,
    "in_channels": 3,
    "num_layers": 2,
    "attention_bias": True,
    "patch_size": 2,
    "activation_fn": "gelu-approximate",
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "sample_size": 8,
}
SHAPES = [(2, 7, 8, 8), (1, 4, 6, 10), (2, 1, 4, 8)]
DTYPES = [(torch.float64, 1e-9), (torch.float32, 1e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("classes", [None, 5])
def test_paper_block_agrees_with_diffusers_latte(classes, shape, dtype, tolerance):
    torch.manual_seed(0)
    batch, frames, height, width = shape
    oracle = diffusers.LatteTransformer3DModel(**COMMON, out_channels=3, caption_channels=8, video_length=frames)
    oracle.labels = nn.Embedding(6, 48)
    randomise(oracle)
    oracle = oracle.to(dtype)
    raw_positions(oracle, height // 2, width // 2)
    model = zoo.create("transformer2d", "test", in_channels=3, num_classes=classes).to(dtype)
    timestep, label = torch.rand(batch) * 1000, torch.tensor([2, 5])[:batch]
    given, unused = {}, ("caption_projection", "labels")
    if classes:
        given, unused = {"label": label}, ("caption_projection",)
        oracle.adaln_single.emb.register_forward_hook(lambda emb, args, out: out + oracle.labels(label))

    def names(name):
        return ["labels.weight"] if name == "label_embed.table.weight" else diffusers_names(name)

    copy_weights(model, oracle, names)
    agree(
        model,
        oracle,
        names,
        lambda model, x: model(x, timestep, **given),
        lambda oracle, x: oracle(x, timestep, x.new_zeros(batch, 1, 8)).sample,
        torch.randn(batch, 3, frames, height, width, dtype=dtype),
        tolerance,
        unused,
    )


class TimeThenText(nn.Module):
    """In the place of a PixArt block's attention to text: Open-Sora's gated attention across frames, and then text."""

    def __init__(self, block, frames, first):
        super().__init__()
        self.frames, self.first = frames, first
        self.text = block.attn2
        self.time = Attention(query_dim=48, heads=4, dim_head=12, bias=True)
        block.register_forward_pre_hook(self.remember_gate, with_kwargs=True)

    def remember_gate(self, block, args, kwargs):
        gates = block.scale_shift_table + kwargs["timestep"].unflatten(1, (6, -1))
        self.gate = gates[:, 2:3]

    def forward(self, x, encoder_hidden_states=None, attention_mask=None):
        y = rearrange(x, "(b t) s c -> (b s) t c", t=self.frames)
        y = self.time(y + frame_table(self.frames, 48).to(x.dtype) if self.first else y)
        y = self.gate * rearrange(y, "(b s) t c -> (b t) s c", s=x.shape[1])
        if self.text is None:
            return y
        return y + self.text(x + y, encoder_hidden_states=encoder_hidden_states, attention_mask=attention_mask)


def stdit_oracle(frames, text):
    channels = {"cross_attention_dim": 48, "caption_channels": 20} if text else {"cross_attention_dim": None}
    oracle = diffusers.PixArtTransformer2DModel(**COMMON, **channels, out_channels=6)
    for i, block in enumerate(oracle.transformer_blocks):
        block.attn2 = TimeThenText(block, frames, first=i == 0)
    randomise(oracle)
    return oracle


def stdit_names(name):
    """Ours, with one modulation a layer and text in the temporal stage, by the names of a PixArt block."""
    name = name.replace(".modulation.", ".spatial.modulation.") if name.startswith("blocks.") else name
    if ".temporal.attention." in name:
        return [n.replace("temporal_t", "t").replace("attn1", "attn2.time") for n in diffusers_names(name)]
    if ".temporal." in name:
        name = name.replace(".temporal.", ".spatial.")
    return [n.replace("attn2", "attn2.text") for n in diffusers_names(name)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("text", [True, False])
def test_stdit_block_agrees_with_diffusers_pixart_and_time(text, shape, dtype, tolerance):
    torch.manual_seed(0)
    batch, frames, height, width = shape
    oracle = stdit_oracle(frames, text).to(dtype)
    raw_positions(oracle, height // 2, width // 2)
    model = zoo.create(
        "transformer2d", "test", block="stdit", in_channels=3, learn_sigma=True, caption_channels=20 if text else 0
    ).to(dtype)
    copy_weights(model, oracle, stdit_names)
    timestep, context, mask = torch.rand(batch) * 1000, None, None
    if text:
        context = torch.randn(batch, 7, 20, dtype=dtype)
        mask = torch.arange(7) < torch.tensor([4, 6])[:batch, None]

    def run_oracle(oracle, x):
        steps, texts, masks = (
            None if y is None else repeat(y, "b ... -> (b t) ...", t=frames) for y in (timestep, context, mask)
        )
        added = {"resolution": None, "aspect_ratio": None}
        out = oracle(to_frames(x), texts, steps, added, encoder_attention_mask=masks).sample
        return rearrange(out, "(b t) o h w -> b o t h w", t=frames)

    agree(
        model,
        oracle,
        stdit_names,
        lambda model, x: model(x, timestep, context=context, context_mask=mask),
        run_oracle,
        torch.randn(batch, 3, frames, height, width, dtype=dtype),
        tolerance,
    )
