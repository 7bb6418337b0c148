"""Spatial-temporal RWKV: a video diffusion model of RWKV-6 blocks (Finch, arXiv 2404.05892), over space and over time.

A block is RWKV-6's: x += gate * time_mix(modulate(norm(x))), then the same with channel_mix; adaLN-Zero (DiT, section
3.2) modulates both. Blocks over space alternate between forward and backward, and so do blocks over time; each block is
then RWKV-6 as published, with a single scan (VisualRWKV, arXiv 2406.13362, scans images in the same manner). Widths and
depths are those of Vision-RWKV (arXiv 2403.02308), each of its blocks once over space and once over time. Parameters,
for latents of 4 channels:

    size   blocks  hidden   parameters
    B/2        24     768  279,617,296
    S/2        24     384   72,126,352
    L/2        48    1024  982,848,528

Letters: `zoo/video/__init__.py`; m the five mixes (w, k, v, r, g), r low rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from zoo.scan import at_least_float32, scan
from zoo.video.scan_model import Block, Norm, ScanConfig, ScanModel

SIZES: dict[str, dict[str, Any]] = {
    "B/2": {"hidden": 768, "depth": 24},
    "S/2": {"hidden": 384, "depth": 24},
    "L/2": {"hidden": 1024, "depth": 48},
    "test": {"hidden": 48, "depth": 6, "head_dim": 12, "mix_rank": 4, "decay_rank": 8},
}


@dataclass(frozen=True)
class Config(ScanConfig):
    head_dim: int = 64
    mlp_ratio: float = 3.5  # inner channels of channel_mix / hidden
    mix_rank: int = 32  # of the low-rank map to the share of the previous position that is mixed in
    decay_rank: int = 64  # of the low-rank map to the decay of the state

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % self.head_dim:
            raise ValueError(f"hidden={self.hidden} does not divide into heads of head_dim={self.head_dim}")


def to_previous(x: Tensor) -> Tensor:
    """The token shift: the previous position minus each position of (b n c); zero precedes the first."""
    return F.pad(x, (0, 0, 1, -1)) - x


class TimeMix(nn.Module):
    """Linear attention with data-dependent decay and mix of each position with the previous one (section 4).

    (b n c) -> (b n c). ``layer`` and ``layers``, counted over space or over time, determine only the initial weights.
    """

    def __init__(self, dim: int, head_dim: int, mix_rank: int, decay_rank: int, layer: int, layers: int):
        super().__init__()
        self.heads, self.layer, self.layers = dim // head_dim, layer, layers
        self.mix_first = nn.Parameter(torch.empty(dim))
        self.mix_down = nn.Linear(dim, 5 * mix_rank, bias=False)
        self.mix_up = nn.Parameter(torch.empty(5, mix_rank, dim))
        self.mix = nn.Parameter(torch.empty(5, dim))
        self.decay_down = nn.Linear(dim, decay_rank, bias=False)
        self.decay_up = nn.Linear(decay_rank, dim)
        self.bonus = nn.Parameter(torch.empty(self.heads, head_dim))
        self.key, self.value, self.receptance, self.gate, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(5))
        self.norm = nn.GroupNorm(self.heads, dim, eps=1e-5 * 8**2)

    def forward(self, x: Tensor) -> Tensor:
        shift = to_previous(x)
        low = torch.tanh(self.mix_down(x + shift * self.mix_first)).unflatten(-1, (5, -1))
        mix = einsum(low, self.mix_up, "b n m r, m r c -> m b n c") + self.mix[:, None, None]
        w, k, v, r, g = (x + shift * mix).unbind()

        log_decay = -at_least_float32(self.decay_up(torch.tanh(self.decay_down(w)))).exp()
        mixed = self.receptance(r), self.key(k), self.value(v), log_decay
        r, k, v, log_decay = (y.unflatten(-1, (self.heads, -1)) for y in mixed)
        y = scan(r, k, v, log_decay, self.bonus)
        y = self.norm(rearrange(y, "b n h e -> (b n) (h e)")).view_as(x)
        return self.out(y * F.silu(self.gate(g)))

    def init_weights(self) -> None:
        """Initialise as RWKV-LM's RWKV_Tmix_x060 and generate_init_weight do, except for ``out``.

        Decay differs between channels. Later layers forget sooner and mix in less of the previous position. ``out``
        starts at zero there; here the gate of adaLN-Zero does, and with both at zero neither would get a gradient.
        """
        depth, height = self.layer / max(1, self.layers - 1), 1 - self.layer / self.layers  # 0 to 1, 1 to almost 0
        mixed, more = (1 - channel_places(self.mix_first) ** (share * height) for share in (1, 0.5))
        self.mix_first.copy_(mixed)
        self.mix.copy_(torch.stack([mixed, mixed, mixed - 0.3 * depth, more, more]))
        ends = torch.linspace(0, 1, len(mixed), device=mixed.device)
        self.decay_up.bias.copy_(-6 + 5 * ends ** (0.7 + 1.3 * depth))
        zigzag = 0.1 * ((torch.arange(len(mixed), device=mixed.device) + 1) % 3 - 1)
        self.bonus.copy_((depth * (1 - ends) + zigzag).view_as(self.bonus))
        for down, up in ((self.mix_down.weight, self.mix_up), (self.decay_down.weight, self.decay_up.weight)):
            nn.init.zeros_(down)
            nn.init.uniform_(up, -0.01, 0.01)
        for linear in (self.receptance, self.value, self.out):
            nn.init.orthogonal_(linear.weight)
        for linear in (self.key, self.gate):
            nn.init.orthogonal_(linear.weight, gain=0.1)
        self.norm.reset_parameters()
        self.norm.weight.fill_(((self.layer + 1) / self.layers) ** 0.7)


class ChannelMix(nn.Module):
    """A gated MLP of squared ReLUs on each position of (b n c) and the previous one."""

    def __init__(self, dim: int, inner: int, layer: int, layers: int):
        super().__init__()
        self.layer, self.layers = layer, layers
        self.mix = nn.Parameter(torch.empty(2, dim))
        self.key = nn.Linear(dim, inner, bias=False)
        self.value = nn.Linear(inner, dim, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, r = (x + to_previous(x) * self.mix[:, None, None]).unbind()
        return self.receptance(r).sigmoid() * self.value(F.relu(self.key(k)).square())

    def init_weights(self) -> None:
        """Initialise as RWKV-LM's RWKV_CMix_x060, except that ``value`` and ``receptance`` do not start at zero."""
        self.mix.copy_(1 - channel_places(self.mix[0]) ** (1 - self.layer / self.layers))
        for linear in (self.key, self.value, self.receptance):
            nn.init.orthogonal_(linear.weight)


def channel_places(like: Tensor) -> Tensor:
    """0 for the first channel to almost 1 for the last."""
    return torch.arange(len(like), device=like.device) / len(like)


class STRWKV(ScanModel):
    """``forward(x, timestep, label=None)``: the scan model whose mixers are RWKV-6.

    x (b i t h w), timestep (b) on the scale 0 to 1000, label (b) with ``num_classes`` -> (b o t h w). Any number of
    frames, of any size.
    """

    def __init__(self, config: Config):
        dim = config.hidden

        def block(over: str, index: int) -> Block:
            place = index, config.depth * config.order.count(over) // len(config.order)
            time = TimeMix(dim, config.head_dim, config.mix_rank, config.decay_rank, *place)
            channel = ChannelMix(dim, int(config.mlp_ratio * dim), *place)
            norms = [Norm(dim, bias=True), Norm(dim, bias=True)]
            return Block(dim, over, norms, [time, channel], reverse=index % 2 == 1)

        super().__init__(config, block)
