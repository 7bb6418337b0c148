"""STDiT, the text-to-video transformer of Open-Sora (Zheng et al., arXiv 2412.20404), in its version 1.2.

Published sizes; parameters with 4 latent channels in, 8 out and text of 4096 channels (T5-XXL):

    size       layers  hidden  heads   parameters     Open-Sora
    v3-XL/2      28     1152     16    1,207,643,936   1.2
    v3-3B/2      28     1872     26    3,182,211,536   1.2

``v3``: a layer is two complete blocks, spatial and temporal, with text in both; queries and keys are normalised before
the rotation; the frame rate is a condition; spatial positions stretch over the pixels. Frames may be given clean
(``x_mask``): they are modulated as at timestep 0, and the training loss leaves them out. Config and sizes are those of
all versions; `stdit_old.py` has v1 and v2.

Letters: `zoo/video/__init__.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import SelfAttention, check_heads
from zoo.init import init_like_dit
from zoo.layers import MLP, ScaleShiftTable, TimestepEmbed, expect, tensor_parallel
from zoo.video.blocks import Block, FinalLinear, PatchEmbed, VideoConfig, unpatchify, video_inputs

SIZES: dict[str, dict[str, Any]] = {
    "v1-XL/2": {"version": "v1", "hidden": 1152, "depth": 28, "heads": 16},
    "v2-XL/2": {"version": "v2", "hidden": 1152, "depth": 28, "heads": 16},
    "v3-XL/2": {"version": "v3", "hidden": 1152, "depth": 28, "heads": 16},
    "v3-3B/2": {"version": "v3", "hidden": 1872, "depth": 28, "heads": 26},
    "test": {"hidden": 48, "depth": 2, "heads": 4, "caption_channels": 20},
}

CONDITIONS: dict[str, tuple[str, ...]] = {  # the inputs of each version that describe the video, each (b)
    "v1": (),
    "v2": ("num_frames", "height", "width", "ar", "fps"),
    "v3": ("height", "width", "fps"),
}


@dataclass(frozen=True)
class Config(VideoConfig):
    version: str = "v3"
    depth: int = 28  # layers, of two stages each
    kv_heads: int | None = None  # heads of keys and values in self-attention; None: equal to heads
    learn_sigma: bool = True  # twice the channels out: rectified flow, the objective of v3, ignores the second half
    caption_channels: int = 4096  # of the text encoder (T5)
    input_sq_size: int = 512  # v2, v3: side in pixels of the square frames that positions are stretched over
    space_scale: float = 1.0  # v1: places in a frame are divided by this, 0.5 for frames of 256 x 256 pixels
    time_scale: float = 1.0  # v1: frame numbers are divided by this, 2/3 for 64 frames

    def __post_init__(self) -> None:
        if self.version not in CONDITIONS:
            raise ValueError(f"version={self.version!r}: expected one of {', '.join(map(repr, CONDITIONS))}")
        super().__post_init__()
        check_heads(self.heads, self.heads if self.kv_heads is None else self.kv_heads)
        if self.version == "v2" and self.hidden % 3:
            raise ValueError(f"hidden={self.hidden}: v2 embeds height, width and aspect ratio in a third of it each")
        if self.version != "v1" and (self.space_scale, self.time_scale) != (1, 1):
            raise ValueError(f"space_scale and time_scale are options of v1; {self.version} has input_sq_size")


def build(config: Config) -> nn.Module:
    """The model of a Config, by its version."""
    from zoo.video.stdit_old import OldSTDiT  # which imports this module

    return STDiT(config) if config.version == "v3" else OldSTDiT(config)


class SpatialTemporal(nn.Module):
    """A layer: a spatial block and the temporal block after it."""

    def __init__(self, config: Config):
        super().__init__()
        dim, heads = config.hidden, config.heads
        options: dict[str, Any] = {"text": True, "kv_heads": config.kv_heads, "qk_norm": "before"}
        self.spatial = Block(dim, heads, "s", ScaleShiftTable(dim, 6), **options)
        self.temporal = Block(dim, heads, "t", ScaleShiftTable(dim, 6), **options, rope="interleaved")

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        x = self.spatial(x, cond, context, mask, clean, x_mask)
        return self.temporal(x, cond, context, mask, clean, x_mask)


class STDiT(nn.Module):
    """``forward(x, timestep, context, context_mask=None, x_mask=None, height, width, fps)``

    x (b i t h w), timestep (b) on the scale 0 to 1000, context (b l caption_channels) and context_mask (b l, True for
    tokens to be seen), x_mask (b t), False for frames that are given clean; each (b): height and width in pixels, fps
    (120 stands for an image) -> (b o t h w). Any number of frames; frames of any size.

    The published code stretches the positions of a whole batch over the height and width of its first sample; here each
    sample uses its own height and width.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim = config.hidden
        self.stages = {
            "": "x=b [i] t h w, x_mask=b t -> b [o] t h w",
            "embed": "b [i] t [h w], stride=b [k] -> b t [s c]",
            "blocks.*.spatial": "b t [s c], cond=b [k], clean=b [k], x_mask=b t, context=b [l c], mask=b [l]",
            "blocks.*.temporal": "b [t] s [c], cond=b [k], clean=b [k], x_mask=b [t], context=b [l c], mask=b [l]",
            "final": "b t s [c], cond=b [c], clean=b [c], x_mask=b t -> b t s [k]",
        }
        self.cores = {"blocks.*.spatial.attention.core": SelfAttention.CORE["s"]}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, 6 * dim)
        self.conditions = nn.ModuleDict({"fps": TimestepEmbed(dim)})
        self.caption = MLP(config.caption_channels, dim, dim)
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        self.blocks = nn.ModuleList(SpatialTemporal(config) for _ in range(config.depth))
        self.final = FinalLinear(dim, config.out_channels, config.patch, ScaleShiftTable(dim, 2))
        self.tensor_parallel = tensor_parallel(self, "blocks")
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        x_mask: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        fps: Tensor | None = None,
    ) -> Tensor:
        for name, value in {"context": context, "height": height, "width": width, "fps": fps}.items():
            expect(name, value, True, "version='v3'")
        assert context is not None
        assert height is not None
        assert width is not None

        rate, t, clean, clean_t = self.conditions["fps"](fps), self.t_embed(timestep), None, None
        cond = self.t_block(F.silu(t + rate))
        if x_mask is not None:
            clean_t = self.t_embed(torch.zeros_like(timestep))
            clean, clean_t = self.t_block(F.silu(clean_t + rate)), clean_t + rate
        t = t + rate
        context = self.caption(context.to(t.dtype))

        size = x.shape[-2], x.shape[-1]
        x = self.embed(x, stretch(self.config, size, height, width))
        for block in self.blocks:
            x = block(x, cond, context, context_mask, clean, x_mask)
        return unpatchify(self.final(x, t, clean_t, x_mask), self.config.patch, size)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as Open-Sora 1.0 does.

        Xavier, biases zero; embeddings at std 0.02; scale-shift tables at std 1/sqrt(hidden). Temporal attention,
        attention to text and the final layer start at zero. (Open-Sora 1.2 starts from an image model instead.)
        """
        temporal = [module.temporal.attention.out for module in self.modules() if isinstance(module, SpatialTemporal)]
        init_like_dit(self, embeddings=(self.t_embed, self.conditions, self.caption, self.t_block), zero=temporal)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens.

        Sample i begins with i clean frames, modulo their number.
        """
        return video_conditions(self.config, batch, frames, height, width, tokens)


def stretch(config: Config, size: tuple[int, int], height: Tensor, width: Tensor) -> Tensor:
    """The distance of neighbouring positions, of rows and of columns (b 2), in frames of `size` cells.

    Positions fill a square. Its side is proportional to the root of the number of patches, over the root of the number
    of pixels of (height, width).
    """
    down, across = (-(-cells // patch) for cells, patch in zip(size, config.patch[1:]))
    side = round((down * across) ** 0.5) * config.input_sq_size / (height.double() * width.double()).sqrt()
    return torch.stack([side / down, side / across], dim=-1)


def video_conditions(
    config: Config, batch: int, frames: int, height: int, width: int, tokens: int
) -> dict[str, Tensor]:
    """Random inputs of a forward with the conditions of the config's version."""
    inputs = video_inputs(batch, config.in_channels, frames, height, width, 0, (tokens, config.caption_channels))
    if config.version != "v1":
        inputs["x_mask"] = torch.arange(frames) >= (torch.arange(batch) % frames)[:, None]
    sizes = {"num_frames": frames, "height": 8 * height, "width": 8 * width, "ar": height / width, "fps": 24}
    return inputs | {name: torch.full((batch,), float(sizes[name])) for name in CONDITIONS[config.version]}
