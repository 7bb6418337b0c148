"""Latte (Ma et al., arXiv 2401.03048), a video transformer in variants (section 3.2, figure 2):

1. spatial and temporal transformer blocks in alternation; the released variant
2. all the spatial blocks, then all the temporal ones

`latte_variants.py` has variants 3 and 4, which share the Config.

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

Letters: `zoo/video/__init__.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import SelfAttention
from zoo.init import init_like_dit
from zoo.layers import MLP, LabelEmbed, ScaleShiftLinear, ScaleShiftTable, TimestepEmbed, expect, tensor_parallel
from zoo.video.blocks import Block, FinalLinear, PatchEmbed, VideoConfig, unpatchify, video_inputs

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


def build(config: Config) -> "Latte":
    """The model of a Config, by its variant."""
    from zoo.video.latte_variants import LatteSplitHeads, LatteSublayers  # which import this module

    variants: dict[int, type[Latte]] = {1: Latte, 2: LatteInSequence, 3: LatteSublayers, 4: LatteSplitHeads}
    return variants[config.variant](config)


class SpatialTemporal(nn.Module):
    """Variant 1: a spatial block and the temporal block after it."""

    def __init__(self, dim: int, heads: int, modulation: Modulation, text: bool, first: bool):
        super().__init__()
        self.spatial = Block(dim, heads, "s", modulation(dim, 6), text=text)
        self.temporal = Block(dim, heads, "t", modulation(dim, 6), positions=first)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        x = self.spatial(x, cond, context, mask)
        return self.temporal(x, cond)


class Latte(nn.Module):
    """``forward(x, timestep, label=None, context=None, context_mask=None)``

    x (b i t h w), timestep (b) from 0 to 999, label (b) with conditioning "class", context (b l caption_channels) and
    context_mask (b l, True for tokens to be seen) with conditioning "text" -> (b o t h w). Any number of frames; frames
    of any size.

    Variant 1. The others have other ``STAGES``, ``CORES``, blocks (``add_blocks``) and ways through them (``run``).
    """

    STAGES = {
        "": "x=b [i] t h w -> b [o] t h w",
        "embed": "b [i] t [h w] -> b t [s c]",
        "blocks.*.spatial": "b t [s c], cond=b [k], context=b [l c], mask=b [l]",
        "blocks.*.temporal": "b [t] s [c], cond=b [k]",
        "final": "b t s [c], cond=b [c] -> b t s [k]",
    }
    CORES = {"blocks.*.spatial.attention.core": SelfAttention.CORE["s"]}
    ROWS = 6  # of the modulation of a block, which `t_block` computes for a model of text

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.stages, self.cores = dict(self.STAGES), dict(self.CORES)
        dim, text = config.hidden, config.conditioning == "text"
        modulation: Modulation = ScaleShiftTable if text else ScaleShiftLinear
        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, self.ROWS * dim) if text else None
        self.label_embed = LabelEmbed(config.num_classes, dim) if config.conditioning == "class" else None
        self.caption = MLP(config.caption_channels, dim, dim) if text else None
        self.embed = PatchEmbed(config.in_channels, dim, config.patch, config.sample_size)
        stacks = self.add_blocks(config, modulation, text)
        self.final = FinalLinear(dim, config.out_channels, config.patch, modulation(dim, 2))
        self.tensor_parallel = tensor_parallel(self, *stacks)
        self.init_weights()

    def add_blocks(self, config: Config, modulation: Modulation, text: bool) -> list[str]:
        """Make the blocks; return the names of their lists."""
        layers = range(config.depth // 2)
        self.blocks = nn.ModuleList(
            SpatialTemporal(config.hidden, config.heads, modulation, text, first=i == 0) for i in layers
        )
        return ["blocks"]

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
        x = self.run(self.embed(x), cond, context, context_mask)
        return unpatchify(self.final(x, t), self.config.patch, size)

    def run(self, x: Tensor, cond: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        """The blocks on the patches x (b t s c)."""
        for block in self.blocks:
            x = block(x, cond, context, mask)
        return x

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as DiT and Latte (and, with text, PixArt) do.

        Xavier, biases zero; the embeddings at std 0.02; scale-shift tables at std 1/sqrt(hidden). The final layer,
        attention to text and adaLN-Zero's linear layers, and with them all gates, start at zero.
        """
        init_like_dit(self, embeddings=(self.t_embed, self.caption, self.t_block, self.label_embed))

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        config = self.config
        classes = config.num_classes if config.conditioning == "class" else 0
        text = (tokens, config.caption_channels) if config.conditioning == "text" else (0, 0)
        return video_inputs(batch, config.in_channels, frames, height, width, classes, text)


class LatteInSequence(Latte):
    """Variant 2: all the spatial blocks, then all the temporal ones. Its ``forward`` is that of ``Latte``."""

    STAGES = {
        "": "x=b [i] t h w -> b [o] t h w",
        "embed": "b [i] t [h w] -> b t [s c]",
        "spatial.*": "b t [s c], cond=b [k], context=b [l c], mask=b [l]",
        "temporal.*": "b [t] s [c], cond=b [k]",
        "final": "b t s [c], cond=b [c] -> b t s [k]",
    }
    CORES = {"spatial.*.attention.core": SelfAttention.CORE["s"]}

    def add_blocks(self, config: Config, modulation: Modulation, text: bool) -> list[str]:
        dim, heads, half = config.hidden, config.heads, range(config.depth // 2)
        self.spatial = nn.ModuleList(Block(dim, heads, "s", modulation(dim, 6), text=text) for _ in half)
        self.temporal = nn.ModuleList(Block(dim, heads, "t", modulation(dim, 6), positions=i == 0) for i in half)
        return ["spatial", "temporal"]

    def run(self, x: Tensor, cond: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
        for block in self.spatial:
            x = block(x, cond, context, mask)
        for block in self.temporal:
            x = block(x, cond)
        return x
