"""Layers that the models share: plain PyTorch with no buffers, so that a model built on meta needs only its weights.

Letters: b batch, t frames, s patches of a frame (row by row), c channels, h heads, e channels of a head, l text tokens.
"""

import math
from itertools import repeat

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

MAX_BATCH = 65535  # CUDA attention kernels launch one grid row a batch entry, and a grid has no more rows


# Attention


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax attention: queries (b n h e), keys and values (b m h e) -> (b n h e).

    ``mask`` (b m) is True for the keys to be seen; where it is False throughout, all of them are. ``causal``: a query
    sees the keys up to its own place (no mask then). flash-attn runs it where it is installed and can (CUDA, half
    precision, no mask), PyTorch's SDPA everywhere else.
    """
    if len(q) > MAX_BATCH:
        masks = repeat(None) if mask is None else mask.split(MAX_BATCH)
        parts = zip(q.split(MAX_BATCH), k.split(MAX_BATCH), v.split(MAX_BATCH), masks)
        return torch.cat([attend(*part, causal=causal) for part in parts])
    half = q.dtype in (torch.float16, torch.bfloat16)
    if flash_attn_func is not None and q.is_cuda and half and mask is None and q.shape[-1] <= 256:
        return flash_attn_func(q, k, v, causal=causal)
    if mask is not None:
        mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal).transpose(1, 2)


class SelfAttention(nn.Module):
    """Multi-head self-attention along one dim of (b t s c): over space (``"s"``) or over time (``"t"``).

    ``width`` is the channels of all heads together, if not ``dim``. ``causal``: no place sees a later one.
    """

    def __init__(self, dim: int, heads: int, over: str, width: int | None = None, causal: bool = False):
        super().__init__()
        width = dim if width is None else width
        self.heads, self.causal = heads, causal
        self.fold = {"s": "b t s c -> (b t) s c", "t": "b t s c -> (b s) t c"}[over]
        self.unfold = {"s": "(b t) s c -> b t s c", "t": "(b s) t c -> b t s c"}[over]
        self.qkv = nn.Linear(dim, 3 * width)
        self.out = nn.Linear(width, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = rearrange(x, self.fold)
        q, k, v = rearrange(self.qkv(y), "b n (k h e) -> k b n h e", k=3, h=self.heads)
        y = self.out(rearrange(attend(q, k, v, causal=self.causal), "b n h e -> b n (h e)"))
        return rearrange(y, self.unfold, b=len(x))


class CrossAttention(nn.Module):
    """Multi-head attention from (b t s c) to text (b l c), the same for every frame; ``mask`` (b l) keeps tokens."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q = rearrange(self.q(x), "b t s (h e) -> b (t s) h e", h=self.heads)
        k, v = rearrange(self.kv(context), "b l (k h e) -> k b l h e", k=2, h=self.heads)
        return self.out(rearrange(attend(q, k, v, mask), "b (t s) h e -> b t s (h e)", t=x.shape[1]))


class MLP(nn.Module):
    """Two linear layers with an activation between them, tanh-GELU unless told otherwise."""

    def __init__(self, dim: int, hidden: int, out: int | None = None, activation: nn.Module | None = None):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.activation = nn.GELU(approximate="tanh") if activation is None else activation
        self.down = nn.Linear(hidden, dim if out is None else out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def init_linear(model: nn.Module) -> None:
    """Xavier-uniform weights and zero biases in every linear layer, the start of DiT and of all that follow it."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


def init_zero(*layers: nn.Linear) -> None:
    """Zero weights and biases: what such a layer adds to a residual starts as nothing."""
    for layer in layers:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)


# Positions: computed in every forward, which costs nothing beside a block and fits any length on any device


def sincos(positions: Tensor, dim: int) -> Tensor:
    """Sines, then cosines, of positions (n) at dim/2 frequencies 10000^(-2k/dim), in float64 -> float32 (n dim)."""
    steps = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    angles = torch.outer(positions.double(), 1.0 / 10000 ** (steps / (dim / 2)))
    return torch.cat([angles.sin(), angles.cos()], dim=1).float()


def add_time(x: Tensor) -> Tensor:
    """Add the sincos table of the frame number to (b t s c), which must hold all its frames."""
    frames = torch.arange(x.shape[1], device=x.device)
    return x + sincos(frames, x.shape[-1]).to(x.dtype)[:, None]


# Conditioning


class TimestepEmbed(nn.Module):
    """Diffusion timesteps (b), on the scale 0 to 1000, to (b c): cosines and sines, then an MLP (DiT, section 3)."""

    def __init__(self, dim: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = MLP(frequencies, dim, dim, activation=nn.SiLU())

    def forward(self, timestep: Tensor) -> Tensor:
        half = self.frequencies // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep.device)
        angles = timestep.float()[:, None] * torch.exp(-math.log(10000) * steps / half)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=1).to(self.mlp.up.weight.dtype))


class LabelEmbed(nn.Module):
    """Class labels (b) to (b c). The last row, label ``num_classes``, is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, dim: int):
        super().__init__()
        self.table = nn.Embedding(num_classes + 1, dim)

    def forward(self, label: Tensor) -> Tensor:
        return self.table(label)


class ScaleShiftTable(nn.Module):
    """adaLN-single (PixArt-alpha, section 2.3): a table (k c) of this layer's own on what the model computed once.

    Takes (b k*c), or (b c) for every row alike -> (b k c).
    """

    def __init__(self, dim: int, rows: int):
        super().__init__()
        self.table = nn.Parameter(torch.empty(rows, dim))

    def forward(self, cond: Tensor) -> Tensor:
        return self.table + cond.unflatten(-1, (-1, self.table.shape[-1]))


class ScaleShiftLinear(nn.Module):
    """adaLN-Zero (DiT, section 3.2): SiLU and a linear layer of this layer's own, (b c) -> (b k c)."""

    def __init__(self, dim: int, rows: int):
        super().__init__()
        self.rows = rows
        self.linear = nn.Linear(dim, rows * dim)

    def forward(self, cond: Tensor) -> Tensor:
        return self.linear(F.silu(cond)).unflatten(-1, (self.rows, -1))


def expect(name: str, given: Tensor | None, wanted: bool, built: str) -> None:
    """A forward takes the conditioning that its model was built for, no less and no more."""
    if wanted != (given is not None):
        raise ValueError(f"a model built with {built} {'needs' if wanted else 'takes no'} {name}")


def norm(x: Tensor) -> Tensor:
    """LayerNorm over c without an affine part: the modulation is its affine part."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


def rows(modulation: Tensor, dims: int = 2) -> tuple[Tensor, ...]:
    """The rows of (b k c), each (b 1 ... 1 c): shift, scale, gate in this order, for one sublayer after another.

    ``dims`` is the number of dims between b and c of what they modulate.
    """
    return modulation.unflatten(-1, [1] * dims + [-1]).unbind(1)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


# Stages: each takes and returns whole residuals, so that nothing but the residual crosses a boundary


class Block(nn.Module):
    """A transformer block on (b t s c), which attends within frames (``over="s"``) or across them (``over="t"``).

    Modulated attention, attention to text (if ``text``; without norm or gate), modulated MLP. ``modulation`` turns
    ``cond`` (b k) into shift, scale and gate of both modulated sublayers. ``positions`` adds the temporal table first,
    unless there is one frame alone: that is an image.
    """

    def __init__(
        self, dim: int, heads: int, over: str, modulation: nn.Module, text: bool = False, positions: bool = False
    ):
        super().__init__()
        self.positions = positions
        self.modulation = modulation
        self.attention = SelfAttention(dim, heads, over)
        self.cross = CrossAttention(dim, heads) if text else None
        self.mlp = MLP(dim, 4 * dim)

    def forward(self, x: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = rows(self.modulation(cond))
        if self.positions and x.shape[1] > 1:
            x = add_time(x)
        x = x + gate * self.attention(modulate(norm(x), shift, scale))
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class ModulatedNorm(nn.Module):
    """The one input of attentions that run side by side: norm and modulation of (b ... c); ``cond`` as in Block."""

    def __init__(self, modulation: nn.Module):
        super().__init__()
        self.modulation = modulation  # of 2 rows

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return modulate(norm(x), *rows(self.modulation(cond), x.ndim - 2))


class FusedMLP(nn.Module):
    """What follows attentions that ran side by side: their gated sum ``y`` joins x (b ... c), then a modulated MLP.

    With ``heads``, attention to text comes between the two, as in Block.
    """

    def __init__(self, dim: int, modulation: nn.Module, heads: int | None = None):
        super().__init__()
        self.modulation = modulation  # of 4 rows
        self.cross = None if heads is None else CrossAttention(dim, heads)
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self, x: Tensor, y: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        gate, shift_mlp, scale_mlp, gate_mlp = rows(self.modulation(cond), x.ndim - 2)
        x = x + gate * y
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class PatchEmbed(nn.Module):
    """Latent video (b i t h w) to tokens (b t s c) with the 2-D sincos table of their place in the frame.

    Frames are padded at the bottom and the right to whole patches. The table's first half of channels encodes the
    column, its second half the row. ``sample_size`` stretches the positions of any frame over the grid of a square
    frame of that many cells, as diffusers' models do; without it they count patches.
    """

    def __init__(self, in_channels: int, dim: int, patch: tuple[int, int, int], sample_size: int | None = None):
        super().__init__()
        self.patch = patch[1:]
        self.sample_size = sample_size
        self.proj = nn.Linear(in_channels * math.prod(patch), dim)

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.patch
        x = F.pad(x, (0, -x.shape[-1] % q, 0, -x.shape[-2] % p))
        height, width = x.shape[-2] // p, x.shape[-1] // q
        x = rearrange(x, "b i t (h p) (w q) -> b t (h w) (i p q)", p=p, q=q)
        x = self.proj(x.to(self.proj.weight.dtype))
        return x + self.table(height, width, x).to(x.dtype)

    def table(self, height: int, width: int, like: Tensor) -> Tensor:
        down, right = (
            sincos(self.positions(count, patch, like.device), like.shape[-1] // 2)
            for count, patch in zip((height, width), self.patch)
        )
        return torch.cat([right.repeat(height, 1), down.repeat_interleave(width, dim=0)], dim=1)

    def positions(self, count: int, patch: int, device: torch.device) -> Tensor:
        places = torch.arange(count, dtype=torch.float32, device=device)
        if self.sample_size is None:
            return places
        return places / (count / (self.sample_size // patch)) / max(self.sample_size // 64, 1)


class FinalLinear(nn.Module):
    """A token (b t s c) to the values of its patch (b t s k): norm, modulation, linear."""

    def __init__(self, dim: int, out_channels: int, patch: tuple[int, int, int], modulation: nn.Module):
        super().__init__()
        self.patch = patch[1:]
        self.modulation = modulation
        self.linear = nn.Linear(dim, out_channels * math.prod(patch))

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return self.linear(modulate(norm(x), *rows(self.modulation(cond), x.ndim - 2)))


class FinalLayer(FinalLinear):
    """Tokens (b t s c) back to latent video (b o t h w) of ``size`` (h, w)."""

    def forward(self, x: Tensor, cond: Tensor, size: tuple[int, int]) -> Tensor:  # type: ignore[override]
        return unpatchify(super().forward(x, cond), self.patch, size)


def unpatchify(x: Tensor, patch: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """The values of all patches, (b t s k) or (b t h w k), as frames (b o t h w) of ``size``, padding cut off."""
    (p, q), (height, width) = patch[-2:], size
    tokens = "(h w)" if x.ndim == 4 else "h w"
    x = rearrange(x, f"b t {tokens} (p q o) -> b o t (h p) (w q)", h=-(-height // p), p=p, q=q)
    return x if x.shape[-2:] == size else x[..., :height, :width]


# What the video models share around their layers


def check_shape(hidden: int, heads: int, patch: tuple[int, int, int]) -> None:
    """Refuse sizes that the layers above cannot have."""
    if hidden % heads:
        raise ValueError(f"hidden={hidden} does not divide into heads={heads}")
    if hidden % 4:
        raise ValueError(f"hidden={hidden}: the 2-D sincos table needs a multiple of 4")
    if patch[0] != 1:
        raise ValueError(f"patch={patch}: frames are embedded one at a time, so its first number is 1")


def video_inputs(
    batch: int, channels: int, frames: int, height: int, width: int, classes: int = 0, text: tuple[int, int] = (0, 0)
) -> dict[str, Tensor]:
    """Random forward arguments of a video model on the default device; ``text`` is (tokens, channels)."""
    inputs = {"x": torch.randn(batch, channels, frames, height, width), "timestep": torch.rand(batch) * 1000}
    if classes:
        inputs["label"] = torch.randint(classes, (batch,))
    if all(text):
        inputs["context"] = torch.randn(batch, *text)
        lengths = text[0] - torch.arange(batch) % text[0]  # captions of several lengths
        inputs["context_mask"] = torch.arange(text[0]) < lengths[:, None]
    return inputs
