"""Weights of HunyuanVideo as diffusers publishes them, in and out of its HunyuanVideoTransformer3DModel."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zoo.reference import Names, count, described, load_renamed, write_renamed
from zoo.video.hunyuan import THETA, Config, HunyuanVideo

CLASSES = ("HunyuanVideoTransformer3DModel",)


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> HunyuanVideo:
    """Build the model of diffusers' HunyuanVideoTransformer3DModel from its state dict.

    The width of a head is that of the norm of its queries.
    """
    if missing := [name for name in ("x_embedder.proj.weight", "proj_out.bias") if name not in state]:
        raise ValueError(f"not diffusers' HunyuanVideo: no {', '.join(missing)}")
    hidden, channels, *patch = state["x_embedder.proj.weight"].shape
    values: dict[str, Any] = {
        "hidden": hidden,
        "depth": count(state, "transformer_blocks.{}."),
        "single": count(state, "single_transformer_blocks.{}."),
        "refiner": count(state, "context_embedder.token_refiner.refiner_blocks.{}."),
        "patch": tuple(patch),
        "in_channels": channels,
        "condition_channels": channels - len(state["proj_out.bias"]) // math.prod(patch),
        "guidance": "time_text_embed.guidance_embedder.linear_1.weight" in state,
    }
    for key, name in (
        ("caption_channels", "context_embedder.proj_in.weight"),
        ("pooled_channels", "time_text_embed.text_embedder.linear_1.weight"),
    ):
        if name in state:
            values[key] = state[name].shape[1]
    if (width := state.get("transformer_blocks.0.attn.norm_q.weight")) is not None:
        values["heads"] = hidden // len(width)
    model = HunyuanVideo(Config(**values | overrides))
    load_renamed(model, state, diffusers_names)
    return model


@described("HunyuanVideoTransformer3DModel", Config)
def published_settings(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a HunyuanVideoTransformer3DModel's config; ValueError if it differs in more than sizes."""
    size, channels = config["attention_head_dim"], config["in_channels"]
    fixed = {
        "mlp_ratio": 4.0,
        "patch_size_t": 1,
        "qk_norm": "rms_norm",
        "rope_theta": THETA,
        "rope_axes_dim": rope_axes(size),
    }
    for key, value in fixed.items():
        written = config.get(key, value)
        if (tuple(written) if isinstance(written, list) else written) != value:
            raise ValueError(f"{key}={written!r} in the diffusers config: HunyuanVideo has {value!r}")
    if config.get("image_condition_type") not in (None, "latent_concat"):
        raise ValueError(
            f"image_condition_type={config['image_condition_type']!r} in the diffusers config: HunyuanVideo takes an "
            "image as further channels (latent_concat) or not at all"
        )
    return {
        "hidden": config["num_attention_heads"] * size,
        "depth": config["num_layers"],
        "single": config["num_single_layers"],
        "refiner": config["num_refiner_layers"],
        "heads": config["num_attention_heads"],
        "patch": (1, config["patch_size"], config["patch_size"]),
        "in_channels": channels,
        "condition_channels": channels - config["out_channels"],
        "caption_channels": config["text_embed_dim"],
        "pooled_channels": config["pooled_projection_dim"],
        "guidance": config["guidance_embeds"],
    }


def rope_axes(size: int) -> tuple[int, int, int]:
    """The channels of a head of `size` that are rotated by frame, row and column."""
    return size // 8, (size - size // 8) // 2, (size - size // 8) // 2


def to_diffusers(model: HunyuanVideo, frames: int = 0) -> Any:
    """diffusers' `HunyuanVideoTransformer3DModel` with the model's weights; it takes clips of any number of frames.

    ValueError: the model takes no pooled text, which diffusers' model needs.
    """
    from diffusers import HunyuanVideoTransformer3DModel

    c = model.config
    if not c.pooled_channels:
        raise ValueError("diffusers' HunyuanVideo takes a pooled text embedding; this model has pooled_channels=0")
    size = c.hidden // c.heads
    theirs: Any = HunyuanVideoTransformer3DModel(
        in_channels=c.in_channels, out_channels=c.out_channels, num_attention_heads=c.heads, attention_head_dim=size,
        num_layers=c.depth, num_single_layers=c.single, num_refiner_layers=c.refiner, patch_size=c.patch[1],
        guidance_embeds=c.guidance, text_embed_dim=c.caption_channels, pooled_projection_dim=c.pooled_channels,
        rope_theta=THETA, rope_axes_dim=rope_axes(size),
        image_condition_type="latent_concat" if c.condition_channels else None,
    )  # fmt: skip
    write_renamed(model, theirs, diffusers_names)
    return theirs


def published_names(model: HunyuanVideo) -> Names:
    """The names that weights of a model are published under."""
    return diffusers_names


def diffusers_names(name: str) -> list[str]:
    """The diffusers parameters that make up one of ours, to be stacked along dim 0."""
    stem, dot, suffix = name.rpartition(".")
    for pattern, (theirs, table) in STACKS.items():
        if match := re.fullmatch(pattern, stem):
            return [f"{theirs.format(match[1])}.{part}{dot}{suffix}" for part in table[match[2]].split()]
    return [NAMES[stem] + dot + suffix]


NAMES = {
    "embed": "x_embedder.proj",
    "t_embed.mlp.up": "time_text_embed.timestep_embedder.linear_1",
    "t_embed.mlp.down": "time_text_embed.timestep_embedder.linear_2",
    "guidance.mlp.up": "time_text_embed.guidance_embedder.linear_1",
    "guidance.mlp.down": "time_text_embed.guidance_embedder.linear_2",
    "pooled.up": "time_text_embed.text_embedder.linear_1",
    "pooled.down": "time_text_embed.text_embedder.linear_2",
    "refiner.t_embed.mlp.up": "context_embedder.time_text_embed.timestep_embedder.linear_1",
    "refiner.t_embed.mlp.down": "context_embedder.time_text_embed.timestep_embedder.linear_2",
    "refiner.mean.up": "context_embedder.time_text_embed.text_embedder.linear_1",
    "refiner.mean.down": "context_embedder.time_text_embed.text_embedder.linear_2",
    "refiner.embed": "context_embedder.proj_in",
    "final.modulation.linear": "norm_out.linear",
    "final.linear": "proj_out",
}
STACKS = {
    r"refiner\.blocks\.(\d+)\.(.+)": (
        "context_embedder.token_refiner.refiner_blocks.{}",
        {
            "gates.linear": "norm_out.linear",
            "norm": "norm1",
            "mlp_norm": "norm2",
            "qkv": "attn.to_q attn.to_k attn.to_v",
            "out": "attn.to_out.0",
            "mlp.up": "ff.net.0.proj",
            "mlp.down": "ff.net.2",
        },
    ),
    r"blocks\.(\d+)\.(.+)": (
        "transformer_blocks.{}",
        {
            "modulation.linear": "norm1.linear",
            "text_modulation.linear": "norm1_context.linear",
            "queries.qkv": "attn.to_q attn.to_k attn.to_v",
            "queries.q_norm": "attn.norm_q",
            "queries.k_norm": "attn.norm_k",
            "text_queries.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
            "text_queries.q_norm": "attn.norm_added_q",
            "text_queries.k_norm": "attn.norm_added_k",
            "update.out": "attn.to_out.0",
            "update.mlp.up": "ff.net.0.proj",
            "update.mlp.down": "ff.net.2",
            "text_update.out": "attn.to_add_out",
            "text_update.mlp.up": "ff_context.net.0.proj",
            "text_update.mlp.down": "ff_context.net.2",
        },
    ),
    r"singles\.(\d+)\.(.+)": (
        "single_transformer_blocks.{}",
        {
            "modulation.linear": "norm.linear",
            "queries.qkv": "attn.to_q attn.to_k attn.to_v",
            "queries.q_norm": "attn.norm_q",
            "queries.k_norm": "attn.norm_k",
            "queries.mlp": "proj_mlp",
            "update.out": "proj_out",
        },
    ),
}
