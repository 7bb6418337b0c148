"""dsp.check: right models pass, and each way of stating a stage wrongly is named."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core.run import Runner
from tests.support import toys


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


@pytest.mark.parametrize("mesh", [1, 2])
def test_wrong_statements_are_named(mesh: DeviceMesh) -> None:
    x, table = torch.randn(2, 7, 5, 4), torch.randn(2, 7, 4)
    for f in WRONG:
        report = dsp.check(One(f), (x,), mesh=mesh)
        assert not report.ok
        assert "stage 'stage' is not independent along 't'" in report.text()
        assert "write [t]" in report.text()
    report = dsp.check(One(frame_argument), (x, table), mesh=mesh)
    assert not report.ok
    assert "stage 'stage'" in report.text()
    assert dsp.check(One(frame_argument, "b t [s c], table=b t [c]"), (x, table), mesh=mesh).ok


class Choosy(One):
    """Asks between stages for tensors of no subclass, which what glue holds is one of."""

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        y = self.stage(x, table)
        return y * 2 if type(y) is Tensor else y


def test_a_branch_that_subclasses_take_is_found(mesh: DeviceMesh) -> None:
    text = dsp.check(Choosy(lambda m, x, table: x + m.w[:1]), (torch.randn(1, 7, 5, 4),), mesh=mesh).text()
    assert "outputs differ" in text, text


class ByRows(torch.autograd.Function):
    """The identity, whose backward looks at how long its part is."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad / grad.shape[1]


def test_a_wrong_gradient_is_named(mesh: DeviceMesh) -> None:
    """Slices of the forward do not show it."""
    model = One(lambda m, x, table: ByRows.apply(x * m.w[:1]))
    report = dsp.check(model, (torch.randn(2, 7, 5, 4),), mesh=mesh)
    assert report.output < 1e-12
    assert not report.ok
    assert any("the gradient of stage.w differs by" in problem for problem in report.problems)


# --- what one call of one kind does not show --------------------------------------------------------------------------


class Late(nn.Module):
    """Right but where `wrong` says that it is not: there it mixes frames, or leaves something behind."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s c"}

    class Space(nn.Module):
        def __init__(self, wrong: Any) -> None:
            super().__init__()
            self.wrong, self.w = wrong, nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            x = x * self.w
            return x - x.mean(1, keepdim=True) if self.wrong(self, x) else x

    def __init__(self, wrong: Any) -> None:
        super().__init__()
        self.space, self.time = self.Space(wrong), nn.Softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.space(x))


def keeps(m: nn.Module, x: Tensor) -> bool:
    m.seen.copy_(x.detach().mean())
    return False


LATE: dict[str, tuple[Any, list[str]]] = {
    "in eval mode": (lambda m, x: not m.training, ["outputs differ by", "(eval mode, t=7 s=5, call 1)"]),
    "under no_grad": (
        lambda m, x: not torch.is_grad_enabled() and x.shape[2] < 4,
        ["outputs differ by", "(no_grad mode, t=4 s=3, call 1)"],
    ),
    "at another size": (lambda m, x: x.shape[2] < 4, ["outputs differ by", "(training mode, t=4 s=3, call 1)"]),
    "a buffer": (keeps, ["leaves the buffer space.seen off by", "(training mode, t=7 s=5, call 1)"]),
}


class Endless(nn.Module):
    """Next to a number without end every other difference is small."""

    stages = {"": "x=b t s c", "stage": "b t [s c]"}

    def __init__(self) -> None:
        super().__init__()
        self.stage = Fn(lambda m, x, _: (x - x.mean(1, keepdim=True)).masked_fill(torch.eye(5, 4) > 0, -torch.inf))

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x)


class Partly(nn.Module):
    """Draws random numbers in training, does not call one of its stages, and multiplies by a gate that stays zero."""

    stages = {"space": "b t [s c]", "time": "b [t] s c", "idle": "b t [s c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.idle = toys.Along(2), nn.Softmax(1), nn.Identity()
        self.register_buffer("gate", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) * self.w() + self.gate * self.time(self.space(x))

    def w(self) -> Tensor:
        return 1 + self.gate


class Unborn(nn.Module):
    """A last layer that starts at zero hides a stage that is wrong where the slices do not look: in its backward."""

    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s c"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time, self.last = toys.Along(2), nn.Softmax(1), nn.Linear(4, 4)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.time(self.space(x)))


def test_faults_after_the_first_call_are_found(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 7, 5, 4)
    for name, (wrong, says) in LATE.items():
        report = dsp.check(Late(wrong), (x,), mesh=mesh)
        assert not report, name
        assert all(part in report.problems[0] for part in says), f"{name}: {report.problems[0]}"
    assert not dsp.check(Endless(), (x,), mesh=mesh)

    # a forward that reads its data, and goes wrong where it follows the record of its first call
    give = Runner.give

    def wrong(self: Runner, *result: Any) -> Any:
        return 1 / 0 if self.record.replans else give(self, *result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "give", wrong)
        report = dsp.check(toys.Glued(lambda x: x * (float(x.detach().abs().sum()) > 0)), (x,), mesh=mesh)
    (problem,) = report.problems
    assert problem == "the parallel run raised ZeroDivisionError: division by zero (training mode, t=7 s=5, call 2)"


def test_all_ranks_report_what_one_of_them_sees(mesh: DeviceMesh) -> None:
    """Only one rank sees that something is wrong; none waits for it, and all say the same."""
    check = import_module("dsp.verify.check")  # the function has its name
    own = check.compare

    def compare(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        found.problems += ["is seen by one rank"] * mesh.get_local_rank()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "compare", compare)
        report = dsp.check(toys.make("Grid"), kwargs=toys.inputs("Grid", 1, 5, 3), mesh=mesh)
    assert report.problems == ["is seen by one rank (training mode, t=5 s=3, call 1)"]


@pytest.mark.parametrize("mesh", [1, 2])
def test_uncovered_parts_are_listed(mesh: DeviceMesh) -> None:
    report = dsp.check(Partly(), (torch.randn(1, 5, 3, 4),), mesh=mesh)
    assert report, report.text()
    assert report.modes == (["eval", "no_grad", "training"] if mesh.size() > 1 else [])
    assert all(f"  not covered: {u}" in report.text() for u in report.uncovered)
    expect = (
        ["a parallel run: there is one rank"]
        if mesh.size() == 1
        else [
            "stages that did not run: idle",
            "slices along 'b', which has size 1: space, time",
            "a second size of the inputs: the stages name no dims of the model's own inputs",
            "outputs and gradients in training mode (the model draws random numbers)",
            "parameters whose gradients are all zeros: space.norm.bias, space.norm.weight, space.out.bias and 2 more",
        ]
    )
    found = report.uncovered[-len(expect) :] if mesh.size() == 1 else report.uncovered
    assert len(found) == len(expect)
    assert all(line.startswith(start) for line, start in zip(found, expect)), found


@pytest.mark.parametrize(
    ("draw", "counted", "zeros"),
    [
        (True, "gradients: 8 tensors", []),
        (
            False,
            "gradients: 2 tensors (6 more always zero)",
            ["gradients are all zeros", "all of them were zeros"],
        ),
    ],
)
def test_a_model_that_was_not_trained_is_compared_with_weights_that_are_drawn(
    mesh: DeviceMesh, draw: bool, counted: str, zeros: list[str]
) -> None:
    model = Unborn()
    report = dsp.check(model, (torch.randn(1, 5, 3, 4),), mesh=mesh, draw=draw)
    assert report, report.text()
    assert f"{counted}, largest" in report.text()
    said = [u for u in report.uncovered if "zero" in u]
    assert len(said) == len(zeros)
    assert all(part in line for part, line in zip(zeros, said))
    assert not any(p.any() for p in model.last.parameters())


class Angles(nn.Module):
    """The angles of a timestep are computed in float32 whatever the model is in, as they are in video models."""

    stages = {"": "x=b t s c", "space": "b t [s c], by=b [c]", "time": "b [t] s c"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Scaled(), nn.Softmax(1)
        self.into = nn.Linear(8, 4)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t.float()[:, None] * torch.arange(1, 5)
        by = self.into(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))
        return self.time(self.space(x, by))


class Scaled(nn.Module):
    def forward(self, x: Tensor, by: Tensor) -> Tensor:
        return x * by[:, None, None]


@pytest.mark.parametrize("mesh", [3])
def test_rounding_of_what_a_model_computes_in_a_shorter_type_is_no_fault(mesh: DeviceMesh) -> None:
    report = dsp.check(Angles(), (torch.randn(2, 7, 5, 4), torch.rand(2) * 900), mesh=mesh)
    assert report.ok, report.text()
    assert 1e-8 < report.gradients["input 1"] < 1e-4  # more than float64 rounds by: this is what is allowed for
