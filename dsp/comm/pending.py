"""Switches in two halves, launched in one place and waited for in another, to overlap with computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsp.comm.exchange import UnderWay, alone, in_format, switch_plan
from dsp.comm.observers import run_observed, save_observer
from dsp.comm.wire import AS_IT_IS, Wire


class PendingSwitch:
    """A switch under way. Forward and backward each run in two halves, so that both can overlap with computation.

    An empty token tensor connects the halves in autograd, which checks shapes and would refuse uneven buffers.
    """

    def __init__(self, x: Tensor, src: int, dst: int, src_size: int, group: str) -> None:
        self.there, self.back = (src, dst, src_size, group), (dst, src, x.shape[dst], group)
        self.under_way: list[UnderWay] = []
        self.waited = False
        self.token = _Launch.apply(x, self)

    def wait(self) -> Tensor:
        if self.waited:
            raise RuntimeError("this switch was already waited for; wait() may be called once")
        self.waited = True
        return _Await.apply(self.token, self)

    def launch(self, x: Tensor, where: Any) -> Tensor:
        plan = switch_plan(x, *where)
        self.under_way.append(UnderWay.start(plan, plan.pack(x)))
        return x.new_empty(0)

    def land(self) -> Tensor:
        one = self.under_way.pop()
        return one.plan.unpack(one.arrived())


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: PendingSwitch) -> Tensor:
        ctx.pending = pending
        return pending.launch(x, pending.there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.pending.land(), None


class _Await(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: PendingSwitch) -> Tensor:
        ctx.pending = pending
        save_observer(ctx)
        return pending.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, ctx.pending.launch, grad, ctx.pending.back), None


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
        switch = switch_plan(x, src, dst, size, group, came, gone)
        plan = in_format(switch, wire, x.dtype)
        under_way = UnderWay.start(plan, plan.pack(x))
        numbers = plan.empty(under_way.received)
        out = alone(switch.room(numbers))
        room = out.data  # has its own version counter, so that autograd does not see the data that arrives as a write
        arrived.append(lambda: switch.fill(room, plan.read(under_way.arrived(), numbers)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return run_observed(ctx, torch.ops.dsp.switch, grad, *ctx.back), None, None
