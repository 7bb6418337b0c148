"""Causal attention over places that are sharded: as much work on every rank, exact, and bytes and FLOPs as planned."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.embedded import pairs, ring_attention
from dsp.planner import chunk_sizes
from tests.support.embedded import own
from tests.support.loopback import measured
from tests.support.parity import assert_step_equal
from tests.support.slow import slow
from zoo.attention import SoftmaxAttention, attend, turn

C, CORE = 24, "b [n] (g r) [e], b [n] g [e], b [n] g [e] -> b [n] (g r) [e]"


class Layer(nn.Module):
    """Causal attention with grouped queries, rotated by a table that is given, one row for each place."""

    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.sizes = [heads, kv_heads, kv_heads]
        self.qkv = nn.Linear(C, sum(self.sizes) * (C // heads))
        self.core, self.out = SoftmaxAttention(causal=True), nn.Linear(C, C)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).split(self.sizes, 2)
        q, k = (turn(t, table.sin()[:, None], table.cos()[:, None], "halves") for t in (q, k))
        return x + self.out(self.core(q, k, v).flatten(2))


class Causal(nn.Module):
    stages = {"": "x=b n c", "layers.*": "b [n c], table=[n a]"}
    cores = {"layers.*.core": CORE}

    def __init__(self, heads: int = 4, kv_heads: int = 4, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(heads, kv_heads) for _ in range(2))
        for layer in self.layers if again else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        self.angles = torch.linspace(1, 0.1, C // heads // 2, dtype=torch.float64)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        table = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * self.angles
        for layer in self.layers:
            x = layer(x, table)
        return x


def places(n: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, n, C, dtype=torch.float64)


@pytest.mark.parametrize("n", range(1, 9))
def test_pairs_are_each_computed_once(n: int) -> None:
    for size in (1, 2, 5, n, 2 * n, 4 * n + 3, 16 * n):
        parts = chunk_sizes(size, n)
        starts = [sum(parts[:i]) for i in range(n)]
        met = torch.zeros(size, size, dtype=torch.int)
        for i, (start, part) in enumerate(zip(starts, parts)):
            met[start : start + part, start : start + part] += torch.ones(part, part, dtype=torch.int).tril()
            before = met.sum()
            for d, t in enumerate(pairs.turns(parts, i)):
                first = starts[t.origin]
                if t.keys_come:
                    met[start + t.first : start + part, first : first + t.keys] += 1
                else:
                    met[first : first + t.come, start : start + part] += 1
                there = pairs.turns(parts, t.to)[d]
                assert (there.origin, there.keys_come, there.come) == (i, t.keys_go, t.go)
            assert met.sum() - before == pairs.work(parts)[i] - part * (part + 1) // 2
        assert met.equal(torch.ones(size, size, dtype=torch.int).tril())
        if size % (2 * n) == 0:
            assert len(set(pairs.work(parts))) == 1


@pytest.mark.parametrize("mesh", [2, 3, 4], indirect=True)
def test_exact_at_any_length(mesh: DeviceMesh) -> None:
    group, n = mesh.get_group().group_name, mesh.size()
    for size, (heads, kv_heads) in zip((1, 2, 2 * n - 1, 2 * n, 4 * n + 3), ((2, 2), (2, 1), (4, 2), (3, 3), (4, 1))):
        torch.manual_seed(size)
        shapes = [(2, size, h, 8) for h in (heads, kv_heads, kv_heads)]
        whole = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]
        weight = torch.randn(shapes[0], dtype=torch.float64)
        expect = attend(*whole, causal=True)
        grads = torch.autograd.grad((expect * weight).sum(), whole)
        parts = [own(x.detach(), mesh).requires_grad_() for x in whole]
        got = ring_attention(*parts, size, group, causal=True)
        (got * own(weight, mesh)).sum().backward()
        torch.testing.assert_close(got, own(expect, mesh))
        for part, grad in zip(parts, grads):
            torch.testing.assert_close(part.grad, own(grad, mesh))


def test_half_precision_is_added_up_in_float32(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    whole = [torch.randn(1, 64, 4, 16) for _ in range(3)]
    parts = [own(x, mesh).bfloat16().requires_grad_() for x in whole]
    got = ring_attention(*parts, 64, mesh.get_group().group_name, causal=True)
    got.float().square().sum().backward()
    assert got.dtype == parts[1].grad.dtype == torch.bfloat16
    assert (got.float() - own(attend(*whole, causal=True), mesh)).abs().max() < 2e-2


MODELS = [(4, 4, False), (4, 2, True), slow(3, 1, False), slow(4, 4, True)]


@pytest.mark.parametrize(("heads", "kv_heads", "again"), MODELS)
@pytest.mark.parametrize("mesh", [2, 3, slow(4)])
def test_models(mesh: DeviceMesh, heads: int, kv_heads: int, again: bool) -> None:
    """Positions stay with their places; what is sent is what the plan says, of the busiest rank in each phase."""
    n = mesh.size()
    single, model = Causal(heads, kv_heads, again), Causal(heads, kv_heads, again)
    dsp.embedded.parallelize(model, mesh, "ring", gather_output=False)
    for size in (4 * n, 4 * n + 1, n):
        x = places(size)
        (comm,) = assert_step_equal(single, model, mesh, {"x": x}, count=True, loss=dsp.mean)
        plan = dsp.embedded.plan(Causal(heads, kv_heads, again), x, size=n, method="ring", gather_output=False)
        for phase, planned in plan.sends.items():
            counted = getattr(comm, phase)
            most = torch.tensor([counted.bytes["ring"], counted.calls["ring"]])
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=mesh.get_group())
            assert tuple(most.tolist()) == planned.get("ring", (0, 0)), phase
        assert plan.sends["recompute"].get("ring", (0, 0))[1] == again * plan.sends["forward"]["ring"][1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the loopback counter of Linux")
@pytest.mark.parametrize("mesh", [2, slow(3)], indirect=True)
def test_bytes_are_those_that_the_kernel_counts(mesh: DeviceMesh) -> None:
    group = mesh.get_group().group_name
    parts = [own(torch.randn(8, 509, h, 128), mesh).requires_grad_() for h in (4, 2, 2)]

    def step() -> None:
        ring_attention(*parts, 509, group, causal=True).sum().backward()

    kernel, counted = measured(mesh, step)
    assert kernel == pytest.approx(counted, rel=0.03)


def flops(model: nn.Module, x: Tensor, n: int, method: str) -> dsp.Plan:
    return dsp.embedded.plan(model, x, size=n, method=method, gather_output=False)


class Alone(nn.Module):
    """Causal attention and nothing else."""

    stages = {"": "x=b n h f", "core": "b [n h f]"}
    cores = {"core.of": "b [n] a [e], b [n] a [e], b [n] a [e]"}

    class Core(nn.Module):
        def __init__(self, causal: bool) -> None:
            super().__init__()
            self.of = SoftmaxAttention(causal)

        def forward(self, x: Tensor) -> Tensor:
            return self.of(x, x, x)

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.core = self.Core(causal)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_plan_counts_what_the_busiest_rank_computes(n: int) -> None:
    """The pairs that are seen, 1/N of them on each rank; where keys go round the last rank has (2N - 1)/N of that."""
    size = 48 * n
    x: Any = torch.randn(1, size, 4, 8, device="meta", requires_grad=True)
    causal, full = (flops(Alone(c), x, n, "ring") for c in (True, False))
    seen = size * (size + 1) // 2
    assert full.flops_alone * seen == causal.flops_alone * size**2
    assert causal.flops == causal.flops_alone // n
    own = size // n
    last = own * (own + 1) // 2 + own * (size - own)
    assert last / (seen / n) == pytest.approx((2 * n - 1) / n, rel=0.02)
    assert full.flops == full.flops_alone // n
    assert causal.bytes["forward"] < full.bytes["forward"] or n == 2
    uneven = flops(Alone(True), x[:, :-1], n, "ring")
    work = pairs.work(chunk_sizes(size - 1, n))
    assert uneven.flops == pytest.approx(uneven.flops_alone * max(work) / sum(work), rel=1e-6)
