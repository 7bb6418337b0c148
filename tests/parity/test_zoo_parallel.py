"""Every zoo model and objective in parallel against itself on one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from tests.support.cases import build, doubled, example
from tests.support.parity import assert_step_equal
from tests.support.slow import slow
from zoo.image.autoregressive import BitsPerDim
from zoo.video.diffusion import IDDPM, RectifiedFlow


def objective(mesh: DeviceMesh, kind: str, case: str, frames: int) -> dict:
    wrap = {"rf": RectifiedFlow, "iddpm": IDDPM}[kind]
    single, model = wrap(build(case)), wrap(build(case))
    inputs = doubled(single.model.example_inputs(2, frames=frames, height=6, width=6))
    time = torch.tensor([0.2, 0.7], dtype=torch.float64) if kind == "rf" else torch.tensor([0, 600])
    inputs["timestep"] = time
    inputs["noise"] = torch.randn_like(inputs["x"])
    dsp.parallelize(model, mesh, gather_output=False)
    return assert_step_equal(single, model, mesh, inputs, loss=dsp.mean, count=True)[0].by_collective()


@pytest.mark.parametrize(
    ("kind", "case"),
    [slow("rf", "transformer2d-class"), slow("iddpm", "latte-class"), ("rf", "stdit-v3"), slow("iddpm", "stdit-v2")],
)
def test_objectives(ranks, kind: str, case: str) -> None:
    depth = build(case).config.depth
    for counts in ranks(objective, 3, kind, case, 5):
        assert set(counts["forward"]) == {"switch", "all_reduce"}
        assert counts["recompute"] == {}
        assert counts["forward"]["switch"]["calls"] <= 2 * depth
        assert counts["backward"]["switch"]["calls"] == counts["forward"]["switch"]["calls"]


@pytest.mark.parametrize(("case", "mesh"), [("axial-image", 2), slow("axial-image-colour", 4)])
def test_bits_per_dim(mesh: DeviceMesh, case: str) -> None:
    single, model = BitsPerDim(build(case)), BitsPerDim(build(case))
    inputs = example(single.model, 3, height=7, width=5)
    assert_step_equal(single, dsp.parallelize(model, mesh, gather_output=False), mesh, inputs, loss=dsp.mean)


@pytest.mark.parametrize(
    ("name", "overrides", "switches"),
    [
        # of four blocks: one between two blocks of variant 1, one in all of variant 2, two a block of the others
        *(("latte", {"variant": variant}, switches) for variant, switches in ((1, 3), (2, 1), (3, 7), (4, 8))),
        # two axes in a row share a layout: one switch in two blocks, never more than two in a cycle of three
        *(("axial_video", {"depth": depth}, switches) for depth, switches in ((1, 2), (2, 3), (4, 6))),
        *(("axial_video", {"depth": depth, "order": "summed"}, 2 * depth) for depth in (1, 2, 4)),
        # of "sst" two blocks in three have nothing to switch between them
        *(("st_mamba", {"order": order, "depth": 2 * len(order)}, 3) for order in ("st", "sst")),
        # two pairs outside; then exterior, and its half convolution
        *(("axial_image", {"channels": channels}, switches) for channels, switches in ((1, 4), (3, 7))),
    ],
)
def test_switches(name: str, overrides: dict[str, Any], switches: int) -> None:
    with torch.device("meta"):
        model = zoo.create(name, "test", **overrides)
        side = 12 if name == "axial_image" else 16
        plan = dsp.plan(model, kwargs=example(model, 1, frames=8, height=side, width=side), size=4, gather_output=False)
    assert len(plan.switches) == switches
    assert {row.layout for row in plan.stages} <= {"t", "s", "h", "w"}
