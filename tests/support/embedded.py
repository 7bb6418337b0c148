"""Embedded methods beside one process: a toy of two blocks, steps of it, what is sent."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.embedded import blocks
from dsp.planner import chunk_sizes
from tests.support.cases import build, doubled, example
from tests.support.parity import assert_step_equal
from zoo.attention import attend


def own(x: Tensor, mesh: DeviceMesh) -> Tensor:
    sizes = chunk_sizes(x.shape[1], mesh.size())
    return x.split(sizes, 1)[mesh.get_local_rank()]


def two_blocks(device: str, dtype: torch.dtype, tolerance: float, causal: bool) -> None:
    """Attention over 40 places, as queries of the last 24 see them in two blocks, against float64."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 40, h, 16, device=device).to(dtype) for h in (4, 2, 2, 4))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expect = attend(*exact, causal=causal)[:, 16:]
    wanted = torch.autograd.grad((expect * grad.double()[:, 16:]).sum(), exact)
    q, grad = q[:, 16:], grad[:, 16:]
    near, far = (k[:, 16:], v[:, 16:], causal), (k[:, :16], v[:, :16], False)
    out, lse = blocks.merge(*blocks.block(q, *near), *blocks.block(q, *far))
    found = [
        blocks.block_backward(grad, q, keys, values, out.to(dtype), lse, late) for keys, values, late in (near, far)
    ]
    (dq, near_k, near_v), (more, far_k, far_v) = found
    got = out, dq + more, torch.cat([far_k, near_k], 1), torch.cat([far_v, near_v], 1)
    for ours, theirs in zip(got, (expect, wanted[0][:, 16:], wanted[1], wanted[2])):
        assert (ours.double() - theirs).norm() < tolerance * theirs.norm()


def parity(
    mesh: DeviceMesh, case: str, method: str, *shapes: tuple[int, int, int], **more: Any
) -> tuple[nn.Module, nn.Module]:
    """Steps on clips of some frames, heights and widths in turn, by a method and on one process: both models."""
    single, model = build(case, **more), build(case, **more)
    assert set(single.state_dict()) == set(model.state_dict())
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    for frames, height, width in shapes:
        inputs = doubled(example(single, 2, frames=frames, height=height, width=width))
        assert_step_equal(single, model, mesh, inputs, gradients=gradients, rtol=1e-10, atol=1e-10)
    return single, model


def recomputed(model: nn.Module, how: str | None) -> None:
    """Checkpoint stages inside their hooks, blocks outside of them, or both, as train.py does."""
    again: dict = {"context_fn": dsp.embedded.save_exchanges} if how == "saved" else {}
    stages = [m for b in model.blocks for m in (b.spatial, b.temporal)]
    modules = stages if how in ("stages", "saved", "both") else []
    modules += model.blocks if how in ("blocks", "both") else []
    for module in modules:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False, **again)


def step(mesh: DeviceMesh, case: str, method: str, how: str | None, shape: dict[str, int]) -> dict:
    single, model = build(case), build(case)
    inputs = doubled(example(single, 2, **shape))
    recomputed(model, how)
    dsp.embedded.parallelize(model, mesh, method, gather_output=False)
    return assert_step_equal(single, model, mesh, inputs, count=True)[0].by_collective()


def sent(counts: dict, phase: str, *collectives: str) -> int:
    return sum(counts[phase].get(name, {"bytes": 0})["bytes"] for name in collectives)


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
