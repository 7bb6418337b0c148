"""A plan calls dims by the user's letters, and a row's move ends in the dim that the row is sharded along."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import dsp
from dsp.report.table import Plan
from tests.support import toys


class Heads(nn.Module):
    """Attention whose core alone is a stage, so that only it knows that there are heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.core, self.out = nn.Linear(48, 144), toys.Core(inner=True), nn.Linear(48, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 6, 8)).unbind(-3)
        return x + self.out(self.core(q, k, v).flatten(-2))


class Unnamed(nn.Module):
    """A Linear and a cumulative sum in glue: only along what the Linear made can the sum be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.embed = nn.Linear(8, 24), nn.Embedding(9, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).cumsum(1) + self.embed(torch.zeros_like(x[..., 0], dtype=torch.long)).cumsum(1)


class Shaped(nn.Module):
    """A result of rows that takes the shape of samples, as many as there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.columns(self.rows(y).reshape_as(x[:, 0]))


def products(x: Tensor) -> Tensor:
    scores = torch.einsum("bic,bjc->bij", x, 2 * x)
    return torch.einsum("bij,bjc->bic", scores.softmax(-1), x)


def names(plan: Plan) -> set[str]:
    assert plan.problem is not None
    return {name for names in plan.names for name in names.values()}


def test_a_dim_is_called_as_the_stage_calls_it_that_is_sharded_along_it() -> None:
    stages = {"": "x=b l c", "qkv": "b l [c]", "core": "b [l] h [e], b [l] h [e], b [l] h [e]", "out": "b l [c]"}
    plan = dsp.plan(Heads(), torch.randn(1, 600, 48), size=3, stages=stages, gather_output=False)
    rows = [(row.layout, row.switch) for row in plan.stages]
    assert rows == [("l", ""), ("h", "l → h, l → h, l → h"), ("l", "h → l")]
    assert names(plan) <= {"b", "l", "c", "h", "e"}


def test_unnamed_dims_are_called_after_their_origin() -> None:
    plan = dsp.plan(Unnamed(), torch.randn(1, 6, 8), size=2, stages={"": "x=b l c"}, gather_output=False)
    assert names(plan) == {"l", "c", "c₁", "embedding₁"}
    assert [(row.layout, row.switch) for row in plan.stages] == [("c₁", "l → c₁"), ("embedding₁", "l → embedding₁")]


def test_a_dim_is_called_after_the_operand_that_brings_it() -> None:
    stages = {"": "x=b n c, y=s c", "rows": "s [c]", "columns": "[s] c"}
    plan = dsp.plan(Shaped(), (torch.randn(4, 2, 6), torch.randn(4, 6)), size=2, stages=stages, gather_output=False)
    assert [(row.layout, row.switch) for row in plan.stages] == [("s", ""), ("c", "s → c")]


def test_an_einsum_has_its_own_letters() -> None:
    plan = dsp.plan(toys.Fn(products), torch.randn(1, 6, 8), size=2, stages={"": "x=b l c"}, gather_output=False)
    assert names(plan) <= {"b", "l", "c", "i", "j", "l₁"}


@pytest.mark.parametrize("toy", ["Grid", "Folded", "Pair", "Branches", "Global", "Streams"])
def test_no_plan_has_a_name_of_our_own(toy: str) -> None:
    plan = dsp.plan(toys.make(toy), kwargs=toys.inputs(toy, 2, 5, 7), size=3, gather_output=False)
    assert not [name for name in names(plan) if "'" in name or re.match(r"dim\d", name)]
    assert not re.search(r"dim\d|'", plan.text())
