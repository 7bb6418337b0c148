"""Tensors of which each rank makes only its shard: expanded or computed ones, and those filled with one number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dsp.comm.layout import Cut
from dsp.core.torch_calls import Operand
from dsp.core.torch_traits import FILLED, OUTER, SOURCES
from dsp.glue.rules.call import Frame, sizes_of
from dsp.glue.rules.elementwise import ELEMENTWISE

FILLED.update("zeros ones full empty new_zeros new_ones new_full new_empty".split())
EXPANDED = frozenset({"expand", "broadcast_to"})
SOURCES.update(FILLED | EXPANDED | {"repeat_interleave", "repeat", "tile"})
OUTER.update({"embedding", *ELEMENTWISE})


def source_cuts(f: Frame) -> list[Cut]:
    """The cuts in which an expanded tensor may be made from a replicated one, so that its full size never exists."""
    x = f.args[0]
    if not isinstance(x, Operand) or x.cut is not None:
        return []
    if f.name == "repeat_interleave":
        times, dim = f.get(1, "repeats"), f.get(2, "dim")
        if not isinstance(times, int) or times < 2 or (dim is None and x.ndim != 1):
            return []
        dim = f.normal(0 if dim is None else dim, x.ndim)
        return [Cut(dim, x.shape[dim])] if x.shape[dim] else []
    sizes = stretched_to(f)
    lead = len(sizes) - x.ndim
    cuts = []
    for d, s in enumerate(sizes):
        have = x.shape[d - lead] if d >= lead else 1
        if isinstance(s, int) and s > 1 and have == 1:
            cuts.append(Cut(d))
    return cuts


def stretched_to(f: Frame) -> list[Any]:
    """The sizes, or numbers of copies, that an expansion is given."""
    named = (f.kwargs[name] for name in ("size", "repeats", "dims") if name in f.kwargs)
    return sizes_of(next(named, f.args[1:]))


def localize_source(f: Frame, cut: Cut) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """The call for one rank: (function, its arguments, global size of the cut dim)."""
    if f.name in FILLED:
        return localize_filled(f, cut)
    x = f.args[0]
    if f.name == "repeat_interleave":
        times = f.get(1, "repeats")
        size = x.shape[cut.dim] * times
        return torch.repeat_interleave, (x, f.local_size(Cut(0), times), cut.dim), size
    sizes = stretched_to(f)
    size = sizes[cut.dim]
    sizes[cut.dim] = f.local_size(Cut(0), size)
    stretch = torch.Tensor.repeat if f.name in ("repeat", "tile") else torch.Tensor.expand
    return stretch, (x, *sizes), size


def localize_filled(f: Frame, cut: Cut) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """The call that fills a shard. The first argument of `new_*` has dtype and device; `full` has its number last."""
    assert f.func is not None
    like, arguments = (f.args[:1], f.args[1:]) if f.name.startswith("new_") else ((), f.args)
    value = arguments[1:] if f.name.endswith("full") else ()
    sizes = sizes_of(f.kwargs.get("size", arguments[:1] if value else arguments))
    size = sizes[cut.dim]
    sizes[cut.dim] = f.local_size(cut, size)
    options = {k: v for k, v in f.kwargs.items() if k != "size"}
    return partial(f.func, **options), (*like, tuple(sizes), *value), size
