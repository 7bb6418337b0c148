"""Unmodified models of other packages, with their stages and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn


@dataclass
class Model:
    build: Callable[[int, int], nn.Module]  # of two lengths
    inputs: Callable[[int, int, int], dict[str, Tensor]]  # of batch and two lengths
    stages: dict[str, str]


def timesformer(frames: int, side: int) -> nn.Module:
    """Divided space-time attention, with a class token that is copied for every frame and averaged over them."""
    config = transformers.TimesformerConfig(
        image_size=2 * side, patch_size=2, num_channels=2, num_frames=frames, hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=5,
    )  # fmt: skip
    return transformers.TimesformerForVideoClassification(config)


def patchtst(steps: int, variables: int) -> nn.Module:
    """Attention over time within each variable, then, by the same weights, over variables at each time."""
    config = transformers.PatchTSTConfig(
        num_input_channels=variables, context_length=4 * steps, patch_length=4, patch_stride=4, prediction_length=3,
        d_model=16, num_attention_heads=2, ffn_dim=32, num_hidden_layers=2, norm_type="layernorm",
        channel_attention=True, scaling="std", loss="mse", dropout=0.0, head_dropout=0.0,
    )  # fmt: skip
    return transformers.PatchTSTForPrediction(config)


def axial(height: int, width: int) -> nn.Module:
    """Axial attention over the three dims of a video, twice."""
    import axial_attention

    return nn.Sequential(
        *(axial_attention.AxialAttention(16, num_dimensions=3, heads=2, sum_axial_out=False) for _ in range(2))
    )


MODELS: dict[str, Model] = {
    "timesformer": Model(
        timesformer,
        lambda b, t, s: {"pixel_values": torch.randn(b, t, 2, 2 * s, 2 * s)},
        {
            "": "pixel_values=b t c h w",
            "timesformer.embeddings.patch_embeddings.projection": "(b t) [c h w] -> (b t) [d p q]",
            "timesformer.encoder.layer.*.temporal_attention": "(b s) [t d]",
            "timesformer.encoder.layer.*.attention": "(b t) [s d]",
        },
    ),
    "patchtst": Model(
        patchtst,
        lambda b, t, v: {"past_values": torch.randn(b, 4 * t, v)},
        {"": "past_values=b l v", "model.encoder.layers.*.self_attn": "(b n) [l d]"},
    ),
    "axial": Model(
        axial,
        lambda b, h, w: {"input": torch.randn(b, 3, h, w, 16)},
        {
            "": "input=b t h w d",
            "*.axial_attentions.0.fn": "(b h w) [t d]",
            "*.axial_attentions.1.fn": "(b t w) [h d]",
            "*.axial_attentions.2.fn": "(b t h) [w d]",
        },
    ),
}


def make(name: str, one: int, two: int) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name].build(one, two)
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.3)
    return model.double().train()
