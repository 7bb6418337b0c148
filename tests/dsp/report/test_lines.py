"""Rows of a plan and errors name the line of the user's code that they come from."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.core.torch_calls import GlueError
from tests.support import toys

HERE = __file__.rpartition("/")[2]


def turned(m: toys.SpaceTime, x: Tensor) -> Tensor:
    """Glue that gathers, by a function of another library."""
    x = m.time(m.space(x))
    x = rearrange(x, "b t s c -> b (t s) c").softmax(1)  # the gather
    return rearrange(x, "b (t s) c -> b t s c", s=4)


def refused(m: toys.SpaceTime, x: Tensor) -> Tensor:
    x = m.space(x)
    return torch.autograd.grad(x.sum(), x)[0]  # the refusal


class Exact(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:  # the check
            raise TypeError("an exact tensor is wanted")
        return x


def written(line: str) -> str:
    """The text of a line of this file that an error or a row names."""
    name, _, number = line.rpartition(":")
    assert name == HERE
    return linecache.getline(__file__, int(number))


def test_rows_name_lines_where_asked() -> None:
    plan = dsp.plan(toys.SpaceTime(turned), torch.randn(1, 6, 4, toys.C), size=2, gather_output=False)
    assert [written(r.line).split("#")[0].strip() for r in plan.stages if r.pattern] == ["x = m.time(m.space(x))"] * 2
    assert any("the gather" in written(r.line) for r in plan.stages if not r.pattern)
    assert HERE not in plan.text()
    head, _, *rows = plan.text(lines=True).split("\n")
    assert head.endswith("line")
    assert all(HERE in row for row in rows[: len(plan.stages)])


def test_a_refusal_in_a_plan_names_its_line() -> None:
    with pytest.raises(GlueError) as caught:
        dsp.plan(toys.SpaceTime(refused), torch.randn(1, 6, 4, toys.C), size=2)
    (line,) = re.findall(rf"\(at ({HERE}:\d+)\)$", str(caught.value))
    assert "the refusal" in written(line)


def test_a_refusal_in_a_run_names_its_line(mesh: DeviceMesh) -> None:
    model = dsp.parallelize(toys.SpaceTime(refused), mesh)
    for _ in range(2):
        with pytest.raises(GlueError) as caught:
            model(torch.randn(1, 6, 4, toys.C))
        (line,) = re.findall(rf"\(at ({HERE}:\d+)\)$", str(caught.value))
        assert "the refusal" in written(line)


def test_a_plan_says_what_its_tensors_are() -> None:
    """A run would raise the same: its tensors between stages are of a subclass, too."""
    x = torch.randn(1, 6, 4, toys.C)
    for given in (x, x.to("meta")):
        with pytest.raises(TypeError, match="an exact tensor is wanted") as caught:
            dsp.plan(Exact(), given, size=2, stages={"": "x=b t s c"})
        assert "Exact was planned on tensors without data, or on copies of a subclass" in caught.value.__notes__[0]
