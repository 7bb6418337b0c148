"""Switches in two halves, launched in one place and waited for in another, to overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsp.comm.exchange import alone, switch_plan, wait
from dsp.comm.observers import notify, run_observed, save_observer
from dsp.comm.wire import AS_IT_IS, Wire, format_of


class PendingSwitch:
    """A switch under way. Forward and backward each run in two halves, so that both can overlap with computation.

    An empty token tensor connects the halves in autograd, which checks shapes and would refuse uneven buffers.
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
    def forward(ctx: Any, x: Tensor, pending: PendingSwitch) -> Tensor:
        ctx.pending = pending
        notify("switch", x, *pending.args)
        plan = pending.there = switch_plan(x, *pending.args)  # type: ignore[attr-defined]
        pending.buffer = plan.exchange(plan.pack(x), pending.args[-1], later=True)  # type: ignore[attr-defined]
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        pending = ctx.pending
        return pending.back.unpack(wait(pending.__dict__.pop("grad_buffer"))), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: PendingSwitch) -> Tensor:
        ctx.pending = pending
        save_observer(ctx)
        return pending.there.unpack(wait(pending.__dict__.pop("buffer")))  # type: ignore[attr-defined]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pending = ctx.pending
        src, dst, _, group = pending.args
        size = pending.there.shape[dst]
        run_observed(ctx, notify, "switch", grad, dst, src, size, group)
        pending.back = switch_plan(grad, dst, src, size, group)
        pending.grad_buffer = pending.back.exchange(pending.back.pack(grad), group, later=True)
        return grad.new_empty(0), None


def ahead(
    x: Tensor, src: int, dst: int, src_size: int, group: str, *pieces: Sequence[int], wire: Wire = AS_IT_IS
) -> tuple[Tensor, Callable[[], None]]:
    """A switch under way: its result, allocated but without data, and a function that waits and fills the result.

    Before that function ran, the result must not be read, but views of it may be taken. Its gradient is switched in one
    collective.
    """
    arrived = list[Callable[[], None]]()
    out = _Ahead.apply(x, (src, dst, src_size, group, *(pieces or ((), ())), *wire.names), arrived)
    return out, arrived[0]


class _Ahead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: Any, arrived: list[Callable[[], None]]) -> Tensor:
        src, dst, size, group, came, gone, wire, back = where
        save_observer(ctx)
        ctx.back = dst, src, x.shape[dst], group, gone, came, back, wire
        notify("switch", x, *where)
        plan, form = switch_plan(x, src, dst, size, group, came, gone), format_of(wire, x.dtype)
        received = plan.exchange(plan.pack(x), group, form, later=True)
        numbers = received if form is None else x.new_empty(sum(plan.out_splits))
        out = alone(plan.room(numbers))
        room = out.data  # has its own version counter, so that autograd does not see the data that arrives as a write

        def arrive() -> None:
            waited = wait(received)
            plan.fill(room, waited if form is None else form.unpack(waited, plan.out_splits, numbers))

        arrived.append(arrive)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, torch.ops.dsp.switch, grad, *ctx.back), None, None
