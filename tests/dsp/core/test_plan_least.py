"""The plans of traced models are least: against brute force over all layouts, and where they were found not to be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsp
from dsp.planner import solve
from tests.support import toys
from tests.support.brute_force import least, verify
from tests.support.slow import long, slow

ONE_LAYER = {"Grid", "Folded", "Cube"}


@pytest.mark.parametrize(
    ("name", "staged", "n", "batch"),
    [
        *((name, True, n, 2) for name in ("Grid", "Cube", "Global") for n in (2, 3)), ("Folded", True, 3, 2),
        *(("Grid", False, n, batch) for n, batch in ((2, 1), (2, 2), (3, 2), (3, 3))),
        slow("Global", False, 2, 2), long("Branches", True, 2, 2), long("Folded", True, 2, 2),
    ],
)  # fmt: skip
def test_no_layouts_of_a_traced_model_cost_less(name: str, staged: bool, n: int, batch: int) -> None:
    model = toys.TOYS[name](**({"layers": 1} if name in ONE_LAYER else {})).double()
    stages = dict(model.stages) if staged else {"": model.stages[""]}
    plan = dsp.plan(model, kwargs=toys.inputs(name, batch, 4, 5), size=n, stages=stages, gather_output=n == 2)
    assert plan.exact
    assert plan.problem is not None
    solution = solve(plan.problem)
    assert verify(plan.problem, solution) == least(plan.problem)
    assert solution.bytes == sum(row.bytes for row in plan.stages) >= plan.bytes["forward"]


class Alignment(nn.Module):
    """Attention along the rows of (B, R, C) tokens and along the columns, with positions counted."""

    def __init__(self, channels: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.token, self.place = nn.Embedding(24, channels), nn.Embedding(64, channels)
        self.project = nn.ModuleList(nn.Linear(channels, 3 * channels) for _ in range(2 * layers))
        self.out = nn.ModuleList(nn.Linear(channels, channels) for _ in range(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        b, r, c = tokens.shape
        there = tokens.view(b * r, c).ne(0).int()
        places = (torch.cumsum(there, 1).type_as(there) * there).long()
        x = self.token(tokens)
        x = x + self.place(places).view(x.size())
        x = F.layer_norm(x, x.shape[-1:]).permute(1, 2, 0, 3)
        for k, (project, out) in enumerate(zip(self.project, self.out)):
            heads = (r, c, b, self.heads, x.shape[-1] // self.heads)
            q, key, v = (y.view(heads) for y in project(F.layer_norm(x, x.shape[-1:])).chunk(3, -1))
            if k % 2:
                y = torch.einsum("hcnij,jcnhd->icnhd", torch.einsum("icnhd,jcnhd->hcnij", q, key).softmax(-1), v)
            else:
                y = torch.einsum("hnij,rjnhd->rinhd", torch.einsum("rinhd,rjnhd->hnij", q, key).softmax(-1), v)
            x = x + out(y.contiguous().view(x.shape))
        return x.permute(2, 0, 1, 3)


@pytest.mark.parametrize(
    ("n", "batch", "most"), [(2, 2, 0), (2, 4, 0), (3, 3, 0), (2, 3, 0.34), (3, 2, 0.21)]
)  # of activations, for two layers: the tokens that are numbered before they are told apart by batch switch to it
def test_an_alignment_does_not_go_to_and_fro_between_batch_and_channels(n: int, batch: int, most: float) -> None:
    """A result is named after the operand whose cut it carries on: not all its dims are batch.

    Where the batch does not divide, no fold with it keeps it: it comes back, by name, where the fold is taken apart.
    """
    plan = dsp.plan(
        Alignment(),
        torch.ones(batch, 6, 10, dtype=torch.long),
        size=n,
        stages={"": "tokens=b r l"},
        gather_output=False,
    )
    assert plan.problem is not None
    named = {v.name: {names[cut]: size for cut, size in v.sizes} for v, names in zip(plan.problem.values, plan.names)}
    assert named[f"type_as [{6 * batch}, 10]"].items() >= {"r": 6, "l": 10}.items()
    m = batch * 6 * 10 * 32 * 4
    assert plan.bytes["forward"] <= most * m
    assert plan.exact
    if not batch % n:
        assert "inputs: tokens along b" in plan.text()


def test_stages_leave_the_batch_to_data_parallelism() -> None:
    """Along an even batch nothing would be sent. It is for stages only if one of them has nothing else."""
    x = torch.randn(2, 4, 5, toys.C)
    grid = toys.TOYS["Grid"](layers=1)
    plan = dsp.plan(grid, kwargs={"x": x, "cond": x[:, 0, 0]}, size=2, gather_output=False)
    assert [r.layout for r in plan.stages if r.pattern] == ["t", "s"]
    stages = {"": "x=b t s c", "time.*": "b [t s c]", "space.*": "b t [s c], scale=b 1 1 [c]"}
    forced = dsp.plan(grid, kwargs={"x": x, "cond": x[:, 0, 0]}, size=2, stages=stages, gather_output=False)
    assert ([r.layout for r in forced.stages if r.pattern], forced.bytes["forward"]) == (["b", "b"], 0)
    uneven = dsp.plan(
        grid, kwargs={"x": x, "cond": x[:, 0, 0]}, size=3, stages=stages, gather_output=False
    )  # one rank would have nothing
    assert [r.layout for r in uneven.stages if r.pattern] == ["t", "b"]


@pytest.mark.parametrize(("n", "batch", "layout"), [(2, 2, "b"), (3, 2, "w"), (2, 3, "b"), (3, 4, "w")])
def test_batch_is_sharded_only_where_few_ranks_are_idle(n: int, batch: int, layout: str) -> None:
    """Along batch it would send nothing, as data parallelism: where its parts are as long as 1.5/N it does not."""
    plan = dsp.plan(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 3, 3, padding=1)),
        torch.randn(batch, 3, 12, 18), size=n, stages={"": "input=b c h w"}, gather_output=False,
    )  # fmt: skip
    assert f"inputs: input along {layout}" in plan.text()
    assert plan.share == pytest.approx(-(-batch // n) / batch if layout == "b" else 1 / n)
    assert (plan.bytes["forward"] == 0) == (layout == "b")


class Narrow(nn.Module):
    """The stages work on a quarter of the channels of a residual stream."""

    stages = {"": "x=b t s c -> b t s c", "space.*": "b t [s c]", "time.*": "b [t] s [c]"}

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = (nn.ModuleList(nn.Linear(8, 8) for _ in range(3)) for _ in "st")
        self.down, self.up = nn.Linear(32, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> Tensor:
        for pair in zip(self.space, self.time):
            for stage in pair:
                x = x + self.up(stage(self.down(F.layer_norm(x, (32,)))))
        return x


def test_a_narrow_branch_is_switched_instead_of_the_residual_stream() -> None:
    plan = dsp.plan(Narrow(), (torch.randn(1, 12, 12, 32),), size=3, gather_output=False)
    branch = 12 * 12 * 8 * 4 * 2 // 9  # a fourth of the stream
    assert (plan.bytes["forward"], plan.calls["forward"]) == (5 * branch, 5)


class Joint(nn.Module):
    """Attention over two inputs, joined, with a mask made of them: each of its operands has many layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = (torch.cat([f(x), f(y)], 1).unflatten(-1, (4, 8)).permute(0, 2, 1, 3) for f in self.qkv)
        seen = torch.cat([x, y], 1)[..., 0] < 9
        mask = seen[:, None, None] & seen[:, None, :, None]
        return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("n", [2, 4])
def test_many_layouts_of_many_operands_leave_those_that_cut_all_alike(n: int) -> None:
    given = torch.randn(1, 12, 32), torch.randn(1, 8, 32)
    plan = dsp.plan(Joint(), given, size=n, stages={"": "x=b t c, y=b s c"}, gather_output=False)
    assert plan.share == 1 / n
