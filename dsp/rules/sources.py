"""Whole tensors stretched in glue: each rank produces its part alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsp.layout import Cut
from dsp.rules.call import Frame, Operand

SOURCES = ("repeat_interleave", "expand", "broadcast_to", "repeat", "tile")


def source_cuts(f: Frame) -> list[Cut]:
    """Where the result of stretching a whole tensor may be cut at its source, so that it is never whole."""
    x = f.args[0]
    if not isinstance(x, Operand) or x.cut is not None:
        return []
    if f.name == "repeat_interleave":
        times, dim = f.get(1, "repeats"), f.get(2, "dim")
        if not isinstance(times, int) or times < 2 or (dim is None and x.ndim != 1):
            return []
        dim = f.normal(0 if dim is None else dim, x.ndim)
        return [Cut(dim, x.shape[dim])]
    sizes = f.kwargs.get("size", f.kwargs.get("repeats", f.args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)):
        sizes = sizes[0]
    lead = len(sizes) - x.ndim
    cuts = []
    for d, s in enumerate(sizes):
        have = x.shape[d - lead] if d >= lead else 1
        if isinstance(s, int) and s > 1 and have == 1:
            cuts.append(Cut(d))
    return cuts


def localize_source(f: Frame, cut: Cut) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """The same stretch for one rank: (function, its arguments, global size of the cut dim)."""
    x = f.args[0]
    if f.name == "repeat_interleave":
        times = f.get(1, "repeats")
        size = x.shape[cut.dim] * times
        own = f.local_size(times, 1)
        return torch.repeat_interleave, (x, own, cut.dim), size
    sizes = f.kwargs.get("size", f.kwargs.get("repeats", f.args[1:]))
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)):
        sizes = sizes[0]
    sizes = list(sizes)
    size = sizes[cut.dim]
    sizes[cut.dim] = f.local_size(size, 1)
    stretch = torch.Tensor.repeat if f.name in ("repeat", "tile") else torch.Tensor.expand
    return stretch, (x, *sizes), size
