"""Spatial-temporal Mamba: a video diffusion model whose every block is one Mamba mixer, over space or over time.

Each block is x += gate * mixer(modulate(RMSNorm(x))), modulated by adaLN-Zero (DiT, section 3.2), without an MLP.
Mixers are Mamba-1 (arXiv 2312.00752) or Mamba-2 (arXiv 2405.21060), in both directions as in Vision Mamba (arXiv
2401.09417): the input and output projections are shared, each direction has its own convolution and state space. Widths
and depths of S and B are those of Vision Mamba, those of L are Mamba-370M's. Parameters, for latents of 4 channels:

    size   blocks  hidden       mamba1       mamba2
    B/2        24     768  140,603,152  135,101,584
    S/2        24     384   36,239,248   35,178,064
    L/2        48    1024  492,606,480  471,996,432

``from_reference`` loads the mixers and norms of a published Mamba, layer by layer. The rest (modulation, embeddings,
the last layer) has no counterpart there and is initialised. ``mixer_from_reference`` loads one mixer.

Letters: `zoo/video/__init__.py`; d inner channels.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.scan import at_least_float32, has_data_on_cuda, scan
from zoo.video.scan_model import Block, Norm, ScanConfig, ScanModel

SIZES: dict[str, dict[str, Any]] = {
    "B/2": {"hidden": 768, "depth": 24},
    "S/2": {"hidden": 384, "depth": 24},
    "L/2": {"hidden": 1024, "depth": 48},
    "test": {"hidden": 48, "depth": 6, "d_state": 6, "head_dim": 12},
}


@dataclass(frozen=True)
class Config(ScanConfig):
    mixer: str = "mamba1"  # or "mamba2"
    bidirectional: bool = True
    d_state: int | None = None  # channels of the state; null for 16 in Mamba-1, 128 in Mamba-2
    d_conv: int = 4  # positions that the convolution before the scan sees
    expand: int = 2  # inner channels / hidden
    head_dim: int = 64  # Mamba-2 only, like groups
    groups: int = 1  # groups of heads that share B and C

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixer not in MIXERS:
            raise ValueError(f"mixer={self.mixer!r}: expected {' or '.join(map(repr, MIXERS))}")
        inner = self.expand * self.hidden
        if self.mixer == "mamba2" and (inner % self.head_dim or inner // self.head_dim % self.groups):
            raise ValueError(
                f"head_dim={self.head_dim}, groups={self.groups}: {inner} inner channels (expand x hidden) must divide "
                "into heads, and these into groups"
            )


class CausalConv(nn.Module):
    """A convolution of each channel of (b n d) over the current and previous positions, then SiLU."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, width))
        self.bias = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        width = self.weight.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        taps = (padded[:, i : i + x.shape[1]] * w for i, w in enumerate(self.weight.unbind(1)))
        return F.silu(sum(taps, self.bias))

    def init_weights(self) -> None:
        for param in (self.weight, self.bias):
            nn.init.uniform_(param, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)


class Mamba1Direction(nn.Module):
    """Convolution and selective state space: h = exp(dt A) h + dt x B, y = C h + D x; (b n d) -> (b n d)."""

    def __init__(self, inner: int, rank: int, d_state: int, d_conv: int):
        super().__init__()
        self.sizes = rank, d_state, d_state
        self.conv1d = CausalConv(inner, d_conv)
        self.x_proj = nn.Linear(inner, rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, d_state))
        self.D = nn.Parameter(torch.empty(inner))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1d(x)
        dt, B, C = self.x_proj(x).split(self.sizes, -1)
        step, A = self.dt_proj(dt), -at_least_float32(self.A_log).exp()
        kernel = mamba_kernel() if has_data_on_cuda(x) and x.dtype != torch.float64 else None
        if kernel is not None:
            return by_kernel(kernel, x, step, A, B, C, self.D)
        dt = F.softplus(at_least_float32(step))
        y = scan(C[:, :, None], B[:, :, None], (dt * x).to(x.dtype)[..., None], dt[..., None] * A)
        return y[..., 0] + self.D * x

    def init_weights(self) -> None:
        self.conv1d.init_weights()
        self.x_proj.reset_parameters()
        nn.init.uniform_(self.dt_proj.weight, -(self.sizes[0] ** -0.5), self.sizes[0] ** -0.5)
        init_time_step(self.dt_proj.bias)
        self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1, device=self.A_log.device).log().expand_as(self.A_log))
        nn.init.ones_(self.D)


@cache
def mamba_kernel() -> Callable[..., Tensor] | None:
    """The CUDA kernel of Mamba-1 of the package mamba_ssm; None if the package is not installed."""
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ImportError:
        return None
    kernel: Callable[..., Tensor] = selective_scan_fn
    return kernel


def by_kernel(
    kernel: Callable[..., Tensor], x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """The scan of Mamba-1 by ``selective_scan_fn``, which takes (b d n) and (b k n), and A and D in float32.

    step: the time step before softplus, which the kernel computes in float32.
    """
    u, delta, keys, queries = (part.to(x.dtype).mT.contiguous() for part in (x, step, B, C))
    return kernel(u, delta, A.float(), keys, queries, D.float(), delta_softplus=True).mT


class Mamba1(nn.Module):
    """The mixer of Mamba-1 (section 3.4), in one or both directions: (b n c) -> (b n c)."""

    def __init__(self, dim: int, d_state: int = 16, d_conv: int = 4, expand: int = 2, bidirectional: bool = False):
        super().__init__()
        inner, rank = expand * dim, math.ceil(dim / 16)
        self.in_proj = nn.Linear(dim, 2 * inner, bias=False)
        self.ahead = Mamba1Direction(inner, rank, d_state, d_conv)
        self.back = Mamba1Direction(inner, rank, d_state, d_conv) if bidirectional else None
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, z = self.in_proj(x).chunk(2, -1)
        y = self.ahead(x)
        if self.back is not None:
            y = y + self.back(x.flip(1)).flip(1)
        return self.out_proj(y * F.silu(z))

    @torch.no_grad()
    def init_weights(self) -> None:
        init_mixer(self)


class Mamba2Direction(nn.Module):
    """Convolution and state space with one decay a head: (x, B and C in one tensor, dt (b n h)) -> (b n d)."""

    def __init__(self, inner: int, heads: int, groups: int, d_state: int, d_conv: int):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.sizes = inner, groups * d_state, groups * d_state
        self.conv1d = CausalConv(sum(self.sizes), d_conv)
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))

    def forward(self, xbc: Tensor, dt: Tensor) -> Tensor:
        x, B, C = self.conv1d(xbc).split(self.sizes, -1)
        x = x.unflatten(-1, (self.heads, -1))
        B, C = (y.unflatten(-1, (self.groups, -1)) for y in (B, C))
        dt, A = F.softplus(at_least_float32(dt + self.dt_bias)), -at_least_float32(self.A_log).exp()
        y = scan(C, B, (dt[..., None] * x).to(x.dtype), dt * A)
        return (y + self.D[:, None] * x).flatten(-2)

    def init_weights(self) -> None:
        self.conv1d.init_weights()
        init_time_step(self.dt_bias)
        self.A_log.copy_(nn.init.uniform_(self.A_log, 1, 16).log())
        nn.init.ones_(self.D)


class Mamba2(nn.Module):
    """The mixer of Mamba-2 (section 7.1), in one or both directions: (b n c) -> (b n c).

    The gated norm is over the heads of a group. It is applied to each direction, then the two are added.
    """

    def __init__(
        self,
        dim: int,
        d_state: int = 128,
        d_conv: int = 4,
        expand: int = 2,
        bidirectional: bool = False,
        head_dim: int = 64,
        groups: int = 1,
    ):
        super().__init__()
        inner = expand * dim
        heads = inner // head_dim
        self.groups = groups
        self.sizes = inner, inner + 2 * groups * d_state, heads
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=False)
        self.ahead = Mamba2Direction(inner, heads, groups, d_state, d_conv)
        self.back = Mamba2Direction(inner, heads, groups, d_state, d_conv) if bidirectional else None
        self.norm = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        z, xbc, dt = self.in_proj(x).split(self.sizes, -1)
        y = self.gated_norm(self.ahead(xbc, dt), z)
        if self.back is not None:
            y = y + self.gated_norm(self.back(xbc.flip(1), dt.flip(1)).flip(1), z)
        return self.out_proj(y)

    def gated_norm(self, y: Tensor, z: Tensor) -> Tensor:
        y = at_least_float32(y) * F.silu(at_least_float32(z))
        grouped = y.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], eps=1e-5).flatten(-2).to(z.dtype) * self.norm

    @torch.no_grad()
    def init_weights(self) -> None:
        init_mixer(self)
        nn.init.ones_(self.norm)


MIXERS: dict[str, type[Mamba1] | type[Mamba2]] = {"mamba1": Mamba1, "mamba2": Mamba2}


def init_mixer(mixer: Mamba1 | Mamba2) -> None:
    """Initialise linear layers as PyTorch does, like the authors' code; the directions initialise themselves."""
    mixer.in_proj.reset_parameters()
    mixer.out_proj.reset_parameters()
    mixer.ahead.init_weights()
    if mixer.back is not None:
        mixer.back.init_weights()


def init_time_step(bias: Tensor) -> None:
    """Initialise the bias so that softplus(bias) is log-uniform in [0.001, 0.1] (Mamba, section 3.6)."""
    dt = nn.init.uniform_(bias, math.log(1e-3), math.log(0.1)).exp()
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class STMamba(ScanModel):
    """``forward(x, timestep, label=None)``: the scan model whose mixers are Mamba-1 or Mamba-2.

    x (b i t h w), timestep (b) on the scale 0 to 1000, label (b) with ``num_classes`` -> (b o t h w). Any number of
    frames, of any size.
    """

    def __init__(self, config: Config):
        def block(over: str, index: int) -> Block:
            kind = {"head_dim": config.head_dim, "groups": config.groups} if config.mixer == "mamba2" else {}
            d_state = config.d_state or {"mamba1": 16, "mamba2": 128}[config.mixer]
            mixer = MIXERS[config.mixer](
                config.hidden, d_state, config.d_conv, config.expand, config.bidirectional, **kind
            )
            return Block(config.hidden, over, [Norm(config.hidden)], [mixer])

        super().__init__(config, block)

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise as every scan model; mixers' outputs are divided by sqrt(depth), as in mamba_ssm and GPT-2."""
        super().init_weights()
        for block in self.running():
            block.mixers[0].out_proj.weight.div_(math.sqrt(self.config.depth))
