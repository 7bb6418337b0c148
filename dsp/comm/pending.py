"""Switches under way while something computes: in two halves, in pieces, and ahead of where they are read.

A switch in pieces is several all-to-alls, so that each travels while the data of the next one is computed. Each rank
cuts its part of one of the two dims, `cut`, into pieces, and all-to-all i carries piece i of every rank. A switch from
`cut` sends each piece as soon as it is computed, and joins the received ones when all are there. One to `cut` sends all
pieces at once, and waits for each when it is needed. Each of the two is the backward of the other, and begins with the
last piece. The bytes are those of one switch. In one piece it is a switch in two halves, in forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dsp.comm.exchange import (
    SwitchPlan,
    UnderWay,
    alone,
    in_format,
    order_of,
    place,
    ranks,
    switch_plan,
    switch_plan_of_parts,
)
from dsp.comm.observers import run_observed, save_observer
from dsp.comm.wire import AS_IT_IS, Wire
from dsp.planner import chunk_sizes, piece_sizes


@lru_cache(maxsize=4096)
def _pieces(size: int, n: int, count: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """The lengths of all pieces of a dim, and for each number of a piece those of each rank."""
    pieces = [piece_sizes(part, count) for part in chunk_sizes(size, n)]
    return [size for parts in pieces for size in parts], [*zip(*pieces)]


class ChunkedSwitch:
    """One switch in `count` pieces of the dim `cut`, between tensors sharded along `cut` and along `across`.

    After the code that computes the pieces, it switches from `cut` to `across`: `send` each in order, then `join`.
    Before the code that reads the pieces, it switches from `across` to `cut`: `start` returns a token for each piece,
    and `take` waits for the piece of a token.
    """

    def __init__(
        self,
        cut: int,
        across: int,
        sizes: tuple[int, int],
        group: str,
        count: int = 1,
        formats: Sequence[str] = AS_IT_IS,
    ) -> None:
        """sizes: of the whole tensor along `cut` and `across`; formats: from `cut` to `across`, and back."""
        self.cut, self.across, self.group, self.count, self.formats = cut, across, group, count, formats
        n, self.rank = ranks(group)
        self.of_all, self.parts = _pieces(sizes[0], n, count)
        self.across_parts = chunk_sizes(sizes[1], n)
        self.under_way: dict[int, tuple[SwitchPlan, UnderWay]] = {}
        self.tokens: list[Tensor] = []

    def send(self, piece: Tensor) -> None:
        """Send the next piece of this rank's part."""
        self.tokens.append(_Send.apply(piece, self, len(self.tokens)))

    def join(self) -> Tensor:
        """Wait for all pieces, and return the switched tensor."""
        tokens, self.tokens = self.tokens, []  # their autograd nodes hold this object, which may not hold them
        if not tokens:
            raise RuntimeError("this switch was already waited for; wait() may be called once")
        return _Join.apply(self, *tokens)

    def start(self, x: Tensor) -> tuple[Tensor, ...]:
        """Send all pieces, and return a token for each of this rank's own, which are under way."""
        return _Start.apply(x, self)

    def take(self, token: Tensor, i: int) -> Tensor:
        """Wait for the piece of a token, and return it in the token's dtype."""
        return _Take.apply(token, self, i).to(token.dtype)

    def let_go(self) -> None:
        """Wait for pieces that nobody will read, since torch would keep their memory otherwise."""
        for _, piece in self.under_way.values():
            piece.arrived()
        self.under_way.clear()
        self.tokens.clear()

    # --- without autograd ---

    def plan(self, i: int, x: Tensor, back: bool) -> SwitchPlan:
        """The switch of piece i from `cut` to `across`; back: from `across` to `cut`."""
        shape, dim_order, ends = [*x.shape], order_of(x), [(self.cut, self.parts[i]), (self.across, self.across_parts)]
        if back:
            shape[self.cut] = sum(self.parts[i])
        (src, src_parts), (dst, dst_parts) = ends[::-1] if back else ends
        return switch_plan_of_parts(tuple(shape), src, dst, src_parts, dst_parts, self.rank, dim_order, self.group)

    def begin(self, i: int, switch: SwitchPlan, numbers: Tensor, back: bool) -> None:
        plan = in_format(switch, self.formats[back], numbers.dtype)
        self.under_way[i] = switch, UnderWay.start(plan, plan.closed(numbers))

    def end(self, i: int) -> tuple[SwitchPlan, Tensor]:
        """Wait for piece i, and return its flat tensor."""
        switch, one = self.under_way.pop(i)
        received = one.arrived()
        return switch, one.plan.read(received, one.plan.empty(received))

    def launch(self, i: int, piece: Tensor) -> None:
        """Send piece i of this rank's part, towards the layout along `across`."""
        switch = self.plan(i, piece, back=False)
        self.begin(i, switch, switch.pack(piece), back=False)

    def collect(self) -> Tensor:
        """Wait for all pieces, and join them to this rank's part along `across`."""
        if self.count == 1:
            return self.piece(0)
        received = [self.end(i) for i in range(self.count)]
        parts = [switch.of_ranks(flat.split(switch.out_splits)) for switch, flat in received]
        return received[0][0].join([of_piece[r] for r in range(len(self.parts[0])) for of_piece in parts])

    def deal(self, x: Tensor, order: Iterable[int]) -> None:
        """Send this rank's part along `across` as pieces along `cut`, in this order."""
        blocks: list[Tensor] = []
        for i in order:
            switch = self.plan(i, x, back=True)
            if self.count == 1:
                return self.begin(i, switch, switch.pack(x), back=True)
            blocks = blocks or [*switch.leading(x).split(self.of_all, switch.block_dim)]
            send = x.new_empty(sum(switch.in_splits))
            place(send.split(switch.in_splits), blocks[i :: self.count])
            self.begin(i, switch, send, back=True)

    def piece(self, i: int) -> Tensor:
        """Wait for piece i of this rank's part along `cut`."""
        switch, flat = self.end(i)
        return switch.unpack(flat)


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
    def forward(ctx: Any, x: Tensor, arguments: Any, arrived: list[Callable[[], None]]) -> Tensor:
        src, dst, size, group, src_pieces, dst_pieces, wire, back = arguments
        save_observer(ctx)
        ctx.back = dst, src, x.shape[dst], group, dst_pieces, src_pieces, back, wire
        switch = switch_plan(x, src, dst, size, group, src_pieces, dst_pieces)
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
