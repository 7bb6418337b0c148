"""The blocks of HunyuanVideo: of two streams, video and text, of one stream, and the text's own before them.

Letters: `zoo/video/__init__.py`; m hidden channels of an MLP.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.attention import attend, turn
from zoo.layers import MLP, ScaleShiftLinear, TimestepEmbed, modulate, norm, split_modulation


class AttentionInputs(nn.Module):
    """Queries, keys and values (b n h e) of a modulated stream (b n c): normed a head, rotated if there is a rope."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.q_norm, self.k_norm = (nn.RMSNorm(dim // heads, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, *_ = split_modulation(modulation, dims=1)
        return self.project(modulate(norm(x), shift, scale), rope)

    def project(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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


JOINT = (
    "b [n] h [e], b [n] h [e], b [n] h [e], b [l] h [e], b [l] h [e], b [l] h [e], mask=b [l] "
    "-> b [n] h [e], b [l] h [e]"
)


class AttentionOutputs(nn.Module):
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
        self.queries, self.text_queries = AttentionInputs(dim, heads), AttentionInputs(dim, heads)
        self.core = JointAttention()
        self.update, self.text_update = AttentionOutputs(dim), AttentionOutputs(dim)

    def forward(
        self, x: Tensor, text: Tensor, cond: Tensor, rope: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        modulation, text_modulation = self.modulation(cond), self.text_modulation(cond)
        y, text_y = self.core(*self.queries(x, modulation, rope), *self.text_queries(text, text_modulation), mask)
        return self.update(x, y, modulation), self.text_update(text, text_y, text_modulation)


class SingleInputs(AttentionInputs):
    """`AttentionInputs`, and the hidden values (b n k) of the MLP that runs in parallel with attention."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.mlp = nn.Linear(dim, 4 * dim)

    def forward(self, x: Tensor, modulation: Tensor, rope: Tensor | None = None) -> tuple[Tensor, ...]:
        shift, scale, _ = split_modulation(modulation, dims=1)
        x = modulate(norm(x), shift, scale)
        return *self.project(x, rope), F.gelu(self.mlp(x), approximate="tanh")


class SingleOutputs(nn.Module):
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
        self.queries = SingleInputs(dim, heads)
        self.core = JointAttention()
        self.update = SingleOutputs(dim)

    def forward(
        self, x: Tensor, text: Tensor, cond: Tensor, rope: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        modulation = self.modulation(cond)
        *q, hidden = self.queries(x, modulation, rope)
        *text_q, text_hidden = self.queries(text, modulation)
        y, text_y = self.core(*q, *text_q, mask)
        return self.update(x, y, hidden, modulation), self.update(text, text_y, text_hidden, modulation)


class Final(nn.Module):
    """A token (b n c) to the values of its patch (b n k): norm, scale and shift, linear."""

    def __init__(self, dim: int, values: int):
        super().__init__()
        self.modulation = ScaleShiftLinear(dim, 2)
        self.linear = nn.Linear(dim, values)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        scale, shift = split_modulation(self.modulation(cond), dims=1)
        return self.linear(modulate(norm(x), shift, scale))


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

    def __init__(self, dim: int, heads: int, blocks: int, caption_channels: int):
        super().__init__()
        self.t_embed = TimestepEmbed(dim)
        self.mean = MLP(caption_channels, dim, dim, activation=nn.SiLU())
        self.embed = nn.Linear(caption_channels, dim)
        self.blocks = nn.ModuleList(RefinerBlock(dim, heads) for _ in range(blocks))

    def forward(self, context: Tensor, timestep: Tensor, mask: Tensor | None) -> Tensor:
        context = context.to(self.embed.weight.dtype)
        seen = torch.ones_like(context[..., :1]) if mask is None else mask[..., None].to(context.dtype)
        mean = (context * seen).sum(1) / seen.sum(1).clamp(min=1)  # zeros for an empty caption
        cond, x = self.t_embed(timestep) + self.mean(mean), self.embed(context)
        for block in self.blocks:
            x = block(x, cond, mask)
        return x
