"""The collectives DSP needs, as custom ops on plain local tensors: switch, gather, reduce_scatter, all_reduce.

Each is one collective with the exact uneven sizes: no padding, no exchange of sizes, no all-gather in disguise, on
every backend. As custom ops they have fake kernels (for torch.compile), autograd formulas (the adjoint of each is
another of them), and names that selective checkpointing and profilers see.

Sizes follow `torch.chunk`, except in `switch_among`, which gets the part of each of some ranks. `group` is the name of
a process group, for a switch with the ways that it may go (`dsp.comm.node_routes`). `wire` names the format in which a
switch travels, and `back` that of its adjoint (`dsp.comm.wire`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from dsp.comm.exchange import (
    CARRIED,
    EXACT,
    alone,
    as_sent,
    begun,
    dense,
    exchanged,
    go_on,
    joint_plan,
    launched,
    like,
    order_of,
    ranks,
    switch_plan,
    switch_plan_of_parts,
    wait,
)
from dsp.comm.observers import notify, run_observed, save_observer
from dsp.comm.wire import SAME, format_of
from dsp.planner import chunk_sizes

_lib = torch.library.Library("dsp", "DEF")
for _op in (
    "switch(Tensor x, int src, int dst, int src_size, str group, int[] src_pieces=[], int[] dst_pieces=[], "
    "str wire='same', str back='same') -> Tensor",
    "switch_among(Tensor x, int src, int dst, int[] src_parts, int[] dst_parts, int[] among, str group) -> Tensor",
    "switch_many(Tensor[] xs, int[] src, int[] dst, int[] src_size, str group, int[] of=[], "
    "str wire='same', str back='same') -> Tensor[]",
    "switch_each(Tensor[] xs, int[] src, int[] dst, int[] src_size, str group, int[] src_pieces, int[] dst_pieces, "
    "str wire='same', str back='same') -> Tensor[]",
    "gather(Tensor x, int dim, int size, str group, int[] pieces=[]) -> Tensor",
    "reduce_scatter(Tensor x, int dim, str group, int[] pieces=[]) -> Tensor",
    "all_reduce(Tensor x, str group) -> Tensor",
    "start(Tensor send, int[] out_splits, int[] in_splits, str group, int total) -> Tensor",  # to be waited for
):
    _lib.define(_op, tags=EXACT)


def inexact(x: Tensor) -> bool:
    """Tell whether a tensor is floating-point or complex, and so may have a gradient."""
    return x.is_floating_point() or x.is_complex()


@cache
def added_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an all-reduce adds: the tensor's own, unless no backend can add in it."""
    if dtype in CARRIED or (dtype.is_complex and dtype.itemsize > 4):  # complex: two real numbers
        return dtype
    if dtype.is_complex:
        return torch.complex64
    if dtype.is_floating_point:
        return torch.float32
    return torch.int32 if dtype.itemsize < 4 else torch.int64


@cache
def summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the sums of ranks are added up: at least fp32."""
    if dtype == torch.bool:
        return torch.uint8
    return added_in(torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype)


def _switch(
    x: Tensor, src: int, dst: int, src_size: int, group: str, src_pieces: Sequence[int] = (),
    dst_pieces: Sequence[int] = (), wire: str = SAME, back: str = SAME,
) -> Tensor:  # fmt: skip
    plan = switch_plan(x, src, dst, src_size, group, src_pieces, dst_pieces)
    return plan.unpack(plan.exchange(plan.pack(x), group, None if wire == SAME else format_of(wire, x.dtype)))


def _switch_among(
    x: Tensor, src: int, dst: int, src_parts: list[int], dst_parts: list[int], among: list[int], group: str
) -> Tensor:
    rank = among.index(ranks(group)[1])
    plan = switch_plan_of_parts(tuple(x.shape), src, dst, tuple(src_parts), tuple(dst_parts), rank, order_of(x))
    return plan.unpack(plan.exchange_among(plan.pack(x), among, group))


def _switch_many(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, of: Sequence[int] = (),
    wire: str = SAME, back: str = SAME,
) -> list[Tensor]:  # fmt: skip
    if any(format_of(wire, x.dtype) for x in xs):
        return import_module("dsp.comm.packed").switch_packed(xs, src, dst, src_size, group, of, wire)
    if len({x.dtype for x in xs}) > 1:  # as bytes, in a dim of their own
        raw = [x.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8) for x in xs]
        return [y.view(x.dtype).squeeze(-1) for x, y in zip(xs, _switch_many(raw, src, dst, src_size, group))]
    plan = joint_plan(xs, src, dst, src_size, group)
    return plan.unpack(exchanged(plan.pack(xs), plan.out_splits, plan.in_splits, group, None, plan))


def _switch_each(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, src_pieces: Sequence[int],
    dst_pieces: Sequence[int], wire: str = SAME, back: str = SAME,
) -> list[Tensor]:  # fmt: skip
    # all at once: links have something to send while a rank waits for a slower one
    plans = [switch_plan(x, *w, group, src_pieces, dst_pieces) for x, w in zip(xs, zip(src, dst, src_size))]
    under_way = [
        launched(p.pack(x), p.out_splits, p.in_splits, group, format_of(wire, x.dtype), p) for p, x in zip(plans, xs)
    ]
    go_on(under_way)
    return [plan.unpack(arrived()) for plan, arrived in zip(plans, under_way)]


def _gather(x: Tensor, dim: int, size: int, group: str, pieces: Sequence[int] = ()) -> Tensor:
    n, rank = ranks(group)
    parts = chunk_sizes(tuple(pieces) or size, n)
    lead = x.movedim(dim, 0).contiguous()
    if len(set(parts)) == 1:
        out = wait(torch.ops._c10d_functional.all_gather_into_tensor(as_sent(lead)[0], n, group)).view(x.dtype)
    else:
        rest = math.prod(lead.shape[1:])
        send = lead.reshape(-1).repeat(n)
        out = exchanged(send, [p * rest for p in parts], [parts[rank] * rest] * n, group)
    whole = out.view(size, *lead.shape[1:])
    if pieces:  # the pieces came rank by rank
        came = whole.split([own for each in zip(*(chunk_sizes(piece, n) for piece in pieces)) for own in each])
        whole = torch.cat([came[i] for k in range(len(pieces)) for i in range(k, len(came), len(pieces))])
    return dense(whole.movedim(0, dim), order_of(x))


def _reduce_scatter(x: Tensor, dim: int, group: str, pieces: Sequence[int] = ()) -> Tensor:
    # one exchange and a local sum: the bytes of a reduce-scatter, with uneven sizes and fp32 sums of half precision
    n, rank = ranks(group)
    parts = chunk_sizes(tuple(pieces) or x.shape[dim], n)
    lead = x.movedim(dim, 0).contiguous()
    if pieces:  # the pieces go rank by rank
        own = lead.split([own for piece in pieces for own in chunk_sizes(piece, n)])
        lead = torch.cat([own[i] for k in range(n) for i in range(k, len(own), n)])
    rest = math.prod(lead.shape[1:])
    received = exchanged(lead.view(-1), [parts[rank] * rest] * n, [p * rest for p in parts], group)
    total = received.view(n, parts[rank], *lead.shape[1:])
    return dense(total.sum(0, dtype=summed_in(x.dtype)).to(x.dtype).movedim(0, dim), order_of(x))


def _all_reduce(x: Tensor, group: str) -> Tensor:
    wide = x.to(added_in(x.dtype)).contiguous()
    if wide.is_complex():
        wide = torch.view_as_real(wide)
    total = wait(torch.ops._c10d_functional.all_reduce(wide, "sum", group))
    return dense((torch.view_as_complex(total) if x.is_complex() else total).to(x.dtype), order_of(x))


def _fresh(name: str, kernel: Any) -> Any:
    def run(*args: Any) -> Any:
        notify(name, *args)
        out = kernel(*args)
        return list(map(alone, out)) if isinstance(out, list) else alone(out)

    return run


def implement(lib: torch.library.Library, name: str, kernel: Any) -> None:
    """The kernel of an op on plain local tensors, on every device."""
    for device in ("CPU", "CUDA"):
        lib.impl(name, _fresh(name, kernel), device)


for _name, _kernel in [
    ("switch", _switch), ("switch_among", _switch_among), ("switch_many", _switch_many),
    ("switch_each", _switch_each), ("gather", _gather), ("reduce_scatter", _reduce_scatter),
    ("all_reduce", _all_reduce), ("start", begun),
]:  # fmt: skip
    implement(_lib, _name, _kernel)


def _shapes(name: str, shape: Callable[..., Sequence[int]]) -> None:
    """Register the fake kernel of an op, whose result has this shape."""
    torch.library.register_fake(f"dsp::{name}", lambda x, *where: like(x, shape(x.shape, *where)), lib=_lib)


def _resized(shape: Sequence[int], sizes: dict[int, int]) -> list[int]:
    return [sizes.get(d, size) for d, size in enumerate(shape)]


def _own(size: Any, group: str) -> int:
    n, rank = ranks(group)
    return chunk_sizes(size if isinstance(size, tuple) else int(size), n)[rank]


_shapes(
    "switch",
    lambda s, src, dst, src_size, group, src_pieces=(), dst_pieces=(), *wire: _resized(
        s, {src: src_size, dst: _own(tuple(dst_pieces) or s[dst], group)}
    ),
)
_shapes(
    "switch_among",
    lambda s, src, dst, src_parts, dst_parts, among, group: _resized(
        s, {src: sum(src_parts), dst: dst_parts[among.index(ranks(group)[1])]}
    ),
)
_shapes("start", lambda s, out_splits, *where: [sum(out_splits)])
_shapes("gather", lambda s, dim, size, group, pieces=(): _resized(s, {dim: size}))
_shapes("reduce_scatter", lambda s, dim, group, pieces=(): _resized(s, {dim: _own(tuple(pieces) or s[dim], group)}))
_shapes("all_reduce", lambda s, group: s)


def _many_like(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, *other: Any
) -> list[Tensor]:
    return _each_like(xs, src, dst, src_size, group)


def _each_like(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, *pieces: Any
) -> list[Tensor]:
    return [torch.ops.dsp.switch(x, *where, group, *pieces) for x, where in zip(xs, zip(src, dst, src_size))]


def _keep(names: str) -> Any:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        save_observer(ctx)
        ctx.shape = inputs[0].shape
        for name, value in zip(names.split(), inputs[1:]):
            setattr(ctx, name, value)

    return setup


def _adjoint(name: str, given: str, send: Callable[[Any, Tensor], Tensor]) -> None:
    """Register the backward of an op on one tensor; `given` names its other arguments."""

    def backward(ctx: Any, g: Tensor) -> Any:
        return send(ctx, g), *[None] * len(given.split())

    torch.library.register_autograd(f"dsp::{name}", backward, setup_context=_keep(given), lib=_lib)


def _switch_back(ctx: Any, g: Tensor) -> Tensor:
    where = ctx.dst, ctx.src, ctx.shape[ctx.dst], ctx.group, ctx.dst_pieces, ctx.src_pieces, ctx.back, ctx.wire
    return run_observed(ctx, torch.ops.dsp.switch, g, *where)


def _switch_among_back(ctx: Any, g: Tensor) -> Tensor:
    where = ctx.dst, ctx.src, ctx.dst_parts, ctx.src_parts, ctx.among, ctx.group
    return run_observed(ctx, torch.ops.dsp.switch_among, g, *where)


def keep_many(ctx: Any, xs: list[Tensor]) -> None:
    """Note, in the forward of an op on several tensors, which of them need a gradient."""
    save_observer(ctx)
    ctx.set_materialize_grads(False)
    ctx.asks = [i for i, x in enumerate(xs) if x.requires_grad]


def back_many(ctx: Any, grads: list[Tensor | None], send: Callable[[list[int]], list[Tensor]]) -> list[Tensor | None]:
    """The gradients in the backward of an op on several tensors. `send` gets the indices of those that have one: a
    result that no rank used has none."""
    asks = [i for i in ctx.asks if grads[i] is not None]
    found = dict(zip(asks, send(asks))) if asks else {}
    return [found.get(i) for i in range(len(grads))]


def _keep_many(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    xs, ctx.src, ctx.dst, _, ctx.group, *ctx.other, ctx.wire, ctx.back = inputs
    ctx.sizes = [x.shape[dst] for x, dst in zip(xs, ctx.dst)]
    keep_many(ctx, xs)


def _switches_back(op: Any, other: Callable[[Any, list[int]], Sequence[Any]], required: int) -> Any:
    def backward(ctx: Any, grads: list[Tensor | None]) -> Any:
        def send(asks: list[int]) -> list[Tensor]:
            where = [[v[i] for i in asks] for v in (ctx.dst, ctx.src, ctx.sizes)]
            formats = ctx.back, ctx.wire
            return run_observed(ctx, op, [grads[i] for i in asks], *where, ctx.group, *other(ctx, asks), *formats)

        # torch takes an empty list for one of tensors, and does not count trailing arguments with default values
        rest = [*ctx.other, ctx.wire, ctx.back]
        while len(rest) > required and rest[-1] in ([], SAME):
            rest.pop()
        return back_many(ctx, grads, send), *[None] * 4, *(None if given else [] for given in rest)

    return backward


for _name, _like, _other, _required in (
    ("switch_many", _many_like, lambda ctx, asks: [[of[i] for i in asks] if of else of for of in ctx.other], 0),
    ("switch_each", _each_like, lambda ctx, asks: reversed(ctx.other), 2),
):
    _back = _switches_back(getattr(torch.ops.dsp, _name), _other, _required)
    torch.library.register_fake(f"dsp::{_name}", _like, lib=_lib)
    torch.library.register_autograd(f"dsp::{_name}", _back, setup_context=_keep_many, lib=_lib)
_adjoint("switch", "src dst src_size group src_pieces dst_pieces wire back", _switch_back)
_adjoint("switch_among", "src dst src_parts dst_parts among group", _switch_among_back)
_adjoint(
    "gather", "dim size group pieces",
    lambda ctx, g: run_observed(ctx, torch.ops.dsp.reduce_scatter, g, ctx.dim, ctx.group, ctx.pieces),
)  # fmt: skip
_adjoint(
    "reduce_scatter", "dim group pieces",
    lambda ctx, g: run_observed(ctx, torch.ops.dsp.gather, g, ctx.dim, ctx.shape[ctx.dim], ctx.group, ctx.pieces),
)  # fmt: skip
_adjoint("all_reduce", "group", lambda ctx, g: run_observed(ctx, torch.ops.dsp.all_reduce, g, ctx.group))
