"""The cost of switching a residual stream, or its branches: by hand, and from models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dsp
import zoo
from dsp.plan.residual import residuals
from dsp.planner import Problem, price, solve
from tests.support import toys
from tests.support.brute_force import EVEN, chain


def kinds(problem: Problem) -> list[bool]:
    return [op.name in ("s", "t", "stage") for op in problem.ops]


def test_of_equal_price_where_two_layouts_alternate() -> None:
    """Two switches a layer either way; the stream starts whole, so that the first split of a branch is free."""
    layers, n = 5, 4
    problem = chain(EVEN, ["s", "t"] * layers, n, joins=True)
    plan = solve(problem)
    each = price(problem.values[1], "t", "s", n)[0]
    (found,) = residuals(problem, kinds(problem), (plan.bytes, plan.calls))
    assert (found.dims, found.joins) == ("b t s c", 2 * layers)
    assert found.plan == found.switched == (each * (2 * layers - 1), 2 * layers - 1)
    assert found.kept == (each * (2 * layers - 1), 2 * layers - 1)


def test_a_stream_is_cheaper_to_switch_where_stages_follow_in_one_layout() -> None:
    problem = chain(EVEN, ["s"] * 3 + ["t"] * 3, 4, joins=True)
    plan = solve(problem)
    each = price(problem.values[1], "t", "s", 4)[0]
    (found,) = residuals(problem, kinds(problem), (plan.bytes, plan.calls))
    assert found.plan == found.switched == (each, 1)
    # three branches out of the way; the first of all is split from the whole input
    assert found.kept == (5 * each, 5)
    assert found.along == "s"


class Branch(nn.Module):
    """Attention alone is the stage; norm and residual are glue."""

    stages = {"": "x=b t s c -> b t s c", "space.*": "b t [s c]", "time.*": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.time = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for space, time in zip(self.space, self.time):
            x = x + space(torch.nn.functional.layer_norm(x, (8,)))
            x = x + 0.5 * time(torch.nn.functional.layer_norm(x, (8,)))
        return x


def test_the_plan_of_a_model_shows_both() -> None:
    plan = dsp.plan(Branch(), (torch.randn(1, 8, 8, 8),), size=4, gather_output=False)
    (found,) = plan.residuals
    each = 8**3 * 4 * 3 // 16
    assert (found.dims, found.joins) == ("t s c", 6)
    assert found.plan == found.switched == (plan.bytes["forward"], plan.calls["forward"]) == (5 * each, 5)
    assert found.kept is not None
    assert found.kept[0] >= 5 * each
    line = "residual stream over t s c, 6 additions: 1.9 KiB in 5 calls forward as planned; 1.9 KiB in 5 calls if only"
    assert line in plan.text()


def test_streams_of_their_own_dims() -> None:
    plan = dsp.plan(toys.make("Pair"), kwargs=toys.inputs("Pair", 1, 6, 8), size=2, gather_output=False)
    assert [(r.dims.split()[0], r.joins) for r in plan.residuals] == [("s", 2), ("i", 3)]
    for r in plan.residuals:
        assert r.plan <= min(way for way in (r.switched, r.kept) if way is not None)


def test_whole_blocks_leave_no_choice() -> None:
    """The addition lies inside the stage: there is only the stream, and the plan does not speak of another way."""
    model = zoo.create("transformer2d", "test")
    plan = dsp.plan(model, kwargs=model.example_inputs(), size=2, gather_output=False)
    assert plan.residuals == []
    assert "residual" not in plan.text()
    assert dsp.plan(Branch(), (torch.randn(1, 8, 8, 8),), size=1, gather_output=False).residuals == []
