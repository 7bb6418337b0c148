"""Random numbers between stages: those of one process, on any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import dsp
from tests.support.parity import assert_close_named, averaged
from tests.support.toys import Along, C, Does


def noisy(m: Any, x: Tensor) -> Tensor:
    """Noise on replicated tensors, by functions of plain tensors and of those between stages, and in a whole stage."""

    def part(x: Tensor, v: Tensor) -> Tensor:
        return m.along(x * torch.rand(C)) * F.dropout(v, 0.5)

    v = F.dropout(m.v, 0.25) * m.whole(x.new_ones(C)).sum()
    return checkpoint(part, x, v, use_reentrant=False) + torch.randn(C)


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Does(noisy, along=Along(1), whole=Whole(), v=nn.Parameter(torch.ones(C))).double()


STAGES = {"": "x=b t s c", "along": "b [t] s [c]", "whole": "[c]"}


@pytest.mark.parametrize("mesh", [2, 3])
@pytest.mark.parametrize("seeds", ["one", "each"])
def test_they_are_those_of_one_process(mesh: DeviceMesh, seeds: str) -> None:
    """Whatever the generators of other ranks are, and call for call."""
    single = model()
    parallel = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    x = torch.randn(1, 5, 7, C, dtype=torch.float64)
    torch.manual_seed(3)
    expected = [single(x) for _ in range(3)]
    sum(y.square().mean() for y in expected).backward()
    torch.manual_seed(3 + (seeds == "each") * mesh.get_local_rank())
    outputs = [parallel(x) for _ in range(3)]
    sum(y.square().mean() for y in outputs).backward()
    for y, wanted in zip(outputs, expected):
        torch.testing.assert_close(y, wanted)
    assert_close_named(averaged(parallel, mesh), {n: p.grad for n, p in single.named_parameters()})


def reading(m: Any, x: Tensor) -> Tensor:
    return noisy(m, x) if float(x.sum()) < 1e9 else x


@pytest.mark.parametrize("mesh", [2])
def test_a_forward_that_reads_its_data_draws_them_too(mesh: DeviceMesh) -> None:
    single = model()
    single.does = reading
    parallel = dsp.parallelize(copy.deepcopy(single), mesh, STAGES)
    x = torch.randn(1, 5, 7, C, dtype=torch.float64)
    torch.manual_seed(3)
    expected = [single(x) for _ in range(3)]
    torch.manual_seed(3)
    for wanted in expected:
        torch.testing.assert_close(parallel(x), wanted)


def test_a_forward_that_draws_none_leaves_the_generator(mesh: DeviceMesh) -> None:
    parallel = dsp.parallelize(Does(lambda m, x: m.along(x) * 2, along=Along(1)), mesh, {"along": "b [t] s [c]"})
    torch.manual_seed(3 + mesh.get_local_rank())
    before = torch.get_rng_state()
    for _ in range(2):
        parallel(torch.randn(1, 5, 7, C, generator=torch.Generator().manual_seed(0)))
        assert torch.equal(before, torch.get_rng_state())
