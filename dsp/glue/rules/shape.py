"""Rules of operations that show the same data with other dims."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsp.comm.layout import Cut, fold_fits
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import Frame, Outcome, first, independent, rule, sizes_of
from dsp.planner import chunk_sizes


def reshaped(f: Frame, x: Operand, cut: Cut, new: Sequence[int]) -> Cut:
    """The cut after a reshape: the sharded dim must stay one factor of one axis, with the same chunk boundaries."""
    after = math.prod(x.shape[cut.dim + 1 :])
    if cut.joined:  # it must stay a dim of its own
        for d, size in enumerate(new):
            if size == x.shape[cut.dim] and math.prod(new[d + 1 :]) == after and 0 not in x.shape:
                return Cut(d, cut.outer)
        raise f.refuse(
            f"reshaping to {list(new)} takes dim {cut.dim} apart, which is a concatenation of pieces, "
            "each sharded on its own"
        )
    extent = x.shape[cut.dim] // cut.folds
    before = math.prod(x.shape[: cut.dim]) * cut.folds
    lengths = [c * after for c in chunk_sizes(extent, f.n)]
    best: Cut | None = None
    lead = 1
    for d, size in enumerate(new):
        if lead and before % lead == 0:
            outer = before // lead
            if outer and size % outer == 0:
                part, suffix = size // outer, math.prod(new[d + 1 :])
                if part * suffix == extent * after and [c * suffix for c in chunk_sizes(part, f.n)] == lengths:
                    if part == extent and suffix == after:
                        return Cut(d, outer)
                    best = best or Cut(d, outer)
        lead *= size
    if best is None:
        raise f.refuse(
            f"dim {cut.dim} (size {extent}) is sharded over {f.n} ranks, and after reshaping to {list(new)} a rank's "
            "part would not be a chunk of any one dim",
            "Reshape inside a stage whose pattern writes the fold, as '(b t) [s c]', or put the sharded dim last among "
            "the dims that are merged",
        )
    return best


def reshape_to(f: Frame, new: Sequence[int]) -> Outcome:
    x, cut = first(f)
    total = math.prod(x.shape)
    if any(isinstance(s, Operand) for s in new):
        raise f.refuse("a size is a tensor, whose number is not known", "Write int(...) of it")
    new = [int(s) for s in new]
    if -1 in new:
        known = -math.prod(new)
        if known <= 0 or total % known:
            raise f.refuse(f"shape {new} does not fit {total} elements")
        new[new.index(-1)] = total // known
    if math.prod(new) != total:
        raise f.refuse(f"shape {new} does not fit {total} elements")
    out = reshaped(f, x, cut, new)
    local = list(new)
    local[out.dim] = f.local_size(out, new[out.dim])
    return Outcome(out, new[out.dim], args=(x, tuple(local)), kwargs={}, func=torch.Tensor.reshape, view=True)


@rule("view reshape", piecewise=True)
def view(f: Frame) -> Outcome:
    sizes = sizes_of(f.kwargs.get("shape", f.kwargs.get("size", f.args[1:])))
    if len(sizes) == 1 and isinstance(sizes[0], torch.dtype):
        raise f.refuse("it reinterprets the bytes of a sharded tensor")
    return reshape_to(f, sizes)


@rule("view_as reshape_as", piecewise=True)
def view_as(f: Frame) -> Outcome:
    x, shape = f.args[0], f.get(1, "other").shape
    return reshape_to(Frame(f.name, (x, shape), {}, f.n, f.rank), shape)


@rule("flatten ravel", piecewise=True)
def flatten(f: Frame) -> Outcome:
    x, _ = first(f)
    start = f.normal(f.get(1, "start_dim", 0), x.ndim)
    end = f.normal(f.get(2, "end_dim", -1), x.ndim)
    return reshape_to(f, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


@rule("unflatten", piecewise=True)
def unflatten(f: Frame) -> Outcome:
    x, _ = first(f)
    dim, sizes = f.normal(f.get(1, "dim"), x.ndim), list(f.get(2, "sizes"))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // -math.prod(sizes)
    return reshape_to(f, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


@rule("unsqueeze", piecewise=True)
def unsqueeze(f: Frame) -> Outcome:
    x, cut = first(f)
    dim = f.normal(f.get(1, "dim"), x.ndim + 1)
    return Outcome(Cut(cut.dim + (dim <= cut.dim), cut.outer), x.shape[cut.dim], view=True)


@rule("squeeze", piecewise=True)
def squeeze(f: Frame) -> Outcome:
    x, cut = first(f)
    dims = f.get(1, "dim")
    ones = [d for d in (range(x.ndim) if dims is None else f.dims(dims, x.ndim)) if x.shape[d] == 1]
    if cut.dim in ones:
        raise f.refuse("it drops the sharded dim")
    # name the dims: a dim may be of size 1 on a shard only
    out = Cut(cut.dim - sum(d < cut.dim for d in ones), cut.outer)
    return Outcome(out, x.shape[cut.dim], args=(x, tuple(ones)), kwargs={}, view=True)


@rule("permute transpose swapaxes swapdims movedim moveaxis t T mT H mH adjoint", piecewise=True)
def permuted(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.name in ("t", "T", "H") and x.ndim > 2:
        raise f.refuse("the tensor has more than two dims", "Use transpose or permute")
    if x.ndim < 2:
        return Outcome(cut, x.shape[cut.dim], view=True)
    # torch itself permutes: each dim is marked by its stride
    permute = getattr(torch.empty_strided([1] * x.ndim, list(range(x.ndim)), device="meta"), f.name)
    view = permute(*f.args[1:], **f.kwargs) if callable(permute) else permute
    return Outcome(Cut(view.stride().index(cut.dim), cut.outer), x.shape[cut.dim], view=True)


def complex_numbers(x: torch.Tensor) -> torch.Tensor:
    """Complex numbers of a shard, which is copied if its strides do not allow a view."""
    *strides, last = x.stride()
    return torch.view_as_complex(x if last == 1 and all(s % 2 == 0 for s in strides) else x.contiguous())


# torch checks strides, of a gradient too, that an empty tensor may lack
independent("view_as_real", filled=True)
independent(
    "view_as_complex", "the parts of its numbers lie on several ranks", lambda f, x: (x.ndim - 1,), filled=True,
    func=complex_numbers,
)  # fmt: skip


@rule("expand broadcast_to expand_as", piecewise=True)
def expand(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.name == "expand_as":
        sizes = list(f.get(1, "other").shape)
    else:
        sizes = sizes_of(f.kwargs.get("size", f.args[1:]))
    lead = len(sizes) - x.ndim
    at = cut.dim + lead
    if sizes[at] not in (-1, x.shape[cut.dim]):
        raise f.refuse("it stretches the sharded dim")
    sizes[at] = -1
    return Outcome(Cut(at, cut.outer), x.shape[cut.dim], args=(x, tuple(sizes)), kwargs={}, func=torch.Tensor.expand)


@rule("repeat tile")
def repeat(f: Frame) -> Outcome:
    x, cut = first(f)
    reps = sizes_of(f.kwargs.get("repeats", f.kwargs.get("dims", f.args[1:])))
    lead = max(len(reps) - x.ndim, 0)
    reps = [1] * (x.ndim - len(reps)) + reps
    at = cut.dim + lead
    if not reps[at]:
        raise f.refuse("it repeats the sharded dim zero times")
    return Outcome(Cut(at, cut.folds * reps[at]), x.shape[cut.dim] * reps[at])


@rule("repeat_interleave")
def repeat_interleave(f: Frame) -> Outcome:
    x, cut = first(f)
    times, dim = f.get(1, "repeats"), f.get(2, "dim")
    if not isinstance(times, int) or dim is None:
        raise f.refuse("repeats is not one number, or dim is missing")
    kwargs = {k: v for k, v in f.kwargs.items() if k != "output_size"}
    dim = f.normal(dim, x.ndim)
    size = x.shape[cut.dim]
    if dim == cut.dim:
        if not fold_fits(size // cut.folds, times, f.n):
            raise f.refuse(f"{size // cut.folds} repeated {times} times does not divide over {f.n} ranks")
        size *= times
    return Outcome(cut, size, kwargs=kwargs)
