"""Attention under a mask along its queries: as much work on every rank, exact, and bytes as planned."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.deal import RowDeal, pairs
from dsp.planner import chunk_sizes
from tests.support.beside import beside
from tests.support.runs import Heard
from tests.support.slow import slow

C = 8


class Attention(nn.Module):
    """Heads of queries that share one of keys, fewer than there are ranks; a table of positions is added."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.kv, self.out = (
            heads,
            nn.Linear(C, C * heads),
            nn.Linear(C, 2 * C),
            nn.Linear(C * heads, C),
        )

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x + torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]).unflatten(-1, (self.heads, C))
        k, v = self.kv(x).unflatten(-1, (2, 1, C)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads > 1)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    stages = {"": "x=b n c"}

    def __init__(self, heads: int, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(heads) for _ in range(2))
        for layer in self.layers if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def places(n: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(1, n, C, dtype=torch.float64)


@pytest.mark.parametrize("n", range(2, 9))
def test_head_and_tail_are_as_much_for_every_rank(n: int) -> None:
    for size in (1, 2, n, 2 * n - 1, 2 * n, 5 * n + 1, 32 * n):
        deal = RowDeal.halves(size, n)
        every = [row for rank in range(n) for span in deal.spans(rank) for row in range(*span)]
        assert sorted(every) == list(range(size))
        work = [sum(row + 1 for span in deal.spans(rank) for row in range(*span)) for rank in range(n)]
        chunks = chunk_sizes(size, n)
        assert deal.causal_load == pytest.approx(max(work) / pairs(size) * size / chunks[0])
        if size % (2 * n) == 0:
            assert set(work) == {pairs(size) // n}


def exact(model: nn.Module, mesh: DeviceMesh, x: Tensor) -> dsp.Plan:
    """A step of it on all ranks beside one process; what is sent is planned, and nobody is told otherwise."""
    plan = dsp.plan(model, x, size=mesh.size(), gather_output=False)
    parallel = dsp.parallelize(copy.deepcopy(model), mesh, gather_output=False)
    with Heard() as heard:
        (comm,) = beside(model, parallel, mesh, {"x": x}, count=True, loss=lambda y: dsp.mean(y * y * y))
    assert not [text for text in heard.texts if "its plan says" in text]
    for phase, kinds in plan.sends.items():
        traffic = getattr(comm, phase)
        most = torch.tensor([traffic.bytes["rows"], traffic.calls["rows"]])
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
        nbytes, calls = kinds.get("rows", (0, 0))
        assert most[1] == calls, phase
        assert 0.7 * nbytes <= most[0] <= 1.3 * nbytes, phase  # not the same rank is the busiest of all kinds
    return plan


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("mesh", "heads"), [(2, 1), (3, 2), slow(4, 3)], indirect=["mesh"])
def test_causal_attention_along_queries(mesh: DeviceMesh, heads: int, again: bool) -> None:
    n = mesh.size()
    for size in (16 * n, 16 * n + 3, n + 1):
        plan = exact(Model(heads, again), mesh, places(size))
        assert plan.share < 1.5 / n or size < 2 * n
        assert size % (2 * n) or plan.flops == plan.flops_alone // n
