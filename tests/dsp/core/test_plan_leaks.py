"""A plan leaves nothing behind: no fake tensors, and a cache of torch's that stays short."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core import skeleton
from dsp.support.private import FakeTensor, FakeTensorMode, forget_fakes
from zoo.training.estimate import Keeping


class Saving(nn.Module):
    """Operations whose backward reads their own result, in a stage and between stages."""

    stages = {"": "x=b t s c", "inside": "b t s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Softmax(-1))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.inside(x)).tanh().exp()


def alive() -> int:
    """The count of fake tensors that are alive."""
    gc.collect()
    return sum(isinstance(o, FakeTensor) for o in gc.get_objects())


def planned() -> None:
    dsp.plan(Saving(), (torch.randn(2, 6, 10, 8),), size=2)


def without_data() -> None:
    dsp.without_data(Saving(), (torch.randn(2, 6, 10, 8),))


def estimated() -> None:
    """The trainer's estimate of what a step keeps for backward."""
    keeping = Keeping(Saving(), frozenset())
    with torch.autograd.graph.saved_tensors_hooks(keeping.save, lambda t: t):
        dsp.without_data(Saving(), (torch.randn(2, 6, 10, 8),))


@pytest.mark.parametrize("call", [planned, without_data, estimated], ids=lambda f: f.__name__)
def test_no_fake_tensor_outlives_its_plan(call: Callable[[], None]) -> None:
    call()
    before = alive()
    for _ in range(3):
        call()
    assert alive() <= before


def test_no_fake_tensor_outlives_a_forward(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = dsp.parallelize(Saving(), mesh)
    model(torch.ones(2, 6, 10, 8)).sum().backward()
    before = alive()
    for frames in (3, 4, 5):
        model(torch.ones(2, frames, 10, 8)).sum().backward()
    assert alive() <= before


def test_the_cache_of_fake_operations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skeleton, "forget_fakes", lambda: forget_fakes(most=10))
    planned()
    assert len(FakeTensorMode.cache) <= 10
