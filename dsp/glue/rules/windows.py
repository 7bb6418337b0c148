"""Rules of operations with a window along a dim: each row of the result reads a range of rows of the operand.

If that dim is sharded, a rank reads the rows that its chunk of the result needs, including rows of its neighbours;
beyond the ends of the dim there is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from dsp.comm.halo import Rows
from dsp.comm.layout import Cut, chunk
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import Frame, Outcome, first, rule

Local = Callable[..., torch.Tensor]


def spanned(
    f: Frame, size: int, out: int, reads: Callable[[int, int], tuple[int, int]]
) -> tuple[list[tuple[int, int]], int, int]:
    """The rows of `size` that each rank reads, and how many rows this rank needs beyond either end.

    `reads` returns the rows that results `start` to `stop` read, including those beyond the ends. A rank without
    results reads nothing, and needs padding for the first result instead.
    """
    spans, lack = [], (0, 0)
    for rank in range(f.n):
        start, length = chunk(out, f.n, rank)
        a, b = reads(start, start + length) if length else reads(0, 1)
        span = (min(max(a, 0), size), min(max(b, 0), size)) if length else (0, 0)
        spans.append((span[0], max(span)))
        if rank == f.rank:
            beyond = (min(max(0, -a), b - a), b - max(size, a) if b > size else 0)
            lack = beyond if length else (b - a, 0)
    return spans, *lack


def windowed(
    f: Frame, x: Operand, cut: Cut, out: int, reads: Callable[[int, int], tuple[int, int]], run: Local,
    *, fill: float | None = 0.0, crop: Callable[[int, int], int] = lambda start, first: 0, **kwargs: Any,
) -> Outcome:  # fmt: skip
    """An operation of which results `start` to `stop` along the dim read the rows that `reads` returns.

    `run` computes on these rows, without padding along the dim; `fill` is the number beyond the ends, or None to repeat
    the row at the end. `crop`: how many of run's results precede `start`, if `first` is the first row read.
    """
    if cut.outer != 1:
        raise f.refuse("its window crosses from one part of a fold into the next, as from one b into the next in (b t)")
    dim, size = cut.dim, x.shape[cut.dim]
    spans, before, after = spanned(f, size, out, reads)
    start, length = chunk(out, f.n, f.rank)
    skip = crop(start, reads(start, start + length)[0]) if length else 0

    def local(rows: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        result = run(padded(rows, dim, before, after, fill), *args, **kw)
        return result if result.shape[dim] == length else result.narrow(dim, skip, length)

    i = next(i for i, o in enumerate(f.operands()) if o is x)
    return Outcome(cut, out, rows={i: (Rows(dim, size, tuple(spans)),)}, func=local, **kwargs)


def strided(
    f: Frame, x: Operand, cut: Cut, window: tuple[int, int, int], run: Local, out: int | None = None, **kwargs: Any
) -> Outcome:
    """A window (step, lead, span): `span` rows at every `step`, with `lead` rows of padding at either end."""
    step, lead, span = window
    out = (x.shape[cut.dim] + 2 * lead - span) // step + 1 if out is None else out
    if out < 1:
        raise f.refuse("the sharded dim is shorter than the window")
    if (step, lead, span) == (1, 0, 1):  # each row on its own, also in a fold
        return Outcome(cut, out, func=f.on_a_row(cut, out))
    return windowed(f, x, cut, out, lambda a, b: (a * step - lead, (b - 1) * step - lead + span), run, **kwargs)


def padded(x: torch.Tensor, dim: int, before: int, after: int, fill: float | None) -> torch.Tensor:
    if not before + after:
        return x

    def rows(k: int, edge: int) -> torch.Tensor:
        if fill is None and x.shape[dim]:
            return x.narrow(dim, edge, 1).expand(*x.shape[:dim], k, *x.shape[dim + 1 :])
        return x.new_full((*x.shape[:dim], k, *x.shape[dim + 1 :]), fill or 0.0)

    parts = [rows(before, 0)] * (before > 0) + [x] + [rows(after, x.shape[dim] - 1)] * (after > 0)
    return torch.cat(parts, dim)


def each(f: Frame, value: Any, d: int) -> list[int]:
    """One number for every dim of a window; a single number counts for all."""
    numbers = [value] * d if isinstance(value, int) else list(value)
    if len(numbers) == 1:
        numbers *= d
    if len(numbers) != d:
        raise f.refuse(f"{value} is not a number for each of {d} dims")
    return numbers


def placed(f: Frame, d: int) -> tuple[Operand, Cut, int]:
    """The sharded operand, its cut, and the sharded dim of its window; a negative one is batch or channels."""
    x, cut = first(f)
    return x, cut, cut.dim - (x.ndim - d)


def batch(f: Frame, x: Operand, cut: Cut, d: int) -> Outcome:
    if cut.dim or x.ndim == d + 1:
        raise f.refuse("it mixes channels, along which the tensor is sharded")
    return Outcome(cut, x.shape[0])


def dims_of(f: Frame) -> int:
    return next(int(c) for c in f.name if c.isdigit())


@rule("conv1d conv2d conv3d")
def conv(f: Frame) -> Outcome:
    d = dims_of(f)
    x, cut, at = placed(f, d)
    if at < 0:
        return batch(f, x, cut, d)
    weight, bias = f.get(1, "weight"), f.get(2, "bias")
    stride, dilation = each(f, f.get(3, "stride", 1), d), each(f, f.get(5, "dilation", 1), d)
    reach = [k * (size - 1) for k, size in zip(dilation, weight.shape[2:])]
    padding, out = f.get(4, "padding", 0), None
    if padding == "same":
        if any(r % 2 for i, r in enumerate(reach) if i != at):
            raise f.refuse(
                "padding='same' with an even kernel pads the two sides of another dim unequally; pad explicitly, or "
                "take an odd kernel"
            )
        padding = [r // 2 for r in reach]
        out = x.shape[cut.dim]
    else:
        padding = [0] * d if padding == "valid" else each(f, padding, d)
    lead, padding[at] = padding[at], 0
    kwargs = {"bias": bias, "stride": stride, "padding": padding, "dilation": dilation, "groups": f.get(6, "groups", 1)}
    window = stride[at], lead, reach[at] + 1
    return strided(f, x, cut, window, getattr(F, f.name), out, args=(x, weight), kwargs=kwargs)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def conv_transpose(f: Frame) -> Outcome:
    d = dims_of(f)
    x, cut, at = placed(f, d)
    if at < 0:
        return batch(f, x, cut, d)
    weight, bias = f.get(1, "weight"), f.get(2, "bias")
    stride, dilation = each(f, f.get(3, "stride", 1), d), each(f, f.get(7, "dilation", 1), d)
    padding, more = each(f, f.get(4, "padding", 0), d), each(f, f.get(5, "output_padding", 0), d)
    step, lead, reach = stride[at], padding[at], dilation[at] * (weight.shape[2 + at] - 1)
    out = (x.shape[cut.dim] - 1) * step - 2 * lead + reach + more[at] + 1
    if out < 1:
        raise f.refuse("its result is empty")
    gap = step - 1 > reach  # some results lie between two rows and read neither
    padding[at] = more[at] = 0

    def reads(a: int, b: int) -> tuple[int, int]:
        stop = (b - 1 + lead) // step + 1 + gap
        return min(-((reach - a - lead) // step), (a + lead) // step), stop

    kwargs = {
        "bias": bias, "stride": stride, "padding": padding, "output_padding": more,
        "groups": f.get(6, "groups", 1), "dilation": dilation,
    }  # fmt: skip
    return windowed(
        f, x, cut, out, reads, getattr(F, f.name), crop=lambda start, row: start + lead - row * step,
        args=(x, weight), kwargs=kwargs,
    )  # fmt: skip


@rule("avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d")
def pool(f: Frame) -> Outcome:
    d = dims_of(f)
    x, cut, at = placed(f, d)
    if at < 0:
        return Outcome(cut, x.shape[cut.dim], func=f.on_a_row(cut, x.shape[cut.dim]))
    highest = f.name.startswith("max")
    size = each(f, f.get(1, "kernel_size"), d)
    stride = f.get(2, "stride")
    stride = list(size) if stride is None or (isinstance(stride, (tuple, list)) and not stride) else each(f, stride, d)
    padding, dilation = each(f, f.get(3, "padding", 0), d), [1] * d
    kwargs: dict[str, Any] = {"kernel_size": size, "stride": stride, "padding": padding}
    if highest:
        dilation = kwargs["dilation"] = each(f, f.get(4, "dilation", 1), d)
        if f.get(6, "return_indices", False):
            raise f.refuse("its indices would count from the start of this rank's part")
    else:
        kwargs["count_include_pad"] = f.get(5, "count_include_pad", True)
        if d > 1:
            kwargs["divisor_override"] = f.get(6, "divisor_override")
        if padding[at] and not kwargs["count_include_pad"]:
            raise f.refuse("count_include_pad=False divides by fewer elements at the ends of the sharded dim")
    if f.get(5 if highest else 4, "ceil_mode", False):
        raise f.refuse("with ceil_mode=True its last window may extend over the end of the sharded dim")
    lead, padding[at] = padding[at], 0
    window = stride[at], lead, dilation[at] * (size[at] - 1) + 1
    return strided(
        f, x, cut, window, getattr(F, f.name), fill=float("-inf") if highest else 0.0, args=(x,), kwargs=kwargs
    )


@rule("interpolate")
def interpolate(f: Frame) -> Outcome:
    x, cut = first(f)
    d = x.ndim - 2
    if cut.dim < 2:
        return Outcome(cut, x.shape[cut.dim], func=f.on_a_row(cut, x.shape[cut.dim]))
    size, scale, mode = f.get(1, "size"), f.get(2, "scale_factor"), f.get(3, "mode", "nearest")
    at = cut.dim - 2
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear") or f.get(4, "align_corners"):
        raise f.refuse(f"mode {mode!r} reads along the whole sharded dim")
    if f.get(6, "antialias", False):
        raise f.refuse("antialias has no rule along the sharded dim")
    if size is None:
        scales = [scale] * d if isinstance(scale, (int, float)) else list(scale)
        if f.get(5, "recompute_scale_factor") or any(s != int(s) for s in scales):
            raise f.refuse("it stretches the sharded dim by a factor that is not a whole number")
        target = [int(s) * k for s, k in zip(scales, x.shape[2:])]
    else:
        target = each(f, size, d)
    times, over = divmod(target[at], x.shape[cut.dim])
    if over or not times:
        raise f.refuse("it stretches the sharded dim by a factor that is not a whole number")
    beside = 0 if mode.startswith("nearest") else 1
    end = x.shape[cut.dim]

    def reads(a: int, b: int) -> tuple[int, int]:
        return max(a // times - beside, 0), min((b - 1) // times + 1 + beside, end)

    def run(rows: torch.Tensor) -> torch.Tensor:
        local = [*target[:at], rows.shape[cut.dim] * times, *target[at + 1 :]]
        return F.interpolate(rows, size=local, mode=mode)

    return windowed(
        f, x, cut, target[at], reads, run, crop=lambda start, row: start - row * times, args=(x,), kwargs={}
    )


@rule("pixel_shuffle pixel_unshuffle")
def pixels(f: Frame) -> Outcome:
    """Channels become r x r pixels, or the other way; along height and width a row becomes r rows, or r rows one."""
    x, cut = first(f)
    finer = f.name == "pixel_shuffle"
    r, size = f.get(1, "upscale_factor" if finer else "downscale_factor"), x.shape[cut.dim]
    if cut.dim < x.ndim - 3 or r == 1:
        return Outcome(cut, size, func=f.on_a_row(cut, size))
    if cut.dim == x.ndim - 3:
        raise f.refuse("it makes pixels of channels, along which the tensor is sharded")
    run = getattr(F, f.name)
    if not finer:
        return windowed(f, x, cut, size // r, lambda a, b: (a * r, b * r), run)
    return windowed(
        f, x, cut, size * r, lambda a, b: (a // r, (b - 1) // r + 1), run, crop=lambda start, row: start - row * r
    )


@rule("unfold")
def unfold(f: Frame) -> Outcome:
    x, cut = first(f)
    if f.normal(f.get(1, "dimension"), x.ndim) != cut.dim:
        return Outcome(cut, x.shape[cut.dim])
    size, step = f.get(2, "size"), f.get(3, "step")
    return strided(f, x, cut, (step, 0, size), torch.Tensor.unfold, args=(x, cut.dim, size, step), kwargs={})


@rule("pad")
def pad(f: Frame) -> Outcome:
    x, cut = first(f)
    amounts, mode, value = list(f.get(1, "pad")), f.get(2, "mode", "constant"), f.get(3, "value")
    k = 2 * (x.ndim - 1 - cut.dim)
    before, after = (amounts + [0] * (k + 2))[k : k + 2]
    if not (before or after):
        return Outcome(cut, x.shape[cut.dim], func=f.on_a_row(cut, x.shape[cut.dim]))
    amounts[k : k + 2] = 0, 0
    if mode == "reflect" and cut.outer == 1:
        return mirrored(f, x, cut, before, after, amounts)
    if mode not in ("constant", "replicate"):
        raise f.refuse(f"mode={mode!r} takes its padding from other rows of the sharded dim")
    out, end = x.shape[cut.dim] + before + after, x.shape[cut.dim]
    if out < 1:
        raise f.refuse("its result has no rows along the sharded dim")
    if mode == "replicate" and min(before, after) < 0:
        raise f.refuse("it replicates one end of the sharded dim and cuts off the other")

    def reads(a: int, b: int) -> tuple[int, int]:
        if mode == "replicate":  # results beyond an end read the row at that end
            a, b = min(a, end - 1 + before), max(b, before + 1)
        return a - before, b - before

    def run(rows: torch.Tensor) -> torch.Tensor:
        return F.pad(rows, amounts, mode, value) if any(amounts) else rows

    return windowed(
        f, x, cut, out, reads, run, fill=None if mode == "replicate" else value or 0.0,
        crop=lambda start, row: start - before - row, args=(x,), kwargs={},
    )  # fmt: skip


def mirrored(f: Frame, x: Operand, cut: Cut, before: int, after: int, padding: list[int]) -> Outcome:
    """Padding by the rows next to the ends, in reverse order: each rank reads the span that contains its rows.

    padding: of the other dims, as F.pad takes it.
    """
    dim, end, out = cut.dim, x.shape[cut.dim], x.shape[cut.dim] + before + after
    if min(before, after) < 0:
        raise f.refuse("it pads one end of the sharded dim and cuts the other", "Pad both ends, or cut first")

    def place(row: int) -> int:
        return end - 1 - abs(end - 1 - abs(row))

    spans = []
    for rank in range(f.n):
        start, length = chunk(out, f.n, rank)
        a, b = start - before, start - before + length
        places = [place(row) for row in (a, b - 1, *(turn for turn in (0, end - 1) if a <= turn < b))]
        spans.append((min(places), max(places) + 1) if length else (0, 0))
    start, length = chunk(out, f.n, f.rank)

    def local(rows: torch.Tensor) -> torch.Tensor:
        if length and (start < before or start + length > before + end):
            of = torch.arange(start - before, start - before + length, device=rows.device)
            of = end - 1 - (end - 1 - of.abs()).abs()
            rows = rows.index_select(dim, of - spans[f.rank][0])
        return F.pad(rows, padding, "reflect" if length else "constant") if any(padding) else rows

    return Outcome(cut, out, rows={0: (Rows(dim, end, tuple(spans)),)}, func=local, args=(x,), kwargs={})


@rule("grid_sample")
def grid_sample(f: Frame) -> Outcome:
    x, grid = f.get(0, "input"), f.get(1, "grid")
    cuts = [(o.cut.dim + (o is grid and o.cut.dim > 0), o) for o in (x, grid) if o.cut]  # as dims of the result
    places = {(dim, o.cut.outer, o.shape[o.cut.dim]) for dim, o in cuts if o.cut}
    if len(places) > 1 or any(dim > 1 if o is x else dim == grid.ndim for dim, o in cuts):
        raise f.refuse("it may read any position of the sharded dim, or its operands are sharded along different dims")
    ((dim, outer, size),) = places
    return Outcome(Cut(dim, outer), size, {i: Cut(0, outer) for i, o in enumerate(f.operands()) if not (o.cut or dim)})
