"""Parts that transformers of video share: blocks, the embedding of patches, the last layer, options and inputs.

Letters: b batch, t frames, s patches of a frame (row by row), c channels, l text tokens.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor, nn

from zoo.attention import CrossAttention, SelfAttention
from zoo.layers import MLP, add_time, modulate, norm, sincos, split_modulation

# Stages: each takes and returns the residual, so that nothing else crosses a stage's boundary


class Block(nn.Module):
    """A transformer block on (b t s c), which attends within frames (``over="s"``) or across them (``over="t"``).

    Modulated attention, attention to text (if ``text``; without norm or gate), modulated MLP. ``modulation`` turns
    ``cond`` (b k) into shift, scale and gate of both modulated sublayers, and ``clean`` (b k) into those of the frames
    where ``x_mask`` (b t) is False. ``positions`` adds the temporal table first, unless there is only one frame, an
    image. ``options`` are those of the attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        over: str,
        modulation: nn.Module,
        text: bool = False,
        positions: bool = False,
        **options: Any,
    ):
        super().__init__()
        self.positions = positions
        self.modulation = modulation
        self.attention = SelfAttention(dim, heads, over, **options)
        self.cross = CrossAttention(dim, heads) if text else None
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self,
        x: Tensor,
        cond: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        clean: Tensor | None = None,
        x_mask: Tensor | None = None,
    ) -> Tensor:
        modulation = self.modulation(cond), None if clean is None else self.modulation(clean)
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = split_modulation(*modulation, x_mask)
        if self.positions and x.shape[1] > 1:
            x = add_time(x)
        x = x + gate * self.attention(modulate(norm(x), shift, scale))
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class ModulatedNorm(nn.Module):
    """The common input of parallel attentions: norm and modulation of (b ... c); ``cond`` as in Block."""

    def __init__(self, modulation: nn.Module):
        super().__init__()
        self.modulation = modulation  # makes 2 rows

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        return modulate(norm(x), *split_modulation(self.modulation(cond), dims=x.ndim - 2))


class FusedMLP(nn.Module):
    """The end of parallel attentions: their sum ``y``, gated, is added to x (b ... c); then a modulated MLP.

    With ``heads``, attention to text comes between the two, as in Block.
    """

    def __init__(self, dim: int, modulation: nn.Module, heads: int | None = None):
        super().__init__()
        self.modulation = modulation  # makes 4 rows
        self.cross = None if heads is None else CrossAttention(dim, heads)
        self.mlp = MLP(dim, 4 * dim)

    def forward(
        self, x: Tensor, y: Tensor, cond: Tensor, context: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        gate, shift_mlp, scale_mlp, gate_mlp = split_modulation(self.modulation(cond), dims=x.ndim - 2)
        x = x + gate * y
        if self.cross is not None:
            assert context is not None
            x = x + self.cross(x, context, mask)
        return x + gate_mlp * self.mlp(modulate(norm(x), shift_mlp, scale_mlp))


class PatchEmbed(nn.Module):
    """Latent video (b i t h w) to tokens (b t s c) with the 2-D sincos table of their position in the frame.

    Frames are padded at the bottom and the right to whole patches. The table's first half of channels encodes the
    column, its second half the row. ``sample_size`` stretches the positions of any frame over the grid of a square
    frame with sides of that many cells, as diffusers' models do. Without it positions count patches, or are ``stride``
    (b 2) apart: the distance of each sample's rows, then of its columns.
    """

    def __init__(self, in_channels: int, dim: int, patch: tuple[int, int, int], sample_size: int | None = None):
        super().__init__()
        self.patch = patch[1:]
        self.sample_size = sample_size
        self.proj = nn.Linear(in_channels * math.prod(patch), dim)

    def forward(self, x: Tensor, stride: Tensor | None = None) -> Tensor:
        p, q = self.patch
        x = F.pad(x, (0, -x.shape[-1] % q, 0, -x.shape[-2] % p))
        height, width = x.shape[-2] // p, x.shape[-1] // q
        x = rearrange(x, "b i t (h p) (w q) -> b t (h w) (i p q)", p=p, q=q)
        x = self.proj(x.to(self.proj.weight.dtype))
        down, right = self.positions(height, p, x.device), self.positions(width, q, x.device)
        if stride is not None:
            down, right = stride[:, :1] * down, stride[:, 1:] * right
        down, right = (sincos(places, x.shape[-1] // 2) for places in (down, right))
        right, down = (
            repeat(right, "... w c -> ... 1 (h w) c", h=height),
            repeat(down, "... h c -> ... 1 (h w) c", w=width),
        )
        return x + torch.cat([right, down], dim=-1).to(x.dtype)

    def positions(self, count: int, patch: int, device: torch.device) -> Tensor:
        places = torch.arange(count, dtype=torch.float32, device=device)
        if self.sample_size is None:
            return places
        return places / (count / (self.sample_size // patch)) / max(self.sample_size // 64, 1)


class FinalLinear(nn.Module):
    """A token (b t s c) to the values of its patch (b t s k): norm, modulation, linear.

    Frames where ``x_mask`` (b t) is False are normalised and modulated a second time, with ``clean`` (b k), as in
    Open-Sora, whose weights were trained so.
    """

    def __init__(self, dim: int, out_channels: int, patch: tuple[int, int, int], modulation: nn.Module):
        super().__init__()
        self.patch = patch[1:]
        self.modulation = modulation
        self.linear = nn.Linear(dim, out_channels * math.prod(patch))

    def forward(self, x: Tensor, cond: Tensor, clean: Tensor | None = None, x_mask: Tensor | None = None) -> Tensor:
        dims = x.ndim - 2
        x = modulate(norm(x), *split_modulation(self.modulation(cond), dims=dims))
        if x_mask is not None:
            conditioned = modulate(norm(x), *split_modulation(self.modulation(clean), dims=dims))
            x = torch.where(x_mask[:, :, None, None], x, conditioned)
        return self.linear(x)


def unpatchify(x: Tensor, patch: tuple[int, ...], size: tuple[int, int]) -> Tensor:
    """The values of all patches, (b t s k) or (b t h w k), as frames (b o t h w) of ``size``, padding cut off."""
    (p, q), (height, width) = patch[-2:], size
    tokens = "(h w)" if x.ndim == 4 else "h w"
    x = rearrange(x, f"b t {tokens} (p q o) -> b o t (h p) (w q)", h=-(-height // p), p=p, q=q)
    return x if x.shape[-2:] == size else x[..., :height, :width]


@dataclass(frozen=True)
class VideoConfig:
    """The options that transformers of video share, with values of the XL sizes; every model's Config adds its own."""

    hidden: int = 1152
    depth: int = 28
    heads: int = 16
    patch: tuple[int, int, int] = (1, 2, 2)
    in_channels: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch", tuple(self.patch))
        check_shape(self.hidden, self.heads, self.patch)

    @property
    def out_channels(self) -> int:
        """in_channels, doubled if the model also predicts a variance, less those that only condition."""
        times = 2 if getattr(self, "learn_sigma", False) else 1
        return times * self.in_channels - getattr(self, "condition_channels", 0)


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
