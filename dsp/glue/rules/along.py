"""Rules of operations along a dim, which must not be sharded unless results can be combined over ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from dsp.comm.layout import Cut
from dsp.core.torch_calls import Operand
from dsp.glue.rules import statistics
from dsp.glue.rules.call import Frame, Outcome, align, first, independent, only, rule
from dsp.glue.rules.elementwise import elementwise


@rule(
    "softmax log_softmax softmin cumsum cumprod logcumsumexp flip roll sort argsort topk normalize glu", piecewise=True
)
def along(f: Frame) -> Outcome:
    x, cut = first(f)
    name = {"flip": "dims", "roll": "dims"}.get(f.name, "dim")
    default = {"normalize": 1}.get(f.name, -1)
    position = {"topk": 2, "roll": 2, "normalize": 2}.get(f.name, 1)
    if f.name == "flip" and len(f.args) > 2:
        dims: Any = f.args[1:]
    else:
        dims = f.get(position, name, default)
        if isinstance(dims, bool) or dims is None:
            dims = f.kwargs.get(name, default)
        if f.name in ("softmax", "log_softmax", "softmin") and f.get(1, "dim") is None:
            dims = int(x.ndim not in (0, 1, 3))  # torch's default
    if f.name == "roll" and (dims in ((), []) or (dims == -1 and "dims" not in f.kwargs and len(f.args) < 3)):
        raise f.refuse("it rolls the flattened tensor")
    if cut.dim in f.dims(dims, x.ndim):
        if cut.joined:
            raise f.refuse(
                "it works along the sharded dim, which is a concatenation of pieces, each sharded on its own"
            )
        if f.name in ("softmax", "log_softmax", "softmin"):
            dtype = next((a for a in (*f.args, *f.kwargs.values()) if isinstance(a, torch.dtype)), None)
            return statistics.softmax(f, x, cut, dtype)
        if f.name == "normalize" and f.get(1, "p", 2.0) == 2:
            return statistics.normalized(f, x, cut, f.dims(dims, x.ndim), f.get(3, "eps", 1e-12))
        raise f.refuse("it works along the sharded dim")
    return Outcome(cut, x.shape[cut.dim])


@rule(
    "sum mean amax amin max min argmax argmin any all prod norm vector_norm logsumexp var std nansum nanmean median",
    "count_nonzero std_mean var_mean",
    piecewise=True,
)
def reduction(f: Frame) -> Outcome:
    x = f.args[0] if f.args else f.kwargs.get("input")
    if f.name in ("max", "min") and any(o is not x for o in f.operands()):
        return elementwise(f)
    x, cut = first(f)
    dims, keep = reduced(f)
    everything = dims is None or (isinstance(dims, (tuple, list)) and not dims)
    over = list(range(x.ndim)) if everything else f.dims(dims, x.ndim)
    if cut.dim not in over:
        out = cut.dim if keep else cut.dim - sum(d < cut.dim for d in over)
        return Outcome(Cut(out, cut.outer), x.shape[cut.dim])
    if f.name in ("sum", "nansum", "mean"):
        count = math.prod(x.shape[d] for d in over)
        return Outcome(None, reduce=float(count) if f.name == "mean" else 1.0)
    if cut.joined:
        raise f.refuse("it reduces over the sharded dim, which is a concatenation of pieces, each sharded on its own")
    if f.name in ("var", "std") and dims is not None and everything:
        # torch itself returns a wrong gradient then
        raise f.refuse("dim=() names no dim", "Leave dim out to reduce over all dims")
    return over_ranks(f, x, cut, over, keep, "all" if dims is None else "none" if everything else "some")


def reduced(f: Frame) -> tuple[Any, bool]:
    """The dims that a reduction names (None: it names no dim), and whether it keeps them as size 1."""
    position = {"norm": 2, "vector_norm": 2}.get(f.name, 1)
    beside = f.name in ("var", "std", "var_mean", "std_mean")  # unbiased precedes keepdim
    dims = f.args[1:] if f.name == "count_nonzero" and len(f.args) > 2 else f.get(position, "dim")
    if isinstance(dims, bool):
        dims = f.kwargs.get("dim")
    return dims, f.name != "count_nonzero" and bool(f.get(position + 1 + beside, "keepdim", False))


def over_ranks(f: Frame, x: Operand, cut: Cut, over: list[int], keep: bool, named: str) -> Outcome:
    """A reduction over the sharded dim other than a sum. `named`: "all" without dims, "none" for (), "some" dims."""
    if f.name in ("var", "std"):
        unbiased = f.args[1] if len(f.args) > 1 and isinstance(f.args[1], bool) else f.get(2, "unbiased", True)
        correction = f.kwargs.get("correction", unbiased)
        return statistics.spread(f, x, cut, over, keep, 1 if correction is None else float(correction))
    if f.name in ("amax", "amin") or (f.name in ("max", "min") and named == "all"):
        return statistics.extremes(f, x, cut, over, keep)
    if f.name in ("any", "all") and named != "none":
        return statistics.flags(f, x, over, keep)
    if f.name == "logsumexp" and named == "some":
        return statistics.logsumexp(f, x, cut, over, keep)
    if f.name in ("norm", "vector_norm") and is_length(f, len(over)):
        return statistics.norm(f, x, cut, over, keep)
    raise f.refuse(
        "it reduces over the sharded dim",
        "over ranks dsp reduces sum, mean, amax, amin, max and min of the whole tensor, any, all, 2-norms, var, std "
        "and logsumexp; put any other reduction into a stage that computes over the dim",
    )


def is_length(f: Frame, dims: int) -> bool:
    """Tell whether a norm is the root of a sum of squares: with two dims, "2" may be a matrix norm."""
    kind = f.get(1, "p" if "p" in f.kwargs else "ord")
    if f.kwargs.get("dtype") is not None or len(f.args) > 4:
        return False
    return kind in ("fro", None) or (kind == 2 and (dims == 1 or f.name == "vector_norm"))


@rule("bucketize searchsorted", piecewise=True)
def searched(f: Frame) -> Outcome:
    """Places of values in sorted rows. A rank needs a row in full. One row serves all values; several rows have the
    values' shape but for the last dim, and are sharded with them."""
    rows, values = f.get(0, "sorted_sequence"), f.get(1, "input")
    if f.name == "bucketize":
        rows, values = f.get(1, "boundaries"), f.get(0, "input")
    cuts = {o.cut for o in f.operands() if o.cut is not None}
    if len(cuts) > 1:
        raise f.refuse("its tensors are sharded along different dims")
    (cut,) = cuts
    narrow: dict[int, Cut] = {}
    if rows.ndim > 1 and cut.dim < rows.ndim - 1:
        narrow = {i: cut for i, o in enumerate(f.operands()) if o.cut is None}
    elif only(f)[0] is not values:
        raise f.refuse("it searches along the sharded dim")
    return Outcome(cut, values.shape[cut.dim], narrow)


MATRICES = "inv inverse pinv det logdet slogdet matrix_exp cholesky qr svd svdvals eigh eigvalsh"
independent("tril triu", "it counts positions along the sharded dim", lambda f, x: (x.ndim - 2, x.ndim - 1))
independent(MATRICES, "it mixes the sharded dim", lambda f, x: (x.ndim - 2, x.ndim - 1))


@rule("solve solve_triangular")
def solve(f: Frame) -> Outcome:
    """Along batch dims, and along the free dim of the right-hand side."""
    a, b = f.get(0, "A"), f.get(1, "B")
    if a.ndim < 2 or b.ndim < 2 or (f.name == "solve" and b.ndim == a.ndim - 1):
        raise f.refuse("its right-hand side is a vector, or a part of it may be read as one")
    free = -1 if f.kwargs.get("left", True) else -2
    if a.cut is None and b.cut is not None and b.cut.dim - b.ndim == free:
        return Outcome(Cut(max(a.ndim, b.ndim) + free, b.cut.outer), b.shape[free])
    position, outcome = align(f, [a, b])
    if position >= -2:
        raise f.refuse("it mixes the sharded dim")
    return outcome


@rule("cross")
def cross(f: Frame) -> Outcome:
    a, b = f.get(0, "input"), f.get(1, "other")
    position, outcome = align(f, [a, b])
    ndim = max(a.ndim, b.ndim)
    dim = f.get(2, "dim", -1 if f.func is torch.linalg.cross else None)
    if dim is None:
        raise f.refuse("no dim is named", "Write dim=")
    if ndim + position == f.normal(dim, ndim):
        raise f.refuse("it mixes the sharded dim")
    return outcome


@rule("pairwise_distance")
def pairwise_distance(f: Frame) -> Outcome:
    position, outcome = align(f, [f.get(0, "x1"), f.get(1, "x2")])
    if position == -1:
        raise f.refuse("it adds up along the sharded dim")
    return outcome


@rule("gather take_along_dim")
def taken_by_index(f: Frame) -> Outcome:
    x, swapped = f.get(0, "input"), f.name == "take_along_dim"
    index = f.get(1 if swapped else 2, "indices" if swapped else "index")
    dim = f.get(2 if swapped else 1, "dim")
    if dim is None:
        raise f.refuse("it takes from the flattened tensor")
    dim = f.normal(dim, x.ndim)
    position, outcome = align(f, [x, index])
    if x.ndim + position == dim:
        raise f.refuse("it takes parts of the sharded dim")
    if x.shape[position] != index.shape[position]:
        raise f.refuse("its index and its input have different sizes along the sharded dim")
    return outcome


@rule("index_add index_copy index_reduce scatter scatter_add scatter_reduce")
def put_by_index(f: Frame) -> Outcome:
    x, index, rows = f.get(0, "input"), f.get(2, "index"), f.name.startswith("index")  # entire rows, one index each
    source = f.get(3, "source" if rows else "src")
    beside = [o for o in ((x, source) if rows else (x, index, source)) if isinstance(o, Operand)]
    if rows and index.cut is not None:
        raise f.refuse("its index is sharded")
    dim = f.normal(f.get(1, "dim"), x.ndim)
    if any(o.ndim != x.ndim for o in beside):
        raise f.refuse("its tensors have different numbers of dims")
    position, outcome = align(f, beside)
    if x.ndim + position == dim:
        raise f.refuse("it puts parts into the sharded dim")
    if any(o.shape[position] != x.shape[position] for o in beside):
        raise f.refuse("its source has another size along the sharded dim")
    return outcome


@rule("layer_norm rms_norm", piecewise=True)
def trailing_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    shape = f.get(1, "normalized_shape")
    count = 1 if isinstance(shape, int) else len(shape)
    if cut.dim < x.ndim - count:
        return Outcome(cut, x.shape[cut.dim])
    if cut.joined:
        raise f.refuse(
            "its statistics run over the sharded dim, which is a concatenation of pieces, each sharded on its own"
        )
    if f.name == "rms_norm":
        return statistics.trailing(f, x, cut, count, f.get(2, "weight"), None, f.get(3, "eps"), centred=False)
    return statistics.trailing(f, x, cut, count, f.get(2, "weight"), f.get(3, "bias"), f.get(4, "eps", 1e-5))


@rule("group_norm")
def group_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim == 0:
        return Outcome(cut, x.shape[0])
    return statistics.grouped_norm(
        f, x, cut, f.get(1, "num_groups"), f.get(2, "weight"), f.get(3, "bias"), f.get(4, "eps", 1e-5)
    )


@rule("instance_norm")
def instance_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    running = f.get(1, "running_mean") is not None
    if running if f.get(5, "use_input_stats", True) else cut.dim:
        raise f.refuse("its running statistics are those of the whole tensor")
    if cut.dim == 0:
        return Outcome(cut, x.shape[0], func=f.on_a_row(cut, x.shape[0]))
    return statistics.grouped_norm(f, x, cut, x.shape[1], f.get(3, "weight"), f.get(4, "bias"), f.get(7, "eps", 1e-5))


def all_but_samples(f: Frame, x: Operand) -> range:
    unbatched = {"im2col": 3, "fold": 2}.get(f.name, next((int(c) + 1 for c in f.name if c.isdigit()), 0))
    if x.ndim == unbatched:
        raise f.refuse("its input has no batch dim")
    return range(1, x.ndim)


independent("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d fold", "it mixes dim {}", all_but_samples)
independent("im2col", "it mixes dim {}", all_but_samples, filled=True)


@rule("batch_norm")
def batch_norm(f: Frame) -> Outcome:
    x, cut = first(f)
    if cut.dim == 1:
        raise f.refuse("its running statistics are of all channels")
    if not f.get(5, "training", False):
        return Outcome(cut, x.shape[cut.dim])
    return statistics.batch_norm(f, x, cut, f.get(6, "momentum", 0.1), f.get(7, "eps", 1e-5))
