"""A switch in several all-to-alls, so that each travels while the data of the next one is computed.

Each rank cuts its part of one of the two dims, `cut`, into pieces, and all-to-all i carries piece i of every rank. A
switch from `cut` sends each piece as soon as it is computed, and joins the received ones when all are there. One to
`cut` sends all pieces at once, and waits for each when it is needed. Each of the two is the backward of the other, and
begins with the last piece. The bytes are those of one switch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsp.comm.exchange import SwitchPlan, alone, order_of, packed, place, ranks, switch_plan_of_parts, wait
from dsp.comm.formats import Format
from dsp.comm.observers import run_observed, save_observer
from dsp.comm.wire import format_of
from dsp.planner import chunk_sizes, piece_sizes


class UnderWay(NamedTuple):
    """One of the all-to-alls, under way."""

    plan: SwitchPlan
    form: Format | None
    received: Tensor
    dtype: torch.dtype

    @classmethod
    def start(cls, plan: SwitchPlan, send: Tensor, group: str, wire: str) -> UnderWay:
        form, splits = format_of(wire, send.dtype), (plan.out_splits, plan.in_splits)
        flat, *splits = (send, *splits) if form is None else packed(form, send, *splits, group)  # type: ignore[assignment]
        total = plan.total if form is None else form.nbytes(plan.total)
        return cls(plan, form, torch.ops.dsp.start(flat, *splits, group, total), send.dtype)

    def arrived(self) -> Tensor:
        """The flat tensor that arrives, after a wait."""
        came = wait(self.received)
        if self.form is None:
            return came
        return self.form.unpack(came, self.plan.out_splits, came.new_empty(sum(self.plan.out_splits), dtype=self.dtype))

    def parts(self) -> list[Tensor]:
        """The part of the result from each rank; the memory order may differ from piece to piece."""
        plan = self.plan
        parts = [part.view(shape) for part, shape in zip(self.arrived().split(plan.out_splits), plan.shapes)]
        return parts if plan.dst_leads else [part.movedim(0, plan.src) for part in parts]


class ChunkedSwitch:
    """One switch in `count` pieces of the dim `cut`, between tensors sharded along `cut` and along `other`.

    After the code that computes the pieces, it switches from `cut` to `other`: `send` each in order, then `join`.
    Before the code that reads the pieces, it switches from `other` to `cut`: `start` returns a token for each piece,
    and `take` waits for the piece of a token.
    """

    def __init__(
        self, cut: int, other: int, sizes: tuple[int, int], group: str, count: int, formats: tuple[str, str]
    ) -> None:
        """sizes: of the whole tensor along `cut` and `other`; formats: from `cut` to `other`, and back."""
        self.cut, self.other, self.group, self.count, self.formats = cut, other, group, count, formats
        n, self.rank = ranks(group)
        self.pieces = [piece_sizes(part, count) for part in chunk_sizes(sizes[0], n)]  # of each rank
        self.there = chunk_sizes(sizes[1], n)
        self.under_way: dict[int, UnderWay] = {}
        self.tokens: list[Tensor] = []

    def send(self, piece: Tensor) -> None:
        """Send the next piece of this rank's part."""
        self.tokens.append(_Send.apply(piece, self, len(self.tokens)))

    def join(self) -> Tensor:
        """Wait for all pieces, and return the switched tensor."""
        tokens, self.tokens = self.tokens, []  # their autograd nodes hold this object, which may not hold them
        return _Join.apply(self, *tokens)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Send all pieces, and return a token for each of this rank's own, which are under way."""
        return _Start.apply(x, self)

    def take(self, token: Tensor, i: int) -> Tensor:
        """Wait for the piece of a token, and return it in the token's dtype."""
        return _Take.apply(token, self, i).to(token.dtype)

    def let_go(self) -> None:
        """Wait for pieces that nobody will read, since torch would keep their memory otherwise."""
        for piece in self.under_way.values():
            wait(piece.received)
        self.under_way.clear()
        self.tokens.clear()

    # --- without autograd ---

    def launch(self, i: int, piece: Tensor) -> None:
        """Send piece i of this rank's part, towards the layout along `other`."""
        parts = tuple(own[i] for own in self.pieces)
        where = tuple(piece.shape), self.cut, self.other, parts, self.there, self.rank, order_of(piece)
        plan = switch_plan_of_parts(*where)
        self.under_way[i] = UnderWay.start(plan, plan.pack(piece), self.group, self.formats[0])

    def collect(self) -> Tensor:
        """Wait for all pieces, and join them to this rank's part along `other`."""
        came = [self.under_way.pop(i) for i in range(self.count)]
        parts = [piece.parts() for piece in came]
        in_order = [parts[i][r] for r in range(len(self.pieces)) for i in range(self.count)]
        return came[0].plan.join((), parts=in_order)

    def deal(self, x: Tensor, order: Iterable[int]) -> None:
        """Send this rank's part along `other` as pieces along `cut`, in this order."""
        sizes, shape = [own[i] for own in self.pieces for i in range(self.count)], [*x.shape]
        blocks: list[Tensor] = []
        for i in order:
            parts = tuple(own[i] for own in self.pieces)
            shape[self.cut] = sum(parts)
            plan = switch_plan_of_parts(
                tuple(shape), self.other, self.cut, self.there, parts, self.rank, order_of(x)
            )  # fmt: skip
            blocks = blocks or [*plan.leading(x).split(sizes, plan.block_dim)]
            send = x.new_empty(sum(plan.in_splits))
            place(send.split(plan.in_splits), blocks[i :: self.count])
            self.under_way[i] = UnderWay.start(plan, send, self.group, self.formats[1])

    def piece(self, i: int) -> Tensor:
        """Wait for piece i of this rank's part along `cut`."""
        came = self.under_way.pop(i)
        return came.plan.unpack(came.arrived())


class _Send(torch.autograd.Function):
    """The token of a piece under way: an empty tensor that connects the piece to the result in autograd."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, switch: ChunkedSwitch, i: int) -> Tensor:
        ctx.switch, ctx.i = switch, i
        switch.launch(i, piece)
        return piece.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> Any:
        return ctx.switch.piece(ctx.i), None, None


class _Join(torch.autograd.Function):
    """The result of all tokens. Its gradient goes back in pieces, the last piece first, as backward needs them."""

    @staticmethod
    def forward(ctx: Any, switch: ChunkedSwitch, *tokens: Tensor) -> Tensor:
        save_observer(ctx)
        ctx.switch = switch
        return alone(switch.collect())  # it may be written in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run_observed(ctx, ctx.switch.deal, grad, reversed(range(ctx.switch.count)))
        return None, *[grad.new_empty(0)] * ctx.switch.count


class _Start(torch.autograd.Function):
    """The tokens of the pieces that arrive when a tensor is sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: ChunkedSwitch) -> tuple[Tensor, ...]:
        ctx.switch = switch
        switch.deal(x, range(switch.count))
        return tuple(x.new_empty(0) for _ in range(switch.count))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tokens: Tensor) -> Any:
        return ctx.switch.collect(), None


class _Take(torch.autograd.Function):
    """The piece of a token. Its gradient is sent as soon as it is computed."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, switch: ChunkedSwitch, i: int) -> Tensor:
        save_observer(ctx)
        ctx.switch, ctx.i = switch, i
        return switch.piece(i)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        run_observed(ctx, ctx.switch.launch, ctx.i, grad)
        return grad.new_empty(0), None, None
