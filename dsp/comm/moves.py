"""Switches and gathers of local tensors, for the functions on DTensors and for the runtime."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dsp.comm.collectives  # noqa: F401 (its ops)
from dsp.comm.layout import Axis, Cut, factor
from dsp.comm.observers import run_observed, save_observer
from dsp.planner import fuses


def switch_local(x: Tensor, src: Cut, dst: Cut, shape: Any, sp: Axis) -> Tensor:
    """From this rank's part of a tensor of global `shape` cut at `src` to its part cut at `dst`."""
    if src.outer == dst.outer == 1 and src.dim != dst.dim:
        return torch.ops.dsp.switch(x, src.dim, dst.dim, shape[src.dim], sp.switching, (), (), *sp.formats)
    part = Part(x, src, dst, shape)
    if part.pieces is None:
        return switch_together([part], sp)[0]
    return part.closed(torch.ops.dsp.switch(*part.opened(sp), sp.switching, *part.pieces, *sp.formats), sp)


class Part(NamedTuple):
    """A switch to be made: this rank's part of a tensor of global `shape`, from the cut `src` to the cut `dst`."""

    local: Tensor
    src: Cut
    dst: Cut
    shape: tuple[int, ...]

    def small(self, n: int) -> bool:
        """Tell whether the tensor is so small that its switch over n ranks shares a collective with others."""
        return fuses(math.prod(self.shape) * self.local.element_size(), n)

    @property
    def simple(self) -> bool:
        """Tell whether the exchange can run on the tensor's own dims: neither cut is inside a fold."""
        return self.src.dim != self.dst.dim and all(cut.outer == 1 or cut.joined for cut in (self.src, self.dst))

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...] | None:
        """The pieces of its two dims, () for one that is not joined; None if the exchange cannot take it whole."""
        joined = tuple(cut.pieces(0) if cut.joined else () for cut in (self.src, self.dst))
        return joined if self.simple or not any(joined) else None

    def opened(self, sp: Axis) -> tuple[Tensor, int, int, int]:
        """For the exchange: the part with folds opened, the dims of `src` and `dst`, the size of the first."""
        if self.simple:
            return self.local, self.src.dim, self.dst.dim, self.shape[self.src.dim]
        fine, (i, j) = factor(self.shape, (self.src, self.dst))
        return self.local.reshape(sp.local_shape(fine, Cut(i))), i, j, fine[i]

    def closed(self, received: Tensor, sp: Axis) -> Tensor:
        """The result of the exchange with folds closed again."""
        return received if self.simple else received.reshape(sp.local_shape(self.shape, self.dst))

    def split(self, sp: Axis) -> list[Part]:
        """The switches of its pieces as tensors of their own: for each piece along `src`, each piece along `dst`. If
        neither dim is joined, the switch itself."""
        if not (self.src.joined or self.dst.joined):
            return [self]
        (src, src_sizes), (dst, dst_sizes) = (pieces_of(cut, self.shape) for cut in (self.src, self.dst))
        lengths = [src._replace(dim=0).local_size(size, sp.size, sp.rank) for size in src_sizes]
        parts = []
        for row, size in zip(self.local.split(lengths, src.dim), src_sizes):
            for piece, extent in zip(row.split(dst_sizes, dst.dim), dst_sizes):
                shape = list(self.shape)
                shape[src.dim], shape[dst.dim] = size, extent
                parts.append(Part(piece, src, dst, tuple(shape)))
        return parts

    def together(self, results: list[Tensor]) -> Tensor:
        """The result, joined from the results of its pieces."""
        if len(results) == 1:
            return results[0]
        count = len(pieces_of(self.dst, self.shape)[1])
        rows = [results[i : i + count] for i in range(0, len(results), count)]
        joined = [row[0] if count == 1 else torch.cat(row, self.dst.dim) for row in rows]
        return joined[0] if len(joined) == 1 else torch.cat(joined, self.src.dim)


def pieces_of(cut: Cut, shape: Sequence[int]) -> tuple[Cut, list[int]]:
    """The cut of each piece of a joined dim, and the lengths of the pieces; a dim that is not joined is one piece."""
    size = shape[cut.dim]
    return (Cut(cut.dim), list(cut.pieces(size))) if cut.joined else (cut, [size])


def switch_together(parts: Sequence[Part], sp: Axis) -> list[Tensor]:
    """Several switches in one all-to-all, forward and backward."""
    pieces = [part.split(sp) for part in parts]
    every = [piece for row in pieces for piece in row]
    of = [k for k, row in enumerate(pieces) for _ in row]
    received = torch.ops.dsp.switch_many(
        *map(list, zip(*[piece.opened(sp) for piece in every])), sp.switching, of, (), (), *sp.formats
    )
    results = iter([piece.closed(t, sp) for piece, t in zip(every, received)])
    return [part.together([next(results) for _ in row]) for part, row in zip(parts, pieces)]


def switch_all(parts: Sequence[Part], sp: Axis) -> list[Tensor]:
    """Several switches at one place. Those of small tensors share one all-to-all; those of large ones run at once.

    Their backward does the same.
    """
    if len(parts) == 1:
        return [switch_local(*parts[0], sp)]
    alike: dict[Any, list[int]] = {}
    for i, p in enumerate(parts):
        alike.setdefault("small" if p.small(sp.size) else i if p.pieces is None else p.pieces, []).append(i)
    results: dict[int, Tensor] = {}
    for kind, indices in alike.items():
        of = [parts[i] for i in indices]
        if len(indices) == 1:
            outputs = [switch_local(*of[0], sp)]
        elif kind == "small":
            outputs = switch_together(of, sp)
        else:
            opened = map(list, zip(*[p.opened(sp) for p in of]))
            received = torch.ops.dsp.switch_many(*opened, sp.switching, (), *kind, *sp.formats)
            outputs = [p.closed(t, sp) for p, t in zip(of, received)]
        results.update(zip(indices, outputs))
    return [results[i] for i in range(len(parts))]


def gather_local(x: Tensor, cut: Cut, shape: Any, sp: Axis) -> Tensor:
    if cut.outer == 1:
        return torch.ops.dsp.gather(x, cut.dim, shape[cut.dim], sp.group)
    if cut.joined:
        return torch.ops.dsp.gather(x, cut.dim, shape[cut.dim], sp.group, cut.pieces(shape[cut.dim]))
    fine, (i,) = factor(shape, (cut,))
    out = torch.ops.dsp.gather(x.reshape(sp.local_shape(fine, Cut(i))), i, fine[i], sp.group)
    return out.reshape(tuple(shape))


class SplitInput(torch.autograd.Function):
    """This rank's part of a replicated model input. In backward every rank gets the input's whole, true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sp: Axis, cut: Cut) -> Tensor:
        save_observer(ctx)
        ctx.sp, ctx.cut, ctx.shape = sp, cut, tuple(x.shape)
        return sp.narrow(x, cut).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, gather_local, grad, ctx.cut, ctx.shape, ctx.sp) / ctx.sp.size, None, None


class WholeInput(torch.autograd.Function):
    """A model input that stays replicated. In backward every rank gets its true gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sp: Axis) -> Tensor:
        save_observer(ctx)
        ctx.sp = sp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, torch.ops.dsp.all_reduce, grad, ctx.sp.group) / ctx.sp.size, None


class ScaleGradient(torch.autograd.Function):
    """The identity; in backward the gradient is divided by N, which makes it true for an input that came sharded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.size, None
