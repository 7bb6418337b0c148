"""Glue that a sharded dim cannot pass: what the plan says it sends is what is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.records import figures
from tests.support.toys import Along, C

STAGES = {"": "x=b t s c", "blocks.*.space": "b t [s c]", "blocks.*.time": "b [t] s [c]"}

# x is [b, t, s, c] and so is the result; v is a parameter [c]
GLUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean over frames": lambda x, v: x - x.mean(1, keepdim=True) * v,
    "einops mean": lambda x, v: x + repeat(reduce(x, "b t s c -> b s c", "mean"), "b s c -> b t s c", t=x.shape[1]),
    "max over frames": lambda x, v: x - x.amax(1, keepdim=True),
    "deviation over frames": lambda x, v: x / (x.std(1, keepdim=True) + 1),
    "softmax over frames, then over positions": lambda x, v: x * x.softmax(1) * x.softmax(2),
    "max over everything": lambda x, v: x / (x.abs().max() + 1),
    "deviation over everything": lambda x, v: x / (x.std() + 1),
    "token read": lambda x, v: x + x[:, :1] * v + x[:, -1, :, None].sum(-2)[:, None],
    "token copied per frame": lambda x, v: token_per_frame(x, v),
    "token among the frames": lambda x, v: token_in_front(x, v),
    "frames joined": lambda x, v: torch.cat([x[:, 1:], v.expand(x.shape[0], 1, x.shape[2], C)], 1),
    "flip": lambda x, v: x.flip(1) + x.flip(2) * v,
    "roll": lambda x, v: x.roll(1, 1) + x.roll((1, 2), (1, 2)),
    "shift": lambda x, v: x + F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1],
    "difference": lambda x, v: torch.cat([x[:, :1], x[:, 1:] - x[:, :-1]], 1),
    "cumsum": lambda x, v: x.cumsum(1) * v + x.cumsum(2),
    "sort": lambda x, v: x.sort(1).values + x.sort(2).values,
    "every second frame": lambda x, v: torch.stack([x[:, ::2].mean(1), x[:, 1::2].mean(1)], 1).repeat_interleave(
        (x.shape[1] + 1) // 2, 1
    )[:, : x.shape[1]],
    "frames by number": lambda x, v: x[:, [0, *range(x.shape[1] - 1)]] * v,
    "positions by number": lambda x, v: x + x.index_select(2, torch.arange(x.shape[2]).flip(0)),
    "window": lambda x, v: windows(x, v),
    "scrambled": lambda x, v: x.transpose(1, 3).reshape(x.shape) * v,
    "mask": lambda x, v: x.masked_fill((x > 0).any(-1, keepdim=True) & (x.amax(1, keepdim=True) > 1), 0.0) + v,
    "the type of a sharded tensor": lambda x, v: x + v.type_as(x) * x.to(v) + v.to(x),
    "no rule": lambda x, v: torch.fft.fft(x, dim=1).real + torch.kron(x[0, 0], v)[: x.shape[2], :C],
    "functions written out": lambda x, v: of_parts(x, v),
    "mirrored": lambda x, v: F.pad(x.flatten(0, 1).mT, (2, 3), "reflect")[..., 1:-4].mT.unflatten(0, x.shape[:2]) * v,
    "type by name": lambda x, v: x * v.type(x.type()),
    "triangle": lambda x, v: torch.einsum("btsc,busc->btuc", x, x).mean(2, keepdim=True) * v + x,
    "written frame": lambda x, v: written(x, v),
    "written in other layouts": lambda x, v: (x * 1).cumsum(1).add_(v).cumsum_(2).mul_(2) + x,
    "written whole": lambda x, v: filled(x, v),
}


def of_parts(x: Tensor, v: Tensor) -> Tensor:
    y = torch.addmm(v, x.flatten(0, 2), torch.outer(v, v)).view(x.shape)
    matrices = torch.outer(v, v).expand(x.shape[0] * x.shape[1], C, C)
    y = y + torch.baddbmm(v, x.flatten(0, 1), matrices, beta=0.5).view_as(x)
    y = F.prelu(y.movedim(-1, 1), v).movedim(1, -1) + F.cosine_similarity(x, y, -1)[..., None]
    loss = F.cross_entropy(y.movedim(-1, 1), x.detach().argmax(-1)) + F.kl_div(y, x.detach().exp(), reduction="sum")
    y = torch.hstack([y[:, :1], y.diff(dim=1)]) * torch.linalg.det(torch.outer(v, v) + torch.eye(C).to(v)) + loss
    return y + torch.cdist(x, y.detach()).mean(-1, keepdim=True)


def token_per_frame(x: Tensor, v: Tensor) -> Tensor:
    """A token beside the positions, one copy for each frame, averaged over the frames afterwards."""
    b, t, s, _ = x.shape
    token = x[:, 0, 0] * v
    y = rearrange(x, "b t s c -> (b t) s c")
    y = torch.cat([token.unsqueeze(1).repeat(1, t, 1).reshape(b * t, 1, C), y], 1)
    y = y + y.mean(1, keepdim=True)
    token = y[:, 0].reshape(b, t, C).mean(1, True)
    return y[:, 1:].reshape(b, t, s, C) + token[:, None]


def token_in_front(x: Tensor, v: Tensor) -> Tensor:
    """A token before all frames and positions, laid out as one sequence of 1 + t s."""
    y = torch.cat([v.expand(x.shape[0], 1, C), x.flatten(1, 2)], 1)
    y = F.layer_norm(y, (C,)) * y
    return y[:, 1:].reshape(x.shape) + y[:, :1, None]


def windows(x: Tensor, v: Tensor) -> Tensor:
    """Shifted windows of two positions: pad, roll, cut up, and back."""
    s = x.shape[2]
    y = F.pad(x, (0, 0, 0, s % 2)).roll(-1, 2)
    y = y.reshape(*x.shape[:2], -1, 2, C)
    y = (y * y.softmax(3)).flatten(2, 3).roll(1, 2)
    return y[:, :, :s] * v


def written(x: Tensor, v: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = v
    y[..., 1:2] += 1
    y[..., 2:].mul_(2)
    return y


def filled(x: Tensor, v: Tensor) -> Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    for i in range(x.shape[1]):
        y[:, i] = x[:, i] * v
    return y


class Block(nn.Module):
    def __init__(self, glue: str) -> None:
        super().__init__()
        self.space, self.time = Along(2), Along(1)
        self.v = nn.Parameter(torch.randn(C))
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        x = GLUE[self.glue](self.space(x), self.v)
        return GLUE[self.glue](self.time(x), self.v)


class Model(nn.Module):
    def __init__(self, glue: str, ckpt: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(glue)])
        self.ckpt = ckpt

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.ckpt else block(x)
        return x


def make(glue: str, ckpt: bool) -> nn.Module:
    torch.manual_seed(1)
    return Model(glue, ckpt).double()


def traffic(mesh: DeviceMesh) -> dict[str, tuple[Any, Any]]:
    found = {}
    for name in GLUE:
        x = torch.randn(2, 8, 8, C, dtype=torch.float64)
        model = dsp.parallelize(make(name, ckpt=True), mesh, STAGES)
        with dsp.count_comm() as comm:
            model(x).sum().backward()
        plan = figures(model)  # its own, which dsp.plan makes too
        counted = {p: sum(v["bytes"] for v in c.values()) for p, c in comm.by_collective().items()}
        found[name] = (counted, plan.bytes)
    return found


def test_planned_bytes_are_counted_bytes(ranks) -> None:
    results = ranks(traffic, 2)
    for name in GLUE:
        busiest = {p: max(r[name][0][p] for r in results) for p in ("forward", "backward", "recompute")}
        planned = results[0][name][1]
        assert busiest == planned, name
