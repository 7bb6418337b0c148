"""Inputs that are lists or tuples of tensors, one a sample: a pattern of the root names each, with sizes of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.parity import assert_step_equal


class Joint(nn.Module):
    """Joint attention of each sample's tokens and its text, of other sizes in each, as in some of today's models."""

    stages = {"": "x=c t h w, text=l d"}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(4, 12), nn.Linear(12, 36), nn.Linear(12, 4)

    def forward(self, x: list[Tensor], text: tuple[Tensor, ...], scale: float = 1.0) -> list[Tensor]:
        made = []
        for own, words in zip(x, text):
            y = self.embed(own.permute(1, 2, 3, 0))
            z = torch.cat([y.flatten(0, 2), words], 0)
            q, k, v = (a.transpose(0, 1)[None] for a in self.qkv(z).unflatten(-1, (3, 3, 4)).unbind(-3))
            z = z + scale * F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
            made.append(self.out(z[: -len(words)].view_as(y)).permute(3, 0, 1, 2))
        return made


class Apart(nn.Module):
    """Stages along either dim, of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.rows, self.columns = (
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        made = []
        for own in x:
            y = self.rows(self.embed(own.permute(1, 2, 0)))
            made.append(self.columns(y.transpose(0, 1)).transpose(0, 1))
        return made


def inputs(count: int) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = ((5, 4, 6), (3, 6, 6), (1, 2, 3))[:count]
    x = [torch.randn(4, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    return {"x": x, "text": tuple(torch.randn(3 + n, 12, dtype=torch.float64) for n in range(count))}


@pytest.mark.parametrize(("mesh", "count"), [(2, 1), (2, 2), (3, 3)])
def test_a_list_of_samples_is_exact(mesh: DeviceMesh, count: int) -> None:
    kwargs = inputs(count)
    single = Joint().double()
    model = dsp.parallelize(copy.deepcopy(single), mesh)
    assert_step_equal(single, model, mesh, kwargs)
    plan = dsp.plan(single, kwargs=kwargs, size=mesh.size())
    with torch.no_grad(), dsp.count_comm() as comm:
        model(**kwargs)
    assert sum(comm.forward.bytes.values()) <= plan.bytes["forward"]


@pytest.mark.slow
def test_check_takes_lists_at_two_sizes(mesh: DeviceMesh) -> None:
    text = dsp.check(Joint(), kwargs=inputs(2), mesh=mesh).text()
    assert "float64: ok" in text
    assert "at each size (t₁=5 h₁=4 w=6 t₂=3 h₂=6 l₁=3 l₂=4; t₁=3" in text


def test_a_plan_names_the_items() -> None:
    kwargs = inputs(2)
    plan = dsp.plan(Joint().double(), kwargs=kwargs, size=2, gather_output=False)
    assert set(plan.inputs) == {"x[0]", "x[1]", "text[0]", "text[1]"}
    one = dsp.plan(Joint().double(), kwargs=inputs(1), size=2, gather_output=False)
    assert set(one.inputs["x[0]"]) <= set("cthw")  # plain names where the sizes are one


@pytest.mark.slow
def test_discover_finds_one_pattern_for_all_items() -> None:
    torch.manual_seed(0)
    x = [torch.randn(4, 5, 7), torch.randn(4, 3, 6)]
    stages = dsp.discover(Apart(), (x,))
    assert stages[""].startswith("x=")
    assert "->" not in stages[""]
    assert "columns" in stages
    plan = dsp.plan(Apart(), (x,), size=2, stages=stages, gather_output=False)
    layouts = [r.layout for r in plan.stages if r.pattern]
    assert len(layouts) == 4
    assert all(layouts)


def test_lists_of_other_values_are_refused() -> None:
    kwargs = inputs(2)
    with pytest.raises(dsp.NotationError, match="whose value is a list, not a tensor, nor a list or tuple of tensors"):
        dsp.plan(Joint(), kwargs={**kwargs, "x": [*kwargs["x"], None]}, size=2)
    with pytest.raises(
        dsp.NotationError, match=r"the pattern 'x\[1\]=c t₂ h₂ w₂' has 4 axes .* but .* its shape is \(4, 6, 6\)"
    ):
        dsp.plan(Joint(), kwargs={**kwargs, "x": [kwargs["x"][0], kwargs["x"][1][:, 0]]}, size=2)
