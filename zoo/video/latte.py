"""Latte (Ma et al., arXiv 2401.03048), a video transformer in four variants (section 3.2, figure 2):

1. spatial and temporal transformer blocks in alternation; the released variant
2. all the spatial blocks, then all the temporal ones
3. blocks of three sublayers, each with its residual: spatial attention, temporal attention, MLP
4. blocks whose attention is split by heads: on one normed input, half of the heads attend within the frame and half
   across time; their outputs are added, then MLP

Published sizes; trainable parameters of unconditional variant 1 at patch 2, latents 4 channels in and 8 out:

    size   blocks  hidden  heads   parameters
    S/2      12      384      6     32,480,672
    B/2      12      768     12    129,547,040
    L/2      24     1024     16    456,815,648
    XL/2     28     1152     16    673,681,568
    T2V      56     1152     16  1,057,246,880   text to video, the released Latte-1

``conditioning="none"`` and ``"class"`` are the models of the paper: DiT blocks, modulated by adaLN-Zero from the
timestep embedding, plus a label embedding with a null class. ``"text"`` is Latte-1, which diffusers has as
LatteTransformer3DModel: adaLN-single, and attention to text in the spatial blocks. The fixed temporal position table is
added before the first temporal block. ``from_reference`` loads weights of the authors or of diffusers, for variant 1.

Details of variants 3 and 4 that the paper leaves open follow variant 1. Every sublayer has its own shift, scale and
gate, so that variant 3 takes 9 rows a block; the two halves of attention in variant 4 share theirs. Heads keep their
width, so that a block of variant 4 has as many weights as one of variant 1. The temporal table is added before the
first temporal attention (3) or before the first block (4); attention to text follows the spatial attention (3) or the
sum of both (4).

Letters: b batch, i and o latent channels in and out, t frames, h w latent cells, s patches of a frame, c hidden
channels, l text tokens, k channels of a conditioning vector or values of a patch.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention
from zoo.layers import (
    MLP,
    Block,
    FinalLinear,
    FusedMLP,
    LabelEmbed,
    ModulatedNorm,
    PatchEmbed,
    ScaleShiftLinear,
    ScaleShiftTable,
    TimestepEmbed,
    VideoConfig,
    add_time,
    expect,
    init_linear,
    init_zero,
    modulate,
    norm,
    rows,
    tensor_parallel,
    unpatchify,
    video_inputs,
)
from zoo.reference import count, give, load, read_safetensors

log = logging.getLogger(__name__)

SIZES: dict[str, dict[str, Any]] = {
    f"{name}/{p}": {**size, "patch": (1, p, p)}
    for name, size in {
        "S": {"hidden": 384, "depth": 12, "heads": 6},
        "B": {"hidden": 768, "depth": 12, "heads": 12},
        "L": {"hidden": 1024, "depth": 24, "heads": 16},
        "XL": {"hidden": 1152, "depth": 28, "heads": 16},
    }.items()
    for p in (2, 4, 8)
}
SIZES["T2V"] = {"hidden": 1152, "depth": 56, "heads": 16, "conditioning": "text", "sample_size": 64}
SIZES["test"] = {"hidden": 48, "depth": 4, "heads": 4}


@dataclass(frozen=True)
class Config(VideoConfig):
    hidden: int = 384
    depth: int = 12  # blocks; in variants 1 and 2 half of them are spatial and half temporal
    heads: int = 6
    variant: int = 1
    learn_sigma: bool = True  # twice the channels out: noise and the range of its variance (iddpm)
    conditioning: str = "none"  # "class" or "text"
    num_classes: int = 101  # "class": label num_classes is the null class of classifier-free guidance
    caption_channels: int = 4096  # "text": channels of the text encoder (T5)
    sample_size: int = 32  # side in cells of the training frames: positions of other frame sizes stretch over theirs

    def __post_init__(self) -> None:
        if self.conditioning not in ("none", "class", "text"):
            raise ValueError(f"conditioning={self.conditioning!r}: expected 'none', 'class' or 'text'")
        if self.variant not in (1, 2, 3, 4):
            raise ValueError(f"variant={self.variant}: expected 1, 2, 3 or 4")
        if self.variant <= 2 and self.depth % 2:
            raise ValueError(f"depth={self.depth} is odd, but each spatial block goes with a temporal one")
        if self.variant == 4 and self.heads % 2:
            raise ValueError(f"heads={self.heads}: half of them are spatial and half temporal, so take an even number")
        super().__post_init__()


Modulation = type[ScaleShiftLinear] | type[ScaleShiftTable]


class Pair(nn.Module):
    """Variant 1: a spatial block and the temporal block after it."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool, first: bool):
        super().__init__()
        self.spatial = Block(dim, heads, "s", modulation(dim, 6), text=text)
        self.temporal = Block(dim, heads, "t", modulation(dim, 6), positions=first)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.spatial(x, cond, context, mask)
        return self.temporal(x, cond)


class Sublayer(nn.Module):
    """A modulated ``layer`` with its residual (b t s c), then attention to text if ``text_heads`` is not 0."""

    def __init__(self, dim: int, layer: nn.Module, modulation: nn.Module, text_heads: int = 0, positions: bool = False):
        super().__init__()
        self.positions = positions
        self.modulation = modulation  # of 3 rows
        self.layer = layer
        self.cross = CrossAttention(dim, text_heads) if text_heads else None

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        shift, scale, gate = rows(self.modulation(cond))
        if self.positions and x.shape[1] > 1:
            x = add_time(x)
        x = x + gate * self.layer(modulate(norm(x), shift, scale))
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x


class Triple(nn.Module):
    """Variant 3: spatial attention, temporal attention and an MLP, each with its residual."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool, first: bool):
        super().__init__()
        self.spatial = Sublayer(dim, SelfAttention(dim, heads, "s"), modulation(dim, 3), text_heads=heads * text)
        self.temporal = Sublayer(dim, SelfAttention(dim, heads, "t"), modulation(dim, 3), positions=first)
        self.mlp = Sublayer(dim, MLP(dim, 4 * dim), modulation(dim, 3))

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        spatial, temporal, mlp = modulations(cond, x.shape[-1], 3, 3, 3)
        x = self.spatial(x, spatial, context, mask)
        x = self.temporal(x, temporal)
        return self.mlp(x, mlp)


class Fork(nn.Module):
    """Variant 4: half of the heads over space, half over time, on one input; then their sum and an MLP."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool):
        super().__init__()
        self.norm = ModulatedNorm(modulation(dim, 2))
        self.spatial = SelfAttention(dim, heads // 2, "s", width=dim // 2)
        self.temporal = SelfAttention(dim, heads // 2, "t", width=dim // 2)
        self.fused = FusedMLP(dim, modulation(dim, 4), heads if text else None)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        first, second = modulations(cond, x.shape[-1], 2, 4)
        y = self.norm(x, first)
        return self.fused(x, self.spatial(y) + self.temporal(y), second, context, mask)


def modulations(cond: Tensor, dim: int, *rows: int) -> list[Tensor]:
    """The conditioning of each stage of a block: its rows of adaLN-single's vector (b k), or the embedding (b dim)."""
    if cond.shape[-1] == dim:
        return [cond] * len(rows)
    return list(cond.split([n * dim for n in rows], dim=-1))


class Latte(nn.Module):
    """``forward(x, timestep, label=None, context=None, context_mask=None)``

    x (b i t h w), timestep (b) from 0 to 999, label (b) with conditioning "class", context (b l caption_channels) and
    context_mask (b l, True for tokens to be seen) with conditioning "text" -> (b o t h w). Any number of frames; frames
    of any size.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, heads, text = config.hidden, config.heads, config.conditioning == "text"
        spatial, temporal, local = (f"{dims}, cond=b [k]" for dims in ("b t [s c]", "b [t] s [c]", "b t s [c]"))
        given = ", context=b [l c], mask=b [l]" if text else ""
        repeated = {
            1: {"blocks.*.spatial": spatial + given, "blocks.*.temporal": temporal},
            2: {"spatial.*": spatial + given, "temporal.*": temporal},
            3: {"blocks.*.spatial": spatial + given, "blocks.*.temporal": temporal, "blocks.*.mlp": local},
            4: {
                "blocks.*.norm": local,
                "blocks.*.spatial": "b t [s c]",
                "blocks.*.temporal": "b [t] s [c]",
                "blocks.*.fused": "b t s [c], b t s [c], cond=b [k]" + given,
            },
        }[config.variant]
        self.stages = {
            "": "x=b [i] t h w -> b [o] t h w",
            "embed": "b [i] t [h w] -> b t [s c]",
            **repeated,
            "final": "b t s [c], cond=b [c] -> b t s [k]",
        }
        core = {1: "blocks.*.spatial.attention", 2: "spatial.*.attention", 3: "blocks.*.spatial.layer"}
        self.cores = {core.get(config.variant, "blocks.*.spatial") + ".core": SelfAttention.CORE["s"]}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, (9 if config.variant == 3 else 6) * dim) if text else None
        self.label_embed = LabelEmbed(config.num_classes, dim) if config.conditioning == "class" else None
        self.caption = MLP(config.caption_channels, dim, dim) if text else None
        self.embed = PatchEmbed(config.in_channels, dim, config.patch, config.sample_size)
        modulation: Modulation = ScaleShiftTable if text else ScaleShiftLinear
        half, depth = range(config.depth // 2), range(config.depth)
        if config.variant == 1:
            self.blocks = nn.ModuleList(Pair(dim, heads, modulation, text, first=i == 0) for i in half)
        elif config.variant == 2:
            self.spatial = nn.ModuleList(Block(dim, heads, "s", modulation(dim, 6), text=text) for _ in half)
            self.temporal = nn.ModuleList(Block(dim, heads, "t", modulation(dim, 6), positions=i == 0) for i in half)
        elif config.variant == 3:
            self.blocks = nn.ModuleList(Triple(dim, heads, modulation, text, first=i == 0) for i in depth)
        else:
            self.blocks = nn.ModuleList(Fork(dim, heads, modulation, text) for _ in depth)
        self.final = FinalLinear(dim, config.out_channels, config.patch, modulation(dim, 2))
        stacks = ("spatial", "temporal") if config.variant == 2 else ("blocks",)
        self.tensor_parallel = tensor_parallel(self, *stacks)
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        label: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        classes, text = self.label_embed is not None, self.caption is not None
        built = f"conditioning={self.config.conditioning!r}"
        expect("label", label, classes, built)
        expect("context", context, text, built)
        expect("context_mask", context_mask, text and context_mask is not None, built)

        t = self.t_embed(timestep)
        if self.label_embed is not None:
            t = t + self.label_embed(label)
        cond = t if self.t_block is None else self.t_block(F.silu(t))
        if self.caption is not None and context is not None:
            context = self.caption(context.to(t.dtype))

        size = x.shape[-2], x.shape[-1]
        x = self.embed(x)
        if self.config.variant == 2:
            for block in self.spatial:
                x = block(x, cond, context, context_mask)
            for block in self.temporal:
                x = block(x, cond)
        else:
            if self.config.variant == 4 and x.shape[1] > 1:
                x = add_time(x)
            for block in self.blocks:
                x = block(x, cond, context, context_mask)
        return unpatchify(self.final(x, t), self.config.patch, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as DiT and Latte (and, with text, PixArt) do.

        Xavier, biases zero; the embeddings at std 0.02; scale-shift tables at std 1/sqrt(hidden). The final layer,
        attention to text and adaLN-Zero's linear layers, and with them all gates, start at zero.
        """
        init_linear(self)
        for mlp in filter(None, (self.t_embed.mlp, self.caption)):
            nn.init.normal_(mlp.up.weight, std=0.02)
            nn.init.normal_(mlp.down.weight, std=0.02)
        if self.t_block is not None:
            nn.init.normal_(self.t_block.weight, std=0.02)
        if self.label_embed is not None:
            nn.init.normal_(self.label_embed.table.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, ScaleShiftTable):
                nn.init.normal_(module.table, std=self.config.hidden**-0.5)
            if isinstance(module, ScaleShiftLinear):
                init_zero(module.linear)
            if isinstance(module, CrossAttention):
                init_zero(module.out)
        init_zero(self.final.linear)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        config = self.config
        classes = config.num_classes if config.conditioning == "class" else 0
        text = (tokens, config.caption_channels) if config.conditioning == "text" else (0, 0)
        return video_inputs(batch, config.in_channels, frames, height, width, classes, text)

    @classmethod
    def from_diffusers(
        cls, source: str | Path | Mapping[str, Tensor], config: str | Path | Mapping[str, Any] | None = None
    ) -> "Latte":
        """Build the model of a diffusers LatteTransformer3DModel and load its weights.

        ``source`` is a state dict, a safetensors file or a directory of them; ``config`` is that model's config or
        the path of its JSON file, by default the ``config.json`` beside the weights. ValueError: the config describes
        another architecture, or the weights do not fit it.
        """
        if config is None:
            if isinstance(source, Mapping):
                raise ValueError("a state dict does not have all settings: pass the model's config, too")
            config = (Path(source) if Path(source).is_dir() else Path(source).parent) / "config.json"
        values = config if isinstance(config, Mapping) else json.loads(Path(config).read_text())
        model = cls(diffusers_config(values))
        load(model, source if isinstance(source, Mapping) else read_safetensors(source), diffusers_names)
        return model


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
    found: dict[str, Any] = {
        "hidden": hidden,
        "depth": 2 * count(state, "transformer_blocks.{}.") if text else count(state, "blocks.{}."),
        "heads": next((size["heads"] for size in published), None),
        "patch": (1, patch, patch),
        "in_channels": channels,
        "learn_sigma": len(state[out]) == 2 * channels * patch**2,
    }
    if text:
        captions = state["caption_projection.linear_1.weight"].shape[1]
        found |= {"conditioning": "text", "caption_channels": captions, "sample_size": 64 if published else None}
    else:
        found["sample_size"] = patch * math.isqrt(state["pos_embed"].shape[1])
        if "y_embedder.embedding_table.weight" in state:
            classes = len(state["y_embedder.embedding_table.weight"]) - 1
            found |= {"conditioning": "class", "num_classes": classes}
    found |= overrides
    if found["heads"] is None:
        raise ValueError(f"no Latte of hidden={hidden} was published: say how many heads it has, heads=")
    if found["sample_size"] is None:
        raise ValueError(
            f"no Latte of hidden={hidden} was published: say on how many cells a side it was trained, sample_size=; "
            "positions stretch over them, and the weights do not tell"
        )
    if assumed := [f"{name}={found[name]}" for name in ("heads", "sample_size") if text and name not in overrides]:
        log.info("the weights do not tell %s: taken from the published model of this width", " and ".join(assumed))
    model = Latte(Config(**found))
    load(model, state, names, ignore=() if text else ("pos_embed", "temp_embed"))
    return model


def diffusers_config(config: Mapping[str, Any]) -> Config:
    """The Config of a LatteTransformer3DModel's config; ValueError if the latter differs in more than sizes."""
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
    return Config(
        hidden=hidden,
        depth=2 * config["num_layers"],
        heads=config["num_attention_heads"],
        patch=(1, patch, patch),
        in_channels=channels,
        learn_sigma=config.get("out_channels") == 2 * channels,
        conditioning="text",
        caption_channels=config["caption_channels"],
        sample_size=config["sample_size"],
    )


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
    give(model, theirs, diffusers_names)
    return theirs


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
