"""Megatron-LM, Megatron-SP and FastFold's schedule: whole models against one process; bytes against those stated."""

from __future__ import annotations

import pytest
import torch
from test_parallel import averaged, same
from test_zoo_parallel import CASES, build, doubled, example
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dsp
import zoo
from dsp.notation import NotationError

MEGATRON = ("megatron_sp", "megatron_lm")


def gradients(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Averaged over ranks, but for those of cut weights: gathered, in the model's own order."""
    orders, group = dsp.embedded.rank_order(model), mesh.get_group().group_name
    found = {}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            whole = p.grad.full_tensor()
            found[name] = whole[orders[name].argsort()] if name in orders else whole
        else:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            found[name] = torch.ops.dsp.all_reduce(grad, group) / mesh.size()
    return found


def parity(mesh: DeviceMesh, case: str, method: str, frames: int, height: int, width: int) -> tuple[list[int], ...]:
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
    weights = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor)}
    assert len(weights) > 10
    for name, p in weights.items():
        assert p.to_local().numel() * mesh.size() == single.get_parameter(name).numel()
    same(gradients(model, mesh), {n: p.grad for n, p in single.named_parameters()})
    assert not comm.recompute.bytes
    phases = comm.forward, comm.backward
    return [plan.bytes["forward"], plan.bytes["backward"]], [sum(p.bytes.values()) for p in phases]


@pytest.mark.parametrize("method", MEGATRON)
@pytest.mark.parametrize(
    ("case", "n"),
    [
        ("transformer2d", 4), ("transformer2d-stdit", 2), ("stdit-v1", 2), ("stdit-v2", 4), ("stdit-v3", 2),
        ("latte-class", 2), ("latte-text", 4), ("latte-2-text", 2), ("latte-3-text", 4), ("latte-4-class", 2),
    ],
)  # fmt: skip
def test_models(ranks, case: str, n: int, method: str) -> None:
    for planned, counted in ranks(parity, n, case, method, 7, 6, 10):  # 15 patches a frame
        assert all(a <= b for a, b in zip(counted, planned))
        if method == "megatron_lm":
            assert counted == planned
