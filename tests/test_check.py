"""dsp.check: right models pass, and each way of stating a stage wrongly is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp


def passes(mesh: DeviceMesh, name: str) -> tuple[bool, str]:
    model = toys.make(name).float()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    kwargs = {k: v.float() if v.is_floating_point() else v for k, v in toys.inputs(name, 2, 7, 5).items()}
    report = dsp.check(model, kwargs=kwargs, mesh=mesh)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())
    return bool(report), str(report)


@pytest.mark.parametrize("name", [n for n in toys.TOYS if n != "Unplanned"])
def test_right_models_pass(ranks, name: str) -> None:
    for ok, text in ranks(passes, 2, name):
        assert ok, text
        assert "float64: ok" in text


class One(nn.Module):
    """One stage, stated as independent along t."""

    def __init__(self, f, pattern: str = "b t [s c]") -> None:
        super().__init__()
        self.stage = Fn(f)
        self.stages = {"": "x=b t s c -> b t s c", "stage": pattern}

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return self.stage(x, table) if table is not None else self.stage(x)


class Fn(nn.Module):
    def __init__(self, f) -> None:
        super().__init__()
        self.f = f
        self.w = nn.Parameter(torch.randn(16, 1, 4, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        return self.f(self, x, table)


def table_by_frame(m: Fn, x: Tensor, table: Tensor | None) -> Tensor:
    return x + m.w[: x.shape[1]]


def arange_positions(m: Fn, x: Tensor, table: Tensor | None) -> Tensor:
    return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None, None]


def divided_by_length(m: Fn, x: Tensor, table: Tensor | None) -> Tensor:
    return x / x.shape[1]


def over_time(m: Fn, x: Tensor, table: Tensor | None) -> Tensor:
    return x - x.mean(1, keepdim=True)


def frame_argument(m: Fn, x: Tensor, table: Tensor | None) -> Tensor:
    assert table is not None
    return x + table[:, :, None]


WRONG = [table_by_frame, arange_positions, divided_by_length, over_time]


def finds(mesh: DeviceMesh) -> list[tuple[bool, str]]:
    x = torch.randn(2, 7, 5, 4)
    found = []
    for f in WRONG:
        report = dsp.check(One(f), (x,), mesh=mesh)
        found.append((report.ok, str(report)))
    report = dsp.check(One(frame_argument), (x, torch.randn(2, 7, 4)), mesh=mesh)
    found.append((report.ok, str(report)))
    right = One(frame_argument, "b t [s c], table=b t [c]")
    found.append((dsp.check(right, (x, torch.randn(2, 7, 4)), mesh=mesh).ok, ""))
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_wrong_statements_are_named(ranks, n: int) -> None:
    *wrong, argument, right = ranks(finds, n)[0]
    for ok, text in wrong:
        assert not ok
        assert "stage 'stage' is not independent along 't'" in text
        assert "write [t]" in text
    assert not argument[0]
    assert "stage 'stage'" in argument[1]
    assert right[0]


class ByRows(torch.autograd.Function):
    """The identity, whose backward looks at how long its part is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / grad.shape[1]


def gradient(mesh: DeviceMesh) -> Any:
    return dsp.check(One(lambda m, x, table: ByRows.apply(x * m.w[:1])), (torch.randn(2, 7, 5, 4),), mesh=mesh)


def test_a_wrong_gradient_is_named(ranks) -> None:
    """What slices of the forward do not show."""
    report = ranks(gradient, 2)[0]
    assert report.output < 1e-12
    assert not report.ok
    assert any("the gradient of stage.w differs by" in problem for problem in report.problems)
