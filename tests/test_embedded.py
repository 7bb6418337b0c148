"""Ulysses and ring attention: the functions and whole models against one process; bytes against those stated."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from test_parallel import averaged, same
from test_zoo_parallel import build, doubled, example
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import dsp
from dsp.embedded import ring_attention, ulysses_attention
from dsp.planner import chunk_sizes
from zoo.attention import attend

FUNCTIONS = ("ulysses", "ring")


def own(x: Tensor, mesh: DeviceMesh) -> Tensor:
    sizes = chunk_sizes(x.shape[1], mesh.size())
    return x.split(sizes, 1)[mesh.get_local_rank()]


def function(mesh: DeviceMesh, method: str, cases: list[tuple[int, int, int, bool]]) -> None:
    group = mesh.get_group().group_name
    for places, heads, kv_heads, causal in cases:
        torch.manual_seed(0)
        whole = [torch.randn(2, places, h, 8, dtype=torch.float64).requires_grad_() for h in (heads, kv_heads, kv_heads)]
        weight = torch.randn(2, places, heads, 8, dtype=torch.float64)
        expect = attend(*whole, causal=causal)
        grads = torch.autograd.grad((expect * weight).sum(), whole)
        parts = [own(x.detach(), mesh).requires_grad_() for x in whole]
        with dsp.count_comm() as comm:
            if method == "ring":
                got = ring_attention(*parts, places, group, causal)
            else:
                got = ulysses_attention(*parts, partial(attend, causal=causal), places, group)
            (got * own(weight, mesh)).sum().backward()
        torch.testing.assert_close(got, own(expect, mesh))
        for part, grad in zip(parts, grads):
            torch.testing.assert_close(part.grad, own(grad, mesh))
        assert comm.recompute.bytes.total() == 0


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_functions(ranks, method: str, n: int) -> None:
    heads = [(4, 4), (4, 2), (6, 2), (6, 1), (12, 6), (5, 5)]
    cases = [(places, *h, causal) for places in (8, 7, 5) for h in heads for causal in (False, True)]
    ranks(function, n, method, cases)


CASES = {
    "transformer2d": 0, "transformer2d-stdit": 0, "latte-class": 0, "stdit-v1": 0, "stdit-v2": 0, "stdit-v3": 0,
    "latte-2-text": 0, "latte-3-text": 0, "latte-4-class": 0,
}  # fmt: skip


def parity(mesh: DeviceMesh, case: str, method: str, frames: int, height: int, width: int) -> None:
    single, model = build(case), build(case)
    inputs = doubled(example(single, 2, frames=frames, height=height, width=width))
    expect = single(**inputs)
    expect.square().mean().backward()
    plan = dsp.embedded.plan(model, kwargs=inputs, size=mesh.size(), method=method)
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    with dsp.count_comm() as comm:
        out = model(**inputs)
        dsp.mean(out * out).backward()
    torch.testing.assert_close(dsp.gather(out), expect)
    same(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})


@pytest.mark.parametrize("method", FUNCTIONS)
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_models(ranks, case: str, method: str, n: int) -> None:
    if case.startswith("latte-4") and n > 2 and method == "ulysses":
        pytest.skip("two heads")
    ranks(parity, n, case, method, 5, 6, 10 if n != 4 else 6)
