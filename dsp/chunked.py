"""A switch in several all-to-alls, so that each may travel while what the next one sends is computed.

Every rank's part of the dim that is sharded before, `src`, is cut into as many pieces, and all-to-all i carries piece i
of every rank. Forward, a piece is sent as soon as it is there, and the pieces that came are joined once all did. In
backward the gradients of all pieces start at once, the last piece's first: that is what backward begins with, while the
others travel. The bytes are those of one switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsp.exchange import SwitchPlan, joined, order_of, packed, place, ranks, switch_plan_of_parts, wait
from dsp.observers import run_observed, save_observer
from dsp.planner import chunk_sizes, piece_sizes
from dsp.wire import AS_IT_IS, Format, Wire, format_of


class UnderWay(NamedTuple):
    """One of the all-to-alls, and what its numbers are to become."""

    plan: SwitchPlan
    form: Format | None
    received: Tensor
    dtype: torch.dtype

    @classmethod
    def start(cls, plan: SwitchPlan, send: Tensor, group: str, wire: str) -> UnderWay:
        form, splits = format_of(wire, send.dtype), (plan.out_splits, plan.in_splits)
        flat, *splits = (send, *splits) if form is None else packed(form, send, *splits, group)  # type: ignore[assignment]
        return cls(plan, form, torch.ops.dsp.start(flat, *splits, group), send.dtype)

    def arrived(self) -> Tensor:
        """What came, flat, once it did."""
        came = wait(self.received)
        if self.form is None:
            return came
        return self.form.unpack(came, self.plan.out_splits, came.new_empty(sum(self.plan.out_splits), dtype=self.dtype))


class ChunkedSwitch:
    """One switch of a local part, from `src` to `dst`, in `count` pieces: `send` each in order, then `join`."""

    def __init__(
        self, src: int, dst: int, sizes: tuple[int, int], group: str, count: int, wire: Wire = AS_IT_IS
    ) -> None:
        """sizes: of the whole tensor along `src` and `dst`."""
        self.src, self.dst, self.group, self.count, self.wire = src, dst, group, count, wire.names
        n, self.rank = ranks(group)
        self.pieces = [piece_sizes(part, count) for part in chunk_sizes(sizes[0], n)]  # of each rank
        self.there = chunk_sizes(sizes[1], n)
        self.under_way: dict[int, UnderWay] = {}
        self.tokens: list[Tensor] = []

    def send(self, piece: Tensor) -> None:
        """Send the next piece of this rank's part."""
        self.tokens.append(_Send.apply(piece, self, len(self.tokens)))

    def join(self) -> Tensor:
        """The switched tensor, once all pieces came."""
        return _Join.apply(self, *self.tokens)

    def let_go(self) -> None:
        """Wait for what nobody will read any more: torch keeps it for good otherwise."""
        for piece in self.under_way.values():
            wait(piece.received)
        self.under_way.clear()

    # --- without autograd ---

    def launch(self, i: int, piece: Tensor) -> None:
        parts = tuple(own[i] for own in self.pieces)
        where = tuple(piece.shape), self.src, self.dst, parts, self.there, self.rank, order_of(piece)
        plan = switch_plan_of_parts(*where)
        self.under_way[i] = UnderWay.start(plan, plan.pack(piece), self.group, self.wire[0])

    def collect(self) -> Tensor:
        came = [self.under_way.pop(i) for i in range(self.count)]
        parts = [piece.plan.shaped(piece.arrived().split(piece.plan.out_splits)) for piece in came]
        in_order = [parts[i][r] for r in range(len(self.pieces)) for i in range(self.count)]
        return joined(in_order, self.src, came[0].plan.kept)

    def launch_back(self, grad: Tensor) -> None:
        """Send all pieces of the gradient of the result, the last first."""
        cut, order, shape = [own[i] for own in self.pieces for i in range(self.count)], order_of(grad), [*grad.shape]
        blocks: Sequence[Tensor] = ()
        for i in reversed(range(self.count)):
            parts = tuple(own[i] for own in self.pieces)
            shape[self.src] = sum(parts)
            plan = switch_plan_of_parts(tuple(shape), self.dst, self.src, self.there, parts, self.rank, order)
            blocks = blocks or plan.leading(grad).split(cut, plan.block_dim)
            send = grad.new_empty(sum(plan.in_splits))
            place(send.split(plan.in_splits), blocks[i :: self.count])
            self.under_way[i] = UnderWay.start(plan, send, self.group, self.wire[1])

    def take_back(self, i: int) -> Tensor:
        """The gradient of a piece, once it came."""
        piece = self.under_way.pop(i)
        return piece.plan.unpack(piece.arrived())


class _Send(torch.autograd.Function):
    """Of a piece on its way the token, which is empty: it ties what was sent to what comes of it."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, switch: ChunkedSwitch, i: int) -> Tensor:
        ctx.switch, ctx.i = switch, i
        switch.launch(i, piece)
        return piece.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.switch.take_back(ctx.i), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, switch: ChunkedSwitch, *tokens: Tensor) -> Tensor:
        save_observer(ctx)
        ctx.switch = switch
        return switch.collect()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run_observed(ctx, ctx.switch.launch_back, grad)
        return None, *[grad.new_empty(0)] * ctx.switch.count
