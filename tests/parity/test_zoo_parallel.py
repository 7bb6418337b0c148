"""Every zoo model and objective in parallel against itself on one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from tests.support.beside import beside
from tests.support.cases import CASES, PROTEINS, build, doubled, example
from tests.support.shares import shares
from tests.support.slow import long, slow, slow_but
from zoo.image.autoregressive import BitsPerDim
from zoo.video.diffusion import IDDPM, RectifiedFlow


def parity(mesh: DeviceMesh, case: str, frames: int, height: int, width: int) -> None:
    single, model = build(case), build(case)
    inputs = doubled(example(single, 2, frames=frames, height=height, width=width))
    beside(single, dsp.parallelize(model, mesh, gather_output=False), mesh, inputs)


OF_A_KIND = {  # others show the same
    "transformer2d", "transformer2d-class", "latte", "latte-class", "stdit-v1", "stdit-v2", "st_mamba", "st_mamba-sst",
    "st_mamba-2-sst", "st_rwkv-sst", "latte-2-class", "latte-2-text", "latte-3-class", "latte-3-text", "latte-4-class",
    "stdit-v3", "axial-video-summed", "axial-image", "latte-text",
    "st_rwkv", "st_mamba-2", "hunyuan-alone", "transformer2d-stdit",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "n"),
    [
        *((case, 3) for case in CASES if case not in OF_A_KIND),
        *((slow if case in OF_A_KIND else long)(case, 4) for case in CASES),
    ],
)
def test_models(ranks, case: str, n: int) -> None:
    ranks(parity, n, case, 7 if n == 3 else 5, 6, 10)


def objective(mesh: DeviceMesh, kind: str, case: str, frames: int) -> dict:
    wrap = {"rf": RectifiedFlow, "iddpm": IDDPM}[kind]
    single, model = wrap(build(case)), wrap(build(case))
    inputs = doubled(single.model.example_inputs(2, frames=frames, height=6, width=6))
    time = torch.tensor([0.2, 0.7], dtype=torch.float64) if kind == "rf" else torch.tensor([0, 600])
    inputs["timestep"] = time
    inputs["noise"] = torch.randn_like(inputs["x"])
    dsp.parallelize(model, mesh, gather_output=False)
    return beside(single, model, mesh, inputs, loss=dsp.mean, count=True)[0].by_collective()


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


NEW = [case for case in CASES if case.startswith("axial") or case[:8] in ("latte-2-", "latte-3-", "latte-4-")]
NEW += ["stdit-v1", "stdit-v2", "stdit-v3", "st_mamba", "st_mamba-2-sst", "st_rwkv", "wan"]


@pytest.mark.parametrize("mesh", [3])
@pytest.mark.parametrize("case", slow_but([*(c for c in CASES if c not in OF_A_KIND), *PROTEINS], "axial-image-colour"))
def test_stages_are_what_they_say(mesh: DeviceMesh, case: str) -> None:
    model = build(case)
    inputs = doubled(example(model, 2, frames=5, height=6, width=10, rows=5, residues=7))
    # whole numbers: the sinusoids are float32, and so would be the gradients of what they are taken of
    inputs = {k: v.round().long() if v.ndim == 1 and v.is_floating_point() else v for k, v in inputs.items()}
    report = dsp.check(model, kwargs=inputs, mesh=mesh, thorough=False)
    assert report, report.text()


def held(mesh: DeviceMesh, case: str) -> tuple[float, float]:
    side = 12 if case.startswith("axial-image") else 16  # of 12 pixels, or of 8 patches
    batch, floor = (1, 24 * 24 * 4) if case in PROTEINS else (4, 0)  # biases of attention are whole: a number a head
    inputs = doubled(example(build(case), batch, frames=8, height=side, width=side, rows=24, residues=24))
    return shares(lambda: build(case), inputs, lambda model: dsp.parallelize(model, mesh, gather_output=False), floor)


HELD = [("axial-video", 2), *((case, 4) for case in [*NEW, *PROTEINS])]


@pytest.mark.parametrize(("case", "n"), slow_but(HELD, HELD[0], but=[("evoformer", 4), ("st_mamba", 4)]))
def test_no_rank_holds_more_than_its_share(ranks, n: int, case: str) -> None:
    for largest, total in ranks(held, n, case):
        assert largest <= 1.1 / n
        assert total <= 1.1 / n


@pytest.mark.parametrize(("case", "mesh"), [("axial-image", 2), slow("axial-image-colour", 4)])
def test_bits_per_dim(mesh: DeviceMesh, case: str) -> None:
    single, model = BitsPerDim(build(case)), BitsPerDim(build(case))
    inputs = example(single.model, 3, height=7, width=5)
    beside(single, dsp.parallelize(model, mesh, gather_output=False), mesh, inputs, loss=dsp.mean)


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
