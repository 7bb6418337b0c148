"""Tensors of size 0 in glue, in stages and as inputs: exact, for no bytes, and no riddle for discover."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_parallel_equal
from tests.support.slow import keep_short, long
from tests.support.toys import C, SpaceTime


class Model(SpaceTime):
    def __init__(self, glue: Any) -> None:
        super().__init__(lambda m, x: m.time(glue(m, m.space(x))), w=nn.Parameter(torch.randn(C)))


def rotary(m: Model, x: Tensor) -> Tensor:
    """As rotary-embedding-torch has it, which leaves the dims before and after those that it turns."""
    middle = x[..., 0:C]
    half = torch.stack((-middle[..., 1::2], middle[..., ::2]), -1).flatten(-2)
    return torch.cat((x[..., :0], middle * m.w.cos() + half * m.w.sin(), x[..., C:]), -1)


def parts(x: Tensor, dim: int) -> Tensor:
    left, all_of_it, right = x.split([0, x.shape[dim], 0], dim)
    return torch.cat([right, all_of_it * 2, left], dim)


def by_its_data(m: Model, x: Tensor) -> Tensor:
    return rotary(m, parts(x, 2)) if x.detach().abs().max() > 0 else x


NOTHING: dict[str, Any] = {
    "rotary": rotary,
    "channels": lambda m, x: parts(x, 3),
    "frames": lambda m, x: parts(x, 1),
    "positions": lambda m, x: parts(x, 2),
    "sum": lambda m, x: x + x[:, :0].sum(1, keepdim=True) + x[:, :, :0].sum(),
    "product": lambda m, x: x + x[..., :0] @ m.w[:0, None].expand(0, C),
    "fold": lambda m, x: x + x[..., :0].flatten(2).sum(-1)[..., None, None],
    "einsum": lambda m, x: x + torch.einsum("btsc,c->bts", x[..., :0], m.w[:0])[..., None],
    "repeat": lambda m, x: torch.cat([x.repeat(1, 1, 1, 0), x[:, :1].expand(-1, 7, -1, -1)[..., :0], x], -1),
    "taken apart": lambda m, x: torch.stack([*x[:, :0].unbind(1), *x.unbind(1)], 1),
    "norm": lambda m, x: torch.cat([x[:, :0].softmax(-1), x.narrow(1, 0, 0).chunk(2, 1)[0], x], 1),
    "stage": lambda m, x: torch.cat([m.space(x[:, :, :0]), x], 2),
    "data": by_its_data,
}  # fmt: skip


def make(name: str) -> Model:
    torch.manual_seed(1)
    return Model(NOTHING[name]).double()


def total(y: Tensor) -> Tensor:
    return (y * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum() + 1


class Two(Model):
    """Frames of two inputs, of which one has none."""

    stages = {**Model.stages, "": "x=b t s c, y=b u s c"}

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.time(torch.cat([self.space(x), self.space(y)], 1))


X = torch.randn(2, 7, 5, C, dtype=torch.float64)
MODELS = {
    **{name: (partial(make, name), (X,)) for name in NOTHING},
    **{f"an input {tuple(y.shape)}": (partial(make, "rotary"), (y,)) for y in (X[:, :0], X[:0], X[:, :, :0])},
    "two inputs": (lambda: Two(None).double(), (X, X[:, :0])),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", [2, long(3)])
def test_exact(mesh: DeviceMesh, name: str) -> None:
    build, args = MODELS[name]
    assert_parallel_equal(build(), mesh, tuple(x.clone().requires_grad_() for x in args), rounds=2, loss=total)


def test_nothing_costs_nothing() -> None:
    x = torch.randn(2, 7, 5, C, dtype=torch.float64)
    least = dsp.plan(Model(lambda m, x: x * m.w).double(), x, size=2, gather_output=True).bytes
    for name in NOTHING:
        if name not in ("sum", "taken apart", "data"):
            assert dsp.plan(make(name), x, size=2, gather_output=True).bytes == least, name


@pytest.mark.parametrize("name", keep_short([n for n in NOTHING if n != "stage"], only=["rotary", "frames", "data"]))
def test_discover(name: str) -> None:
    assert dsp.discover(make(name), torch.randn(2, 7, 5, C)) == {**Model.stages, "": "x=b t s c -> b t s c"}


def test_discover_refuses_what_holds_nothing() -> None:
    with pytest.raises(ValueError, match=r"an input \(2, 0, 5, 4\) without elements"):
        dsp.discover(make("rotary"), torch.randn(2, 0, 5, C))
