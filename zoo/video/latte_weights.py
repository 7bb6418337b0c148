"""Weights of Latte as its authors and diffusers publish them, in and out of diffusers' LatteTransformer3DModel."""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.files import read_table
from zoo.reference import Names, count, described, load_renamed, read_safetensors, write_renamed
from zoo.video.latte import SIZES, Config, Latte

log = logging.getLogger(__name__)

KERNEL_DIMS = 2  # of the kernel that embeds patches
CLASSES = ("LatteTransformer3DModel",)


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> Latte:
    """Build variant 1 from a state dict of the authors' code (the ``"ema"`` of a checkpoint) or of diffusers' model.

    ``heads``, and ``sample_size`` of a text model (64 cells a side), are those of the published model of this width,
    which is logged. For other widths they have to be given.
    """
    text = "adaln_single.linear.weight" in state
    names = diffusers_names if text else official_names
    (patches,), (out,) = names("embed.proj.weight"), names("final.linear.weight")
    if missing := [name for name in (patches, out) if name not in state]:
        raise ValueError(f"neither the authors' nor diffusers' Latte: no {', '.join(missing)}")
    hidden, channels, patch, _ = state[patches].shape
    published = [size for name, size in SIZES.items() if size["hidden"] == hidden and name != "test"]
    values: dict[str, Any] = {
        "hidden": hidden,
        "depth": 2 * count(state, "transformer_blocks.{}.") if text else count(state, "blocks.{}."),
        "heads": next((size["heads"] for size in published), None),
        "patch": (1, patch, patch),
        "in_channels": channels,
        "learn_sigma": len(state[out]) == 2 * channels * patch**2,
    }
    if text:
        captions = state["caption_projection.linear_1.weight"].shape[1]
        values |= {"conditioning": "text", "caption_channels": captions, "sample_size": 64 if published else None}
    else:
        values["sample_size"] = patch * math.isqrt(state["pos_embed"].shape[1])
        if "y_embedder.embedding_table.weight" in state:
            classes = len(state["y_embedder.embedding_table.weight"]) - 1
            values |= {"conditioning": "class", "num_classes": classes}
    values |= overrides
    if values["heads"] is None:
        raise ValueError(f"no Latte of hidden={hidden} was published: say how many heads it has, heads=")
    if values["sample_size"] is None:
        raise ValueError(
            f"no Latte of hidden={hidden} was published: say on how many cells a side it was trained, sample_size=; "
            "positions stretch over them, and the weights do not tell"
        )
    if assumed := [f"{name}={values[name]}" for name in ("heads", "sample_size") if text and name not in overrides]:
        log.info("the weights do not tell %s: taken from the published model of this width", " and ".join(assumed))
    model = Latte(Config(**values))
    load_renamed(model, state, names, ignore=() if text else ("pos_embed", "temp_embed"))
    return model


def from_diffusers(
    source: str | Path | Mapping[str, Tensor], config: str | Path | Mapping[str, Any] | None = None
) -> Latte:
    """Build the model of a diffusers LatteTransformer3DModel and load its weights.

    ``source`` is a state dict, a safetensors file or a directory of them; ``config`` is that model's config or
    the path of its JSON file, by default the ``config.json`` beside the weights. ValueError: the config describes
    another architecture, or the weights do not fit it.
    """
    if config is None:
        if isinstance(source, Mapping):
            raise ValueError("a state dict does not have all settings: pass the model's config, too")
        config = (Path(source) if Path(source).is_dir() else Path(source).parent) / "config.json"
    values = config if isinstance(config, Mapping) else read_table(Path(config))
    model = Latte(Config(**published_settings(values)))
    load_renamed(model, source if isinstance(source, Mapping) else read_safetensors(source), diffusers_names)
    return model


@described("LatteTransformer3DModel", Config)
def published_settings(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a LatteTransformer3DModel's config; ValueError if it differs in more than sizes."""
    hidden = config["num_attention_heads"] * config["attention_head_dim"]
    fixed = {
        "norm_type": "ada_norm_single",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "norm_elementwise_affine": False,
        "norm_eps": 1e-6,
        "cross_attention_dim": hidden,
    }
    for key, value in fixed.items():
        if config.get(key) != value:
            raise ValueError(f"{key}={config.get(key)!r} in the diffusers config: Latte has {value!r}")
    channels, patch = config["in_channels"], config["patch_size"]
    if config.get("out_channels") not in (None, channels, 2 * channels):
        raise ValueError(f"out_channels={config['out_channels']} is neither in_channels={channels} nor twice that")
    return {
        "hidden": hidden,
        "depth": 2 * config["num_layers"],
        "heads": config["num_attention_heads"],
        "patch": (1, patch, patch),
        "in_channels": channels,
        "learn_sigma": config.get("out_channels") == 2 * channels,
        "conditioning": "text",
        "caption_channels": config["caption_channels"],
        "sample_size": config["sample_size"],
    }


def to_diffusers(model: Latte, frames: int = 16) -> Any:
    """diffusers' `LatteTransformer3DModel` for clips of `frames` frames, with the weights of a text model of variant 1.

    ValueError: the model is of another variant or conditioning.
    """
    from diffusers import LatteTransformer3DModel

    c = model.config
    if c.variant != 1 or c.conditioning != "text":
        raise ValueError(f"diffusers' Latte is variant 1 with text; this is variant {c.variant}, {c.conditioning}")
    theirs: Any = LatteTransformer3DModel(
        num_attention_heads=c.heads, attention_head_dim=c.hidden // c.heads, in_channels=c.in_channels,
        out_channels=c.out_channels, num_layers=c.depth // 2, cross_attention_dim=c.hidden, attention_bias=True,
        sample_size=c.sample_size, patch_size=c.patch[1], caption_channels=c.caption_channels, video_length=frames,
        activation_fn="gelu-approximate", norm_type="ada_norm_single", norm_elementwise_affine=False, norm_eps=1e-6,
    )  # fmt: skip
    write_renamed(model, theirs, diffusers_names)
    return theirs


def published_names(model: Latte) -> Names:
    """The names that weights of variant 1 are published under; the other variants have none but their own."""
    names = diffusers_names if model.config.conditioning == "text" else official_names
    return names if model.config.variant == 1 else str


def diffusers_names(name: str) -> list[str]:
    """The diffusers parameters that make up one of ours, to be stacked along dim 0."""
    parts = re.fullmatch(r"blocks\.(\d+)\.(spatial|temporal)\.(.+?)(\.weight|\.bias|)", name)
    if parts:
        i, kind, layer, suffix = parts.groups()
        blocks = {"spatial": "transformer_blocks", "temporal": "temporal_transformer_blocks"}[kind]
        return [f"{blocks}.{i}.{theirs}{suffix}" for theirs in DIFFUSERS_BLOCK[layer].split()]
    layer, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
    return [DIFFUSERS[layer] + dot + suffix]


def official_names(name: str) -> list[str]:
    """The parameter of the authors' code that equals one of ours."""
    parts = re.fullmatch(r"blocks\.(\d+)\.(spatial|temporal)\.(.+)\.(weight|bias)", name)
    if parts:
        i, kind, layer, suffix = parts.groups()
        return [f"blocks.{2 * int(i) + (kind == 'temporal')}.{OFFICIAL_BLOCK[layer]}.{suffix}"]
    layer, _, suffix = name.rpartition(".")
    return [f"{OFFICIAL[layer]}.{suffix}"]


OFFICIAL = {
    "embed.proj": "x_embedder.proj",
    "t_embed.mlp.up": "t_embedder.mlp.0",
    "t_embed.mlp.down": "t_embedder.mlp.2",
    "label_embed.table": "y_embedder.embedding_table",
    "final.modulation.linear": "final_layer.adaLN_modulation.1",
    "final.linear": "final_layer.linear",
}
OFFICIAL_BLOCK = {
    "modulation.linear": "adaLN_modulation.1",
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
DIFFUSERS = {
    "embed.proj": "pos_embed.proj",
    "t_embed.mlp.up": "adaln_single.emb.timestep_embedder.linear_1",
    "t_embed.mlp.down": "adaln_single.emb.timestep_embedder.linear_2",
    "t_block": "adaln_single.linear",
    "caption.up": "caption_projection.linear_1",
    "caption.down": "caption_projection.linear_2",
    "final.modulation.table": "scale_shift_table",
    "final.linear": "proj_out",
}
DIFFUSERS_BLOCK = {
    "modulation.table": "scale_shift_table",
    "attention.qkv": "attn1.to_q attn1.to_k attn1.to_v",
    "attention.out": "attn1.to_out.0",
    "cross.q": "attn2.to_q",
    "cross.kv": "attn2.to_k attn2.to_v",
    "cross.out": "attn2.to_out.0",
    "mlp.up": "ff.net.0.proj",
    "mlp.down": "ff.net.2",
}
