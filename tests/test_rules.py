"""Every operation of glue, on every dim: the same numbers and gradients as on a whole tensor, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange, reduce, repeat
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.layout import Axis, Cut
from dsp.run import recipes
from dsp.run.forward import Run
from dsp.run.glue import active

# x is [2, 4, 6, 8]; y has its shape; v is [8], w is [8, 5], m is [4, 1, 8]
OPS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y, v, w, m: x + y * 2 - 1,
    "radd": lambda x, y, v, w, m: 1 - (2 / (x.abs() + 1)) + 2**y,
    "vector": lambda x, y, v, w, m: x * v + m,
    "vector first": lambda x, y, v, w, m: v - x,
    "broadcast up": lambda x, y, v, w, m: x[0] + y,
    "where": lambda x, y, v, w, m: torch.where(x > 0, y, m),
    "masked_fill": lambda x, y, v, w, m: x.masked_fill(y > 0, 0.0),
    "clamp": lambda x, y, v, w, m: x.clamp(min=-0.5).clamp(max=y),
    "maximum": lambda x, y, v, w, m: torch.maximum(x, y) + torch.max(x, m),
    "activations": lambda x, y, v, w, m: F.gelu(x, approximate="tanh") + F.silu(y) + torch.sigmoid(x).log() + F.relu(x),
    "in place": lambda x, y, v, w, m: (x * 1).add_(y).mul_(2).clamp_(-1, 1),
    "augmented": lambda x, y, v, w, m: augmented(x, y),
    "lerp": lambda x, y, v, w, m: torch.lerp(x, y, 0.3) + torch.addcmul(x, y, y, value=0.5),
    "to": lambda x, y, v, w, m: x.to(torch.float32).double() + x.type_as(y).contiguous().clone(),
    "like": lambda x, y, v, w, m: torch.zeros_like(x) + torch.ones_like(y) * x,
    "fold 01": lambda x, y, v, w, m: x.reshape(8, 6, 8) * 2,
    "fold 12": lambda x, y, v, w, m: x.view(2, 24, 8) * 2,
    "fold 123": lambda x, y, v, w, m: x.flatten(1) * 2,
    "fold all": lambda x, y, v, w, m: x.reshape(-1) * 2,
    "fold and open": lambda x, y, v, w, m: x.flatten(0, 1).sin().unflatten(0, (2, 4)),
    "open last": lambda x, y, v, w, m: x.unflatten(-1, (2, -1)).exp(),
    "open all": lambda x, y, v, w, m: x.reshape(2, 2, 2, 3, 2, 4, 2).exp(),
    "refold": lambda x, y, v, w, m: x.reshape(8, 6, 8).reshape(2, 4, 48).reshape(4, 2, 6, 8),
    "patches": lambda x, y, v, w, m: rearrange(x, "b (h p) (w q) c -> b (h w) (p q c)", p=2, q=3),
    "unpatch": lambda x, y, v, w, m: rearrange(x, "b s w (p c) -> b (s p) w c", p=2),
    "einops fold": lambda x, y, v, w, m: rearrange(rearrange(x, "b t s c -> (b s) t c"), "(b s) t c -> t s b c", s=6),
    "einops reduce": lambda x, y, v, w, m: reduce(x, "b t s c -> b t c", "mean"),
    "einops repeat": lambda x, y, v, w, m: repeat(x[:, :, :, 0], "b t s -> b t s k", k=3),
    "permute": lambda x, y, v, w, m: x.permute(3, 0, 2, 1) * 2,
    "transpose": lambda x, y, v, w, m: x.transpose(1, 2).mT.swapaxes(0, -1),
    "movedim": lambda x, y, v, w, m: x.movedim(1, -1).movedim((0, 1), (1, 0)),
    "squeeze": lambda x, y, v, w, m: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze() * 1,
    "None index": lambda x, y, v, w, m: x[:, None, ..., None] * 2,
    "expand": lambda x, y, v, w, m: x.unsqueeze(2).expand(-1, -1, 3, -1, -1) * 1,
    "expand_as": lambda x, y, v, w, m: x[:, :, :, :1].expand_as(y) * y,
    "repeat": lambda x, y, v, w, m: x.repeat(1, 2, 1, 3),
    "repeat_interleave": lambda x, y, v, w, m: x.repeat_interleave(2, dim=1),
    "tile": lambda x, y, v, w, m: x.tile(2, 1, 1),
    "linear": lambda x, y, v, w, m: F.linear(x, w.T, w[0]),
    "matmul": lambda x, y, v, w, m: x @ w,
    "matmul two": lambda x, y, v, w, m: x @ y.mT,
    "matmul whole first": lambda x, y, v, w, m: w.T @ x.mT,
    "bmm": lambda x, y, v, w, m: torch.bmm(x.flatten(0, 1), y.flatten(0, 1).transpose(1, 2)),
    "einsum": lambda x, y, v, w, m: torch.einsum("btsc,btrc->btsr", x, y),
    "einsum outer": lambda x, y, v, w, m: torch.einsum("btsc,cd->bstd", x, w),
    "einsum sum": lambda x, y, v, w, m: torch.einsum("btsc,btsc->bc", x, y),
    "attention": lambda x, y, v, w, m: F.scaled_dot_product_attention(x, y, y),
    "masked attention": lambda x, y, v, w, m: F.scaled_dot_product_attention(x, y, y, m[:, :, :6].expand(4, 6, 6)),
    "attention on whole": lambda x, y, v, w, m: F.scaled_dot_product_attention(x, m.repeat(1, 3, 1), m.repeat(1, 3, 1)),
    "layer_norm": lambda x, y, v, w, m: F.layer_norm(x, (8,), v, v),
    "layer_norm two": lambda x, y, v, w, m: F.layer_norm(x, (6, 8)),
    "rms_norm": lambda x, y, v, w, m: F.rms_norm(x, (8,), v),
    "softmax": lambda x, y, v, w, m: x.softmax(-1) + F.log_softmax(x, dim=1),
    "normalize": lambda x, y, v, w, m: F.normalize(x, dim=-1),
    "cumsum": lambda x, y, v, w, m: x.cumsum(1) + x.cumprod(dim=2),
    "flip": lambda x, y, v, w, m: x.flip(1) + x.flip((2, 3)),
    "roll": lambda x, y, v, w, m: x.roll(1, 2) + x.roll(shifts=(1, 2), dims=(1, 2)),
    "sort": lambda x, y, v, w, m: x.sort(dim=2)[0] + x.topk(6, 2).values,
    "sum": lambda x, y, v, w, m: x.sum() + x.sum(1).sum() + x.sum((0, 2)).sum(),
    "sum dim": lambda x, y, v, w, m: x.sum(2, keepdim=True) * y.mean((1, 2), keepdim=True),
    "mean": lambda x, y, v, w, m: x.mean() * y.mean(-1).mean(-1),
    "square mean": lambda x, y, v, w, m: torch.mean(x * x, dim=(1, 2, 3)),
    "max": lambda x, y, v, w, m: x.amax(-1) + x.max(dim=-1).values + x.min(-1)[0],
    "argmax": lambda x, y, v, w, m: x.argmax(2) + (x > 0).any(2),
    "var": lambda x, y, v, w, m: x.var(-1) + x.std(dim=2).mean(-1, keepdim=True).sum(1, keepdim=True)[..., :1],
    "norm": lambda x, y, v, w, m: x.norm(dim=-1) + torch.linalg.vector_norm(x, dim=-1) + x.logsumexp(-1),
    "losses": lambda x, y, v, w, m: F.mse_loss(x, y) + F.l1_loss(x, y, reduction="sum") + F.smooth_l1_loss(x, y),
    "loss none": lambda x, y, v, w, m: F.mse_loss(x, y, reduction="none"),
    "chunk": lambda x, y, v, w, m: x.chunk(2, -1)[0] * y.chunk(2, dim=-1)[1],
    "split": lambda x, y, v, w, m: sum(x.split(2, 1)) + sum(torch.split(y, [1, 1], 0)).sum(0)[:2],
    "unbind": lambda x, y, v, w, m: x.unbind(1)[0] + y.unbind(1)[3],
    "iterate": lambda x, y, v, w, m: sum(a for a in x.transpose(0, 1)),
    "select": lambda x, y, v, w, m: x.select(2, 1) + y[:, :, -1],
    "slice": lambda x, y, v, w, m: x[:, 1:3] + y[:, :4:2],
    "slice whole": lambda x, y, v, w, m: x[:, :4, :6] + y[..., :8],
    "index": lambda x, y, v, w, m: x[1, :, 2] + y[0, ..., 0, :],
    "index_select": lambda x, y, v, w, m: x.index_select(2, torch.tensor([0, 3])) + y.narrow(2, 1, 2),
    "cat": lambda x, y, v, w, m: torch.cat([x, y], -1) + torch.cat([y, x], dim=-1),
    "cat whole": lambda x, y, v, w, m: torch.cat([x, m.expand(2, 4, 6, 8)], 2),
    "stack": lambda x, y, v, w, m: torch.stack([x, y], 2),
    "pad": lambda x, y, v, w, m: F.pad(x, (1, 2)) * F.pad(y, (0, 3, 0, 0)),
    "pad more": lambda x, y, v, w, m: F.pad(x, (0, 0, 0, 0, 1, 0)),
    "conv": lambda x, y, v, w, m: F.conv2d(x, w.new_ones(3, 4, 3, 3), w.new_ones(3), padding=1),
    "group_norm": lambda x, y, v, w, m: F.group_norm(x, 2),
    "pool": lambda x, y, v, w, m: F.avg_pool2d(x, 2) + F.interpolate(y, scale_factor=0.5),
    "embedding": lambda x, y, v, w, m: F.embedding((x > 0).long(), w),
    "one_hot": lambda x, y, v, w, m: F.one_hot((x > 0).long(), 2).double() * y[..., None],
    "new": lambda x, y, v, w, m: x + x.new_ones(x.shape[-1]) + torch.zeros(x.size(1), 1, 1, dtype=x.dtype),
    "sizes": lambda x, y, v, w, m: x * len(x) * x.numel() * x.ndim * x.stride(-1) * (x.dtype == torch.float64),
    "std": lambda x, y, v, w, m: x.std(),
    "outer": lambda x, y, v, w, m: x[..., None] * y[..., None, :],
    "dtype": lambda x, y, v, w, m: (x > y).sum(-1) + (x == y).any(-1).long(),
    "bool": lambda x, y, v, w, m: ((x > 0) & (y > 0) | ~(x < y)).double() * x,
    "baddbmm": lambda x, y, v, w, m: torch.baddbmm(x.flatten(0, 1), y.flatten(0, 1), y.new_ones(8, 8, 8)),
    "diagonal": lambda x, y, v, w, m: x.diagonal(dim1=1, dim2=2),
    "unfold": lambda x, y, v, w, m: x.unfold(1, 2, 1),
    "gather": lambda x, y, v, w, m: x.gather(2, (y > 0).long()),
    "tril": lambda x, y, v, w, m: x.tril(),
    "kron": lambda x, y, v, w, m: torch.kron(x, y),
    "advanced index": lambda x, y, v, w, m: x[:, [0, 1]],
    "two indices": lambda x, y, v, w, m: x[0, :, 0] * y[0, :, 0],
    "last index": lambda x, y, v, w, m: x[..., -1, :][:, None, -1:],
    "index and slices": lambda x, y, v, w, m: x[:, 1, None, 2:4] * 2,
    "set": lambda x, y, v, w, m: set_to(x, slice(None), 0.0) + set_to(x, (Ellipsis, 3), y[..., 3]),
    "set to whole": lambda x, y, v, w, m: set_to(x, (0, slice(None), slice(1, 3)), v) + set_to(x, 1, m),
    "set list": lambda x, y, v, w, m: set_to(x, (slice(None), [0, 2]), y[:, :1]),
    "mask index": lambda x, y, v, w, m: x[x > 0].sum(),
    "nonzero": lambda x, y, v, w, m: x.nonzero(),
    "arange positions": lambda x, y, v, w, m: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None, None],
}  # fmt: skip
# what has to work along at least these dims
WORKS = {
    "add": 4, "fold 01": 3, "patches": 3, "linear": 3, "sum": 4, "mean": 4, "attention": 2, "cat": 3, "losses": 4,
    "select": 4, "index": 4, "unfold": 3,
    "two indices": 4, "index and slices": 3, "advanced index": 3, "set": 2, "set list": 2,
}  # fmt: skip


def set_to(x: Tensor, index: Any, value: Any) -> Tensor:
    z = x * 1
    view = z[:1]
    z[index] = value
    return z + view


def augmented(x: Tensor, y: Tensor) -> Tensor:
    z = x * 1
    alias = z
    z += y
    z *= 2
    return z + alias


def arguments() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 4, 6, 8), (2, 4, 6, 8), (8,), (8, 5), (4, 1, 8)]
    return tuple(torch.randn(s, generator=g, dtype=torch.float64, requires_grad=True) for s in shapes)


def every_op(mesh: DeviceMesh) -> dict[str, list[int]]:
    axis = Axis.of(mesh)
    allowed: dict[str, list[int]] = {}
    for name, op in OPS.items():
        inputs = arguments()
        expect = op(*inputs)
        grads: Any = [None] * 5
        if expect.is_floating_point() and expect.requires_grad:
            grads = torch.autograd.grad(expect.sin().sum(), inputs, allow_unused=True)
        allowed[name] = []
        for dim in range(4):
            whole = arguments()
            run = Run(axis, None, {}, {})
            run.recorder = None
            x, y = (run.carry(axis.narrow(t, Cut(dim)), Cut(dim), tuple(t.shape)) for t in whole[:2])
            try:
                with active(None, run), patch.object(recipes, "detour", refuse_detour):
                    out = op(x, y, *whole[2:])
            except dsp.GlueError:
                continue
            shell = run.open(out)
            got = out if shell is None else run.move(shell, None)
            where = f"{name} along {dim}"
            assert got.shape == expect.shape, where
            torch.testing.assert_close(got, expect, msg=lambda m, w=where: f"{w}: {m}")
            if shell is not None:
                assert tuple(out.shape) == tuple(expect.shape), where
            if grads[0] is not None or grads[1] is not None:
                got.sin().sum().backward()
                for t, g in zip(whole, grads):
                    if g is not None:
                        mine = torch.zeros_like(t) if t.grad is None else t.grad
                        mine = torch.ops.dsp.all_reduce(mine, axis.group) / axis.size
                        torch.testing.assert_close(mine, g, msg=lambda m, w=where: f"{w}, gradient: {m}")
            allowed[name].append(dim)
    return allowed


def refuse_detour(op: Any) -> Any:
    raise dsp.GlueError(f"{op.what.name} between stages")


def test_same_numbers_or_a_refusal(ranks) -> None:
    results = ranks(every_op, 2)
    assert all(r == results[0] for r in results)
    for name, least in WORKS.items():
        assert len(results[0][name]) >= least, (name, results[0][name])
    working = [name for name, dims in results[0].items() if dims]
    assert len(working) > 80
    for name in ("kron", "mask index", "nonzero"):
        assert not results[0][name]


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("btsc,us->btuc", x, self.w).contiguous()


class Glued(nn.Module):
    """A stage, an operation of glue on its output, and the loss."""

    stages = {"": "x=b t s c, y=b t s c", "mix": "b t [s] c"}

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.mix = Mix()
        self.op, self.v, self.w = op, nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8, 5))

    def forward(self, x: Tensor, y: Tensor, m: Tensor) -> Tensor:
        x, y = self.mix(x), self.mix(y)
        return self.op(x, y, self.v, self.w, m)


def planned_op(mesh: DeviceMesh) -> list[str]:
    moved = []
    for name in OPS:
        torch.manual_seed(0)
        single = Glued(OPS[name]).double()
        inputs = [torch.randn(s).double() for s in ((2, 4, 6, 8), (2, 4, 6, 8), (4, 1, 8))]
        expect = single(*inputs)
        torch.manual_seed(0)
        model = dsp.parallelize(Glued(OPS[name]).double(), mesh)
        with dsp.count_comm() as comm:
            got = model(*inputs)
        torch.testing.assert_close(got, expect, msg=lambda m, w=name: f"{w}: {m}")
        if got.requires_grad:
            got.sin().sum().backward()
            expect.sin().sum().backward()
            for (key, p), q in zip(model.named_parameters(), single.parameters()):
                mine = torch.zeros_like(p) if p.grad is None else p.grad
                mine = torch.ops.dsp.all_reduce(mine, mesh.get_group().group_name) / mesh.size()
                want = torch.zeros_like(q) if q.grad is None else q.grad
                close = {"rtol": 1e-4, "atol": 1e-5} if name == "to" else {}  # which goes through float32
                torch.testing.assert_close(mine, want, msg=lambda m, w=f"{name}, {key}": f"{w}: {m}", **close)
        if comm.forward.calls:
            moved.append(name)
    return moved


@pytest.mark.slow
def test_every_operation_runs_in_a_plan(ranks) -> None:
    """What no sharded dim can pass is switched or gathered: nothing between stages is refused for its own sake."""
    assert "kron" in ranks(planned_op, 2)[0]
