"""The layers of the Axial Transformer of images, and what they keep while images are sampled.

Letters: n slices ((b c): images and channels), h w rows and columns of pixels, d hidden channels, k levels of a pixel,
e features of a pixel from previous channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from zoo.attention import SelfAttention, attend
from zoo.layers import MLP

if TYPE_CHECKING:
    from zoo.image.axial import Config


class Block(nn.Module):
    """Attention along one axis of (n h w d) and an MLP, each behind a norm: ``"row"`` or ``"column"``."""

    def __init__(self, config: Config, along: str, causal: bool):
        super().__init__()
        dim = config.hidden
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = SelfAttention(dim, config.heads, {"column": "t", "row": "s"}[along], causal=causal)
        self.mlp = MLP(dim, config.mlp * dim, activation=QuickGELU())
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, above: ColumnCache | None = None) -> Tensor:
        """above: the block's cache of the rows above; x is then a single row."""
        normed = self.norm_attention(x)
        x = x + self.dropout(self.attention(normed) if above is None else above.attend(self.attention, normed))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class RowColumn(nn.Module):
    """A block along rows, not causal, and a block along columns."""

    def __init__(self, config: Config, causal: bool):
        super().__init__()
        self.row = Block(config, "row", causal=False)
        self.column = Block(config, "column", causal)

    def forward(self, x: Tensor, above: ColumnCache | None = None) -> Tensor:
        return self.column(self.row(x), above)


class ColumnCache:
    """The cache of one causal block along columns: keys and values of the rows above, extended row by row."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, attention: SelfAttention, x: Tensor) -> Tensor:
        """The attention of a row (n 1 w d) to itself and to all previous rows."""
        q, k, v = rearrange(attention.qkv(x), "n 1 w (kind h e) -> kind (n w) 1 h e", kind=3, h=attention.heads)
        self.keys.append(k)
        self.values.append(v)
        y = attend(q, torch.cat(self.keys, dim=1), torch.cat(self.values, dim=1))
        return attention.out(rearrange(y, "(n w) 1 h e -> n 1 w (h e)", n=len(x)))


class SamplingCache:
    """The cache of a forward while a batch of images is sampled.

    channel, row: position of the next value. context (b h w d): features of the channel from the label and previous
    channels; above: for each outer block, its cache of the rows above; seen (b 1 w d): the outer result for the row.
    """

    def __init__(self) -> None:
        self.channel = self.row = -1
        self.context: Tensor | None = None
        self.above: list[ColumnCache] = []
        self.seen: Tensor | None = None


class Positions(nn.Module):
    """Add a row vector and a column vector to every pixel of (n h w d)."""

    def __init__(self, config: Config):
        super().__init__()
        self.row = nn.Parameter(torch.empty(config.height, config.hidden))
        self.column = nn.Parameter(torch.empty(config.width, config.hidden))

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        # one after the other: their sum would be as large as x
        return x + self.row[first : first + x.shape[1], None] + self.column[: x.shape[2]]


class Shift(nn.Module):
    """Move (n h w d) one row down or one column to the right: zeros enter, the last row or column is dropped."""

    def __init__(self, towards: str):
        super().__init__()
        self.padding = {"down": (0, 0, 0, 0, 1, -1), "right": (0, 0, 1, -1)}[towards]

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.padding)


def neighbours(x: Tensor, dim: int) -> Tensor:
    """Every place of (n h w e) with the places before and after it: (n h w (3 e)), zeros beyond the edge."""
    padding = (0, 0, 0, 0, 1, 1) if dim == 1 else (0, 0, 1, 1)
    return torch.cat([F.pad(x, padding).narrow(dim, i, x.shape[dim]) for i in range(3)], dim=-1)


class Previous(nn.Module):
    """Features of every channel of an image (b c h w) from previous channels, with the rows above and below.

    For a channel, (2 c) numbers: the values of previous channels, scaled to 0 to 1, zeros for the others, and the
    channel's number, one-hot. Three rows together are ((b c) h w e).
    """

    def __init__(self, levels: int):
        super().__init__()
        self.levels = levels

    def forward(self, image: Tensor, dtype: torch.dtype) -> Tensor:
        channels = image.shape[1]
        numbers = torch.arange(channels, device=image.device)
        values = image[:, None].to(dtype) / (self.levels - 1) * (numbers < numbers[:, None])[:, :, None, None]
        which = (numbers == numbers[:, None])[:, :, None, None].expand_as(values)
        known = torch.cat([values, which.to(dtype)], dim=2)
        return neighbours(known.flatten(0, 1).movedim(1, -1), dim=1)


class Convolution(nn.Module):
    """The second half of a convolution of 3 x 3 pixels: (n h w e), which has three rows, to (n h w d)."""

    def __init__(self, channels: int, dim: int):
        super().__init__()
        self.linear = nn.Linear(9 * channels, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(neighbours(x, dim=2))


class Logits(nn.Module):
    """Norm and linear layer, (n h w d) -> (n h w k)."""

    def __init__(self, dim: int, levels: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(dim), nn.Linear(dim, levels)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))
