"""Small models of every shape that DSP meets, written for one device, each with its stages and inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

C = 4


def attend(x: Tensor, dim: int, w: Tensor) -> Tensor:
    """Attention along one dim of [..., c], whatever the other dims."""
    q, k, v = (x @ w).movedim(dim, -2).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v).movedim(-2, dim)


class Fn(nn.Module):
    """A function as a module, to be named as a stage."""

    def __init__(self, f: Callable[..., Any]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


class Core(nn.Module):
    """Attention as a module, of (b h s d), or of (b s h d) if `inner`."""

    def __init__(self, inner: bool = False) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.inner:
            return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v)


class Along(nn.Module):
    """Residual attention along `dim`, with a per-sample modulation."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = dim
        self.norm = nn.LayerNorm(C)
        self.w = nn.Parameter(torch.randn(C, 3 * C) / 2)
        self.out = nn.Linear(C, C)
        self.dropout = dropout

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y = self.out(attend(self.norm(x), self.dim, self.w))
        y = F.dropout(y, self.dropout, self.training)
        return x + y * (1 if scale is None else scale)


class Grid(nn.Module):
    """Two sequence dims; glue with residuals, a time table, modulation by sample, a norm and an elementwise head."""

    stages = {
        "": "x=b t s c -> b t s c",
        "space.*": "b t [s c], scale=b 1 1 [c]",
        "time.*": "b [t] s [c]",
    }

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(16, C))
        self.embed = nn.Linear(C, C)
        self.space = nn.ModuleList(Along(2) for _ in range(layers))
        self.time = nn.ModuleList(Along(1) for _ in range(layers))
        self.scale = nn.Linear(C, C)
        self.head = nn.Linear(C, 2 * C)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        scale = self.scale(F.silu(cond))[:, None, None]
        x = self.embed(x) + self.table[: x.shape[1], None]
        for space, time in zip(self.space, self.time):
            x = x + 0.5 * space(x, scale=scale)
            x = time(x)
        a, b = self.head(F.layer_norm(x, (C,))).chunk(2, -1)
        return a * torch.sigmoid(b) + scale

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C), "cond": torch.randn(batch, C)}


class Folded(nn.Module):
    """The same with folds (b t) and (b s) in glue, frame-wise text and an additive mask."""

    stages = {
        "": "x=b t s c, mask=(b t) 1 l -> b t s c",
        "space.*": "(b t) [s c], text=(b t) [l c], mask=(b t) 1 [l]",
        "time.*": "(b s) [t c]",
    }

    class Space(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = Along(1)

        def forward(self, x: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.own(x) + F.scaled_dot_product_attention(x, text, text, mask)

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.space = nn.ModuleList(self.Space() for _ in range(layers))
        self.time = nn.ModuleList(Along(1) for _ in range(layers))
        self.project = nn.Linear(C, C)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t = x.shape[:2]
        text = self.project(text).unsqueeze(1).expand(-1, t, -1, -1).flatten(0, 1)
        for space, time in zip(self.space, self.time):
            x = rearrange(x, "b t s c -> (b t) s c")
            x = space(x, text, mask=mask)
            x = rearrange(x, "(b t) s c -> (b s) t c", b=b)
            x = time(x)
            x = rearrange(x, "(b s) t c -> b t s c", b=b)
        return x

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        mask = torch.zeros(batch * t, 1, 3)
        mask[::2, :, -1] = -1e4
        return {"x": torch.randn(batch, t, s, C), "text": torch.randn(batch, 3, C), "mask": mask}


class Cube(nn.Module):
    """Three sequence dims in turn."""

    stages = {"": "x=b t h w c -> b t h w c", "t.*": "b [t] h w [c]", "h.*": "b t [h] w [c]", "w.*": "b t h [w c]"}

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.t = nn.ModuleList(Along(1) for _ in range(layers))
        self.h = nn.ModuleList(Along(2) for _ in range(layers))
        self.w = nn.ModuleList(Along(3) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for t, h, w in zip(self.t, self.h, self.w):
            x = w(h(t(x)))
        return x

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, 6, C)}


class Pair(nn.Module):
    """An MSA and a pair tensor: row attention with pair bias, columns, outer product mean, triangles, transitions."""

    stages = {
        "": "m=b s r c, z=b i j c -> b s r c, b i j c",
        "row": "b s [r c], z=b [i j c] -> b s [r c]",
        "column": "b [s] r [c]",
        "outer": "b [s] i [c], b [s] j [c] -> b i j [c]",
        "outgoing": "b i [k] c, b j [k] c -> b i j c",
        "transition": "b i j [c]",
        "start": "b i [j c], bias=b [k j c]",
    }

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(C, 3 * C) / 2)
            self.bias = nn.Linear(C, 1)

        def forward(self, m: Tensor, z: Tensor) -> Tensor:
            q, k, v = (m @ self.w).chunk(3, -1)
            return F.scaled_dot_product_attention(q, k, v, self.bias(z)[..., 0].unsqueeze(1))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(C * C, C)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.out(torch.einsum("bsic,bsjd->bijcd", left, right).flatten(-2) / left.shape[1])

    class Outgoing(nn.Module):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return torch.einsum("bikc,bjkc->bijc", left, right)

    class Start(nn.Module):
        def forward(self, z: Tensor, bias: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(z, z, z, bias.mean(-1).unsqueeze(1))

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column, self.outer, self.outgoing = self.Row(), Along(1), self.Outer(), self.Outgoing()
        self.transition, self.start = (
            nn.Sequential(nn.LayerNorm(C), nn.Linear(C, C), nn.ReLU(), nn.Linear(C, C)),
            self.Start(),
        )
        self.left, self.right, self.gate = nn.Linear(C, C), nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        m = m + self.row(m, z=z)
        m = m + self.column(m)
        z = z + self.outer(m, m)
        left, right = self.left(z), self.right(z)
        z = z + torch.sigmoid(self.gate(z)) * self.outgoing(left, right)
        z = z + self.transition(z)
        z = z + self.start(z, bias=left)
        return m, z

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"m": torch.randn(batch, t, s, C), "z": torch.randn(batch, s, s, C)}


class Branches(nn.Module):
    """Both layouts of one input (Latte's fourth variant), and a skip over the whole depth."""

    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]", "last": "b t [s c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.last = Along(2), Along(1), Along(2)
        self.join = nn.Linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        skip = torch.tanh(x)
        x = self.last(x)
        y = self.join(torch.cat([self.space(x), self.time(x)], -1))
        return self.last(y) + skip * self.time(x)

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C)}


class Global(nn.Module):
    """A stage with no dim left to shard between two that have one."""

    stages = {"": "x=b t s c -> b t s c", "space.*": "b t [s c]", "mix": "[b t s c]"}

    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(C, C)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.w(x).softmax(1).cumsum(2).flip(0) * x.mean()

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.ModuleList(Along(2) for _ in range(2))
        self.mix = self.Mix()

    def forward(self, x: Tensor) -> Tensor:
        return self.space[1](self.mix(self.space[0](x)))

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C)}


class Loss(nn.Module):
    """A loss and its weights computed in the model's own forward: means, sums and reductions over the sharded dim."""

    stages = {"": "x=b t s c, target=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Along(2), Along(1)
        self.w = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.time(self.space(x)) * self.w
        per_frame = y.square().mean(dim=(2, 3))
        pooled = y.mean(dim=(1, 2))
        return (
            F.mse_loss(y, target)
            + y.abs().mean()
            + per_frame.sum() * 0.1
            + (pooled * self.w).sum()
            + y.sum(1).square().mean()
        )

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C), "target": torch.randn(batch, t, s, C)}


class Streams(nn.Module):
    """Two streams and a mask that switch together: out of one stage, and from several into one."""

    stages = {
        "": "x=b t s c, y=b t s k -> b t s c, b t s k",
        "space.*": "b t [s c], b t [s k] -> b t [s c], b t [s k], b t [s 1]",
        "time.*": "b [t] s [c], b [t] s [k], keep=b [t] s [1] -> b [t] s [c], b [t] s [k]",
        "left": "b t [s c]",
        "right": "b t [s k]",
    }

    class Both(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.x, self.y = Along(dim), nn.Linear(2, 2)
            self.dim = dim

        def forward(self, x: Tensor, y: Tensor, keep: Tensor | None = None) -> tuple[Tensor, ...]:
            x, y = self.x(x), y + torch.tanh(self.y(y)).mean(self.dim, keepdim=True)
            if keep is None:
                return x, y, y[..., :1] > 0
            return x.masked_fill(~keep, 0.5), y * x[..., :2]

    class Right(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Linear(2, 2)

        def forward(self, y: Tensor) -> Tensor:
            return y + self.w(y).softmax(2)

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.space = nn.ModuleList(self.Both(2) for _ in range(layers))
        self.time = nn.ModuleList(self.Both(1) for _ in range(layers))
        self.left, self.right = Along(2), self.Right()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        keep = None
        for space, time in zip(self.space, self.time):
            x, y, keep = space(x, y)
            x, y = time(x, y, keep=keep)
        return self.time[0](self.left(x), self.right(y), keep=keep)

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C), "y": torch.randn(batch, t, s, 2)}


class Does(nn.Module):
    """A forward of a test's own: `does(model, x, ...)`, with whatever modules and attributes it needs."""

    def __init__(self, does: Callable[..., Any], **attributes: Any) -> None:
        super().__init__()
        self.does = does
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *args: Any) -> Any:
        return self.does(self, x, *args)


class SpaceTime(Does):
    """Such a forward of attention over space and attention over time."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self, does: Callable[..., Any], **attributes: Any) -> None:
        super().__init__(does, **{"space": Along(2), "time": Along(1), **attributes})


class Glued(SpaceTime):
    """Attention over space, what `glue` does, attention over time."""

    def __init__(self, glue: Any = lambda x: x) -> None:
        super().__init__(lambda m, x: m.time(m.glue(m.space(x))), glue=glue)


class Unplanned(nn.Module):
    """A forward that looks at its data, so that no plan can be made ahead of the run."""

    stages = {"": "x=b t s c -> b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Along(2), Along(1)

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for _ in range(int(steps)):
            x = self.time(self.space(x))
        return x.flip(2).flip(1)

    @staticmethod
    def inputs(batch: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch, t, s, C), "steps": torch.tensor(2)}


TOYS: dict[str, Any] = {t.__name__: t for t in (Grid, Folded, Cube, Pair, Branches, Global, Loss, Streams, Unplanned)}


# --- models that would rather not be made parallel --------------------------------------------------------------------

BLOCKS = {"": "x=b t s c", "blocks.*.space": "b t [s c]", "blocks.*.time": "b [t] s [c]"}


class Blocks(nn.Module):
    """Two blocks, each of which may be checkpointed by the model itself."""

    block: type[nn.Module]
    stages: dict[str, str] = BLOCKS

    def __init__(self, ckpt: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(type(self).block() for _ in range(2))
        self.ckpt = ckpt

    def call(self, block: nn.Module, *args: Any) -> Any:
        return checkpoint(block, *args, use_reentrant=False) if self.ckpt else block(*args)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = self.call(block, x)
        return x

    @staticmethod
    def inputs(b: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, t, s, C)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Along(2), Along(1)

    def forward(self, x: Tensor) -> Any:
        return self.glue(self.time(self.glue(self.space(x))))

    def glue(self, x: Tensor) -> Tensor:
        return x


class Cumsum(Blocks):
    """A running sum over both dims, so that no one layout will do."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            return x.cumsum(1) / x.shape[1] + x.cumsum(2) / x.shape[2]


class InPlace(Blocks):
    """Writes in place: into slices, through views, with masks, and into a buffer filled frame by frame."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            y = x.clone()
            y[:, 0] *= 2
            y[..., 1:].add_(x[..., :-1])
            row = y.select(-1, 0)
            y += 1
            row.mul_(3)
            out = torch.zeros_like(x)
            for i in range(x.shape[2]):
                out[:, :, i] = y[:, :, i].tanh()
            return F.relu(out.masked_fill_(x > 1, 0.5), inplace=True)


class TwoRoles(Blocks):
    """One module over space and over time, by what it is given."""

    stages = {"": "x=b t s c", "blocks.*.mix": "(b n) [l c]"}

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Along(1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mix(x.flatten(0, 1)).view(x.shape)
            y = x.transpose(1, 2)
            return self.mix(y.flatten(0, 1)).view(y.shape).transpose(1, 2)


class TwoRolesUnnamed(TwoRoles):
    """The same, with a pattern that does not say what its first axis is folded from."""

    stages = {"": "x=b t s c", "blocks.*.mix": "n [l c]"}


class DataDependent(Blocks):
    """Shapes and steps that depend on the data: positions are dropped by value, a loop runs as often as it is told."""

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        for block in list(self.blocks)[: int(steps)]:
            x = self.call(block, x)
        kept = x[:, :, x.detach().mean((0, 1, 3)) > -1]
        if kept.detach().abs().max() > 0.5:
            kept = kept * 0.5
        kept = kept.reshape(len(kept), torch.div(kept.shape[1], 1, rounding_mode="trunc"), -1, C)
        return self.call(self.blocks[0], kept)

    block = Block

    @staticmethod
    def inputs(b: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, t, s, C), "steps": torch.tensor(2 - t % 2)}


class Norm(Blocks):
    """A batch norm whose statistics run over every dim but the channels, in training mode, running averages and all."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(C)

        def glue(self, x: Tensor) -> Tensor:
            return self.norm(x.flatten(0, 2)).view(x.shape)


class CrossedFold(Blocks):
    """Views whose axes begin and end inside of dims: pairs of tokens across frames, and the dims in another order."""

    class block(Block):
        def glue(self, x: Tensor) -> Tensor:
            b, t, s, c = x.shape
            y = x.reshape(b, c, s, t) if t * s % 2 else x.reshape(b, t * s // 2, 2 * c).flip(1)
            return x + y.reshape(b, -1, c).tanh().reshape(x.shape)


class Outputs(Blocks):
    """Lists of tensors of different layouts among other things, in a dataclass; and a stage that returns a list."""

    @dataclass
    class Result:
        parts: list[Any]
        pooled: Tensor
        note: str = "kept"

    class block(Block):
        class Both(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.own = Along(2)

            def forward(self, x: Tensor) -> list[Tensor]:
                return [self.own(x), x.mean(2)]

        def __init__(self) -> None:
            super().__init__()
            self.space, self.time = self.Both(), Along(1)

        def forward(self, x: Tensor) -> list[Tensor]:
            x, pooled = self.space(x)
            return [self.time(x), pooled]

    stages = {**BLOCKS, "blocks.*.space": "b t [s c] -> b t [s c], b t [c]"}

    def forward(self, x: Tensor) -> Result:
        first, pooled = self.call(self.blocks[0], x)
        second, _ = self.call(self.blocks[1], first)
        return self.Result([first, None, {"second": second, "size": x.shape[1]}], pooled)


class CalledInside(Blocks):
    """A stage that another stage calls, too, without being part of it: there it is part of the caller."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.time = Along(1)
            self.space = self.Around([self.time])

        class Around(nn.Module):
            def __init__(self, other: list[nn.Module]) -> None:
                super().__init__()
                self.own, self.other = Along(2), other

            def forward(self, x: Tensor) -> Tensor:
                y = self.other[0](x.transpose(1, 2)).transpose(1, 2)  # over positions, not over frames
                return self.own(y)


class FrameTable(Blocks):
    """Tables and masks indexed by frame, with positions counted from the whole and taken from an input."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(16, C))
            self.register_buffer("decay", torch.linspace(1, 0, 16))

        def glue(self, x: Tensor) -> Tensor:
            t = x.shape[1]
            frames = torch.arange(t)
            x = x + self.table[frames][:, None] + F.embedding(frames.flip(0), self.table)[None, :, None]
            return x * self.decay[:t, None, None] + (frames % 2 == 0).to(x.dtype).view(1, t, 1, 1)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        x = x + self.blocks[0].table[numbers].unsqueeze(2)
        return super().forward(x)

    @staticmethod
    def inputs(b: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, t, s, C), "numbers": torch.arange(t).expand(b, t).flip(1)}


class Windows(nn.Module):
    """Down and up again with a skip connection, causal caches, and norms over what is sharded."""

    stages = {"": "x=b c h w"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(4, 4, 4, 2, 1), nn.Conv2d(8, 2, (5, 3), padding=(0, 1))
        self.group = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.group(self.first(x)))
        x = F.interpolate(F.avg_pool2d(self.down(skip), (1, 2)), scale_factor=(1, 2), mode="nearest")
        x = F.silu(self.up(F.instance_norm(x)))
        beyond = (0, skip.shape[3] - x.shape[3], 0, skip.shape[2] - x.shape[2])
        x = torch.cat([skip, F.pad(x, beyond)], 1)
        x = F.pad(x, (0, 0, 4, 0), mode="replicate")
        x = self.last(torch.cat([x[:, :, -1:], x[:, :, 1:]], 2))
        head, tail = x.split([2, x.shape[2] - 2], 2)
        return torch.cat([tail, head.softmax(2)], 2) * x.std((2, 3), keepdim=True)

    @staticmethod
    def inputs(b: int, h: int, w: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, 3, h, w)}


class Stretches(nn.Module):
    """Writes into stretches of the only dim that there is to shard, and of two, either of which it may be."""

    stages = {"": "x=b l"}

    def __init__(self) -> None:
        super().__init__()
        self.v, self.s = nn.Parameter(torch.linspace(0.5, 2, 20)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        y, v = x * self.s, self.v[: x.shape[1]]
        y[:, 1:] += x[:, :-1] * v[1:]
        y[:, 2:-1] = y[:, :-3] * 0.7 + x[:, 3:].sin() * self.s
        y[:, 1::2] *= 0.5
        y[..., 3] = x[:, 1] * self.s
        y[:, -2:], y[:, :1] = self.v[:2], self.s
        view = y.unsqueeze(-1)
        view[:, 1:] += x[:, 1:, None]
        z = x.new_zeros(x.shape)
        z[:, 1:] = y[:, :-1]
        pairs = y[:, :, None] * x[:, None]
        pairs[:, 1:, 1:] += y[:, 1:, None] * z[:, None, 1:]
        return y * z + pairs.softmax(-1).mean(1)

    @staticmethod
    def inputs(b: int, length: int, _: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, length)}


class Mixers(nn.Module):
    """A recurrence over frames, and a Fourier layer over space whose modes are few, as modules between stages."""

    stages = {"": "x=b t h w c"}

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), nn.GRU(6, 4)
        self.modes = nn.Parameter(torch.randn(4, 4, 2, 2, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        b, t, h, w, c = x.shape
        y, _ = self.lstm(x.permute(0, 2, 3, 1, 4).reshape(b * h * w, t, c))
        y, _ = self.gru(y.transpose(0, 1))
        x = x + y.view(t, b, h, w, c).transpose(0, 1)
        few = torch.fft.rfft2(x, dim=(2, 3))[:, :, :2, :2]
        few = torch.einsum("bthwc,cdhw->bthwd", few, torch.view_as_complex(self.modes))
        wide = torch.zeros(b, t, h, w // 2 + 1, c, dtype=few.dtype)
        wide[:, :, :2, :2] = few
        return torch.fft.irfft2(wide, s=(h, w), dim=(2, 3))

    @staticmethod
    def inputs(b: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, t, s, 5, 4)}


class ByNumpy(torch.autograd.Function):
    """A kernel that torch knows nothing of: a running sum over the last dim but one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert type(x) is Tensor
        return torch.from_numpy(x.detach().numpy().cumsum(-2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy()[..., ::-1, :].cumsum(-2)[..., ::-1, :].copy())


class Kernel(nn.Module):
    stages = {"": "x=b t s c -> b t s c", "space": "b t [s] c", "time": "b [t] s [c]"}

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ByNumpy.apply(x)

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = self.Sum(), Along(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.space(self.time(x)) * 0.1 + x

    @staticmethod
    def inputs(b: int, t: int, s: int) -> dict[str, Tensor]:
        return {"x": torch.randn(b, t, s, C)}


HOSTILE: dict[str, Any] = {
    m.__name__: m
    for m in (
        Cumsum, InPlace, TwoRoles, TwoRolesUnnamed, DataDependent, Norm, CrossedFold, Outputs, CalledInside, FrameTable,
        Windows, Stretches, Mixers, Kernel,
    )
}  # fmt: skip


def make(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    return (TOYS | HOSTILE)[name](**options).double()


def inputs(name: str, batch: int, t: int, s: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    given = (TOYS | HOSTILE)[name].inputs(batch, t, s)
    return {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
