"""Operands by keyword: in every way in which a function may be called, a rule reads the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core.torch_calls import usual_call
from dsp.glue.rules import RULES
from tests.support.parity import assert_parallel_equal, assert_step_equal
from tests.support.runs import Heard
from tests.support.toys import Does

CALLS: dict[str, Any] = {
    "repeat_interleave by a tensor": lambda x, t: x[
        :, torch.repeat_interleave(input=torch.arange(7), repeats=torch.ones(7, dtype=torch.long), dim=0)
    ],
    "repeat_interleave": lambda x, t: x + torch.repeat_interleave(input=t, repeats=7, dim=1),
    "broadcast_to": lambda x, t: x + torch.broadcast_to(input=t, size=(2, 7, 4)),
    "tile": lambda x, t: x + torch.tile(input=t, dims=(1, 7, 1)),
    "attention": lambda x, t: F.scaled_dot_product_attention(key=x[:, None], value=x[:, None], query=x[:, None])[:, 0],
    "where": lambda x, t: torch.where(condition=x > 0, other=t, input=x),
    "linear": lambda x, t: F.linear(weight=t[0, :1].expand(4, 4), input=x),
    "add and sum": lambda x, t: torch.add(input=x, other=t) * torch.sum(input=x, dim=1, keepdim=True),
    "a cat of a list": lambda x, t: torch.cat(tensors=[x, x * 2], dim=1)[:, :7],
}


class Calls(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call, self.lin = call, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.call(self.lin(x), self.lin.weight[:1].expand(2, 1, 4).clone()))


NAMES_OF_NUMPY: dict[str, Callable[[Tensor], Tensor]] = {
    "scan": lambda y: torch.cumsum(y, axis=1) + y.cumsum(axis=2),
    "sort": lambda y: y.sort(axis=1).values + torch.sort(y, descending=True, axis=2)[0],
    "reduction": lambda y: y + y.sum(axis=1, keepdims=True) + torch.amax(x=y, axis=(1,), keepdims=True),
    "position": lambda y: y + y.argmax(axis=1, keepdims=True) + y.median(axis=2, keepdims=True)[0],
    "join": lambda y: torch.cat([y, torch.mul(x=y, x2=y)], axis=1)[:, :7] + torch.stack([y, y], axis=1).sum(axis=1),
}


@pytest.mark.parametrize("name", NAMES_OF_NUMPY)
def test_arguments_by_the_names_that_numpy_has(mesh: DeviceMesh, name: str) -> None:
    """Torch's functions take axis= for dim=: a rule that read neither took another dim, and numbers were wrong."""
    single = Does(lambda m, x: m.lin(NAMES_OF_NUMPY[name](m.lin(x))), lin=nn.Linear(4, 4)).double()
    assert_parallel_equal(single, mesh, (torch.randn(2, 7, 4).double(),), {"": "x=b t c"})


@pytest.mark.parametrize("mesh", [2])
@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_is_a_keyword_is_an_operand(mesh: DeviceMesh, name: str) -> None:
    single = Calls(CALLS[name]).double()
    with Heard() as heard:
        model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t c"})
        assert_step_equal(single, model, mesh, (torch.randn(2, 7, 4).double(),), rounds=2)
    assert not heard.texts  # no rule failed, and no rank has all of a table


def test_the_positions_of_keywords() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    assert usual_call(torch.add, (), {"other": y, "input": x, "alpha": 2}) == ((x, y), {"alpha": 2})
    assert usual_call(F.linear, (x,), {"bias": y}) == ((x,), {"bias": y})  # nobody gave what is before it
    assert usual_call(torch.sum, (x,), {"dim": 1}) == ((x,), {"dim": 1})
    assert usual_call(torch.sum, (), {"x": x, "axis": 1, "keepdims": True}) == ((x,), {"dim": 1, "keepdim": True})
    assert usual_call(torch.swapaxes, (x,), {"axis0": 0, "axis1": 1}) == ((x,), {"axis0": 0, "axis1": 1})


def test_a_rule_that_fails_leaves_its_operation_replicated(mesh: DeviceMesh) -> None:
    single = Does(lambda m, x: m.lin(m.lin(x).roll(1, 1)), lin=nn.Linear(4, 4)).double()
    with pytest.MonkeyPatch.context() as patch, Heard() as heard:
        patch.setitem(RULES, "roll", lambda frame: 1 // 0)
        model = dsp.parallelize(copy.deepcopy(single), mesh, {"": "x=b t c"})
        assert_step_equal(single, model, mesh, (torch.randn(2, 7, 4).double(),), rounds=2)
    text, *_ = [text for text in heard.texts if "failed" in text]
    assert "the rule of roll([2, 7, 4]) between stages failed (at test_keywords.py:" in text
    assert "ZeroDivisionError" in text
