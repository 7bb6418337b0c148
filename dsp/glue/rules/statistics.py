"""Rules of operations that need numbers of the full sharded dim: each rank's are gathered and combined.

A rank summarises its shard by a few numbers, such as a mean and a sum of squares, however long the dim is. Ranks
gather these, in fp32 at least, and the operation continues with them: nothing else is sent.
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

from dsp.comm.collectives import summed_in
from dsp.comm.layout import Cut
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import Frame, Numbers, Outcome
from dsp.planner import chunk_sizes

Dims = Sequence[int]
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda t: t.softmax(-1),
    "log_softmax": lambda t: t.log_softmax(-1),
    "softmin": lambda t: F.softmin(t, -1),
    "logsumexp": lambda t: t.logsumexp(-1),
    "norm": lambda t: torch.norm(t, dim=-1),
    "vector_norm": lambda t: torch.linalg.vector_norm(t, dim=-1),
    "normalize": lambda t: F.normalize(t, dim=-1),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "rms_norm": lambda t: F.rms_norm(t, t.shape[-1:]),
    "group_norm": lambda t: F.group_norm(t, 1),
    "instance_norm": F.instance_norm,
    "batch_norm": lambda t: F.batch_norm(t, None, None, training=True),
    "var": lambda t: t.var(-1),
    "std": lambda t: t.std(-1),
}


def result_dtype(f: Frame, t: Tensor) -> torch.dtype:
    """The dtype of the plain operation's result for t's dtype: autocast may change it."""
    if not torch.is_autocast_enabled(t.device.type):
        return t.dtype
    return PLAIN[f.name](t.new_zeros(1, 1, 2)).dtype


def moments(x: Tensor, dims: Dims) -> Tensor:
    """(2 ...): the mean over `dims`, which are kept as 1, and the sum of squared differences from it."""
    x = x.to(summed_in(x.dtype))
    mean = x.sum(tuple(dims), keepdim=True) / max(math.prod(x.shape[d] for d in dims), 1)
    return torch.stack([mean, (x - mean).square().sum(tuple(dims), keepdim=True)])


def together(every: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared differences over all ranks, from the (n 2 ...) moments of `counts` numbers each.

    After Chan, Golub and LeVeque 1983: no large sums are subtracted.
    """
    runs, at = [], 0
    for count, alike in groupby(counts):  # few runs: full chunks, perhaps a shorter one, and empty ones
        stop = at + len(list(alike))
        runs.append((count, every[at:stop]))
        at = stop
    mean: Any = sum(part[:, 0].sum(0) * (count / sum(counts)) for count, part in runs)
    return mean, every[:, 1].sum(0) + sum(count * (part[:, 0] - mean).square().sum(0) for count, part in runs)


def counted(f: Frame, x: Operand, cut: Cut, dims: Dims) -> list[int]:
    """The count of numbers that each rank has over `dims`, which must not be empty in total."""
    size = x.shape[cut.dim]
    if not math.prod(x.shape[d] for d in dims):
        raise f.refuse("it normalizes over an empty dim")
    beside = math.prod(x.shape[d] for d in dims) // size * cut.folds
    return [beside * length for length in chunk_sizes(size // cut.folds, f.n)]


def results(x: Operand, dims: Dims) -> int:
    """The number of results of a reduction over `dims`."""
    return math.prod(s for d, s in enumerate(x.shape) if d not in dims)


def grouped_norm(f: Frame, x: Operand, cut: Cut, groups: int, weight: Any, bias: Any, eps: float) -> Outcome:
    """Group norm of (b c ...), over the channels of a group and all dims after channels."""
    if cut.dim < 2:
        raise f.refuse("it normalizes over channels")
    b, c = x.shape[:2]
    counts = [count * (c // groups) for count in counted(f, x, cut, range(2, x.ndim))]
    dims = range(2, x.ndim + 1)

    def opened(t: Tensor) -> Tensor:
        return t.reshape(b, groups, c // groups, *t.shape[2:])

    def run(every: Tensor, t: Tensor, *affine: Tensor | None) -> Tensor:
        mean, squares = together(every, counts)
        y = ((opened(t) - mean) * (squares / sum(counts) + eps).rsqrt()).reshape(t.shape)
        per_channel = [p if p is None else p.reshape(c, *[1] * (x.ndim - 2)) for p in affine]
        return affinely(y, *per_channel).to(result_dtype(f, t))

    numbers = Numbers(lambda t, *_: moments(opened(t), dims), 2 * b * groups)
    return Outcome(cut, x.shape[cut.dim], args=(x, weight, bias), kwargs={}, func=run, numbers=numbers)


def batch_norm(f: Frame, x: Operand, cut: Cut, momentum: float, eps: float) -> Outcome:
    """Batch norm in training, over all dims but channels, (b c ...). All ranks update running statistics equally."""
    dims = [d for d in range(x.ndim) if d != 1]
    counts = counted(f, x, cut, dims)
    total = sum(counts)
    if total < 2:
        raise f.refuse("it would normalize over a single value per channel")

    def run(every: Tensor, t: Tensor, mean_so_far: Any, var_so_far: Any, *affine: Tensor | None) -> Tensor:
        mean, squares = together(every, counts)
        with torch.no_grad():
            for running, new in ((mean_so_far, mean), (var_so_far, squares / (total - 1))):
                if running is not None:
                    running.lerp_(new.flatten().to(running.dtype), momentum)
        per_channel = [p if p is None else p.reshape(mean.shape) for p in affine]
        return affinely((t - mean) * (squares / total + eps).rsqrt(), *per_channel).to(result_dtype(f, t))

    operands = [f.get(i, name) for i, name in enumerate(("running_mean", "running_var", "weight", "bias"), 1)]
    numbers = Numbers(lambda t, *_: moments(t, dims), 2 * x.shape[1])
    return Outcome(cut, x.shape[cut.dim], args=(x, *operands), kwargs={}, func=run, numbers=numbers)


def affinely(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def trailing(
    f: Frame, x: Operand, cut: Cut, count: int, weight: Any, bias: Any, eps: float | None, centred: bool = True
) -> Outcome:
    """A norm over the last `count` dims, one of them sharded; weight and bias have these dims."""
    dims = range(x.ndim - count, x.ndim)
    counts = counted(f, x, cut, dims)
    at = Cut(cut.dim - x.ndim + count, cut.outer)
    narrow = {i: at for i, o in enumerate(f.operands()) if o is weight or o is bias}

    def squares(t: Tensor, *_: Any) -> Tensor:
        return t.to(summed_in(t.dtype)).square().sum(tuple(dims), keepdim=True)

    def run(every: Tensor, t: Tensor, *affine: Tensor | None) -> Tensor:
        mean, total = together(every, counts) if centred else (0, every.sum(0))
        small = torch.finfo(every.dtype).eps if eps is None else eps
        return affinely((t - mean) * (total / sum(counts) + small).rsqrt(), *affine).to(result_dtype(f, t))

    numbers = Numbers(lambda t, *_: moments(t, dims) if centred else squares(t), (1 + centred) * results(x, dims))
    return Outcome(cut, x.shape[cut.dim], narrow, args=(x, weight, bias), kwargs={}, func=run, numbers=numbers)


def exponentials(t: Tensor, dims: Dims, dtype: Any = None) -> Tensor:
    """(2 ...): the maximum over `dims`, and the sum of exponentials of the differences from it.

    A shard that is empty, or masked entirely, has -inf and 0: it adds nothing, however low the others are.
    """
    kind = dtype or (t.dtype if t.is_floating_point() else torch.get_default_dtype())
    t, over = t.to(summed_in(kind)), tuple(dims)
    if not t.numel():
        total = t.sum(over, keepdim=True)
        return torch.stack([torch.full_like(total, -math.inf), total])
    top = t.detach().amax(over, keepdim=True)
    near = top.masked_fill(top.isinf(), 0)  # inf - inf is nan
    return torch.stack([top, (t - near).exp().sum(over, keepdim=True)])


def softmax(f: Frame, x: Operand, cut: Cut, dtype: Any) -> Outcome:
    """softmax, softmin or log_softmax along the sharded dim."""
    sign = -1 if f.name == "softmin" else 1

    def run(every: Tensor, t: Tensor) -> Tensor:
        tops = every[:, 0].detach()
        top = tops.amax(0)
        total = (every[:, 1] * (tops - top).exp()).sum(0)  # all masked: nan, as on one device
        less = sign * t.to(every.dtype) - top
        return (less - total.log() if f.name == "log_softmax" else less.exp() / total).to(dtype or result_dtype(f, t))

    counted(f, x, cut, [cut.dim])
    numbers = Numbers(lambda t: exponentials(sign * t, [cut.dim], dtype), 2 * results(x, [cut.dim]))
    return Outcome(cut, x.shape[cut.dim], args=(x,), kwargs={}, func=run, numbers=numbers)


def whole(
    f: Frame, x: Operand, dims: Dims, keep: bool, of: Callable[[Tensor], Tensor], rows: int,
    combine: Callable[..., Tensor],
) -> Outcome:  # fmt: skip
    """A reduction with a replicated result: `combine` from all ranks' numbers, `rows` of them for each element."""

    def run(every: Tensor, t: Tensor) -> Tensor:
        out = combine(every, t)
        return out if keep else out.squeeze(tuple(dims))

    return Outcome(None, args=(x,), kwargs={}, func=run, numbers=Numbers(of, rows * results(x, dims)))


def logsumexp(f: Frame, x: Operand, cut: Cut, dims: Dims, keep: bool) -> Outcome:
    def combine(every: Tensor, t: Tensor) -> Tensor:
        tops = every[:, 0].detach()
        top = tops.amax(0)
        near = top.masked_fill(top.isinf(), 0)
        total = (every[:, 1] * (tops - near).exp()).sum(0)
        nothing = total == 0  # all are masked: -inf, and no gradient
        out = (near + total.masked_fill(nothing, 1).log()).masked_fill(nothing, -math.inf)
        return out.to(result_dtype(f, t)) if t.is_floating_point() else out

    counted(f, x, cut, dims)
    return whole(f, x, dims, keep, partial(exponentials, dims=dims), 2, combine)


def extremes(f: Frame, x: Operand, cut: Cut, dims: Dims, keep: bool) -> Outcome:
    """The maximum or minimum over the sharded dim, perhaps with others; ties share the gradient."""
    low, over = f.name in ("amin", "min"), tuple(dims)

    def of(t: Tensor) -> Tensor:
        t = t.to(summed_in(t.dtype))
        if not t.numel():  # other ranks have numbers
            none = t.sum(over, keepdim=True, dtype=t.dtype)
            least = -math.inf if t.is_floating_point() else torch.iinfo(t.dtype).min
            most = math.inf if t.is_floating_point() else torch.iinfo(t.dtype).max
            return torch.stack([torch.full_like(none, most if low else least), none])
        top = t.amin(over, keepdim=True) if low else t.amax(over, keepdim=True)
        return torch.stack([top, (t == top).sum(over, keepdim=True).to(t.dtype)])

    def combine(every: Tensor, t: Tensor) -> Tensor:
        tops = every[:, 0].detach()
        top = tops.amin(0) if low else tops.amax(0)
        if not t.is_floating_point():
            return top.to(t.dtype)
        ties = every[:, 1].detach() * (tops == top)
        return (torch.where(ties > 0, every[:, 0] * ties, 0).sum(0) / ties.sum(0)).to(t.dtype)

    counted(f, x, cut, dims)
    return whole(f, x, dims, keep, of, 2, combine)


def flags(f: Frame, x: Operand, dims: Dims, keep: bool) -> Outcome:
    """any or all over the sharded dim, perhaps with others."""

    def of(t: Tensor) -> Tensor:
        result = t != 0
        for d in dims:
            result = result.any(d, keepdim=True) if f.name == "any" else result.all(d, keepdim=True)
        return result.to(summed_in(t.dtype))[None]

    def combine(every: Tensor, t: Tensor) -> Tensor:
        result = every[:, 0] != 0
        result = result.any(0) if f.name == "any" else result.all(0)
        return result.to(t.dtype if t.dtype == torch.uint8 else torch.bool)

    return whole(f, x, dims, keep, of, 1, combine)


def squared(t: Tensor, dims: Dims) -> Tensor:
    """(1 ...): the sum of squares over `dims`."""
    t = t.to(summed_in(t.dtype))
    return (t * t.conj()).sum(tuple(dims), keepdim=True)[None]


def root(total: Tensor) -> Tensor:
    """The square root, with gradient 0 at 0."""
    nothing = total == 0
    return total.masked_fill(nothing, 1).sqrt().masked_fill(nothing, 0)


def length_of(every: Tensor) -> Tensor:
    return root(every[:, 0].sum(0).real)


def norm(f: Frame, x: Operand, cut: Cut, dims: Dims, keep: bool) -> Outcome:
    def combine(every: Tensor, t: Tensor) -> Tensor:
        return length_of(every).to(result_dtype(f, t.real))

    counted(f, x, cut, dims)
    return whole(f, x, dims, keep, partial(squared, dims=dims), 1, combine)


def normalized(f: Frame, x: Operand, cut: Cut, dims: Dims, eps: float) -> Outcome:
    def run(every: Tensor, t: Tensor) -> Tensor:
        return t / length_of(every).to(result_dtype(f, t.real)).clamp_min(eps)

    counted(f, x, cut, dims)
    numbers = Numbers(partial(squared, dims=dims), results(x, dims))
    return Outcome(cut, x.shape[cut.dim], args=(x,), kwargs={}, func=run, numbers=numbers)


def spread(f: Frame, x: Operand, cut: Cut, dims: Dims, keep: bool, correction: float) -> Outcome:
    """var or std over the sharded dim, perhaps with others: the result is replicated."""
    counts = counted(f, x, cut, dims)

    def combine(every: Tensor, t: Tensor) -> Tensor:
        out = together(every, counts)[1] / max(sum(counts) - correction, 0)
        return (root(out) if f.name == "std" else out).to(result_dtype(f, t))

    return whole(f, x, dims, keep, partial(moments, dims=dims), 2, combine)
