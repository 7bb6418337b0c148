"""Every zoo model and objective in parallel against itself on one process: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_parallel import averaged, same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dsp
import zoo
from zoo.video.diffusion import IDDPM, RectifiedFlow

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer2d": ("transformer2d", {}),
    "transformer2d-class": ("transformer2d", {"num_classes": 10}),
    "transformer2d-stdit": ("transformer2d", {"block": "stdit", "caption_channels": 8}),
    "latte": ("latte", {"conditioning": "none"}),
    "latte-class": ("latte", {"conditioning": "class", "num_classes": 5}),
    "latte-text": ("latte", {"conditioning": "text", "caption_channels": 8}),
    "stdit-v1": ("stdit", {"version": "v1"}),
    "stdit-v2": ("stdit", {"version": "v2"}),
    "stdit-v3": ("stdit", {"version": "v3", "kv_heads": 2}),
    "st_mamba": ("st_mamba", {"num_classes": 5}),
    "st_mamba-sst": ("st_mamba", {"order": "sst", "bidirectional": False}),
    "st_mamba-2": ("st_mamba", {"mixer": "mamba2"}),
    "st_mamba-2-sst": ("st_mamba", {"mixer": "mamba2", "order": "sst", "learn_sigma": True}),
    "st_rwkv": ("st_rwkv", {}),
    "st_rwkv-sst": ("st_rwkv", {"order": "sst", "num_classes": 5}),
    "latte-2-class": ("latte", {"variant": 2, "conditioning": "class", "num_classes": 5}),
    "latte-2-text": ("latte", {"variant": 2, "conditioning": "text", "caption_channels": 8}),
    "latte-3-class": ("latte", {"variant": 3, "depth": 2, "conditioning": "class", "num_classes": 5}),
    "latte-3-text": ("latte", {"variant": 3, "depth": 2, "conditioning": "text", "caption_channels": 8}),
    "latte-4-class": ("latte", {"variant": 4, "depth": 2, "conditioning": "class", "num_classes": 5}),
    "latte-4-text": ("latte", {"variant": 4, "depth": 2, "conditioning": "text", "caption_channels": 8}),
}


def build(case: str) -> nn.Module:
    name, overrides = CASES[case]
    torch.manual_seed(0)
    model = zoo.create(name, "test", **overrides).double()
    for p in model.parameters():  # zero-initialised gates would hide everything
        nn.init.normal_(p, std=0.1)
    return model


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {k: torch.randn_like(v.double()) if v.is_floating_point() and v.ndim > 1 else v for k, v in inputs.items()}


def parity(mesh: DeviceMesh, case: str, frames: int, height: int, width: int) -> None:
    single, model = build(case), build(case)
    inputs = doubled(single.example_inputs(2, frames=frames, height=height, width=width))
    expect = single(**inputs)
    assert expect.std() > 0.01
    expect.square().mean().backward()
    dsp.parallelize(model, mesh, gather_output=False)
    out = model(**inputs)
    torch.testing.assert_close(dsp.gather(out), expect)
    dsp.mean(out * out).backward()
    same(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_models(ranks, case: str, n: int) -> None:
    ranks(parity, n, case, 7 if n != 4 else 5, 6, 10)


def objective(mesh: DeviceMesh, kind: str, case: str, frames: int) -> dict:
    wrap = {"rf": RectifiedFlow, "iddpm": IDDPM}[kind]
    single, model = wrap(build(case)), wrap(build(case))
    inputs = doubled(single.model.example_inputs(2, frames=frames, height=6, width=6))
    time = torch.tensor([0.2, 0.7], dtype=torch.float64) if kind == "rf" else torch.tensor([0, 600])
    inputs["timestep"] = time
    inputs["noise"] = torch.randn_like(inputs["x"])
    loss, weight = single(**inputs)
    expect = (loss * weight).sum() / weight.expand_as(loss).sum()
    expect.backward()
    dsp.parallelize(model, mesh, gather_output=False)
    with dsp.count_comm() as comm:
        got = dsp.mean(*model(**inputs))
        got.backward()
    torch.testing.assert_close(got, expect)
    same(averaged(model, mesh), {n: p.grad for n, p in single.named_parameters()})
    return comm.by_collective()


@pytest.mark.parametrize(
    ("kind", "case"),
    [("rf", "transformer2d-class"), ("iddpm", "latte-class"), ("rf", "stdit-v3"), ("iddpm", "stdit-v2")],
)
@pytest.mark.parametrize("n", [2, 4])
def test_objectives(ranks, kind: str, case: str, n: int) -> None:
    depth = build(case).config.depth
    for counts in ranks(objective, n, kind, case, 7 if n == 2 else 5):
        assert set(counts["forward"]) == {"switch", "all_reduce"}
        assert counts["recompute"] == {}
        assert counts["forward"]["switch"]["calls"] <= 2 * depth
        assert counts["backward"]["switch"]["calls"] == counts["forward"]["switch"]["calls"]
