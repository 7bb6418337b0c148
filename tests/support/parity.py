"""N ranks against one process: outputs, a loss, every gradient, and what was sent."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import dsp
from dsp.support.tensors import tensors_in


def weighted(*outputs: Tensor) -> Tensor:
    """A weighted mean of the squares of each output, by `dsp.mean` on shards."""
    total = torch.zeros((), dtype=torch.float64)
    for y in outputs:
        weight = torch.linspace(0.5, 2, y.shape[1], dtype=y.dtype).view(-1, *[1] * (y.ndim - 2)) if y.ndim > 1 else None
        total = total + (y if y.ndim == 0 else dsp.mean(y * y, weight))
    return total


def averaged(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    group = mesh.get_group().group_name
    return {
        n: torch.ops.dsp.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, group) / mesh.size()
        for n, p in model.named_parameters()
    }


def unsharded(model: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Gradients that fully_shard has averaged."""
    return {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}


def assert_close_named(got: dict[str, Tensor], expect: dict[str, Tensor | None], **rounding: float) -> None:
    for name, g in expect.items():
        g = torch.zeros_like(got[name]) if g is None else g
        torch.testing.assert_close(got[name], g, msg=lambda m, name=name: f"{name}: {m}", **rounding)


def assert_step_equal(
    single: nn.Module, model: nn.Module, mesh: DeviceMesh, inputs: Any, given: Any = None, *,
    gradients: Any = averaged, loss: Any = None, rounds: int = 1, count: bool = False, **rounding: float,
) -> list[Any]:  # fmt: skip
    """Steps of `model` on all ranks against one of `single` on one process: outputs, a loss, every gradient.

    `inputs`: arguments in a tuple or by name; of those that require gradients the gradients are compared too. `given`:
    what the ranks give the model, if it is something else. `loss`: of the outputs, instead of their mean squares.
    Returns what was sent in each of the steps, if it is to be counted: then autograd does not look at what is written
    in place.
    """

    def step(m: nn.Module, args: Any) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        m.zero_grad()
        named = args if isinstance(args, dict) else dict(enumerate(args))
        asks = [k for k, v in named.items() if isinstance(v, Tensor) and v.requires_grad]
        leaves = named | {k: named[k].detach().clone().requires_grad_() for k in asks}
        outputs = tensors_in(m(**leaves) if isinstance(args, dict) else m(*leaves.values()))
        total = loss(*outputs) if loss else sum(dsp.mean(y.square()) for y in outputs)
        total.backward()
        return outputs, total.detach(), [leaves[k].grad for k in asks]

    expect, expect_total, expect_inputs = step(single, inputs)
    assert expect_total != 0
    sent = []
    for _ in range(rounds):
        with dsp.count_comm() if count else nullcontext() as comm:
            outputs, total, found = step(model, inputs if given is None else given)
        assert len(outputs) == len(expect)
        for a, b in zip(outputs, expect):
            torch.testing.assert_close(dsp.gather(a), b, **rounding)
        torch.testing.assert_close(total, expect_total, **rounding)
        for a, b in zip(found, expect_inputs if given is None else ()):
            torch.testing.assert_close(a, b, **rounding)
        assert_close_named(gradients(model, mesh), {n: p.grad for n, p in single.named_parameters()}, **rounding)
        sent.append(comm)
    return sent


def assert_parallel_equal(
    single: nn.Module, mesh: DeviceMesh, inputs: Any, stages: Any = None, *, gather: bool = True, **how: Any
) -> list[Any]:
    """Steps of a copy of the model, made parallel, against one of the model."""
    model = dsp.parallelize(copy.deepcopy(single), mesh, stages, gather_output=gather)
    return assert_step_equal(single, model, mesh, inputs, **how)


def wrap_checkpoints(model: nn.Module) -> None:
    """The model's own activation checkpointing: around whole stage calls, outside the hooks."""
    for child in model.modules():
        if isinstance(child, nn.ModuleList):
            for i, block in enumerate(child):
                child[i] = Checkpointed(block)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
