"""Axial attention over time, rows and columns (Ho et al. 2019, arXiv 1912.12180) in a diffusion transformer (DiT).

Everything around attention is DiT's, as in the other video models. The model treats a volume as a video.

    order="sequential"  a block attends along one axis, then applies its MLP: t, h, w, t, h, w, ...
    order="summed"      a block attends along all three axes, each on the same normed input, sums the results (as the
                        package axial-attention does), then applies its MLP

Under sequence parallelism the sequential order needs one switch per two blocks, since two consecutive axes share the
layout along the third. The summed order needs its input and its sum in two layouts: two switches a block.

Axial-DeepLab (Wang et al. 2020, arXiv 2003.07853) has batch norms inside its attention. There are none here: in
training they reduce over the batch and all axes, the sharded one included, which no stage can do on its shard alone.

The paper has no sizes for this model. S and XL have the widths of DiT and, in sequential order, DiT's number of blocks
(XL one less).

Letters: `zoo/video/__init__.py`; y x latent cells of a frame, h w its rows and columns of patches.
"""

from dataclasses import dataclass
from typing import Any

import torch
from einops import parse_shape, rearrange
from torch import Tensor, nn

from zoo.attention import SelfAttention
from zoo.init import init_like_dit
from zoo.layers import LabelEmbed, ScaleShiftLinear, TimestepEmbed, expect, sincos
from zoo.video.blocks import (
    Block,
    FinalLinear,
    FusedMLP,
    ModulatedNorm,
    PatchEmbed,
    VideoConfig,
    unpatchify,
    video_inputs,
)

SIZES: dict[str, dict[str, Any]] = {
    "S/2": {"hidden": 384, "depth": 4, "heads": 6},
    "XL/2": {"hidden": 1152, "depth": 9, "heads": 16},
    "test": {"hidden": 48, "depth": 2, "heads": 4},
}
AXES = ("t", "h", "w")


@dataclass(frozen=True)
class Config(VideoConfig):
    hidden: int = 384
    depth: int = 4  # attentions along each axis
    heads: int = 6
    order: str = "sequential"  # or "summed"
    learn_sigma: bool = False  # twice the channels out: a mean and a variance (iddpm)
    num_classes: int | None = None  # class-conditional: label num_classes is the null class of classifier-free guidance

    def __post_init__(self) -> None:
        if self.order not in ("sequential", "summed"):
            raise ValueError(f"order={self.order!r}: expected 'sequential' or 'summed'")
        super().__post_init__()


def fold(x: Tensor, axis: str) -> Tensor:
    """(b t h w c) as (b n m c): m is the axis, n the other two axes in one."""
    a, b = (name for name in AXES if name != axis)
    return rearrange(x, f"b t h w c -> b ({a} {b}) {axis} c")


def unfold(x: Tensor, axis: str, like: Tensor) -> Tensor:
    a, b = (name for name in AXES if name != axis)
    return rearrange(x, f"b ({a} {b}) {axis} c -> b t h w c", **parse_shape(like, "_ t h w _"))


class AxialBlock(Block):
    """A block on (b t h w c) that attends along one axis."""

    def __init__(self, dim: int, heads: int, axis: str):
        super().__init__(dim, heads, "s", ScaleShiftLinear(dim, 6))
        self.axis = axis

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:  # type: ignore[override]
        return unfold(super().forward(fold(x, self.axis), cond), self.axis, like=x)


class AxialAttention(SelfAttention):
    """Multi-head self-attention along one axis of (b t h w c)."""

    def __init__(self, dim: int, heads: int, axis: str):
        super().__init__(dim, heads, "s")
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return unfold(super().forward(fold(x, self.axis)), self.axis, like=x)


class Sequential(nn.Module):
    """One block for each axis, in sequence."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.t, self.h, self.w = (AxialBlock(dim, heads, axis) for axis in AXES)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return self.w(self.h(self.t(x, cond), cond), cond)


class Summed(nn.Module):
    """One block: attention along every axis of (b t h w c) in parallel, the sum of the three, and an MLP."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm = ModulatedNorm(ScaleShiftLinear(dim, 2))
        self.t, self.h, self.w = (AxialAttention(dim, heads, axis) for axis in AXES)
        self.fused = FusedMLP(dim, ScaleShiftLinear(dim, 4))

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        y = self.norm(x, cond)
        return self.fused(x, self.t(y) + self.h(y) + self.w(y), cond)


class AxialVideo(nn.Module):
    """``forward(x, timestep, label=None)``

    x (b i t y x), timestep (b) on the scale 0 to 1000, label (b) with ``num_classes`` -> (b o t y x). Any number of
    frames; frames of any size.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, summed = config.hidden, config.order == "summed"
        self.cores, self.tensor_parallel = dict[str, str](), dict[str, str]()
        self.stages = {
            "sequential": {
                "": "x=b [i] t y x -> b [o] t y x",
                "embed": "b [i] t [y x] -> b t [s c]",
                "blocks.*.t": "b [t] h w [c], cond=b [e]",
                "blocks.*.h": "b t [h] w [c], cond=b [e]",
                "blocks.*.w": "b t h [w] [c], cond=b [e]",
                "final": "b t h w [c], cond=b [e] -> b t h w [k]",
            },
            "summed": {
                "": "x=b [i] t y x -> b [o] t y x",
                "embed": "b [i] t [y x] -> b t [s c]",
                "blocks.*.norm": "b t h w [c], cond=b [e]",
                "blocks.*.t": "b [t] h w [c]",
                "blocks.*.h": "b t [h] w [c]",
                "blocks.*.w": "b t h [w] [c]",
                "blocks.*.fused": "b t h w [c], b t h w [c], cond=b [e]",
                "final": "b t h w [c], cond=b [e] -> b t h w [k]",
            },
        }[config.order]

        self.t_embed = TimestepEmbed(dim)
        self.label_embed = LabelEmbed(config.num_classes, dim) if config.num_classes else None
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        layer = Summed if summed else Sequential
        self.blocks = nn.ModuleList(layer(dim, config.heads) for _ in range(config.depth))
        self.final = FinalLinear(dim, config.out_channels, config.patch, ScaleShiftLinear(dim, 2))
        self.init_weights()

    def forward(self, x: Tensor, timestep: Tensor, label: Tensor | None = None) -> Tensor:
        expect("label", label, self.label_embed is not None, f"num_classes={self.config.num_classes}")
        cond = self.t_embed(timestep)
        if self.label_embed is not None:
            cond = cond + self.label_embed(label)

        size = x.shape[-2], x.shape[-1]
        x = self.embed(x).unflatten(2, (-(-size[0] // self.config.patch[1]), -1))
        frames = torch.arange(x.shape[1], device=x.device)
        x = x + sincos(frames, x.shape[-1]).to(x.dtype)[:, None, None]
        for block in self.blocks:
            x = block(x, cond)
        return unpatchify(self.final(x, cond), self.config.patch, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as DiT does.

        Xavier, biases zero; the embeddings at std 0.02. The final layer and adaLN-Zero's linear layers, and with them
        all gates, start at zero.
        """
        init_like_dit(self, embeddings=(self.t_embed, self.label_embed))

    def example_inputs(self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells."""
        config = self.config
        return video_inputs(batch, config.in_channels, frames, height, width, config.num_classes or 0)
