"""The dims along which a rule has to take an operation. That it is right test_prover.py shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tools.prover.forms import x
from tools.prover.prover import Call, prove

A = 2, 4, 6, 8
LEAST: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]] = {
    "add": (torch.add, (x(*A), x(*A)), 4),
    "add a vector": (torch.add, (x(*A), x(8)), 4),
    "where": (torch.where, (x(*A) > 0.5, x(*A), x(4, 1, 8)), 4),
    "fold": (torch.Tensor.reshape, (x(*A), (8, 6, 8)), 4),
    "open": (torch.Tensor.unflatten, (x(*A), -1, (2, -1)), 4),
    "permute": (torch.Tensor.permute, (x(*A), (3, 0, 2, 1)), 4),
    "linear": (F.linear, (x(*A), x(5, 8)), 3),
    "matmul": (torch.matmul, (x(*A), x(2, 4, 8, 6)), 3),
    "einsum": (torch.einsum, ("btsc,btrc->btsr", x(*A), x(*A)), 3),
    "attention": (F.scaled_dot_product_attention, (x(*A), x(*A), x(*A)), 3),
    "layer norm": (F.layer_norm, (x(*A), (8,)), 4),
    "softmax": (torch.softmax, (x(*A), -1), 4),
    "sum": (torch.sum, (x(*A),), 4),
    "mean": (torch.mean, (x(*A),), 4),
    "a loss": (F.mse_loss, (x(*A), x(*A)), 4),
    "cat": (torch.cat, ([x(*A), x(*A)], -1), 3),
    "stack": (torch.stack, ([x(*A), x(*A)], 2), 4),
    "select": (torch.select, (x(*A), 2, 1), 4),
    "narrow": (torch.narrow, (x(*A), 2, 1, 2), 4),
    "unfold": (torch.Tensor.unfold, (x(*A), 1, 2, 1), 3),
    "two indices": (torch.Tensor.__getitem__, (x(*A), (0, slice(None), 0)), 4),
    "index and slices": (torch.Tensor.__getitem__, (x(*A), (slice(None), 1, None, slice(2, 4))), 3),
    "a list": (torch.Tensor.__getitem__, (x(*A), (slice(None), [0, 1])), 3),
    "set": (torch.Tensor.__setitem__, (x(*A, grad=False), (slice(None), [0, 2]), x(2, 2, 6, 8, grad=False)), 2),
    "pad": (F.pad, (x(*A), (1, 2)), 3),
    "conv": (F.conv2d, (x(*A), x(3, 4, 3, 3)), 3),
    "group norm": (F.group_norm, (x(*A), 2), 3),
}


@pytest.mark.parametrize("name", LEAST)
def test_accepted_along(name: str) -> None:
    func, args, least = LEAST[name]
    proof = prove(Call(func, args), 2)
    dims = {cut.dim for layouts, said in proof.found.items() if said == "ok" and (cut := layouts[0]) is not None}
    assert len(dims) >= least, proof


@pytest.mark.parametrize("func", [torch.kron, torch.nonzero])
def test_no_layout_will_do(func: Callable[..., Any]) -> None:
    args = (x(*A, grad=False),) * (2 if func is torch.kron else 1)
    assert not prove(Call(func, args), 2).accepted
