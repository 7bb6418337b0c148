"""Wan 2.1 and 2.2 (Wan team, arXiv 2503.20314), video transformers that attend over all places of a video at once.

Published sizes; parameters with text of 4096 channels (UMT5-XXL), 512 tokens of it:

    size        blocks  hidden  heads     MLP    parameters   published as
    1.3B          30     1536     12     8960   1,418,996,800  2.1 T2V
    14B           40     5120     40    13824  14,288,491,584  2.1 T2V; each of the two experts of 2.2 T2V
    i2v-14B       40     5120     40    13824  16,394,878,784  2.1 I2V: attends to CLIP's tokens of the first frame
    i2v-2.2-14B   40     5120     40    13824  14,288,901,184  each of the two experts of 2.2 I2V
    ti2v-5B       30     3072     24    14336   4,999,787,712  2.2: a timestep for each frame, 48 latent channels

A block is modulated self-attention over the clip, attention to text behind a LayerNorm with weights, a modulated MLP.
Queries and keys of both attentions have an RMSNorm over the channels of all heads together; those of self-attention
are then rotated by frame, row and column, each with a third of a head's channels. One linear layer computes the
modulation of all blocks from the timestep; each block adds its own table.

Self-attention is over the whole sequence; only its heads are independent. The layers before it, self-attention and the
layers after it are therefore three stages. The tokens of a clip are one dim, sharded evenly for any number of frames.

A clip continues from an image in three ways: the image's latent and a mask are further input channels
(``condition_channels``, which have no output), attention is to the image's CLIP tokens too (``image_channels``), or the
image is a clean frame at timestep 0 (``frame_times``).

``from_reference`` loads diffusers' WanTransformer3DModel. Norms and modulation run in the type of the weights; in
diffusers they run in float32. The velocity is noise - x, as published; objectives and samplers read ``flow_sign``. Not
here: a last frame as a condition in addition to the first (2.1 FLF2V).

Letters: `zoo/video/__init__.py`.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.attention import CrossAttention, SoftmaxAttention, attend, turn
from zoo.init import init_embeddings, init_linear, init_modulation, init_zero
from zoo.layers import (
    MLP,
    ScaleShiftTable,
    TimestepEmbed,
    expect,
    modulate,
    norm,
    sincos,
    split_modulation,
    tensor_parallel,
)
from zoo.video.blocks import FinalLinear, VideoConfig, unpatchify, video_inputs

SIZES: dict[str, dict[str, Any]] = {
    "1.3B": {"hidden": 1536, "depth": 30, "heads": 12, "mlp": 8960},
    "14B": {"hidden": 5120, "depth": 40, "heads": 40, "mlp": 13824},
    "i2v-14B": {
        **{"hidden": 5120, "depth": 40, "heads": 40, "mlp": 13824},
        **{"in_channels": 36, "condition_channels": 20, "image_channels": 1280},
    },
    "i2v-2.2-14B": {
        **{"hidden": 5120, "depth": 40, "heads": 40, "mlp": 13824},
        **{"in_channels": 36, "condition_channels": 20},
    },
    "ti2v-5B": {"hidden": 3072, "depth": 30, "heads": 24, "mlp": 14336, "in_channels": 48, "frame_times": True},
    "test": {"hidden": 48, "depth": 2, "heads": 4, "mlp": 64, "in_channels": 4, "caption_channels": 20},
}


@dataclass(frozen=True)
class Config(VideoConfig):
    hidden: int = 1536
    depth: int = 30
    heads: int = 12
    mlp: int = 8960  # channels inside the MLP
    in_channels: int = 16
    condition_channels: int = 0  # the channels among in_channels that are not denoised: a mask and an image's latent
    caption_channels: int = 4096  # of the text encoder (UMT5)
    image_channels: int = 0  # of the image encoder (CLIP), whose tokens are attended to like text; 0 for none
    frame_times: bool = False  # every frame has its own timestep

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden // self.heads < 6 or self.hidden // self.heads % 2:
            raise ValueError(
                f"hidden={self.hidden} in heads={self.heads}: rotary positions in three dims need an even number of "
                "channels a head, 6 at least"
            )


class AttentionInputs(nn.Module):
    """Queries, keys and values (b n h e) of a modulated stream (b n c): q and k normed over all heads, then rotated."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift, scale, *_ = split_modulation(modulation, dims=1)
        q, k, v = self.qkv(modulate(norm(x), shift, scale)).chunk(3, dim=-1)
        q, k, v = (rearrange(y, "b n (h e) -> b n h e", h=self.heads) for y in (self.q_norm(q), self.k_norm(k), v))
        sin, cos = rope[:, None].chunk(2, dim=-1)
        return turn(q, sin, cos, "interleaved"), turn(k, sin, cos, "interleaved"), v


class ImageAttention(CrossAttention):
    """Attention to text and, with the same queries but its own keys and values, to an image (b j c)."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads, qk_norm=True)
        self.image_kv = nn.Linear(dim, 2 * dim)
        self.image_k_norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, context: Tensor, image: Tensor) -> Tensor:  # type: ignore[override]
        (k, v), (image_k, image_v) = (of(y).chunk(2, dim=-1) for of, y in ((self.kv, context), (self.image_kv, image)))
        q, k, v, image_k, image_v = (
            rearrange(y, "b n (h e) -> b n h e", e=self.head_dim)
            for y in (self.q_norm(self.q(x)), self.k_norm(k), v, self.image_k_norm(image_k), image_v)
        )
        return self.out((attend(q, k, v) + attend(q, image_k, image_v)).flatten(2))


class AttentionOutputs(nn.Module):
    """The rest of a block after self-attention ``y`` (b n h e): its residual, attention to text, the MLP."""

    def __init__(self, dim: int, heads: int, mlp: int, image: bool = False):
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.cross = ImageAttention(dim, heads) if image else CrossAttention(dim, heads, qk_norm=True)
        self.mlp = MLP(dim, mlp)

    def forward(self, x: Tensor, y: Tensor, modulation: Tensor, context: Tensor, image: Tensor | None = None) -> Tensor:
        _, _, gate, shift, scale, gate_mlp = split_modulation(modulation, dims=1)
        x = x + gate * self.out(y.flatten(-2))
        x = x + self.cross(self.norm(x), context, image)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift, scale))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, mlp: int, image: bool = False):
        super().__init__()
        self.modulation = ScaleShiftTable(dim, 6)
        self.queries = AttentionInputs(dim, heads)
        self.core = SoftmaxAttention()
        self.update = AttentionOutputs(dim, heads, mlp, image)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor, rope: Tensor, image: Tensor | None = None) -> Tensor:
        modulation = self.modulation(cond)
        return self.update(x, self.core(*self.queries(x, modulation, rope)), modulation, context, image)

    def fused(self) -> list[nn.Linear]:
        """The layers that are several projections in one."""
        cross = self.update.cross
        return [self.queries.qkv, cross.kv, *([cross.image_kv] if isinstance(cross, ImageAttention) else [])]


class ImageEmbed(nn.Module):
    """Tokens of the image encoder (b j image_channels) to (b j c)."""

    def __init__(self, channels: int, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.mlp = MLP(channels, channels, dim, activation=nn.GELU())
        self.out_norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor) -> Tensor:
        return self.out_norm(self.mlp(self.norm(image.to(self.norm.weight.dtype))))


class Wan(nn.Module):
    """``forward(x, timestep, context, context_mask=None, image=None)``

    x (b i t y x), timestep (b) on the scale 0 to 1000, or (b t) with ``frame_times``, context (b l caption_channels),
    context_mask (b l, False for padding: these tokens are set to zero and are attended to),
    image (b j image_channels) with ``image_channels`` -> (b o t y x). Any number of frames; frames of any size.
    """

    flow_sign = -1  # the velocity is noise - x
    first_frame = ("mask", "frames")  # what the channels of an image are, if any

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim, image = config.hidden, config.image_channels > 0
        self.stages = {
            "": "x=b [i] t y x -> b [o] t y x",
            "embed": "b n [k] -> b n [c]",
            "blocks.*.queries": "b n [c], modulation=b [k c], rope=n [e] -> b n h [e], b n h [e], b n h [e]",
            "blocks.*.core": "b [n] h [e], b [n] h [e], b [n] h [e] -> b [n] h [e]",
            "blocks.*.update": "b n [c], y=b n [h e], modulation=b [k c], context=b [l c], image=b [j c]",
            "final": "b n [c], cond=b [c] -> b n [k]",
        }
        if config.frame_times:
            self.stages |= {
                "blocks.*.queries": "b n [c], modulation=b n [k c], rope=n [e] -> b n h [e], b n h [e], b n h [e]",
                "blocks.*.update": "b n [c], y=b n [h e], modulation=b n [k c], context=b [l c], image=b [j c]",
                "final": "b n [c], cond=b n [c] -> b n [k]",
            }
        self.cores = {"blocks.*.core": "b [n] (g r) [d], b [n] g [d], b [n] g [d] -> b [n] (g r) [d]"}

        self.t_embed = TimestepEmbed(dim)
        self.t_block = nn.Linear(dim, 6 * dim)
        self.caption = MLP(config.caption_channels, dim, dim)
        self.image = ImageEmbed(config.image_channels, dim) if image else None
        self.embed = nn.Linear(config.in_channels * math.prod(config.patch), dim)
        self.blocks = nn.ModuleList(Block(dim, config.heads, config.mlp, image) for _ in range(config.depth))
        self.final = FinalLinear(dim, config.out_channels, config.patch, ScaleShiftTable(dim, 2))
        self.tensor_parallel = tensor_parallel(self, "blocks")
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        image: Tensor | None = None,
    ) -> Tensor:
        expect("context", context, True, f"caption_channels={self.config.caption_channels}")
        expect("image", image, self.image is not None, f"image_channels={self.config.image_channels}")
        assert context is not None
        if context_mask is not None:
            context = context * context_mask[..., None]

        (frames, *size), (_, p, q) = x.shape[2:], self.config.patch
        x = F.pad(x, (0, -x.shape[-1] % q, 0, -x.shape[-2] % p))
        height, width = x.shape[-2] // p, x.shape[-1] // q
        if self.config.frame_times:
            timestep = timestep if timestep.ndim == 2 else timestep[:, None].expand(-1, frames)
        t = self.t_embed(timestep)
        cond, context = self.t_block(F.silu(t)), self.caption(context.to(t.dtype))
        if self.config.frame_times:
            t, cond = (repeat(y, "b t k -> b (t y x) k", y=height, x=width) for y in (t, cond))
        if self.image is not None:
            image = self.image(image)

        rope = self.positions(frames, height, width, x.device)
        x = rearrange(x, "b i t (y p) (x q) -> b (t y x) (i p q)", p=p, q=q)
        x = self.embed(x.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = block(x, cond, context, rope, image)
        x = self.final(x, t).unflatten(1, (frames, -1))
        return unpatchify(x, self.config.patch, (size[0], size[1]))

    def positions(self, t: int, y: int, x: int, device: torch.device) -> Tensor:
        """The rotation at each place of t frames of y x patches: sines, then cosines of the angles (n e), float32."""
        size = self.config.hidden // self.config.heads
        side = 2 * (size // 6)
        frames, down, right = (
            sincos(torch.arange(count, device=device), channels)
            for count, channels in ((t, size - 2 * side), (y, side), (x, side))
        )
        turns = [
            repeat(frames, "t (s e) -> s (t y x) e", s=2, y=y, x=x),
            repeat(down, "y (s e) -> s (t y x) e", s=2, t=t, x=x),
            repeat(right, "x (s e) -> s (t y x) e", s=2, t=t, y=y),
        ]
        return rearrange(torch.cat(turns, dim=-1), "s n e -> n (s e)")

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as Wan does.

        Xavier in every matrix, separately for queries, keys and values; biases zero; the MLPs of timestep and text at
        std 0.02; scale-shift tables at std 1/sqrt(hidden). The final layer starts at zero.
        """
        init_linear(self)
        init_embeddings(self.t_embed, self.caption)
        for block in (module for module in self.blocks if isinstance(module, Block)):
            init_modulation(block)
            for weight in (part for linear in block.fused() for part in linear.weight.split(self.config.hidden)):
                nn.init.xavier_uniform_(weight)
        for module in filter(None, (self.image, self.final)):
            init_modulation(module)
        init_zero(self.final.linear)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        text, channels = (tokens, self.config.caption_channels), self.config.image_channels
        inputs = video_inputs(batch, self.config.in_channels, frames, height, width, text=text)
        if self.config.frame_times:  # the first frame is clean
            inputs["timestep"] = inputs["timestep"][:, None] * (torch.arange(frames) > 0)
        return inputs | ({"image": torch.randn(batch, tokens + 2, channels)} if channels else {})
