"""STDiT, the text-to-video transformer of Open-Sora (Zheng et al., arXiv 2412.20404), in its versions 1.0, 1.1 and 1.2.

Published sizes; parameters with 4 latent channels in, 8 out and text of 4096 channels (T5-XXL):

    size       layers  hidden  heads   parameters     Open-Sora
    v1-XL/2      28     1152     16      759,620,768   1.0
    v2-XL/2      28     1152     16      767,452,064   1.1
    v3-XL/2      28     1152     16    1,207,643,936   1.2
    v3-3B/2      28     1872     26    3,182,211,536   1.2

``v1``: a layer is modulated spatial attention, temporal attention on the plain residual behind the same gate, attention
to text, one modulated MLP; sincos tables for places and frames. ``v2``: the temporal attention has its own norm,
modulation and rotary positions; queries and keys are normalised after the rotation. Size, aspect ratio, length and
frame rate are conditions, and spatial positions stretch over the pixels. ``v3``: a layer is two complete blocks,
spatial and temporal, with text in both; queries and keys are normalised before the rotation; only the frame rate
remains a condition. From v2 on, frames may be given clean (``x_mask``): they are modulated as at timestep 0, and the
training loss leaves them out.

Letters: b batch, i and o latent channels in and out, t frames, h w latent cells, s patches of a frame, c hidden
channels, l text tokens, k values of a patch, channels of a conditioning vector or rows of a modulation.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention, check_heads
from zoo.layers import (
    MLP,
    Block,
    FinalLinear,
    PatchEmbed,
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

SIZES: dict[str, dict[str, Any]] = {
    "v1-XL/2": {"version": "v1", "hidden": 1152, "depth": 28, "heads": 16},
    "v2-XL/2": {"version": "v2", "hidden": 1152, "depth": 28, "heads": 16},
    "v3-XL/2": {"version": "v3", "hidden": 1152, "depth": 28, "heads": 16},
    "v3-3B/2": {"version": "v3", "hidden": 1872, "depth": 28, "heads": 26},
    "test": {"hidden": 48, "depth": 2, "heads": 4, "caption_channels": 20},
}

TOLD: dict[str, tuple[str, ...]] = {  # the inputs of each version that describe the video, each (b)
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
        if self.version not in TOLD:
            raise ValueError(f"version={self.version!r}: expected one of {', '.join(map(repr, TOLD))}")
        super().__post_init__()
        check_heads(self.heads, self.heads if self.kv_heads is None else self.kv_heads)
        if self.version == "v2" and self.hidden % 3:
            raise ValueError(f"hidden={self.hidden}: v2 embeds height, width and aspect ratio in a third of it each")
        if self.version != "v1" and (self.space_scale, self.time_scale) != (1, 1):
            raise ValueError(f"space_scale and time_scale are options of v1; {self.version} has input_sq_size")


# Layers of v1 and v2, and of Transformer-2D


class Spatial(nn.Module):
    """Modulated attention within each frame."""

    def __init__(self, dim: int, heads: int, **options: Any):
        super().__init__()
        self.attention = SelfAttention(dim, heads, "s", **options)

    def forward(
        self, x: Tensor, modulation: Tensor, clean: Tensor | None = None, x_mask: Tensor | None = None
    ) -> Tensor:
        shift, scale, gate, *_ = rows(modulation, clean, x_mask)
        return x + gate * self.attention(modulate(norm(x), shift, scale))


class Temporal(nn.Module):
    """Attention across frames, attention to text, modulated MLP.

    The modulation of v2 has three rows for the attention across frames. v1 has none: there this attention reads the
    plain residual, behind the spatial gate. ``time_scale``, set in v1's first layer, adds the table of frame positions
    to its input.
    """

    def __init__(self, dim: int, heads: int, text: bool, time_scale: float | None = None, **options: Any):
        super().__init__()
        self.time_scale = time_scale
        self.attention = SelfAttention(dim, heads, "t", **options)
        self.cross = CrossAttention(dim, heads) if text else None
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        _, _, gate, shift_mlp, scale_mlp, gate_mlp, *own = rows(modulation, clean, x_mask)
        y = x if self.time_scale is None else add_time(x, self.time_scale)
        if own:
            shift, scale, gate = own
            y = modulate(norm(y), shift, scale)
        x = x + gate * self.attention(y)
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class Layer(nn.Module):
    """A layer of v1 (``table`` of 6 rows) or v2 (9 rows): two stages that share one modulation."""

    def __init__(self, table: ScaleShiftTable, spatial: Spatial, temporal: Temporal):
        super().__init__()
        self.modulation, self.spatial, self.temporal = table, spatial, temporal

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        modulation, clean = self.modulation(cond), None if clean is None else self.modulation(clean)
        x = self.spatial(x, modulation, clean, x_mask)
        return self.temporal(x, modulation, context, mask, clean, x_mask)


class Pair(nn.Module):
    """A layer of v3: a spatial block and the temporal block after it."""

    def __init__(self, spatial: Block, temporal: Block):
        super().__init__()
        self.spatial, self.temporal = spatial, temporal

    def forward(self, x: Tensor, *given: Tensor | None) -> Tensor:
        return self.temporal(self.spatial(x, *given), *given)


def make_layer(config: Config, first: bool) -> Layer | Pair:
    dim, heads = config.hidden, config.heads
    options: dict[str, Any] = {"kv_heads": config.kv_heads}
    if config.version == "v1":
        temporal = Temporal(dim, heads, True, config.time_scale if first else None, **options)
        return Layer(ScaleShiftTable(dim, 6), Spatial(dim, heads, **options), temporal)
    if config.version == "v2":
        temporal = Temporal(dim, heads, True, **options, rope="interleaved", qk_norm="after")
        return Layer(ScaleShiftTable(dim, 9), Spatial(dim, heads, **options, qk_norm="after"), temporal)
    return Pair(
        Block(dim, heads, "s", ScaleShiftTable(dim, 6), text=True, **options, qk_norm="before"),
        Block(dim, heads, "t", ScaleShiftTable(dim, 6), text=True, **options, rope="interleaved", qk_norm="before"),
    )


class Told(nn.Module):
    """Embeddings of the video's conditions, to add to the timestep's: (b c) for space, (b c) for time.

    v2: height, width and aspect ratio for space, length and frame rate for time. v3: the frame rate for both.
    """

    def __init__(self, dim: int, version: str):
        super().__init__()
        self.fps = TimestepEmbed(dim)
        if version == "v2":
            self.size, self.ar, self.length = TimestepEmbed(dim // 3), TimestepEmbed(dim // 3), TimestepEmbed(dim)

    def forward(
        self, fps: Tensor, height: Tensor, width: Tensor, ar: Tensor | None = None, num_frames: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if ar is None or num_frames is None:
            return (self.fps(fps),) * 2
        size = self.size(torch.stack([height, width], dim=-1)).flatten(1)
        return torch.cat([size, self.ar(ar)], dim=-1), self.length(num_frames) + self.fps(fps)


class STDiT(nn.Module):
    """``forward(x, timestep, context, context_mask=None, x_mask=None, fps=..., height=..., ...)``

    x (b i t h w), timestep (b) on the scale 0 to 1000, context (b l caption_channels) and context_mask (b l, True for
    tokens to be seen) -> (b o t h w). Any number of frames; frames of any size. v2 and v3 take x_mask (b t), False for
    frames that are given clean, and the video's conditions, each (b): height and width in pixels, fps (120 stands for
    an image), v2 also num_frames of the video and ar, its aspect ratio.

    The published code stretches the positions of a whole batch over the height and width of its first sample; here each
    sample uses its own height and width.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, version = config.hidden, config.version
        cond = "cond=b [k], clean=b [k]" if version == "v3" else "modulation=b [k c], clean=b [k c]"
        text = "context=b [l c], mask=b [l]"
        self.stages = {
            "": "x=b [i] t h w, x_mask=b t -> b [o] t h w",
            "embed": "b [i] t [h w], stride=b [k] -> b t [s c]",
            "blocks.*.spatial": f"b t [s c], {cond}, x_mask=b t" + (f", {text}" if version == "v3" else ""),
            "blocks.*.temporal": f"b [t] s [c], {cond}, x_mask=b [t], {text}",
            "final": "b t s [c], cond=b [c], clean=b [c], x_mask=b t -> b t s [k]",
        }
        self.cores = {"blocks.*.spatial.attention.core": SelfAttention.CORE["s"]}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, 6 * dim)
        self.t_block_temporal = nn.Linear(dim, 3 * dim) if version == "v2" else None
        self.told = None if version == "v1" else Told(dim, version)
        self.caption = MLP(config.caption_channels, dim, dim)
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        self.blocks = nn.ModuleList(make_layer(config, first=i == 0) for i in range(config.depth))
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
        num_frames: Tensor | None = None,
        height: Tensor | None = None,
        width: Tensor | None = None,
        ar: Tensor | None = None,
        fps: Tensor | None = None,
    ) -> Tensor:
        version = self.config.version
        given = {"num_frames": num_frames, "height": height, "width": width, "ar": ar, "fps": fps}
        built = f"version={version!r}"
        expect("context", context, True, built)
        expect("x_mask", x_mask, version != "v1" and x_mask is not None, built)
        for name, value in given.items():
            expect(name, value, name in TOLD[version], built)
        assert context is not None

        space, time = (0.0, 0.0) if self.told is None else self.told(**given)
        t = self.t_embed(timestep)
        cond, clean, clean_t = self.condition(t + space, t + time), None, None
        if x_mask is not None:
            clean_t = self.t_embed(torch.zeros_like(timestep))
            clean, clean_t = self.condition(clean_t + space, clean_t + time), clean_t + space
        if version != "v2":  # v2's last layer is conditioned on the sizes for clean frames only
            t = t + space
        context = self.caption(context.to(t.dtype))

        size = x.shape[-2], x.shape[-1]
        x = self.embed(x, self.stride(size, timestep, height, width))
        for block in self.blocks:
            x = block(x, cond, context, context_mask, clean, x_mask)
        return unpatchify(self.final(x, t, clean_t, x_mask), self.config.patch, size)

    def condition(self, space: Tensor, time: Tensor) -> Tensor:
        """The modulation (b k), to which each layer adds its table; in v2 that of space, then that of time."""
        cond = self.t_block(F.silu(space))
        if self.t_block_temporal is not None:
            cond = torch.cat([cond, self.t_block_temporal(F.silu(time))], dim=-1)
        return cond

    def stride(self, size: tuple[int, int], timestep: Tensor, height: Tensor | None, width: Tensor | None) -> Tensor:
        """The distance of neighbouring positions, of rows and of columns (b 2).

        From v2 on, positions fill a square. Its side is proportional to the root of the number of patches, over the
        root of the number of pixels of (height, width).
        """
        if height is None or width is None:
            stride = torch.tensor([1 / self.config.space_scale], dtype=torch.float64, device=timestep.device)
            return stride.expand(len(timestep), 2)
        down, across = (-(-cells // patch) for cells, patch in zip(size, self.config.patch[1:]))
        side = round((down * across) ** 0.5) * self.config.input_sq_size / (height.double() * width.double()).sqrt()
        return torch.stack([side / down, side / across], dim=-1)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as Open-Sora 1.0 does.

        Xavier, biases zero; embeddings at std 0.02; scale-shift tables at std 1/sqrt(hidden). Temporal attention,
        attention to text and the final layer start at zero. (Open-Sora 1.2 starts from an image model instead.)
        """
        init_linear(self)
        for module in self.modules():
            if isinstance(module, ScaleShiftTable):
                nn.init.normal_(module.table, std=self.config.hidden**-0.5)
            if isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            if isinstance(module, CrossAttention):
                init_zero(module.out)
            if isinstance(module, Layer | Pair):
                init_zero(module.temporal.attention.out)
        embeddings = [module.mlp for module in self.modules() if isinstance(module, TimestepEmbed)]
        for mlp in (*embeddings, self.caption):
            nn.init.normal_(mlp.up.weight, std=0.02)
            nn.init.normal_(mlp.down.weight, std=0.02)
        for linear in filter(None, (self.t_block, self.t_block_temporal)):
            nn.init.normal_(linear.weight, std=0.02)
        init_zero(self.final.linear)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens.

        Sample i begins with i clean frames, modulo their number.
        """
        config = self.config
        inputs = video_inputs(batch, config.in_channels, frames, height, width, 0, (tokens, config.caption_channels))
        if config.version != "v1":
            inputs["x_mask"] = torch.arange(frames) >= (torch.arange(batch) % frames)[:, None]
        sizes = {"num_frames": frames, "height": 8 * height, "width": 8 * width, "ar": height / width, "fps": 24}
        return inputs | {name: torch.full((batch,), float(sizes[name])) for name in TOLD[config.version]}
