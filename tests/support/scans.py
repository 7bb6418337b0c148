"""Arguments of the selective scan, and one call of it with its gradients."""

from __future__ import annotations

import torch

KINDS = ["scalar", "vector", "bonus", "states"]


def arguments(kind, n, strength, dtype=torch.float64, batch=2, groups=2, heads=4, channels=6, values=5):
    torch.manual_seed(0)
    q, k = torch.randn(2, batch, n, groups, channels, dtype=dtype)
    v = torch.randn(batch, n, heads, 1 if kind == "states" else values, dtype=dtype)
    decay = -strength * torch.rand(batch, n, heads, channels, dtype=dtype) ** 4  # weak and strong side by side
    bonus = torch.randn(heads, channels, dtype=dtype) if kind == "bonus" else None
    return [q, k, v, decay[..., 0] if kind == "scalar" else decay, bonus]


def run(function, args):
    """The output and the gradient of every argument."""
    args = [x if x is None else x.clone().requires_grad_() for x in args]
    y = function(*args)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [y, *(torch.zeros_like(x) if x.grad is None else x.grad for x in args if x is not None)]
