"""The offers that `decide` chooses for a record cost least: against all combinations, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsp
from dsp.core.decide import Decision, decide
from dsp.core.offers import lay_out
from dsp.core.recording import record_forward
from dsp.glue.offers import ShardingRules
from dsp.stages.known import stages_of
from tests.support import cases, toys
from tests.support.brute_force import least, verify
from tests.support.forwards import FORWARDS
from tests.support.slow import slow


def decided(model: nn.Module, inputs: dict[str, Any], n: int, gather: bool) -> Decision:
    """The decision on the record of a forward on n ranks."""
    stages, root = stages_of(model, None)
    record, _ = record_forward(model, stages, root, (), inputs, n, ShardingRules())
    lay_out(record)
    return decide(record, gather)


def toy(name: str) -> tuple[nn.Module, dict[str, Any]]:
    layers = {"layers": 1} if name in ("Grid", "Folded", "Cube") else {}
    return toys.TOYS[name](**layers).double(), toys.inputs(name, 1, 4, 5)


def zoo(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = cases.build(name)
    return model, cases.doubled(cases.example(model, 1, frames=5, height=8, width=4))


def forward(name: str) -> tuple[nn.Module, dict[str, Any]]:
    make, inputs, _ = FORWARDS[name]
    return make().double(), inputs()


CASES = [
    *((toy, name) for name in ("Grid", "Folded", "Cube", "Global")),
    *((forward, name) for name in ("a rank without a part", "views", "checkpoints")),
    (zoo, "transformer2d"),
]


@pytest.mark.parametrize("n", [2, slow(3)])
@pytest.mark.parametrize("gather", [True, slow(False)])
@pytest.mark.parametrize(("make", "name"), CASES)
def test_no_combination_of_offers_costs_less(make: Any, name: str, gather: bool, n: int) -> None:
    """A batch of 1 leaves no offer out."""
    decision = decided(*make(name), n, gather)
    problem, solution = decision.problem, decision.solution
    assert [len(op.choices) for op in problem.ops] == [len(node.offers) for node in decision.nodes]
    assert solution.exact
    assert verify(problem, solution) == least(problem)


class Widens(nn.Module):
    """Channels joined and added up along the positions have twice the bytes of what they are made of."""

    stages = {"": "x=b t c"}

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(12, 12), nn.Parameter(torch.randn(1, 3, 12).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.linear(x).tanh().to(torch.float64), self.more], 1).cumsum(1)


def test_a_switch_is_offered_before_a_tensor_grows() -> None:
    plan = dsp.plan(Widens(), torch.randn(1, 7, 12), size=3, gather_output=False)
    assert plan.bytes["forward"] == 3 * 12 * 2 // 3 * 4  # the busiest rank's 3 of 7 rows, in single precision
