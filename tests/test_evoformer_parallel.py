"""Evoformer and Pairformer: what the zoo owes, and in parallel loss, every gradient, bytes and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_diffusers_latte import Sizes
from test_parallel import averaged, same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import dsp
import zoo

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "evoformer": ("evoformer", {"chunk": 500}),
    "opm first": ("evoformer", {"opm_first": True, "extra_depth": 0}),
    "pairformer": ("pairformer", {"chunk": 500}),
}
every_case = pytest.mark.parametrize("case", CASES)


def build(case: str, **overrides: Any) -> nn.Module:
    name, own = CASES[case]
    torch.manual_seed(0)
    model = zoo.create(name, "test", **{**own, **overrides}).double()
    for p in model.parameters():  # what starts as zero would hide everything
        nn.init.normal_(p, std=0.3 if p.ndim == 1 else p[0].numel() ** -0.5)
    return model


def inputs(model: nn.Module, batch: int, rows: int, residues: int, masked: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(1)
    more = {"extra_rows": rows + 1 - batch % 2} if getattr(model.config, "extra_depth", 0) else {}
    given = model.example_inputs(batch, rows=rows, residues=residues, **more)
    return given if masked else {k: v for k, v in given.items() if "mask" not in k}


def scalar(out: tuple[Tensor, ...]) -> Tensor:
    return sum(((i + 1) * dsp.mean(y.sin()) for i, y in enumerate(out)), torch.zeros(()))


# In parallel


def parity(mesh: DeviceMesh, case: str, batch: int, rows: int, residues: int, masked: bool, sharded: bool) -> None:
    single, model = build(case), build(case)
    given = inputs(single, batch, rows, residues, masked)
    expect = single(**given, recycles=1)
    scalar(expect).backward()
    dsp.parallelize(model, mesh, gather_output=False)
    if sharded:
        for name in ("msa", "deletions", "msa_mask"):
            whole = given[name]
            own = whole.chunk(mesh.size(), 2)[mesh.get_local_rank()]
            given[name] = DTensor.from_local(
                own, mesh, [Shard(2)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
    out = model(**given, recycles=1)
    for a, b in zip(out, expect):
        assert b.std() > 0.1
        torch.testing.assert_close(dsp.gather(a), b)
    scalar(out).backward()
    same(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})


@every_case
@pytest.mark.parametrize("n", [2, 3, 4])
def test_outputs_and_every_gradient(ranks: Any, case: str, n: int) -> None:
    ranks(parity, n, case, 2, 5, 7, n != 3, n == 2)


def checked(mesh: DeviceMesh, case: str) -> str:
    model = build(case)
    report = dsp.check(model, kwargs=inputs(model, 1, 5, 7), mesh=mesh)
    return str(report)


@every_case
def test_check(ranks: Any, case: str) -> None:
    for report in ranks(checked, 2, case):
        assert "ok" in report and "problem" not in report, report


def moved(mesh: DeviceMesh, case: str) -> tuple[dict[str, int], dict[str, int]]:
    model = build(case)
    given = inputs(model, 1, 8, 16)
    plan = dsp.plan(model, kwargs=given, size=mesh.size())
    dsp.parallelize(model, mesh, gather_output=False)
    with dsp.count_comm() as comm:
        scalar(model(**given)).backward()
    counts = comm.by_collective()
    losses = 3 * 8 * 2 * (mesh.size() - 1) // mesh.size()  # dsp.mean of the three outputs
    sent = {phase: sum(c["bytes"] for c in counts[phase].values()) for phase in counts}
    return plan.bytes, {**sent, "forward": sent["forward"] - losses, "backward": sent["backward"] - losses}


@every_case
@pytest.mark.parametrize("n", [2, 4])
def test_moves_what_the_plan_says(ranks: Any, case: str, n: int) -> None:
    for planned, sent in ranks(moved, n, case):
        assert sent == planned


def held(mesh: DeviceMesh, case: str) -> tuple[float, float]:
    found = []
    for parallel in (False, True):
        model = build(case)
        given = inputs(model, 1, 48, 48)
        if parallel:
            dsp.parallelize(model, mesh, gather_output=False)
            model(**given)
        with Sizes(48 * 48 * 4) as sizes:
            scalar(model(**given)).backward()
        found.append(sizes)
    single, sharded = found
    return sharded.largest / single.largest, sharded.total / single.total


@every_case
@pytest.mark.parametrize("n", [2, 4])
def test_no_rank_holds_more_than_its_share(ranks: Any, case: str, n: int) -> None:
    for largest, total in ranks(held, n, case):
        print(largest * n, total * n)
        assert largest <= 1.1 / n
        assert total <= 1.1 / n
