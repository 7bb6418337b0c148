"""STDiT of Open-Sora 1.0 and 1.1 (Zheng et al., arXiv 2412.20404); `stdit.py` has their Config, and version 1.2.

Published sizes; parameters with 4 latent channels in, 8 out and text of 4096 channels (T5-XXL):

    size       layers  hidden  heads   parameters     Open-Sora
    v1-XL/2      28     1152     16      759,620,768   1.0
    v2-XL/2      28     1152     16      767,452,064   1.1

``v1``: a layer is modulated spatial attention, temporal attention on the plain residual behind the same gate, attention
to text, one modulated MLP; sincos tables for places and frames. ``v2``: the temporal attention has its own norm,
modulation and rotary positions; queries and keys are normalised after the rotation. Size, aspect ratio, length and
frame rate are conditions, spatial positions stretch over the pixels, and frames may be given clean (``x_mask``).

Letters: `zoo/video/__init__.py`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention
from zoo.init import init_like_dit
from zoo.layers import (
    MLP,
    ScaleShiftTable,
    TimestepEmbed,
    add_time,
    expect,
    modulate,
    norm,
    split_modulation,
    tensor_parallel,
)
from zoo.video.blocks import FinalLinear, PatchEmbed, unpatchify
from zoo.video.stdit import CONDITIONS, Config, stretch, video_conditions


class Spatial(nn.Module):
    """Modulated attention within each frame."""

    def __init__(self, dim: int, heads: int, **options: Any):
        super().__init__()
        self.attention = SelfAttention(dim, heads, "s", **options)

    def forward(
        self, x: Tensor, modulation: Tensor, clean: Tensor | None = None, x_mask: Tensor | None = None
    ) -> Tensor:
        shift, scale, gate, *_ = split_modulation(modulation, clean, x_mask)
        return x + gate * self.attention(modulate(norm(x), shift, scale))


class Temporal(nn.Module):
    """Attention across frames, attention to text, modulated MLP.

    The modulation of v2 has three rows for the attention across frames. v1 has none: there this attention reads the
    plain residual, behind the spatial gate. ``time_scale``, set in v1's first layer, adds the table of frame positions
    to its input.
    """

    def __init__(self, dim: int, heads: int, time_scale: float | None = None, **options: Any):
        super().__init__()
        self.time_scale = time_scale
        self.attention = SelfAttention(dim, heads, "t", **options)
        self.cross = CrossAttention(dim, heads)
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        _, _, gate, shift_mlp, scale_mlp, gate_mlp, *temporal = split_modulation(modulation, clean, x_mask)
        y = x if self.time_scale is None else add_time(x, self.time_scale)
        if temporal:
            shift, scale, gate = temporal
            y = modulate(norm(y), shift, scale)
        x = x + gate * self.attention(y)
        x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class Layer(nn.Module):
    """Two stages that share one modulation, of 6 rows in v1 and 9 in v2; `first`: the layer is the model's first."""

    def __init__(self, config: Config, first: bool):
        super().__init__()
        dim, heads = config.hidden, config.heads
        options: dict[str, Any] = {"kv_heads": config.kv_heads}
        rotation, time_scale = {}, config.time_scale if first else None
        if config.version == "v2":
            options["qk_norm"], rotation, time_scale = "after", {"rope": "interleaved"}, None
        self.modulation = ScaleShiftTable(dim, 6 if config.version == "v1" else 9)
        self.spatial = Spatial(dim, heads, **options)
        self.temporal = Temporal(dim, heads, time_scale, **options, **rotation)

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        context: Tensor,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        modulation, clean = self.modulation(cond), None if clean is None else self.modulation(clean)
        x = self.spatial(x, modulation, clean, x_mask)
        return self.temporal(x, modulation, context, mask, clean, x_mask)


class SizeConditioning(nn.Module):
    """Embeddings of v2's conditions (b), to add to the timestep's: of the frame's size (b c), and of time (b c)."""

    def __init__(self, dim: int):
        super().__init__()
        self.fps = TimestepEmbed(dim)
        self.size, self.ar, self.length = TimestepEmbed(dim // 3), TimestepEmbed(dim // 3), TimestepEmbed(dim)

    def forward(
        self, num_frames: Tensor, height: Tensor, width: Tensor, ar: Tensor, fps: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = self.size(torch.stack([height, width], dim=-1)).flatten(1)
        return torch.cat([size, self.ar(ar)], dim=-1), self.length(num_frames) + self.fps(fps)


class OldSTDiT(nn.Module):
    """``forward(x, timestep, context, context_mask=None, x_mask=None, num_frames=..., height=..., ...)``

    x (b i t h w), timestep (b) on the scale 0 to 1000, context (b l caption_channels) and context_mask (b l, True for
    tokens to be seen) -> (b o t h w). Any number of frames; frames of any size. v2 takes x_mask (b t), False for frames
    that are given clean, and each (b): num_frames of the video, height and width in pixels, ar, their ratio, and fps
    (120 stands for an image).
    """

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, v2 = config.hidden, config.version == "v2"
        self.stages = {
            "": "x=b [i] t h w, x_mask=b t -> b [o] t h w",
            "embed": "b [i] t [h w], stride=b [k] -> b t [s c]",
            "blocks.*.spatial": "b t [s c], modulation=b [k c], clean=b [k c], x_mask=b t",
            "blocks.*.temporal": "b [t] s [c], modulation=b [k c], clean=b [k c], x_mask=b [t], context=b [l c], "
            "mask=b [l]",
            "final": "b t s [c], cond=b [c], clean=b [c], x_mask=b t -> b t s [k]",
        }
        self.cores = {"blocks.*.spatial.attention.core": SelfAttention.CORE["s"]}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, 6 * dim)
        self.t_block_temporal = nn.Linear(dim, 3 * dim) if v2 else None
        self.conditions = SizeConditioning(dim) if v2 else None
        self.caption = MLP(config.caption_channels, dim, dim)
        self.embed = PatchEmbed(config.in_channels, dim, config.patch)
        self.blocks = nn.ModuleList(Layer(config, first=i == 0) for i in range(config.depth))
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
        config = self.config
        built = f"version={config.version!r}"
        conditions = {"num_frames": num_frames, "height": height, "width": width, "ar": ar, "fps": fps}
        expect("context", context, True, built)
        expect("x_mask", x_mask, config.version == "v2" and x_mask is not None, built)
        for name, value in conditions.items():
            expect(name, value, name in CONDITIONS[config.version], built)
        assert context is not None

        size = x.shape[-2], x.shape[-1]
        space, time = (0.0, 0.0) if self.conditions is None else self.conditions(**conditions)
        if height is None or width is None:
            stride = torch.tensor([1 / config.space_scale], dtype=torch.float64, device=timestep.device)
            stride = stride.expand(len(timestep), 2)
        else:
            stride = stretch(config, size, height, width)
        t = self.t_embed(timestep)
        cond, clean, clean_t = self.condition(t + space, t + time), None, None
        if x_mask is not None:
            clean_t = self.t_embed(torch.zeros_like(timestep))
            clean, clean_t = self.condition(clean_t + space, clean_t + time), clean_t + space
        context = self.caption(context.to(t.dtype))

        x = self.embed(x, stride)
        for block in self.blocks:
            x = block(x, cond, context, context_mask, clean, x_mask)
        # as published, sizes condition the last layer in clean frames only
        return unpatchify(self.final(x, t, clean_t, x_mask), config.patch, size)

    def condition(self, space: Tensor, time: Tensor) -> Tensor:
        """The modulation (b k), to which each layer adds its table; in v2 that of space, then that of time."""
        cond = self.t_block(F.silu(space))
        if self.t_block_temporal is not None:
            cond = torch.cat([cond, self.t_block_temporal(F.silu(time))], dim=-1)
        return cond

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too: as `STDiT.init_weights`."""
        embeddings = self.t_embed, self.conditions, self.caption, self.t_block, self.t_block_temporal
        temporal = [module.temporal.attention.out for module in self.modules() if isinstance(module, Layer)]
        init_like_dit(self, embeddings, zero=temporal)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens.

        In v2, sample i begins with i clean frames, modulo their number.
        """
        return video_conditions(self.config, batch, frames, height, width, tokens)
