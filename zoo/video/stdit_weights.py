"""Weights of STDiT as Open-Sora publishes them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from zoo.reference import Names, count, described, load_renamed
from zoo.video.stdit import SIZES, Config, build

CLASSES = ("STDiT", "STDiT2", "STDiT3")


def from_reference(state: Mapping[str, Tensor], **overrides: Any) -> nn.Module:
    """Build the model of a state dict of Open-Sora's STDiT, STDiT2 or STDiT3, and load its weights.

    For v1, the number of heads is that of the published size unless given; ``space_scale`` and ``time_scale`` have to
    be given if they are not 1. The null caption of classifier-free guidance, which these models only store, stays in
    the state dict: ``y_embedder.y_embedding`` (l caption_channels) is a ``context`` like any other.
    """
    version = "v2" if "t_block_temp.1.weight" in state else "v1"
    version = "v3" if any(name.startswith("spatial_blocks.") for name in state) else version
    blocks = "spatial_blocks.{}." if version == "v3" else "blocks.{}."
    try:
        hidden, in_channels, *patch = state["x_embedder.proj.weight"].shape
        values: dict[str, Any] = {
            "version": version,
            "hidden": hidden,
            "depth": count(state, blocks),
            "patch": tuple(patch),
            "in_channels": in_channels,
            "learn_sigma": len(state["final_layer.linear.bias"]) == 2 * in_channels * math.prod(patch),
            "caption_channels": state["y_embedder.y_proj.fc1.weight"].shape[1],
        }
        if version != "v1":
            values["heads"] = hidden // len(state[blocks.format(0) + "attn.q_norm.weight"])
    except KeyError as missing:
        raise ValueError(f"these weights are of another model; missing: {missing.args[0]}") from None
    if version == "v1" and "heads" not in overrides:
        if hidden != SIZES["v1-XL/2"]["hidden"]:
            raise ValueError(f"hidden={hidden} is not a published size of v1; pass heads=")
        values["heads"] = SIZES["v1-XL/2"]["heads"]
    config = Config(**{**values, **overrides})
    model = build(config)
    for name, scale in (("pos_embed", config.space_scale), ("pos_embed_temporal", config.time_scale)):
        if name in state and state[name].shape[1] > 1 and abs(state[name][0, 1, 0] - math.sin(1 / scale)) > 1e-3:
            which = "space_scale" if name == "pos_embed" else "time_scale"
            raise ValueError(
                f"{name} of these weights does not fit {which}={scale}; pass the {which} of their training"
            )
    load_renamed(model, state, lambda name: open_sora_names(name, version), ignore=UNUSED)
    return model


@described("STDiT", Config)
def published_settings(config: Mapping[str, Any], pipeline: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the config.json of an Open-Sora model has; ValueError if it differs in more than sizes."""
    version = {"STDiT": "v1", "STDiT2": "v2", "STDiT3": "v3"}[config["model_type"]]
    fixed = {"mlp_ratio": 4.0, "qk_norm": version != "v1", "skip_y_embedder": False, "no_temporal_pos_emb": False}
    for key, value in fixed.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key}={config[key]!r} in the Open-Sora config: STDiT {version} has {value!r}")
    scales = ("space_scale", "time_scale") if version == "v1" else ("input_sq_size",)
    names = {key: key for key in ("depth", "in_channels", "caption_channels", *scales)}
    names |= {"hidden": "hidden_size", "heads": "num_heads", "patch": "patch_size", "learn_sigma": "pred_sigma"}
    values = {ours: config[theirs] for ours, theirs in names.items() if theirs in config}
    if "patch" in values:
        values["patch"] = tuple(values["patch"])
    return {"version": version, **values}


def published_names(model: Any) -> Names:
    """The names that weights of a model are published under."""
    return lambda name: open_sora_names(name, model.config.version)


def open_sora_names(name: str, version: str) -> list[str]:
    """The Open-Sora parameters that make up one of ours, to be stacked along dim 0."""
    parts = re.fullmatch(r"blocks\.(\d+)\.(.+?)(\.weight|\.bias|)", name)
    if parts is None:
        layer, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        return [OPEN_SORA[layer] + dot + suffix]
    i, layer, suffix = parts.groups()
    if layer == "modulation.table":  # v1 and v2, whose two stages share it
        tables = ["scale_shift_table", "scale_shift_table_temporal"] if version == "v2" else ["scale_shift_table"]
        return [f"blocks.{i}.{table}" for table in tables]
    kind, layer = layer.split(".", 1)
    theirs = OPEN_SORA_BLOCK[layer] + suffix
    if version == "v3":
        return [f"{kind}_blocks.{i}.{theirs}"]
    return [f"blocks.{i}." + (re.sub(r"^attn\.", "attn_temp.", theirs) if kind == "temporal" else theirs)]


UNUSED = (
    "pos_embed",
    "pos_embed_temporal",
    "pos_embed.inv_freq",
    "rope.freqs",
    "y_embedder.y_embedding",
)
OPEN_SORA = {
    "embed.proj": "x_embedder.proj",
    "t_embed.mlp.up": "t_embedder.mlp.0",
    "t_embed.mlp.down": "t_embedder.mlp.2",
    "t_block": "t_block.1",
    "t_block_temporal": "t_block_temp.1",
    "conditions.size.mlp.up": "csize_embedder.mlp.0",
    "conditions.size.mlp.down": "csize_embedder.mlp.2",
    "conditions.ar.mlp.up": "ar_embedder.mlp.0",
    "conditions.ar.mlp.down": "ar_embedder.mlp.2",
    "conditions.length.mlp.up": "fl_embedder.mlp.0",
    "conditions.length.mlp.down": "fl_embedder.mlp.2",
    "conditions.fps.mlp.up": "fps_embedder.mlp.0",
    "conditions.fps.mlp.down": "fps_embedder.mlp.2",
    "caption.up": "y_embedder.y_proj.fc1",
    "caption.down": "y_embedder.y_proj.fc2",
    "final.modulation.table": "final_layer.scale_shift_table",
    "final.linear": "final_layer.linear",
}
OPEN_SORA_BLOCK = {
    "modulation.table": "scale_shift_table",
    "attention.qkv": "attn.qkv",
    "attention.q_norm": "attn.q_norm",
    "attention.k_norm": "attn.k_norm",
    "attention.out": "attn.proj",
    "cross.q": "cross_attn.q_linear",
    "cross.kv": "cross_attn.kv_linear",
    "cross.out": "cross_attn.proj",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
