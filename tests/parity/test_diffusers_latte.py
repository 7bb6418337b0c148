"""The acceptance model: diffusers' LatteTransformer3DModel, unmodified, text with mask, made parallel by one dict."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dsp
from tests.support.beside import beside
from tests.support.diffusers_latte import STAGES, build, inputs
from tests.support.shares import shares
from tests.support.slow import long, slow


def parity(mesh: DeviceMesh, batch: int, frames: int, side: int, ckpt: bool, gather: bool) -> None:
    kwargs = inputs(batch, frames, side)
    kwargs["hidden_states"].requires_grad_()
    single, model = build(frames, side).train(), build(frames, side).train()
    if ckpt:
        model.enable_gradient_checkpointing()
    dsp.parallelize(model, mesh, STAGES, gather_output=gather)
    beside(single, model, mesh, kwargs, rounds=2)
    for no_grad in (torch.no_grad, torch.inference_mode)[: 1 if ckpt else 2]:
        with no_grad():
            torch.testing.assert_close(dsp.gather(model(**kwargs, return_dict=False)[0]), single(**kwargs).sample)


@pytest.mark.parametrize(
    ("n", "shape", "ckpt", "gather"),
    [
        (3, (2, 7, 6), True, False), slow(1, (2, 7, 6), True, True), slow(2, (1, 5, 4), False, False),
        slow(3, (1, 5, 4), False, True), slow(4, (2, 7, 6), True, True),
    ],
)  # fmt: skip
def test_outputs_and_every_gradient(ranks, n: int, shape: tuple[int, int, int], ckpt: bool, gather: bool) -> None:
    ranks(parity, n, *shape, ckpt, gather)


def moved(mesh: DeviceMesh, ckpt: bool, gather: bool) -> tuple[dict, dict]:
    batch, frames, side, layers = 2, 8, 8, 3
    model = build(frames, side, layers).train()
    if ckpt:
        model.enable_gradient_checkpointing()
    kwargs = inputs(batch, frames, side)
    plan = dsp.plan(model, kwargs=kwargs, size=mesh.size(), stages=STAGES, gather_output=gather)
    dsp.parallelize(model, mesh, STAGES, gather_output=gather)
    with dsp.count_comm() as comm:
        out = model(**kwargs).sample
        (dsp.mean(out) if not gather else out.mean()).backward()
    return comm.by_collective(), plan.bytes


@pytest.mark.slow
@pytest.mark.parametrize(("n", "ckpt"), [(2, True), slow(4, False), long(4, True)])
def test_bytes_equal_the_hand_derived_formula(ranks, n: int, ckpt: bool) -> None:
    # M = B·T·S·D elements of 8 bytes; 3 layers of two blocks; patch 2; 8 channels come out
    m = 2 * 8 * 16 * 16 * 8
    switches = 2 * 3 - 1  # after the last block nothing computes over s: the output stays sharded along its rows
    each = (n - 1) * m // n**2
    out = 2 * 8 * 8 * 8 * 8 * 8
    for gather in (True, False):
        for counts, planned in ranks(moved, n, ckpt, gather):
            assert counts["forward"]["switch"] == {"calls": switches, "bytes": switches * each}
            assert counts["backward"]["switch"] == {"calls": switches, "bytes": switches * each}
            assert counts["recompute"] == {}
            extra = (n - 1) * out // n if gather else 0
            if gather:
                assert counts["forward"]["gather"] == {"calls": 1, "bytes": extra}
                assert counts["backward"]["reduce_scatter"] == {"calls": 1, "bytes": extra}
            assert set(counts["forward"]) <= {"switch", "gather", "all_reduce"}
            total = switches * each + extra
            assert planned == {"forward": total, "backward": total, "recompute": 0}


def held(mesh: DeviceMesh, backward: bool) -> tuple[float, float]:
    def parallelize(model: Any) -> None:
        dsp.parallelize(model, mesh, STAGES, gather_output=False)

    return shares(lambda: build(16, 16, 1, heads=1).train(), inputs(1, 16, 16, text=32), parallelize, backward=backward)


@pytest.mark.parametrize(("n", "backward"), [(4, True), slow(4, False), slow(2, True)])
def test_no_rank_holds_more_than_its_share(ranks, n: int, backward: bool) -> None:
    for largest, total in ranks(held, n, backward):
        assert largest <= 1.1 / n
        assert total <= 1.1 / n
