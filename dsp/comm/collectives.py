"""The collectives DSP needs, as custom ops on plain local tensors: switch, gather, reduce_scatter, all_reduce.

Each is one collective with the exact uneven sizes: no padding, no exchange of sizes, no all-gather in disguise, on
every backend. As custom ops they have fake kernels (for torch.compile), autograd formulas (the adjoint of each is
another of them), and names that selective checkpointing and profilers see. Most are an exchange: a function from an
op's arguments to its `ExchangePlan` is its kernel and its bytes (`exchanges`).

Sizes follow `torch.chunk`, except in `switch_among`, which gets the part of each of some ranks. `group` is the name of
a process group, for a switch with the ways that it may go (`dsp.comm.node_routes`). `wire` names the format in which a
switch travels, and `back` that of its adjoint (`dsp.comm.wire`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from dsp.comm.exchange import (
    CARRIED,
    Among,
    Bytes,
    ExchangePlan,
    Form,
    Together,
    alone,
    as_sent,
    dense,
    in_format,
    joint_plan,
    launched,
    like,
    order_of,
    ranks,
    run,
    switch_plan,
    switch_plan_of_parts,
    wait,
)
from dsp.comm.observers import notify, run_observed, save_observer
from dsp.comm.traffic_formulas import COLLECTIVES, counts, sent
from dsp.comm.wire import SAME, format_of
from dsp.planner import chunk_sizes
from dsp.support.private import arrives_by

EXACT = torch.Tag.needs_exact_strides  # results have the memory order of the arguments: a compiler may not change it
_lib = torch.library.Library("dsp", "DEF")


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


# ----------------------------------------------------------------------------------------------------------------- ops


def collective(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], back: Callable[..., Any] | None = None
) -> str:
    """Define an op on plain local tensors, on every device, and return its name.

    fake: makes the result without data. back: from the gradient, the shape of the op's tensor and its other arguments
    to the tensor's gradient. Of an op on several tensors: from the gradients that there are, the numbers of their
    tensors, the shapes of all tensors and the other arguments.
    """
    name = schema.partition("(")[0]

    def implementation(*args: Any) -> Any:
        notify(name, *args)
        out = kernel(*args)
        return list(map(alone, out)) if isinstance(out, list) else alone(out)

    def backward(ctx: Any, grad: Any) -> Any:
        if type(ctx.shape) is torch.Size:
            return run_observed(ctx, back, grad, ctx.shape, *ctx.arguments), *[None] * len(ctx.arguments)  # type: ignore[arg-type]
        asks = [i for i in ctx.asks if grad[i] is not None]  # a result that no rank used has none
        some = [grad[i] for i in asks]
        grads = dict(zip(asks, run_observed(ctx, back, some, asks, ctx.shape, *ctx.arguments))) if asks else {}  # type: ignore[arg-type]
        # torch takes an empty list for one of tensors
        return [grads.get(i) for i in range(len(grad))], *([] if value == [] else None for value in ctx.arguments)

    _lib.define(schema, tags=EXACT)
    for device in ("CPU", "CUDA"):
        _lib.impl(name, implementation, device)
    torch.library.register_fake(f"dsp::{name}", fake, lib=_lib)
    if back is not None:
        torch.library.register_autograd(f"dsp::{name}", backward, setup_context=_keep, lib=_lib)
    return name


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    save_observer(ctx)
    x, *ctx.arguments = inputs
    if isinstance(x, Tensor):
        ctx.shape = x.shape
    else:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.asks = [t.shape for t in x], [i for i, t in enumerate(x) if t.requires_grad]


def exchanges(
    schema: str, plan: Callable[..., ExchangePlan], fake: Callable[..., Any], back: Callable[..., Any], kind: str,
    kernel: Callable[[Any, Tensor], Tensor] = run,
) -> None:  # fmt: skip
    """Define an op on one tensor that is an exchange, which `plan` makes of its arguments, counted as `kind`."""
    name = collective(schema, lambda x, *arguments: kernel(plan(x, *arguments), x), fake, back)
    COLLECTIVES[name] = lambda x, *arguments: sent(kind, plan(x, *arguments), x)


def exchanges_of_many(
    schema: str, plans: Callable[..., list[tuple[ExchangePlan, Any]]], fake: Callable[..., Any],
    back: Callable[..., Any], kind: str,
) -> None:  # fmt: skip
    """Define an op on several tensors that is exchanges: `plans` makes them and what each packs of the arguments."""

    def kernel(xs: list[Tensor], *arguments: Any) -> list[Tensor]:
        # all at once: links have something to send while a rank waits for a slower one
        under_way = [(plan, launched(plan.pack(x), plan)) for plan, x in plans(xs, *arguments)]
        for _, one in under_way:
            one.go_on()
        results = [plan.unpack(one.arrived()) for plan, one in under_way]
        while isinstance(results[0], list):
            results = [y for row in results for y in row]
        return [y if y.ndim == x.ndim else y.view(x.dtype).squeeze(-1) for x, y in zip(xs, results)]

    name = collective(schema, kernel, fake, back)
    COLLECTIVES[name] = lambda *args: [one for plan, x in plans(*args) for one in sent(kind, plan, x)]


def resized(x: Tensor, sizes: dict[int, int]) -> Tensor:
    """A new tensor like x, with other sizes of some dims."""
    return like(x, [sizes.get(d, size) for d, size in enumerate(x.shape)])


def _local_size(size: Any, pieces: Sequence[int], group: str) -> int:
    n, rank = ranks(group)
    return chunk_sizes(tuple(pieces) or int(size), n)[rank]


# ------------------------------------------------------------------------------------------------------------ switches

ops = torch.ops.dsp


def _switch(
    x: Tensor, src: int, dst: int, src_size: int, group: str, src_pieces: Sequence[int] = (),
    dst_pieces: Sequence[int] = (), wire: str = SAME, back: str = SAME,
) -> ExchangePlan:  # fmt: skip
    plan = switch_plan(x, src, dst, src_size, group, src_pieces, dst_pieces)
    return plan if wire == SAME else in_format(plan, wire, x.dtype)


exchanges(
    "switch(Tensor x, int src, int dst, int src_size, str group, int[] src_pieces=[], int[] dst_pieces=[], "
    "str wire='same', str back='same') -> Tensor",
    _switch,
    lambda x, src, dst, size, group, src_pieces=(), dst_pieces=(), *wire: resized(
        x, {src: size, dst: _local_size(x.shape[dst], dst_pieces, group)}
    ),
    lambda g, shape, src, dst, size, group, src_pieces, dst_pieces, wire, back: ops.switch(
        g, dst, src, shape[dst], group, dst_pieces, src_pieces, back, wire
    ),
    "switch",
)


def _switch_among(
    x: Tensor, src: int, dst: int, src_parts: list[int], dst_parts: list[int], among: list[int], group: str
) -> ExchangePlan:
    rank, parts = among.index(ranks(group)[1]), (tuple(src_parts), tuple(dst_parts))
    return Among(switch_plan_of_parts(tuple(x.shape), src, dst, *parts, rank, order_of(x), group), among)


exchanges(
    "switch_among(Tensor x, int src, int dst, int[] src_parts, int[] dst_parts, int[] among, str group) -> Tensor",
    _switch_among,
    lambda x, src, dst, src_parts, dst_parts, among, group: resized(
        x, {src: sum(src_parts), dst: dst_parts[among.index(ranks(group)[1])]}
    ),
    lambda g, shape, src, dst, src_parts, dst_parts, *arguments: ops.switch_among(
        g, dst, src, dst_parts, src_parts, *arguments
    ),
    "switch",
)


def _switches(
    xs: list[Tensor], src: list[int], dst: list[int], src_size: list[int], group: str, of: list[int],
    src_pieces: list[int], dst_pieces: list[int], wire: str, back: str,
) -> list[tuple[ExchangePlan, Any]]:  # fmt: skip
    """The exchanges of several switches, and what each packs. With `of` they share one, in which tensors of one number
    there, the pieces of one value, are packed as one."""
    ends = [*zip(src, dst, src_size)]
    if not of:
        pieces = group, src_pieces, dst_pieces
        return [(in_format(switch_plan(x, *w, *pieces), wire, x.dtype), x) for x, w in zip(xs, ends)]
    if not any(format_of(wire, x.dtype) for x in xs):
        if len({x.dtype for x in xs}) > 1:  # as bytes, in a dim of their own
            xs = [x.resolve_conj().resolve_neg().unsqueeze(-1).view(torch.uint8) for x in xs]
        return [(joint_plan(xs, ends, group), xs)]
    plans, groups = list[ExchangePlan](), [[*same] for _, same in groupby(range(len(xs)), of.__getitem__)]
    for indices in groups:
        plan = joint_plan([xs[i] for i in indices], [ends[i] for i in indices], group)
        dtype = xs[indices[0]].dtype
        plans.append(in_format(plan, wire, dtype) if format_of(wire, dtype) else Bytes(plan, dtype))
    return [(Together(plans), [[xs[i] for i in indices] for indices in groups])]


exchanges_of_many(
    "switch_many(Tensor[] xs, int[] src, int[] dst, int[] src_size, str group, int[] of, int[] src_pieces, "
    "int[] dst_pieces, str wire, str back) -> Tensor[]",
    _switches,
    lambda xs, src, dst, size, group, of, *pieces: [
        ops.switch(x, *ends, group, *pieces) for x, ends in zip(xs, zip(src, dst, size))
    ],
    lambda gs, asks, shapes, src, dst, size, group, of, src_pieces, dst_pieces, wire, back: ops.switch_many(
        gs, [dst[i] for i in asks], [src[i] for i in asks], [shapes[i][dst[i]] for i in asks], group,
        [of[i] for i in asks] if of else [], dst_pieces, src_pieces, back, wire,
    ),
    "switch",
)  # fmt: skip


def _start(x: Tensor, out_splits: list[int], in_splits: list[int], group: str, total: int, rows: list[int]) -> Tensor:
    one = launched(x, ExchangePlan(group, in_splits, out_splits, total, rows))
    while one.pending > 1:
        one.go_on()
    arrives_by(one.out, one.works)
    return one.out


collective(  # to be waited for
    "start(Tensor x, int[] out_splits, int[] in_splits, str group, int total, int[] rows) -> Tensor", _start,
    lambda x, out_splits, *arguments: like(x, [sum(out_splits)]),
)  # fmt: skip

# ---------------------------------------------------------------------------------------- along one dim: gathers, sums


class AlongDim(ExchangePlan):
    """An exchange of rows of one dim: of a tensor in which it is the first.

    gives, takes: the rows that go to each rank and come from each; send: from this rank's rows to those that it sends,
    in the order of ranks; make: from the rows that arrive to those of the result.
    """

    def __init__(
        self, form: Form, dim: int, group: str, gives: Sequence[int], takes: Sequence[int],
        send: Callable[[Tensor], Tensor] = Tensor.contiguous, make: Callable[[Tensor], Tensor] = Tensor.contiguous,
    ) -> None:  # fmt: skip
        (shape, self.dim_order), self.dim, self.send, self.make = form, dim, send, make
        row_shape = shape[:dim] + shape[dim + 1 :]
        self.arriving, row = (sum(takes), *row_shape), math.prod(row_shape)
        super().__init__(group, [k * row for k in gives], [k * row for k in takes])

    def pack(self, x: Tensor) -> Tensor:
        return self.send(x.movedim(self.dim, 0)).reshape(-1)

    def unpack(self, received: Tensor) -> Tensor:
        return dense(self.make(received.view(self.arriving)).movedim(0, self.dim), self.dim_order)


def in_pieces(rows: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
    """Rows in blocks of these sizes, and within each in parts, ordered by part and then by block."""
    parts, step = rows.split([size for block in sizes for size in block]), len(sizes[0])
    return torch.cat([parts[i] for k in range(step) for i in range(k, len(parts), step)])


@lru_cache(maxsize=4096)
def _gather(form: Form, dim: int, size: int, group: str, pieces: tuple[int, ...], n: int, rank: int) -> AlongDim:
    parts, of_pieces = chunk_sizes(pieces or size, n), [chunk_sizes(piece, n) for piece in pieces]
    make = partial(in_pieces, sizes=[*zip(*of_pieces)]) if pieces else Tensor.contiguous
    times = n, *[1] * (len(form[0]) - 1)
    return AlongDim(form, dim, group, [parts[rank]] * n, parts, lambda rows: rows.repeat(times), make)


@lru_cache(maxsize=4096)
def _reduce_scatter(
    form: Form, dim: int, group: str, pieces: tuple[int, ...], n: int, rank: int, dtype: torch.dtype
) -> AlongDim:
    # one exchange and a local sum: the bytes of a reduce-scatter, with uneven sizes and fp32 sums of half precision
    parts, of_pieces = chunk_sizes(pieces or form[0][dim], n), [chunk_sizes(piece, n) for piece in pieces]
    send = partial(in_pieces, sizes=of_pieces) if pieces else Tensor.contiguous

    def summed(rows: Tensor) -> Tensor:
        return rows.view(n, parts[rank], *rows.shape[1:]).sum(0, dtype=summed_in(dtype)).to(dtype)

    return AlongDim(form, dim, group, parts, [parts[rank]] * n, send, summed)


def gathered(plan: AlongDim, x: Tensor) -> Tensor:
    if len({*plan.out_splits}) > 1:
        return run(plan, x)
    rows, _ = as_sent(x.movedim(plan.dim, 0).contiguous())
    out = wait(torch.ops._c10d_functional.all_gather_into_tensor(rows, len(plan.in_splits), plan.group))
    return plan.unpack(out.view(x.dtype))


exchanges(
    "gather(Tensor x, int dim, int size, str group, int[] pieces=[]) -> Tensor",
    lambda x, dim, size, group, pieces=(): _gather(
        (tuple(x.shape), order_of(x)), dim, size, group, tuple(pieces), *ranks(group)
    ),
    lambda x, dim, size, *arguments: resized(x, {dim: size}),
    lambda g, shape, dim, size, group, pieces: ops.reduce_scatter(g, dim, group, pieces), "gather", gathered,
)  # fmt: skip
exchanges(
    "reduce_scatter(Tensor x, int dim, str group, int[] pieces=[]) -> Tensor",
    lambda x, dim, group, pieces=(): _reduce_scatter(
        (tuple(x.shape), order_of(x)), dim, group, tuple(pieces), *ranks(group), x.dtype
    ),
    lambda x, dim, group, pieces=(): resized(x, {dim: _local_size(x.shape[dim], pieces, group)}),
    lambda g, shape, dim, group, pieces: ops.gather(g, dim, shape[dim], group, pieces), "reduce_scatter",
)  # fmt: skip


def _all_reduce(x: Tensor, group: str) -> Tensor:
    wide = x.to(added_in(x.dtype)).contiguous()
    if wide.is_complex():
        wide = torch.view_as_real(wide)
    total = wait(torch.ops._c10d_functional.all_reduce(wide, "sum", group))
    return dense((torch.view_as_complex(total) if x.is_complex() else total).to(x.dtype), order_of(x))


collective(
    "all_reduce(Tensor x, str group) -> Tensor", _all_reduce, lambda x, group: like(x, x.shape),
    lambda g, shape, group: ops.all_reduce(g, group),
)  # fmt: skip


@counts("all_reduce", "all_reduce")
def all_reduce(x: Tensor, *arguments: Any) -> int:
    n, _ = ranks(arguments[-1])
    return -(-2 * x.numel() * added_in(x.dtype).itemsize * (n - 1) // n)  # a ring: reduce-scatter, then all-gather
