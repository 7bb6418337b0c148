"""Results of stages: those of an autograd.Function inside one, and a tensor that is returned twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support.parity import assert_parallel_equal
from tests.support.toys import C, SpaceTime


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Last(nn.Module):
    """A stage whose last step is an autograd.Function."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.weight = dim, nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x.softmax(self.dim) * self.weight)


class Functions(nn.Module):
    stages = {"": "x=b t s c", "first": "b t [s c]", "second": "b t [s c]", "third": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Last(2), Last(2), Last(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x)) + 1)


@pytest.mark.parametrize("mesh", [2, 3])
def test_a_stage_that_ends_in_a_function(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    assert_parallel_equal(
        Functions().double(), mesh, {"x": torch.randn(1, 3, 5, 4, dtype=torch.float64)}, Functions.stages
    )


class Twin(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x.softmax(2)
        return {"once": y, "again": y}


class Returned(nn.Module):
    stages = {"": "x=b t s c", "first": "b t [s c] -> b t [s c], b t [s c]", "second": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Twin(), Last(1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        assert found["once"] is found["again"]
        return self.second(found["once"] * found["again"])


@pytest.mark.parametrize("mesh", [2, 3])
def test_a_tensor_that_a_stage_returns_twice_is_one(mesh: DeviceMesh) -> None:
    """On a rank that holds no row as well."""
    assert_parallel_equal(
        Returned().double(), mesh, {"x": torch.randn(1, 2, 5, 4, dtype=torch.float64)}, Returned.stages
    )


def returned(m: Any, x: Tensor) -> Tensor:
    """A stage in no_grad that returns its argument: on one process that has its gradient."""
    y = m.space(x)
    with torch.no_grad():
        z = m.same(y)
    return m.time(z * y)


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("pattern", ["b t [s] c", "b [t] s c"])
def test_an_argument_that_a_stage_returns_in_no_grad_keeps_its_gradient(mesh: DeviceMesh, pattern: str) -> None:
    single = SpaceTime(returned, same=nn.Identity()).double()
    single.stages = single.stages | {"same": pattern}
    assert_parallel_equal(single, mesh, (torch.randn(2, 7, 5, C, dtype=torch.float64),), rounds=2)
