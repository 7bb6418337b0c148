"""Transformer-2D, the model of the DSP paper (Zhao et al., ICML 2025, arXiv 2403.10266, equation 8 and appendix A).

A video diffusion transformer whose layers compute over space and then over time. The paper describes the model in words
(A.1: two complete blocks a layer, without Open-Sora's cross attention) and in sizes (table 5). The two descriptions
disagree, so both readings are here. Parameters, with 4 latent channels in and out:

    size    layers  hidden  heads   block="paper"    block="stdit"
    720m      28     1152     16      902,415,760      759,602,320
    3b        36     2048     32    3,656,062,992    3,064,154,128

``block="paper"`` follows the words. Each layer is a spatial and a temporal block, attention + MLP, 24 hidden^2 in all,
modulated by adaLN-single (Open-Sora's kind; the paper names none). ``block="stdit"`` follows the names: the layer of
Open-Sora 1.0 (STDiT), 20 hidden^2 with text and 16 without, is modulated spatial attention, temporal attention on the
plain residual behind the same gate, attention to text, and one modulated MLP. Table 5 prints a hidden size of 2038 for
3b, which 32 heads do not divide; it is 2048 here. ``low_rank`` makes spatial attention Linformer's, for huge frames.

Letters: `zoo/video/__init__.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention
from zoo.init import init_like_dit
from zoo.layers import (
    MLP,
    LabelEmbed,
    ScaleShiftTable,
    TimestepEmbed,
    add_time,
    expect,
    modulate,
    norm,
    split_modulation,
    tensor_parallel,
)
from zoo.video.blocks import Block, FinalLinear, PatchEmbed, VideoConfig, unpatchify, video_inputs

SIZES: dict[str, dict[str, Any]] = {
    "720m": {"hidden": 1152, "depth": 28, "heads": 16},
    "3b": {"hidden": 2048, "depth": 36, "heads": 32},
    "test": {"hidden": 48, "depth": 2, "heads": 4},
}


@dataclass(frozen=True)
class Config(VideoConfig):
    depth: int = 28  # layers, of two stages each
    learn_sigma: bool = False  # twice the channels out: a mean and a variance (iddpm)
    block: str = "paper"  # or "stdit"
    num_classes: int | None = None  # class-conditional: label num_classes is the null class of classifier-free guidance
    caption_channels: int | None = None  # of the text, 0 for none; None is 4096 (T5) with "stdit" and 0 with "paper"
    low_rank: tuple[int, int] | None = None  # spatial attention to (rank) sums of keys, over at most (n) patches

    def __post_init__(self) -> None:
        if self.low_rank is not None:
            object.__setattr__(self, "low_rank", tuple(self.low_rank))
        if self.block not in ("paper", "stdit"):
            raise ValueError(f"block={self.block!r}: expected 'paper' or 'stdit'")
        if self.caption_channels is None:
            object.__setattr__(self, "caption_channels", 4096 if self.block == "stdit" else 0)
        if self.block == "paper" and self.caption_channels:
            raise ValueError("block='paper' has no attention to text: leave caption_channels, or take block='stdit'")
        super().__post_init__()


class PaperLayer(nn.Module):
    """Two complete blocks, one over space and one over time (appendix A.1, figure 10)."""

    def __init__(self, dim: int, heads: int, first: bool, low_rank: tuple[int, int] | None):
        super().__init__()
        self.spatial = Block(dim, heads, "s", ScaleShiftTable(dim, 6), low_rank=low_rank)
        self.temporal = Block(dim, heads, "t", ScaleShiftTable(dim, 6), positions=first)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        x = self.spatial(x, cond)
        return self.temporal(x, cond)


class Spatial(nn.Module):
    """Modulated attention within each frame."""

    def __init__(self, dim: int, heads: int, low_rank: tuple[int, int] | None):
        super().__init__()
        self.attention = SelfAttention(dim, heads, "s", low_rank=low_rank)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale, gate, *_ = split_modulation(modulation)
        return x + gate * self.attention(modulate(norm(x), shift, scale))


class Temporal(nn.Module):
    """Attention across frames, of the plain residual behind the spatial gate, attention to text, modulated MLP."""

    def __init__(self, dim: int, heads: int, text: bool, positions: bool):
        super().__init__()
        self.positions = positions
        self.attention = SelfAttention(dim, heads, "t")
        self.cross = CrossAttention(dim, heads) if text else None
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self, x: Tensor, modulation: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        _, _, gate, shift_mlp, scale_mlp, gate_mlp = split_modulation(modulation)
        x = x + gate * self.attention(add_time(x) if self.positions else x)
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class STDiTLayer(nn.Module):
    """The layer of Open-Sora 1.0: two stages that share one modulation."""

    def __init__(self, dim: int, heads: int, first: bool, low_rank: tuple[int, int] | None, text: bool):
        super().__init__()
        self.modulation = ScaleShiftTable(dim, 6)
        self.spatial = Spatial(dim, heads, low_rank)
        self.temporal = Temporal(dim, heads, text, positions=first)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        modulation = self.modulation(cond)
        return self.temporal(self.spatial(x, modulation), modulation, context, mask)


class Transformer2D(nn.Module):
    """``forward(x, timestep, label=None, context=None, context_mask=None)``

    x (b i t h w), timestep (b) on the scale 0 to 1000, label (b) with ``num_classes``, context (b l caption_channels)
    and context_mask (b l, True for tokens to be seen) with ``caption_channels`` -> (b o t h w). Any number of frames;
    frames of any size, with ``low_rank`` of at most its number of patches.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, heads, text = config.hidden, config.heads, bool(config.caption_channels)
        self.stages = {
            "paper": {
                "": "x=b [i] t h w -> b [o] t h w",
                "embed": "b [i] t [h w] -> b t [s c]",
                "final": "b t s [c], cond=b [c] -> b t s [k]",
                "blocks.*.spatial": "b t [s c], cond=b [k]",
                "blocks.*.temporal": "b [t] s [c], cond=b [k]",
            },
            "stdit": {
                "": "x=b [i] t h w -> b [o] t h w",
                "embed": "b [i] t [h w] -> b t [s c]",
                "final": "b t s [c], cond=b [c] -> b t s [k]",
                "blocks.*.spatial": "b t [s c], modulation=b [k c]",
                "blocks.*.temporal": "b [t] s [c], modulation=b [k c], context=b [l c], mask=b [l]",
            },
        }[config.block]
        self.cores = {"blocks.*.spatial.attention.core": SelfAttention.CORE["s"]}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, 6 * dim)
        self.label_embed = LabelEmbed(config.num_classes, dim) if config.num_classes else None
        self.caption = MLP(config.caption_channels, dim, dim) if config.caption_channels else None
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        self.blocks = nn.ModuleList(
            PaperLayer(dim, heads, i == 0, config.low_rank)
            if config.block == "paper"
            else STDiTLayer(dim, heads, i == 0, config.low_rank, text)
            for i in range(config.depth)
        )
        self.final = FinalLinear(dim, config.out_channels, config.patch, ScaleShiftTable(dim, 2))
        self.tensor_parallel = tensor_parallel(self, "blocks")
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
        built = f"num_classes={self.config.num_classes}, caption_channels={self.config.caption_channels}"
        expect("label", label, classes, built)
        expect("context", context, text, built)
        expect("context_mask", context_mask, text and context_mask is not None, built)

        t = self.t_embed(timestep)
        if self.label_embed is not None:
            t = t + self.label_embed(label)
        conditions: tuple[Tensor | None, ...] = (self.t_block(F.silu(t)),)
        if self.caption is not None and context is not None:
            conditions = (*conditions, self.caption(context.to(t.dtype)), context_mask)

        size = x.shape[-2], x.shape[-1]
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, *conditions)
        return unpatchify(self.final(x, t), self.config.patch, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as PixArt-alpha and Open-Sora 1.0 do.

        Xavier, biases zero; the embedding MLPs at std 0.02; scale-shift tables at std 1/sqrt(hidden). The final layer
        and, in the stdit block, temporal and text attention start at zero. Low-rank attention initialises itself.
        """
        temporal = [module.temporal.attention.out for module in self.modules() if isinstance(module, STDiTLayer)]
        init_like_dit(self, embeddings=(self.t_embed, self.caption, self.t_block, self.label_embed), zero=temporal)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        config = self.config
        text = tokens, config.caption_channels or 0
        return video_inputs(batch, config.in_channels, frames, height, width, config.num_classes or 0, text)
