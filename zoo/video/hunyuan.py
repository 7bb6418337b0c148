"""HunyuanVideo (Kong et al., arXiv 2412.03603), a video transformer that attends over video and text as one sequence.

Published sizes; parameters with text of 4096 channels (a language model) and a pooled text of 768 (CLIP):

    size       two streams  one stream  hidden  heads   parameters      published as
    13B             20          40       3072     24    12,821,012,544  text to video
    i2v-13B         20          40       3072     24    12,821,221,440  image to video by latent_concat

Two blocks refine the text first. In the two-stream blocks video and text have separate weights (an MMDiT; Esser et al.,
arXiv 2403.03206); in the one-stream blocks they share weights. In both, each token attends to all video and text.
Queries and keys have an RMSNorm a head; those of the video are rotated by frame, row and column. One-stream blocks have
attention and MLP in parallel. Timestep, pooled text and the guidance that was distilled into the weights are embedded
as one vector, from which each block computes its modulation.

Attention is over the whole sequence; only its heads are independent, as in Wan. The layers before attention, attention
and the layers after it are therefore separate stages. The text, which is short, is a second sequence.

``from_reference`` loads diffusers' HunyuanVideoTransformer3DModel. The velocity is noise - x: ``flow_sign``.

Letters: b batch, i and o latent channels in and out, t frames, y x latent cells of a frame, h heads, n places in the
video (frame by frame, row by row), l text tokens, c hidden channels, e channels of a head, k values of a patch or rows
of a modulation.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.attention import attend, turn
from zoo.layers import (
    MLP,
    ScaleShiftLinear,
    TimestepEmbed,
    VideoConfig,
    expect,
    init_linear,
    init_zero,
    modulate,
    norm,
    split_modulation,
    video_inputs,
)

SIZES: dict[str, dict[str, Any]] = {
    "13B": {},
    "i2v-13B": {"in_channels": 33, "condition_channels": 17},
    "test": {
        "hidden": 96, "depth": 2, "single": 2, "heads": 3, "in_channels": 4, "caption_channels": 20,
        "pooled_channels": 6,
    },
}  # fmt: skip
THETA = 256.0  # base of the rotation


@dataclass(frozen=True)
class Config(VideoConfig):
    hidden: int = 3072
    depth: int = 20  # blocks of two streams
    single: int = 40  # blocks of one stream
    refiner: int = 2  # blocks of the text alone
    heads: int = 24
    in_channels: int = 16
    condition_channels: int = 0  # the channels among in_channels that are not denoised: an image's latent and a mask
    caption_channels: int = 4096  # of the text encoder
    pooled_channels: int = 768  # of a second encoder, one vector a text; 0 for none
    guidance: bool = True  # the strength of the distilled guidance is an input

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden // self.heads % 32:
            raise ValueError(f"hidden={self.hidden} in heads={self.heads}: a head needs a multiple of 32 channels")


class Queries(nn.Module):
    """Queries, keys and values (b n h e) of a modulated stream (b n c): normed a head, rotated if there is a rope."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, *_ = split_modulation(modulation, dims=1)
        return self.of(modulate(norm(x), shift, scale), rope)

    def of(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (rearrange(y, "b n (h e) -> b n h e", h=self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            sin, cos = rope[:, None].chunk(2, dim=-1)
            q, k = (turn(y, sin, cos, "interleaved") for y in (q, k))
        return q, k, v


class JointAttention(nn.Module):
    """Attention of video (b n h e) and text (b l h e) to both; ``mask`` (b l) is True for text tokens to be seen."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        text_q: Tensor,
        text_k: Tensor,
        text_v: Tensor,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.cat(pair, dim=1) for pair in ((q, text_q), (k, text_k), (v, text_v)))
        if mask is not None:
            mask = torch.cat([mask.new_ones(len(mask), q.shape[1] - mask.shape[1]), mask], dim=1)
        y = attend(q, k, v, mask)
        return y[:, : -text_q.shape[1]], y[:, -text_q.shape[1] :]


class Update(nn.Module):
    """The residual of attention ``y`` (b n h e) on one of the two streams (b n c), and the modulated MLP."""

    def __init__(self, dim: int):
        super().__init__()
        self.out = nn.Linear(dim, dim)
        self.mlp = MLP(dim, 4 * dim)

    def forward(self, x: Tensor, y: Tensor, modulation: Tensor) -> Tensor:
        _, _, gate, shift, scale, gate_mlp = split_modulation(modulation, dims=1)
        x = x + gate * self.out(y.flatten(-2))
        return x + gate_mlp * self.mlp(modulate(norm(x), shift, scale))


class Block(nn.Module):
    """Two streams: separate weights for video and text, one attention over both."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.modulation, self.text_modulation = ScaleShiftLinear(dim, 6), ScaleShiftLinear(dim, 6)
        self.queries, self.text_queries = Queries(dim, heads), Queries(dim, heads)
        self.core = JointAttention()
        self.update, self.text_update = Update(dim), Update(dim)

    def forward(
        self, x: Tensor, text: Tensor, cond: Tensor, rope: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        modulation, text_modulation = self.modulation(cond), self.text_modulation(cond)
        y, text_y = self.core(*self.queries(x, modulation, rope), *self.text_queries(text, text_modulation), mask)
        return self.update(x, y, modulation), self.text_update(text, text_y, text_modulation)


class SingleQueries(Queries):
    """`Queries`, and the hidden values (b n k) of the MLP that runs in parallel with attention."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.mlp = nn.Linear(dim, 4 * dim)

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, _ = split_modulation(modulation, dims=1)
        x = modulate(norm(x), shift, scale)
        return *self.of(x, rope), F.gelu(self.mlp(x), approximate="tanh")


class SingleUpdate(nn.Module):
    """The gated residual of attention ``y`` (b n h e) and MLP ``hidden`` (b n k) on the stream (b n c)."""

    def __init__(self, dim: int):
        super().__init__()
        self.out = nn.Linear(5 * dim, dim)

    def forward(self, x: Tensor, y: Tensor, hidden: Tensor, modulation: Tensor) -> Tensor:
        return x + split_modulation(modulation, dims=1)[2] * self.out(torch.cat([y.flatten(-2), hidden], dim=-1))


class SingleBlock(nn.Module):
    """One stream: the same weights for video and text."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.modulation = ScaleShiftLinear(dim, 3)
        self.queries = SingleQueries(dim, heads)
        self.core = JointAttention()
        self.update = SingleUpdate(dim)

    def forward(
        self, x: Tensor, text: Tensor, cond: Tensor, rope: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        modulation = self.modulation(cond)
        *q, hidden = self.queries(x, modulation, rope)
        *text_q, text_hidden = self.queries(text, modulation)
        y, text_y = self.core(*q, *text_q, mask)
        return self.update(x, y, hidden, modulation), self.update(text, text_y, text_hidden, modulation)


class RefinerBlock(nn.Module):
    """A block on the text alone (b l c), with gates from the timestep and the mean of the text."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.gates = ScaleShiftLinear(dim, 2)
        self.norm, self.mlp_norm = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = MLP(dim, 4 * dim, activation=nn.SiLU())

    def forward(self, x: Tensor, cond: Tensor, mask: Tensor | None) -> Tensor:
        gate, gate_mlp = split_modulation(self.gates(cond), dims=1)
        q, k, v = (rearrange(y, "b l (h e) -> b l h e", h=self.heads) for y in self.qkv(self.norm(x)).chunk(3, dim=-1))
        x = x + gate * self.out(attend(q, k, v, mask).flatten(-2))
        return x + gate_mlp * self.mlp(self.mlp_norm(x))


class Refiner(nn.Module):
    """Text (b l caption_channels) to tokens (b l c), by blocks conditioned on the timestep and the mean of the text."""

    def __init__(self, config: Config):
        super().__init__()
        dim = config.hidden
        self.t_embed = TimestepEmbed(dim)
        self.mean = MLP(config.caption_channels, dim, dim, activation=nn.SiLU())
        self.embed = nn.Linear(config.caption_channels, dim)
        self.blocks = nn.ModuleList(RefinerBlock(dim, config.heads) for _ in range(config.refiner))

    def forward(self, context: Tensor, timestep: Tensor, mask: Tensor | None) -> Tensor:
        context = context.to(self.embed.weight.dtype)
        seen = torch.ones_like(context[..., :1]) if mask is None else mask[..., None].to(context.dtype)
        mean = (context * seen).sum(1) / seen.sum(1).clamp(min=1)  # zeros for an empty caption
        cond, x = self.t_embed(timestep) + self.mean(mean), self.embed(context)
        for block in self.blocks:
            x = block(x, cond, mask)
        return x


class Final(nn.Module):
    """A token (b n c) to the values of its patch (b n k): norm, scale and shift, linear."""

    def __init__(self, dim: int, values: int):
        super().__init__()
        self.modulation = ScaleShiftLinear(dim, 2)
        self.linear = nn.Linear(dim, values)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        scale, shift = split_modulation(self.modulation(cond), dims=1)
        return self.linear(modulate(norm(x), shift, scale))


class HunyuanVideo(nn.Module):
    """``forward(x, timestep, context, context_mask=None, pooled=None, guidance=None)``

    x (b i t y x), timestep (b) on the scale 0 to 1000, context (b l caption_channels), context_mask (b l, True for
    tokens to be seen, which come first), pooled (b pooled_channels), guidance (b), 1000 times the strength
    -> (b o t y x). Any number of frames; frames of any size.
    """

    flow_sign = -1  # the velocity is noise - x

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        dim = config.hidden
        heads, text = "b [n] h [e], b [n] h [e], b [n] h [e]", "b [l] h [e], b [l] h [e], b [l] h [e]"
        core = f"{heads}, {text}, mask=b [l] -> b [n] h [e], b [l] h [e]"
        out = "b n h [e], b n h [e], b n h [e]"
        self.stages = {
            "": "x=b [i] t y x -> b [o] t y x",
            "embed": "b n [k] -> b n [c]",
            "blocks.*.queries": f"b n [c], modulation=b [k c], rope=n [e] -> {out}",
            "blocks.*.text_queries": f"b n [c], modulation=b [k c] -> {out}",
            "blocks.*.core": core,
            "blocks.*.update": "b n [c], y=b n [h e], modulation=b [k c]",
            "blocks.*.text_update": "b n [c], y=b n [h e], modulation=b [k c]",
            "singles.*.queries": f"b n [c], modulation=b [k c], rope=n [e] -> {out}, b n [m]",
            "singles.*.core": core,
            "singles.*.update": "b n [c], y=b n [h e], hidden=b n [m], modulation=b [k c]",
            "final": "b n [c], cond=b [c] -> b n [k]",
        }
        self.cores: dict[str, str] = {}  # none: Ulysses and rings here do not take two sequences at once
        self.tensor_parallel: dict[str, str] = {}

        self.t_embed = TimestepEmbed(dim)
        self.guidance = TimestepEmbed(dim) if config.guidance else None
        pooled = config.pooled_channels
        self.pooled = MLP(pooled, dim, dim, activation=nn.SiLU()) if pooled else None
        self.refiner = Refiner(config)
        self.embed = nn.Linear(config.in_channels * math.prod(config.patch), dim)
        self.blocks = nn.ModuleList(Block(dim, config.heads) for _ in range(config.depth))
        self.singles = nn.ModuleList(SingleBlock(dim, config.heads) for _ in range(config.single))
        self.final = Final(dim, config.out_channels * math.prod(config.patch))
        self.init_weights()

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        pooled: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        expect("context", context, True, f"caption_channels={self.config.caption_channels}")
        expect("pooled", pooled, self.pooled is not None, f"pooled_channels={self.config.pooled_channels}")
        expect("guidance", guidance, self.guidance is not None, f"guidance={self.config.guidance}")
        assert context is not None
        cond = self.t_embed(timestep)
        if self.guidance is not None:
            cond = cond + self.guidance(guidance)
        if self.pooled is not None and pooled is not None:
            cond = cond + self.pooled(pooled.to(cond.dtype))
        text = self.refiner(context, timestep, context_mask)

        (frames, height, width), (_, p, q) = x.shape[2:], self.config.patch
        x = F.pad(x, (0, -width % q, 0, -height % p))
        down, right = x.shape[-2] // p, x.shape[-1] // q
        rope = self.positions(frames, down, right, x.device)
        x = self.embed(rearrange(x, "b i t (y p) (x q) -> b (t y x) (i p q)", p=p, q=q).to(self.embed.weight.dtype))
        for block in (*self.blocks, *self.singles):
            x, text = block(x, text, cond, rope, context_mask)
        x = rearrange(
            self.final(x, cond), "b (t y x) (o p q) -> b o t (y p) (x q)", t=frames, y=down, x=right, p=p, q=q
        )
        return x if x.shape[-2:] == (height, width) else x[..., :height, :width]

    def positions(self, t: int, y: int, x: int, device: torch.device) -> Tensor:
        """The rotation at each place of t frames of y x patches: sines, then cosines of the angles (n e), float32."""
        size = self.config.hidden // self.config.heads
        sides = size // 8, (size - size // 8) // 2, (size - size // 8) // 2
        angles = []
        for length, channels in zip((t, y, x), sides):
            steps = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
            places = torch.arange(length, dtype=torch.float64, device=device)
            angles.append(places[:, None] * THETA ** (-steps / channels))
        turns = torch.cat(
            [
                repeat(angles[0], "t e -> (t y x) e", y=y, x=x),
                repeat(angles[1], "y e -> (t y x) e", t=t, x=x),
                repeat(angles[2], "x e -> (t y x) e", t=t, y=y),
            ],
            dim=-1,
        )
        return torch.cat([turns.sin(), turns.cos()], dim=-1).float()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too, as DiT does.

        Xavier in every matrix, biases zero; the MLPs of timestep, guidance and texts at std 0.02; modulation and the
        final layer start at zero.
        """
        init_linear(self)
        for module in self.modules():
            if isinstance(module, TimestepEmbed):
                nn.init.normal_(module.mlp.up.weight, std=0.02)
                nn.init.normal_(module.mlp.down.weight, std=0.02)
            if isinstance(module, ScaleShiftLinear):
                init_zero(module.linear)
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.reset_parameters()
        for mlp in filter(None, (self.pooled, self.refiner.mean)):
            nn.init.normal_(mlp.up.weight, std=0.02)
            nn.init.normal_(mlp.down.weight, std=0.02)
        init_zero(self.final.linear)

    def example_inputs(
        self, batch: int = 1, *, frames: int = 5, height: int = 8, width: int = 8, tokens: int = 7
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device; lengths in latent cells and text tokens."""
        config, text = self.config, (tokens, self.config.caption_channels)
        inputs = video_inputs(batch, config.in_channels, frames, height, width, text=text)
        if config.pooled_channels:
            inputs["pooled"] = torch.randn(batch, config.pooled_channels)
        if config.guidance:
            inputs["guidance"] = torch.full((batch,), 6000.0)
        return inputs
