"""Stages alike run once in a trace, and the trace is the one of running them all."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsp
import zoo
from tests.support import toys
from tests.support.parity import wrap_checkpoints
from tests.support.records import planned_forward
from tests.support.slow import keep_short, slow

C = 8


def same(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> None:
    one, every = (planned_forward(model, kwargs, equal=equal, **options) for equal in (True, False))
    assert one == every


@pytest.mark.parametrize(
    "name", keep_short([name for name in toys.TOYS if name != "Unplanned"], only=["Folded", "Loss"])
)
def test_the_same_trace(name: str) -> None:
    model, kwargs = toys.make(name), toys.inputs(name, 1, 7, 5)
    same(model, kwargs)
    same(model, kwargs, dtype=torch.bfloat16)
    same(model, kwargs, recompute=True)
    same(model, {k: v.requires_grad_() for k, v in kwargs.items()})
    with torch.no_grad():
        same(model, kwargs)
    with torch.autocast("cpu", torch.bfloat16):
        same(model.float(), {k: v.detach().float() for k, v in kwargs.items()})


@pytest.mark.parametrize("name", [slow("Grid"), "Folded", slow("Cube")])
def test_the_same_trace_under_checkpointing(name: str) -> None:
    model = toys.make(name)
    wrap_checkpoints(model)
    stages = {k.replace(".*", ".*.inner"): v for k, v in type(model).stages.items()}
    same(model, toys.inputs(name, 1, 7, 5), stages=stages)


@pytest.mark.parametrize("name", keep_short(zoo.list_models(), only=["latte"]))
def test_the_same_trace_of_the_zoo(name: str) -> None:
    with torch.device("meta"):
        deep = {"axial_image": {"exterior": 4, "outer": 4, "inner": 4}}.get(name, {"depth": 4})
        model = zoo.create(name, "test", **deep)
        same(model, model.example_inputs())


class Layers(nn.Module):
    """The same stage over and over, at another width from the half on."""

    stages = {"": "x=b t s c", "blocks.*": "b t [s c]"}

    def __init__(self, block: Any, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))

    def forward(self, x: Tensor) -> Any:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == len(self.blocks) // 2:
                x = torch.cat([x, x], 1)
        return x


X = {"x": torch.randn(1, 6, 4, C)}
RAN = SimpleQueue[int]()  # which planning does not put back


def ran() -> int:
    """How many since it was asked last."""
    return sum(RAN.get() for _ in range(RAN.qsize()))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(C, C)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        RAN.put(1)
        return x + self.act(self.linear(x))


def test_stages_alike_run_once_for_each_kind_of_input() -> None:
    model = Layers(Counted, depth=30)
    ran()
    plan = dsp.plan(model, kwargs=X, size=2, gather_output=False)
    # inputs that ask for no gradient, then some that do, then twice as long
    assert ran() == 3
    assert sum(row.name.startswith("blocks") for row in plan.stages) == 30
    ran()
    same(model, X)
    assert ran() == 3 + 30
    # not alike: in training or not, of another dtype, of another width inside
    model.blocks[3].train(False)
    model.blocks[5].act = nn.GELU()
    model.blocks[7].linear.weight.requires_grad_(False)
    ran()
    dsp.plan(model, kwargs=X, size=2, gather_output=False)
    assert ran() == 6


def lazily(m: nn.Module, x: Tensor) -> Tensor:
    """Keeps a table for the next time."""
    if m.table is None:
        m.table = m.linear(torch.ones(C))
    return x * m.table.detach()


ODD: dict[str, Any] = {
    "its input": lambda m, x: x,
    "a view of its input": lambda m, x: x.view(x.shape),
    "written in place": lambda m, x: m.linear(x.mul_(2) if x.requires_grad else x),  # the next stage may: it is no leaf
    "a part of something larger, which autograd keeps": lambda m, x: torch.cat([m.linear(x)] * 3, -1)[..., C : 2 * C],
    "permuted": lambda m, x: m.linear(x).transpose(1, 2).contiguous().transpose(1, 2),
    "a table": lazily,
    "dropout": lambda m, x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_outputs_and_stages_that_write_to_themselves(name: str) -> None:
    same(Layers(lambda: toys.Does(ODD[name], linear=nn.Linear(C, C), table=None)), X)


class Both(nn.Module):
    """Two tensors and what belongs to them: in a dict, some of it whole numbers."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(C, C)

        def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            x = self.linear(x) + y
            return {"x": x, "y": (x > 0, None, 3), "again": x}

    stages = {"": "x=b t s c", "blocks.*": "b t [s c], b t [s c] -> b t [s c], b t [s c], b t [s c]"}

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Stage() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x, x)
            assert out["again"] is out["x"]
            assert out["y"][1:] == (None, 3)
            x = out["x"] * out["y"][0]
        return x


def test_several_outputs() -> None:
    same(Both(), X)


def test_a_hooked_stage_is_like_no_other() -> None:
    model = Layers(Counted)
    seen = SimpleQueue[int]()  # which planning does not put back
    model.blocks[4].linear.register_forward_hook(lambda m, a, out: seen.put(1))
    same(model, X)
    assert seen.qsize() == 2


def test_the_model_itself_is_left_alone() -> None:
    model = Layers(Counted)
    before = {name: dict(m.__dict__) for name, m in model.named_modules()}
    planned_forward(model, X, equal=True)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert all("forward" not in m.__dict__ for m in model.modules())
