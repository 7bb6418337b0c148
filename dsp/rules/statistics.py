"""Rules of operations that need numbers of the whole sharded dim: each rank has its own, and all are put together.

What a rank knows of its part, a mean and a sum of squares, say, is a few numbers however long the dim is. Ranks gather
those of all, in fp32 at least, and the operation goes on with them: nothing else is sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsp.collectives import summed_in
from dsp.layout import Cut
from dsp.planner import chunk_sizes
from dsp.rules.call import Frame, Numbers, Operand, Outcome

Dims = Sequence[int]
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(-1),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "rms_norm": lambda t: F.rms_norm(t, t.shape[-1:]),
    "group_norm": lambda t: F.group_norm(t, 1),
    "instance_norm": F.instance_norm,
    "var": lambda t: t.var(-1),
    "std": lambda t: t.std(-1),
}


def made_in(f: Frame, t: Tensor) -> torch.dtype:
    """What the plain operation makes of t's dtype: autocast may have a say."""
    if not torch.is_autocast_enabled(t.device.type):
        return t.dtype
    return PLAIN[f.name](t.new_zeros(1, 1, 2)).dtype


def moments(x: Tensor, dims: Dims) -> Tensor:
    """(2 ...): the mean over `dims`, which are kept as 1, and the sum of squared differences from it."""
    x = x.to(summed_in(x.dtype))
    mean = x.sum(tuple(dims), keepdim=True) / max(math.prod(x.shape[d] for d in dims), 1)
    return torch.stack([mean, (x - mean).square().sum(tuple(dims), keepdim=True)])


def together(every: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared differences over all ranks, of the (n 2 ...) moments of `counts` numbers each.

    Chan, Golub and LeVeque 1983: no difference of large sums is taken.
    """
    runs, at = [], 0
    for count, alike in groupby(counts):  # few: full chunks, perhaps a shorter one, and empty ones
        stop = at + len(list(alike))
        runs.append((count, every[at:stop]))
        at = stop
    mean: Any = sum(own[:, 0].sum(0) * (count / sum(counts)) for count, own in runs)
    return mean, every[:, 1].sum(0) + sum(count * (own[:, 0] - mean).square().sum(0) for count, own in runs)


def counted(f: Frame, x: Operand, cut: Cut, dims: Dims) -> list[int]:
    """How many numbers each rank has over `dims`, which must not be none at all."""
    size = x.shape[cut.dim]
    if not math.prod(x.shape[d] for d in dims):
        raise f.refuse("it is over nothing")
    beside = math.prod(x.shape[d] for d in dims) // size * cut.outer
    return [beside * own for own in chunk_sizes(size // cut.outer, f.n)]


def kept(x: Operand, dims: Dims) -> int:
    return math.prod(s for d, s in enumerate(x.shape) if d not in dims)


def grouped_norm(f: Frame, x: Operand, cut: Cut, groups: int, weight: Any, bias: Any, eps: float) -> Outcome:
    """Over the dims after channels, (b c ...), and the channels of a group."""
    if cut.dim < 2:
        raise f.refuse("it normalizes over channels")
    b, c = x.shape[:2]
    counts = [own * (c // groups) for own in counted(f, x, cut, range(2, x.ndim))]
    dims = range(2, x.ndim + 1)

    def opened(t: Tensor) -> Tensor:
        return t.reshape(b, groups, c // groups, *t.shape[2:])

    def run(every: Tensor, t: Tensor, *affine: Tensor | None) -> Tensor:
        mean, squares = together(every, counts)
        made = ((opened(t) - mean) * (squares / sum(counts) + eps).rsqrt()).reshape(t.shape)
        per_channel = [p if p is None else p.reshape(c, *[1] * (x.ndim - 2)) for p in affine]
        return affinely(made, *per_channel).to(made_in(f, t))

    numbers = Numbers(lambda t, *rest: moments(opened(t), dims), 2 * b * groups)
    return Outcome(cut, x.shape[cut.dim], args=(x, weight, bias), kwargs={}, func=run, numbers=numbers)


def affinely(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def trailing(
    f: Frame, x: Operand, cut: Cut, count: int, weight: Any, bias: Any, eps: float | None, centred: bool = True
) -> Outcome:
    """Over the last `count` dims, of which one is sharded; weight and bias are of each place there."""
    dims = range(x.ndim - count, x.ndim)
    counts = counted(f, x, cut, dims)
    at = Cut(cut.dim - x.ndim + count, cut.outer)
    narrow = {i: at for i, o in enumerate(f.operands()) if o is weight or o is bias}

    def squares(t: Tensor, *rest: Any) -> Tensor:
        return t.to(summed_in(t.dtype)).square().sum(tuple(dims), keepdim=True)

    def run(every: Tensor, t: Tensor, *affine: Tensor | None) -> Tensor:
        mean, total = together(every, counts) if centred else (0, every.sum(0))
        small = torch.finfo(every.dtype).eps if eps is None else eps
        return affinely((t - mean) * (total / sum(counts) + small).rsqrt(), *affine).to(made_in(f, t))

    numbers = Numbers(lambda t, *rest: moments(t, dims) if centred else squares(t), (1 + centred) * kept(x, dims))
    return Outcome(cut, x.shape[cut.dim], narrow, args=(x, weight, bias), kwargs={}, func=run, numbers=numbers)


def exponentials(t: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """(2 ...): the largest along `dim`, and the sum of exponentials of what is left without it.

    A part that is empty, or masked entirely, has -inf and 0: it counts nothing, however low the others are.
    """
    t = t.to(summed_in(dtype or t.dtype))
    if not t.shape[dim]:
        total = t.sum(dim, keepdim=True)
        return torch.stack([torch.full_like(total, -math.inf), total])
    top = t.detach().amax(dim, keepdim=True)
    near = top.masked_fill(top == -math.inf, 0)  # -inf less -inf is nan
    return torch.stack([top, (t - near).exp().sum(dim, keepdim=True)])


def all_exponentials(every: Tensor) -> tuple[Tensor, Tensor]:
    tops = every[:, 0].detach()
    top = tops.amax(0)
    return top, (every[:, 1] * (tops - top).exp()).sum(0)  # all masked: nan, as on one device


def softmax(f: Frame, x: Operand, cut: Cut, dtype: Any) -> Outcome:
    """softmax or log_softmax along the sharded dim."""

    def run(every: Tensor, t: Tensor) -> Tensor:
        top, total = all_exponentials(every)
        less = t.to(every.dtype) - top
        return (less - total.log() if f.name == "log_softmax" else less.exp() / total).to(dtype or made_in(f, t))

    counted(f, x, cut, [cut.dim])
    numbers = Numbers(partial(exponentials, dim=cut.dim, dtype=dtype), 2 * kept(x, [cut.dim]))
    return Outcome(cut, x.shape[cut.dim], args=(x,), kwargs={}, func=run, numbers=numbers)


def spread(f: Frame, x: Operand, cut: Cut, dims: Dims, keep: bool, correction: float) -> Outcome:
    """var or std over the sharded dim, perhaps with others: whole on every rank."""
    counts = counted(f, x, cut, dims)

    def run(every: Tensor, t: Tensor) -> Tensor:
        made = together(every, counts)[1] / max(sum(counts) - correction, 0)
        made = made.sqrt() if f.name == "std" else made
        return (made if keep else made.squeeze(tuple(dims))).to(made_in(f, t))

    numbers = Numbers(partial(moments, dims=dims), 2 * kept(x, dims))
    return Outcome(None, args=(x,), kwargs={}, func=run, numbers=numbers)
