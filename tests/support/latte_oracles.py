"""Latte from diffusers' blocks: the layers, their names, their weights."""

from __future__ import annotations

import torch
from einops import rearrange, repeat
from torch import nn

from tests.support.oracles import Attention, diffusers, frame_table, randomise
from zoo.video.latte_weights import diffusers_names

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


WIDTH, HEADS = 48, 4


def attention(heads, **kwargs):
    return Attention(WIDTH, heads=heads, dim_head=WIDTH // HEADS, bias=True, **kwargs)


def number_frames(block, frames):
    """The temporal table is added to ((b t) s c) before ``block``."""

    def add(block, args):
        table = repeat(frame_table(frames, WIDTH).to(args[0].dtype), "t c -> (b t) 1 c", b=len(args[0]) // frames)
        return (args[0] + table, *args[1:])

    block.register_forward_pre_hook(add)


class Parts(nn.Module):
    """A linear layer whose outputs are parameters of several."""

    def __init__(self, *rows):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for n in rows)

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], -1)


LAYERS = {
    "qkv": ["to_q", "to_k", "to_v"],
    "q": ["to_q"],
    "kv": ["to_k", "to_v"],
    "out": ["to_out.0"],
    "up": ["net.0.proj"],
    "down": ["net.2"],
}
