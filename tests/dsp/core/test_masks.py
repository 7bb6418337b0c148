"""Writes by a boolean mask into a sharded tensor: exact, without communication where the mask lies as it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_parallel_equal

C = 4


class Masking(nn.Module):
    """Attention over the rows of (b r f), after a write by a mask; `way` says which."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.e, self.q = way, nn.Linear(C, C), nn.Linear(C, C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.e(x)
        mask = x.sum(-1) > 0  # (b r)
        if self.way == "asked" and mask.any():
            y[mask] = -1.0
        if self.way == "rows":
            y[mask] = -1.0
        if self.way == "all":
            y[x > 0] = 2
        if self.way == "tensor":
            y[mask] = self.e.bias[0]
        if self.way == "row":  # a learned token for masked positions
            y[mask] = self.e.bias
        if self.way == "one row":
            y[mask] = self.e.bias[None]
        if self.way == "whole":
            y[torch.arange(x.shape[0]) < 1] = 0.5
        if self.way == "bool":
            mask[x[..., 0] > 0.3] = True
            y = y * mask[..., None]
        q = self.q(y)
        return torch.softmax(q @ q.mT, -1) @ y


WAYS = [*"rows all tensor row whole bool asked".split(), "one row"]


@pytest.mark.parametrize("mesh", [2, 3])
def test_boolean_mask_writes_need_no_communication(mesh: DeviceMesh) -> None:
    found = {}
    for way in WAYS:
        torch.manual_seed(0)
        single, x = Masking(way).double(), torch.randn(2, 7, C, dtype=torch.float64, requires_grad=True)
        steps = assert_parallel_equal(single, mesh, (x,), {"": "x=b r f"}, gather=False, rounds=3, count=True)
        found[way] = [dict(comm.forward.bytes) for comm in steps]
    own = found["whole"]  # attention alone, whose mask is whole on every rank
    assert all(found[way] == own for way in ("rows", "all", "tensor", "row", "one row", "bool"))
    assert len(own[0]) > 0
    _, second, third = found["asked"]  # a rank tells the others whether there is any
    assert second == third
    assert sum(second.values()) <= sum(own[0].values()) + mesh.size()


def test_planned_though_it_reads_its_mask() -> None:
    plan = dsp.plan(Masking("asked"), (torch.randn(2, 7, C),), size=2, stages={"": "x=b r f"}, gather_output=False)
    assert "this forward reads its data" in plan.text()
    assert plan.share <= 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("value", [2, 1.5, True])
def test_numbers_of_other_types_are_as_on_one_process(mesh: DeviceMesh, dtype: torch.dtype, value: float) -> None:
    x = (torch.arange(12).view(2, 6) % 3).to(dtype)
    try:
        expect = Cast(value)(x)
    except Exception:
        return
    try:
        got = dsp.parallelize(Cast(value), mesh, {"": "x=b s"})(x)
    except dsp.GlueError:
        return  # refused, by name
    assert torch.equal(got, expect)


class Cast(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[x > 0] = self.value
        return y
