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

from dataclasses import dataclass
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
    split_modulation,
    tensor_parallel,
    unpatchify,
    video_inputs,
)

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
        shift, scale, gate = split_modulation(self.modulation(cond))
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
