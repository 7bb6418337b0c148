"""Weights of Wan as diffusers publishes them, in and out of its WanTransformer3DModel."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zoo.reference import Names, count, described, load_renamed, write_renamed
from zoo.video.wan import Config, Wan

CLASSES = ("WanTransformer3DModel",)


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Wan:
    """Build the model of diffusers' WanTransformer3DModel from its state dict.

    As in all published models, heads have 128 channels, and 48 latent channels mean Wan 2.2's 5B, with a timestep for
    each frame: ``heads`` and ``frame_times`` override these assumptions.
    """
    if missing := [name for name in (NAMES["embed"] + ".weight", NAMES["caption.up"] + ".weight") if name not in state]:
        raise ValueError(f"not diffusers' Wan: no {', '.join(missing)}")
    hidden, channels, *patch = state[NAMES["embed"] + ".weight"].shape
    values: dict[str, Any] = {
        "hidden": hidden,
        "depth": count(state, "blocks.{}."),
        "heads": hidden // 128,
        "patch": tuple(patch),
        "in_channels": channels,
        "caption_channels": state[NAMES["caption.up"] + ".weight"].shape[1],
        "frame_times": channels == 48,
    }
    if (out := state.get(NAMES["final.linear"] + ".bias")) is not None:
        values["condition_channels"] = channels - len(out) // math.prod(patch)
    if (image := state.get(NAMES["image.mlp.up"] + ".weight")) is not None:
        values["image_channels"] = image.shape[1]
    if (up := state.get("blocks.0.ffn.net.0.proj.weight")) is not None:
        values["mlp"] = len(up)
    values |= overrides
    if not values["heads"]:
        raise ValueError(f"no Wan of hidden={hidden} was published: say how many heads it has, heads=")
    model = Wan(Config(**values))
    load_renamed(model, state, diffusers_names, ignore=[name for name in state if "norm_added_q" in name])
    return model


@described("WanTransformer3DModel", Config)
def published_settings(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a WanTransformer3DModel's config; ValueError if it differs in more than sizes.

    A timestep for each frame is what ``expand_timesteps`` of the pipeline says, else a matter of 48 channels.
    """
    fixed = {
        "freq_dim": 256, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads", "eps": 1e-6,
        "pos_embed_seq_len": None,
    }  # fmt: skip
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]!r} in the diffusers config: Wan has {value!r}")
    channels, expand = config["in_channels"], pipeline.get("expand_timesteps")
    return {
        "hidden": config["num_attention_heads"] * config["attention_head_dim"],
        "depth": config["num_layers"],
        "heads": config["num_attention_heads"],
        "mlp": config["ffn_dim"],
        "patch": tuple(config["patch_size"]),
        "in_channels": channels,
        "condition_channels": channels - (config["out_channels"] or channels),
        "caption_channels": config["text_dim"],
        "image_channels": config.get("image_dim") or 0,
        "frame_times": channels == 48 if expand is None else expand,
    }


def to_diffusers(model: Wan, frames: int = 0) -> Any:
    """diffusers' `WanTransformer3DModel` with the model's weights, for clips of any number of frames."""
    from diffusers import WanTransformer3DModel

    c = model.config
    image = {"image_dim": c.image_channels, "added_kv_proj_dim": c.hidden} if c.image_channels else {}
    theirs: Any = WanTransformer3DModel(
        patch_size=c.patch, num_attention_heads=c.heads, attention_head_dim=c.hidden // c.heads,
        in_channels=c.in_channels, out_channels=c.out_channels, text_dim=c.caption_channels, ffn_dim=c.mlp,
        num_layers=c.depth, **image,
    )  # fmt: skip
    write_renamed(model, theirs, diffusers_names)
    return theirs


def published_names(model: Wan) -> Names:
    """The names that weights of a model are published under."""
    return diffusers_names


def diffusers_names(name: str) -> list[str]:
    """The diffusers parameters that make up one of ours, to be stacked along dim 0."""
    block, i, layer = re.fullmatch(r"(?:(blocks)\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
    layer, dot, suffix = layer.rpartition(".") if layer.endswith((".weight", ".bias")) else (layer, "", "")
    if block is None:
        return [NAMES[layer] + dot + suffix]
    return [f"blocks.{i}.{theirs}{dot}{suffix}" for theirs in BLOCK_NAMES[layer].split()]


NAMES = {
    "embed": "patch_embedding",
    "t_embed.mlp.up": "condition_embedder.time_embedder.linear_1",
    "t_embed.mlp.down": "condition_embedder.time_embedder.linear_2",
    "t_block": "condition_embedder.time_proj",
    "caption.up": "condition_embedder.text_embedder.linear_1",
    "caption.down": "condition_embedder.text_embedder.linear_2",
    "image.norm": "condition_embedder.image_embedder.norm1",
    "image.mlp.up": "condition_embedder.image_embedder.ff.net.0.proj",
    "image.mlp.down": "condition_embedder.image_embedder.ff.net.2",
    "image.out_norm": "condition_embedder.image_embedder.norm2",
    "final.modulation.table": "scale_shift_table",
    "final.linear": "proj_out",
}
BLOCK_NAMES = {
    "modulation.table": "scale_shift_table",
    "queries.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "queries.q_norm": "attn1.norm_q",
    "queries.k_norm": "attn1.norm_k",
    "update.out": "attn1.to_out.0",
    "update.norm": "norm2",
    "update.cross.q": "attn2.to_q",
    "update.cross.kv": "attn2.to_k attn2.to_v",
    "update.cross.q_norm": "attn2.norm_q",
    "update.cross.k_norm": "attn2.norm_k",
    "update.cross.image_kv": "attn2.add_k_proj attn2.add_v_proj",
    "update.cross.image_k_norm": "attn2.norm_added_k",
    "update.cross.out": "attn2.to_out.0",
    "update.mlp.up": "ffn.net.0.proj",
    "update.mlp.down": "ffn.net.2",
}
