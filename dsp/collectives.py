"""The collectives DSP needs, as custom ops on plain local tensors: switch, gather, reduce_scatter, all_reduce.

Each is one functional collective with the exact uneven sizes: no padding, no size exchange, no all-gather in disguise,
on every backend. Being custom ops they have fake kernels (torch.compile), autograd formulas (each one's adjoint is
another), and names that selective checkpointing and profilers can see.

All sizes follow `torch.chunk`. `group` is the name of a process group.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dsp.planner import chunk_sizes

_lib = torch.library.Library("dsp", "DEF")
_lib.define("switch(Tensor x, int src, int dst, int src_size, str group) -> Tensor")
_lib.define("gather(Tensor x, int dim, int size, str group) -> Tensor")
_lib.define("reduce_scatter(Tensor x, int dim, str group) -> Tensor")
_lib.define("all_reduce(Tensor x, str group) -> Tensor")


def ranks(group: str) -> tuple[int, int]:
    """(size, rank) of a process group by name."""
    pg = _resolve_process_group(group)  # type: ignore[arg-type]
    return dist.get_world_size(pg), dist.get_rank(pg)


# what every backend carries; other dtypes (bool, complex) travel as bytes
_CARRIED = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
})  # fmt: skip


def _all_to_all(send: Tensor, out_splits: list[int], in_splits: list[int], group: str) -> Tensor:
    return torch.ops._c10d_functional.all_to_all_single(send, out_splits, in_splits, group)


def _wait(x: Tensor) -> Tensor:
    return torch.ops._c10d_functional.wait_tensor(x)


class SwitchPlan:
    """Sizes and block order of one switch on one rank: pack, exchange, unpack.

    A block is what one rank sends to one other: its own part of `src`, the other's part of `dst`, all of the rest.
    When `dst` is outermost the blocks already lie in order and sending copies nothing; otherwise blocks are packed with
    `src` leading, so that the received ones join without a copy. With batch 1 a switch costs one copy either way. The
    order is a function of global sizes alone: strides may differ from rank to rank.
    """

    def __init__(self, x: Tensor, src: int, dst: int, src_size: int, group: str) -> None:
        n, rank = ranks(group)
        self.src, self.dst, self.group = src, dst, group
        self.shape = list(x.shape)
        self.src_parts = chunk_sizes(src_size, n)
        self.dst_parts = chunk_sizes(x.shape[dst], n)
        self.own_src, self.own_dst = self.src_parts[rank], self.dst_parts[rank]
        if x.shape[src] != self.own_src:
            raise RuntimeError(
                f"rank {rank} holds {x.shape[src]} of dim {src}, not its chunk {self.own_src} of {src_size}"
            )
        rest = math.prod(s for d, s in enumerate(x.shape) if d not in (src, dst))
        self.in_splits = [self.own_src * d * rest for d in self.dst_parts]
        self.out_splits = [s * self.own_dst * rest for s in self.src_parts]
        self.out_shape = [*x.shape]
        self.out_shape[src], self.out_shape[dst] = src_size, self.own_dst
        self.dst_leads = all(s == 1 for d, s in enumerate(self.out_shape) if d < dst)

    def pack(self, x: Tensor) -> Tensor:
        if self.dst_leads:
            return x.movedim(self.dst, 0).reshape(-1)
        blocks = x.movedim(self.src, 0)
        at = self.dst + (self.dst < self.src)
        n = len(self.dst_parts)
        if len(set(self.dst_parts)) == 1:
            return blocks.unflatten(at, (n, self.own_dst)).movedim(at, 0).reshape(-1)
        send = x.new_empty(x.numel())
        for part, block in zip(send.split(self.in_splits), blocks.split(self.dst_parts, at)):
            part.view(block.shape).copy_(block)
        return send

    def exchange(self, send: Tensor) -> Tensor:
        return _all_to_all(send, self.out_splits, self.in_splits, self.group)

    def unpack(self, received: Tensor) -> Tensor:
        lead = self.dst if self.dst_leads else self.src
        shape = list(self.out_shape)
        shape.insert(0, shape.pop(lead))
        if self.dst_leads:
            at = self.src + (self.src < self.dst)
            blocks = []
            for part, size in zip(received.split(self.out_splits), self.src_parts):
                shape[at] = size
                blocks.append(part.view(shape))
            out = torch.cat(blocks, at)
        else:
            out = received.view(shape)
        return out.movedim(0, lead).contiguous()


def _switch(x: Tensor, src: int, dst: int, src_size: int, group: str) -> Tensor:
    if x.dtype not in _CARRIED:
        raw = x.contiguous().unsqueeze(-1).view(torch.uint8)
        return _switch(raw, src, dst, src_size, group).view(x.dtype).squeeze(-1)
    plan = SwitchPlan(x, src, dst, src_size, group)
    return plan.unpack(_wait(plan.exchange(plan.pack(x))))


def _gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    if x.dtype not in _CARRIED:
        raw = x.contiguous().unsqueeze(-1).view(torch.uint8)
        return _gather(raw, dim, size, group).view(x.dtype).squeeze(-1)
    n, rank = ranks(group)
    parts = chunk_sizes(size, n)
    lead = x.movedim(dim, 0).contiguous()
    if len(set(parts)) == 1:
        out = _wait(torch.ops._c10d_functional.all_gather_into_tensor(lead, n, group))
    else:
        rest = math.prod(lead.shape[1:])
        send = lead.reshape(-1).repeat(n)
        out = _wait(_all_to_all(send, [p * rest for p in parts], [parts[rank] * rest] * n, group))
        out = out.view(size, *lead.shape[1:])
    return out.movedim(0, dim).contiguous()


def _reduce_scatter(x: Tensor, dim: int, group: str) -> Tensor:
    # one exchange and a local sum: the bytes of a reduce-scatter, uneven sizes, and a sum in fp32 for half precision
    n, rank = ranks(group)
    parts = chunk_sizes(x.shape[dim], n)
    lead = x.movedim(dim, 0).contiguous()
    rest = math.prod(lead.shape[1:])
    received = _wait(_all_to_all(lead.view(-1), [parts[rank] * rest] * n, [p * rest for p in parts], group))
    total = received.view(n, parts[rank], *lead.shape[1:])
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    return total.sum(0, dtype=wide).to(x.dtype).movedim(0, dim).contiguous()


def _all_reduce(x: Tensor, group: str) -> Tensor:
    return _wait(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", group))


def _fresh(kernel: Any) -> Any:
    """A view made inside an op may not be written in place outside: hand its storage over as a tensor of its own."""

    def run(*args: Any) -> Tensor:
        out = kernel(*args)
        if not out._is_view():
            return out
        return out.new_empty(0).set_(out.untyped_storage(), out.storage_offset(), out.shape, out.stride())

    return run


for _name, _kernel in [
    ("switch", _switch), ("gather", _gather), ("reduce_scatter", _reduce_scatter), ("all_reduce", _all_reduce),
]:  # fmt: skip
    _lib.impl(_name, _fresh(_kernel), "CPU")
    _lib.impl(_name, _fresh(_kernel), "CUDA")


@torch.library.register_fake("dsp::switch", lib=_lib)
def _(x: Tensor, src: int, dst: int, src_size: int, group: str) -> Tensor:
    n, rank = ranks(group)
    shape = list(x.shape)
    shape[src], shape[dst] = src_size, chunk_sizes(int(x.shape[dst]), n)[rank]
    return x.new_empty(shape)


@torch.library.register_fake("dsp::gather", lib=_lib)
def _(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


@torch.library.register_fake("dsp::reduce_scatter", lib=_lib)
def _(x: Tensor, dim: int, group: str) -> Tensor:
    n, rank = ranks(group)
    shape = list(x.shape)
    shape[dim] = chunk_sizes(int(x.shape[dim]), n)[rank]
    return x.new_empty(shape)


@torch.library.register_fake("dsp::all_reduce", lib=_lib)
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep(names: str) -> Any:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.shape = inputs[0].shape
        for name, value in zip(names.split(), inputs[1:]):
            setattr(ctx, name, value)

    return setup


torch.library.register_autograd(
    "dsp::switch",
    lambda ctx, g: (torch.ops.dsp.switch(g, ctx.dst, ctx.src, ctx.shape[ctx.dst], ctx.group), None, None, None, None),
    setup_context=_keep("src dst src_size group"),
    lib=_lib,
)
torch.library.register_autograd(
    "dsp::gather",
    lambda ctx, g: (torch.ops.dsp.reduce_scatter(g, ctx.dim, ctx.group), None, None, None),
    setup_context=_keep("dim size group"),
    lib=_lib,
)
torch.library.register_autograd(
    "dsp::reduce_scatter",
    lambda ctx, g: (torch.ops.dsp.gather(g, ctx.dim, ctx.shape[ctx.dim], ctx.group), None, None),
    setup_context=_keep("dim group"),
    lib=_lib,
)
torch.library.register_autograd(
    "dsp::all_reduce",
    lambda ctx, g: (torch.ops.dsp.all_reduce(g, ctx.group), None),
    setup_context=_keep("group"),
    lib=_lib,
)


class PendingSwitch:
    """A switch under way. Forward and backward each run in two halves, so both can overlap with computation.

    The two halves are tied by an empty token tensor: uneven buffers may not travel through autograd, which checks
    shapes.
    """

    def __init__(self, x: Tensor, src: int, dst: int, src_size: int, group: str) -> None:
        self.args = (src, dst, src_size, group)
        self.waited = False
        self.token = _Launch.apply(x, self)

    def wait(self) -> Tensor:
        if self.waited:
            raise RuntimeError("this switch was already waited for; wait() may be called once")
        self.waited = True
        return _Await.apply(self.token, self)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingSwitch) -> Tensor:  # type: ignore[override]
        ctx.pending = pending
        pending.there = SwitchPlan(x, *pending.args)  # type: ignore[attr-defined]
        pending.buffer = pending.there.exchange(pending.there.pack(x))  # type: ignore[attr-defined]
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:  # type: ignore[override]
        pending = ctx.pending
        return pending.back.unpack(_wait(pending.__dict__.pop("grad_buffer"))), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: PendingSwitch) -> Tensor:  # type: ignore[override]
        ctx.pending = pending
        return pending.there.unpack(_wait(pending.__dict__.pop("buffer")))  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        pending = ctx.pending
        src, dst, _, group = pending.args
        pending.back = SwitchPlan(grad, dst, src, pending.there.shape[dst], group)
        pending.grad_buffer = pending.back.exchange(pending.back.pack(grad))
        return grad.new_empty(0), None
