"""Small models that show one thing each between stages: checkpoints, sources, masks, views, transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SPACE_TIME = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}
again = partial(checkpoint, use_reentrant=False)


class Along(nn.Module):
    """A transformer layer along one dim of x: b t s c."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.block = dim, nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.movedim(self.dim, 2)
        return x + self.block(rows.flatten(0, 1)).view(rows.shape).movedim(2, self.dim)  # no view, as fully_shard wants


class SpaceTime(nn.Module):
    """Two stages, and nothing between them."""

    stages = SPACE_TIME

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.norm = Along(2), Along(1), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.space(x))


class Residual(SpaceTime):
    """Residual streams, norms and a softmax between stages."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.space(self.norm(x))
        return (x + 0.5 * self.time(self.norm(x))).softmax(-1)


class Views(SpaceTime):
    """Views of one tensor read in two layouts, slices, a statistic along the sharded dim, a convolution over it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.space(x)
        rows = y.flatten(0, 1).transpose(1, 2)  # a view of a view, which the convolution reads along s
        z = self.conv(rows).transpose(1, 2).unflatten(0, x.shape[:2])
        y = self.time(y) + z
        y = (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1)
        return torch.cat([y[:, 2:], y[:, :2]], 1) * y.amax((1, 2), keepdim=True)


class Layers(nn.Module):
    """Layers in checkpoints; depth: the number of checkpoints around the first two of them, some with more inside."""

    stages = {"": "x=b t s c", "layers.*.space": "b t [s c]", "layers.*.time": "b [t] s [c]"}

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.layers, self.depth = nn.ModuleList(Residual() for _ in range(3)), depth

    def layer(self, i: int, x: Tensor) -> Tensor:
        m = self.layers[i]
        x = x + m.space(m.norm(x))
        return x + 0.5 * m.time(m.norm(x))

    def first_two(self, depth: int, x: Tensor) -> Tensor:
        if not depth:
            return again(self.layer, 1, again(self.layer, 0, x))
        x = again(self.first_two, depth - 1, x)
        return x if depth % 2 else (x * 1.5).sin()

    def forward(self, x: Tensor) -> Tensor:
        return again(self.layer, 2, self.first_two(self.depth, x))


class Table(nn.Module):
    """A table of positions, made in forward of short tensors, for a rotation before attention without a stage; and a
    token repeated to the length. kept: the module keeps the table for later calls."""

    stages = {"": "x=b n c"}

    def __init__(self, kept: bool = False) -> None:
        super().__init__()
        self.qk, self.token, self.kept = nn.Linear(16, 48), nn.Parameter(torch.randn(16)), kept
        self.table: Tensor | None = None
        self.register_buffer("freqs", torch.linspace(1, 0.01, 12))

    def angle(self, x: Tensor) -> Tensor:
        if not self.kept:
            return torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.freqs)
        if self.table is None:
            self.table = torch.outer(torch.arange(64, dtype=x.dtype), self.freqs)
        return self.table[: x.shape[1]]

    def forward(self, x: Tensor) -> Tensor:
        angle = self.angle(x)
        y = x * self.token.repeat(x.shape[1], 1)
        a, b = self.qk(y).chunk(2, -1)
        q, k = (torch.cat([t * angle[:, :12].cos(), t * angle[:, :12].sin()], -1) for t in (a[..., :12], b[..., :12]))
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], y[:, None])[:, 0, :, :3]


class Masks(nn.Module):
    """Attention without a stage, under an n x n mask of an input that nobody named. depth: of checkpoints around it."""

    stages = {"": "x=b n c"}

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.qkv, self.depth = nn.ModuleList(nn.Linear(8, 24) for _ in range(2)), depth

    def layer(self, i: int, x: Tensor, seg: Tensor) -> Tensor:
        q, k, v = self.qkv[i](x)[:, None].chunk(3, -1)
        mask = seg[:, :, None] == seg[:, None, :]
        return x + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])[:, 0]

    def layers(self, x: Tensor, seg: Tensor) -> Tensor:
        call: Callable[..., Tensor] = again if self.depth else lambda f, *args: f(*args)
        for i in range(2):
            x = call(self.layer, i, x, seg)
        return x

    def forward(self, x: Tensor, seg: Tensor) -> Tensor:
        return again(self.layers, x, seg) if self.depth > 1 else self.layers(x, seg)


class Pairs(nn.Module):
    """New zeros to which sharded tensors are added; writes: into which one is written."""

    stages = {"": "x=b n c", "rows": "b i [j c]"}

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.rows, self.writes = nn.Sequential(nn.Linear(8, 8), nn.Softmax(2)), writes

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        z = torch.zeros(b, n, n, c, dtype=x.dtype)
        if self.writes:
            z[..., :4] = x[:, :, None, :4]
            z[..., 4:] += x[:, None, :, 4:]
        else:
            z = z + x[:, :, None] * x[:, None]
        return self.rows(z).mean(2)


class Mapped(SpaceTime):
    """torch.vmap over a tensor between stages; closed: over another one, with it in a closure."""

    def __init__(self, closed: bool = False) -> None:
        super().__init__()
        self.closed = closed

    def forward(self, x: Tensor) -> Tensor:
        y = self.space(x)
        if self.closed:
            return self.time(torch.vmap(lambda w: y * w)(torch.linspace(1, 2, 3, dtype=y.dtype)).sum(0))
        return self.time(torch.vmap(lambda v: v * v.sum(0), in_dims=1, out_dims=1)(y))


class Detached(SpaceTime):
    """A detached tensor, and a detached view, share copies with the tensor, also when that is gone."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.space(x)
        rows = y.transpose(1, 2).detach()
        total = self.space(y) + self.time(y.detach()) + self.time(y) + self.time(rows.transpose(1, 2))
        y = y.detach()
        return total + self.time(y)


class Crossed(SpaceTime):
    """A checkpoint in another one gets a view, of which a view is read in another layout."""

    def rows(self, x: Tensor) -> Tensor:
        return self.time(x.transpose(1, 2))

    def both(self, x: Tensor) -> Tensor:
        y = x * 2
        return again(self.rows, y.transpose(1, 2)) + self.space(y)

    def forward(self, x: Tensor) -> Tensor:
        y = self.space(x)
        return y + again(self.both, y)


class Offsets(nn.Module):
    """The offsets of places (b t k) from others (b s k), scaled: b t s k."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, rows: Tensor, columns: Tensor) -> Tensor:
        return (rows[:, :, None] - columns[:, None]) * self.scale


class Places(SpaceTime):
    """A stage that gets plain tensors alone, twice; depth: the checkpoints around it."""

    stages = {**SPACE_TIME, "offsets": "b t [k], b s [k] -> b t s k"}

    def __init__(self, depth: int = 0) -> None:
        super().__init__()
        self.offsets, self.mix, self.depth = Offsets(), nn.Linear(3, 16), depth

    def both(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        x = self.space(x + self.mix(self.offsets(rows, columns)))
        return self.time(x + self.mix(self.offsets(2 * rows, columns)))

    def forward(self, x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        run = self.both
        for _ in range(self.depth):
            run = partial(again, run)
        return run(x, rows, columns)


class Registers(nn.Module):
    """Tokens of a clip joined with learned ones, which are cut off again after attention: then a clip once more.

    way: the learned ones come "last" or "first", or are "split" from the tokens and added to these.
    """

    stages = {"": "x=b c t h w"}

    def __init__(self, way: str = "last") -> None:
        super().__init__()
        self.registers, self.way = nn.Parameter(torch.randn(1, 3, 8)), way
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, _, t, h, w = x.shape
        tokens, learned = x.flatten(2).transpose(1, 2), self.registers.expand(b, -1, -1)
        y = torch.cat([learned, tokens] if self.way == "first" else [tokens, learned], 1)
        q, k, v = self.qkv(y).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.way == "split":
            y, learned = y.split([t * h * w, 3], 1)
            y = y + learned.mean(1, keepdim=True)
        else:
            y = y[:, 3:] if self.way == "first" else y[:, : t * h * w]
        y = self.out(y).view(b, t, h, w, 3, 2, 2, 2).permute(0, 4, 1, 5, 2, 6, 3, 7)
        return y.reshape(b, 3, 2 * t, 2 * h, 2 * w)


def clip(*shape: int) -> dict[str, Any]:
    return {"x": torch.randn(*shape, dtype=torch.float64)}


def segments(n: int) -> dict[str, Any]:
    return {**clip(2, n, 8), "seg": torch.arange(2 * n).view(2, n) % 5}


def places(t: int, s: int) -> dict[str, Any]:
    return {**clip(1, t, s, 16), "rows": torch.rand(1, t, 3).double(), "columns": torch.rand(1, s, 3).double()}


# name -> model, inputs, and the elements of the tensor that no rank may make whole (0: there is none)
FORWARDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], int]] = {
    "two stages": (SpaceTime, partial(clip, 2, 7, 5, 16), 0),
    "a rank without a part": (SpaceTime, partial(clip, 1, 2, 5, 16), 0),
    "residual": (Residual, partial(clip, 2, 7, 5, 16), 0),
    "views": (Views, partial(clip, 1, 7, 5, 16), 0),
    "checkpoints": (Layers, partial(clip, 1, 7, 5, 16), 0),
    "nested checkpoints": (partial(Layers, 1), partial(clip, 1, 7, 5, 16), 0),
    "checkpoints three deep": (partial(Layers, 2), partial(clip, 1, 7, 5, 16), 0),
    "checkpoints five deep": (partial(Layers, 4), partial(clip, 1, 7, 5, 16), 0),
    "table": (Table, partial(clip, 1, 37, 16), 37 * 12),
    "kept table": (partial(Table, True), partial(clip, 1, 37, 16), 0),
    "mask": (Masks, partial(segments, 101), 2 * 101 * 101),
    "mask in checkpoints": (partial(Masks, 1), partial(segments, 101), 2 * 101 * 101),
    "mask in nested checkpoints": (partial(Masks, 2), partial(segments, 101), 2 * 101 * 101),
    "detached": (Detached, partial(clip, 1, 7, 7, 16), 0),
    "a view in nested checkpoints": (Crossed, partial(clip, 1, 7, 7, 16), 0),
    "a stage of plain tensors": (Places, partial(places, 7, 5), 7 * 5 * 3),
    "a stage of plain tensors in a checkpoint": (partial(Places, 1), partial(places, 7, 5), 7 * 5 * 3),
    "a stage of plain tensors in nested checkpoints": (partial(Places, 2), partial(places, 7, 5), 7 * 5 * 3),
    "registers": (Registers, partial(clip, 1, 8, 7, 5, 7), 248 * 24),
    "registers first": (partial(Registers, "first"), partial(clip, 2, 8, 7, 5, 7), 2 * 248 * 24),
    "registers split off": (partial(Registers, "split"), partial(clip, 1, 8, 7, 5, 7), 248 * 24),
    "zeros": (Pairs, partial(clip, 2, 11, 8), 2 * 11 * 11 * 8),
    "zeros written into": (partial(Pairs, True), partial(clip, 2, 11, 8), 2 * 11 * 11 * 8),
}


class Padded(SpaceTime):
    """A number between stages that changes from call to call, of a type that is no Python number."""

    value: Any = np.float64(1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.pad(self.space(x), (0, 0, 1, 0, 1, 0), value=self.value)
        return self.time(y)[:, 1:, 1:]
