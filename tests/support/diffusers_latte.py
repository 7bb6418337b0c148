"""The acceptance model: diffusers' LatteTransformer3DModel, its stages and inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STAGES = {
    "": "hidden_states=b c t h w, encoder_attention_mask=(b t) 1 l -> b c t h w",
    "pos_embed": "(b t) [c h w] -> (b t) [s d]",
    "transformer_blocks.*": "(b t) [s d], encoder_hidden_states=(b t) [l d], "
    "encoder_attention_mask=(b t) 1 [l], timestep=(b t) [e]",
    "temporal_transformer_blocks.*": "(b s) [t d], timestep=(b s) [e]",
}


def build(frames: int, side: int, layers: int = 2, seed: int = 0, heads: int = 2, dtype=torch.float64) -> Any:
    from diffusers import LatteTransformer3DModel

    torch.manual_seed(seed)
    model = LatteTransformer3DModel(
        num_attention_heads=heads, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=layers,
        cross_attention_dim=8 * heads, attention_bias=True, sample_size=side, patch_size=2, caption_channels=12,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
        video_length=frames,
    )  # fmt: skip
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model.to(dtype)


def inputs(batch: int, frames: int, side: int, dtype=torch.float64, text: int = 6) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    mask = torch.zeros(batch * frames, 1, text, dtype=dtype)
    mask[: batch * frames // 2, :, 4:] = -10000.0
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side, generator=g, dtype=dtype),
        "timestep": torch.tensor([3, 500, 70])[:batch],
        "encoder_hidden_states": torch.randn(batch, text, 12, generator=g, dtype=dtype),
        "encoder_attention_mask": mask,
    }
