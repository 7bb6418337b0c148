"""st_mamba and st_rwkv: what the planner makes of their orders, dsp.check, and what a rank holds."""

from __future__ import annotations

import pytest
import torch
from slow import slow
from test_diffusers_latte import Sizes
from test_zoo_parallel import build, doubled
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo

SCANS = ["st_mamba", "st_mamba-2-sst", "st_rwkv"]


@pytest.mark.parametrize("name", ["st_mamba", slow("st_rwkv")])
@pytest.mark.parametrize("order", [slow("st"), "sst"])
def test_two_switches_a_cycle(name: str, order: str) -> None:
    cycles = 2
    with torch.device("meta"):
        model = zoo.create(name, "test", order=order, depth=cycles * len(order))
        inputs = model.example_inputs(1, frames=16, height=16, width=16)
    m = 16 * 64 * model.config.hidden * 4  # bytes of a residual
    for n in (2, 4, 8):
        plan = dsp.plan(model, kwargs=inputs, size=n, gather_output=False)
        switches = 2 * cycles - 1  # after the last block nothing computes over s: of "sst", 2 in 3 blocks
        assert [switch.kind for switch in plan.switches] == ["switch"] * switches
        sent = switches * m * (n - 1) // n**2
        assert plan.bytes == {"forward": sent, "backward": sent, "recompute": 0}


def checked(mesh: DeviceMesh, case: str) -> str:
    model = build(case)
    inputs = doubled(model.example_inputs(2, frames=5, height=4, width=6))
    inputs["timestep"] = torch.tensor([3, 700])  # its embedding is of float32, and so would be its gradient
    return str(dsp.check(model, kwargs=inputs, mesh=mesh, thorough=False))


@pytest.mark.slow
@pytest.mark.parametrize("case", SCANS)
def test_check(ranks, case: str) -> None:
    for report in ranks(checked, 3, case):
        assert report.startswith("check over 3 ranks in float64: ok"), report


def held(mesh: DeviceMesh, case: str) -> tuple[float, float]:
    found = []
    for parallel in (False, True):
        model = build(case)
        inputs = doubled(model.example_inputs(1, frames=16, height=16, width=16))
        if parallel:
            dsp.parallelize(model, mesh, gather_output=False)
            model(**inputs)
        with Sizes(max(p.numel() for p in model.parameters())) as sizes:
            dsp.mean(model(**inputs)).backward() if parallel else model(**inputs).mean().backward()
        found.append(sizes)
    single, sharded = found
    return sharded.largest / single.largest, sharded.total / single.total


@pytest.mark.parametrize(("case", "n"), [("st_mamba-2-sst", 2), *(slow(case, 4) for case in SCANS)])
def test_no_rank_holds_more_than_its_share(ranks, case: str, n: int) -> None:
    for largest, total in ranks(held, n, case):
        assert largest <= 1.1 / n
        assert total <= 1.1 / n
