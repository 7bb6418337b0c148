"""Dims without any element: of tables, between stages."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_step_equal


class Rotary(nn.Module):
    """A table of positions with an empty axis: axes of 0, 4 and 4 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        tables = [torch.outer(ids, torch.arange(0, d, 2).to(x)).cos().repeat_interleave(2, 1) for d in (0, 4, 4)]
        return self.f(x) * torch.cat(tables, 1)


STAGES = {"": "x=b s c, ids=s"}


def test_a_table_with_an_empty_axis_is_sharded() -> None:
    inputs = torch.randn(1, 25, 8), torch.arange(25.0)
    plan = dsp.plan(Rotary(), inputs, size=2, stages=STAGES, gather_output=False)
    assert plan.share < 0.55


@pytest.mark.parametrize("mesh", [2, 3])
def test_it_is_exact(mesh: DeviceMesh) -> None:
    single = Rotary().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    assert_step_equal(single, model, mesh, (torch.randn(1, 25, 8).double(), torch.arange(25.0).double()), rounds=2)
