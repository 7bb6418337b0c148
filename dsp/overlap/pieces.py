"""A stage that runs piece by piece along its sharded dim: one piece is switched while the next is computed.

An offer in pieces runs itself: it takes operands before their switch, and gives results after theirs. The pieces run
inside the hooks of others on the stage, such as fully_shard's, and outside of wrappers of the stage's own forward, such
as an activation checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsp.comm.exchange import dense, order_of
from dsp.comm.gradients import waited
from dsp.comm.layout import Axis, Cut
from dsp.comm.observers import RUNNING
from dsp.comm.pending import ChunkedSwitch
from dsp.core.record import BoundStage, Node, Offer
from dsp.core.run import refuse_shape, with_dummy
from dsp.core.torch_calls import GlueError
from dsp.planner import piece_sizes
from dsp.stages.stage import Stage
from dsp.support.private import backward_pass
from dsp.support.tensors import map_tensors, tensors_in, version

WRITES = (
    "{who} writes in place into what it was given, which it did not when it was planned: pieces of that may be copies. "
    "Use an out-of-place operation, or leave out overlap="
)


@dataclass(frozen=True)
class InPieces:
    """Makes the function of an offer of a stage in pieces.

    offer: the same in one piece; count: the number of pieces; arriving: the cuts of operands that travel in pieces, by
    number, before their switch; leaving: those of results, after theirs.
    """

    node: Node
    offer: Offer
    count: int
    arriving: Mapping[int, Cut]
    leaving: Mapping[int, Cut]

    @property
    def stage(self) -> Stage:
        assert isinstance(self.node.call, BoundStage)
        return self.node.call.stage

    def __call__(self, axis: Axis, call: Any, args: Any, kwargs: Any) -> StageInPieces:
        _, bound = self.stage.signature.bind(args, kwargs)
        return StageInPieces(self, axis, call, [b.slot for b in bound])


class StageInPieces:
    """The function of an offer in pieces on one rank. sizes: of the pieces; slots: of operands, among the arguments."""

    def __init__(self, pieces: InPieces, axis: Axis, call: Callable[..., Any], slots: Sequence[Any]) -> None:
        self.pieces, self.axis, self.call, self.slots = pieces, axis, call, slots
        assert pieces.offer.option is not None
        self.sizes = piece_sizes(Cut(0).local_size(pieces.offer.option.size, axis.size, axis.rank), pieces.count)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = PieceRun(self)
        try:
            args, kwargs = run.start(list(args), kwargs)
            if getattr(self.call, "__func__", None) is not nn.Module._call_impl:  # compiled: it knows one forward
                return run.pieces(self.call, args, kwargs)
            with_forward = Forward(self.pieces.stage.module, run)
            try:
                return self.call(*args, **kwargs)
            finally:
                with_forward.restore()
        except BaseException:
            run.let_go()
            raise

    def switch(self, cut: Cut, across: Cut, shape: Sequence[int], back: bool = False) -> ChunkedSwitch:
        """A switch in pieces along `cut`, from it to `across`; back: from `across` to it."""
        sizes, formats = (shape[cut.dim], shape[across.dim]), self.axis.formats[::-1] if back else self.axis.formats
        return ChunkedSwitch(cut.dim, across.dim, sizes, self.axis.group, self.pieces.count, formats)


class Forward:
    """Takes the place of a module's forward for one call of the module, and runs it in pieces."""

    def __init__(self, module: nn.Module, run: PieceRun) -> None:
        self.module, self.run = module, run
        self.forward, self.before = module.forward, module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def restore(self) -> None:
        if self.module.__dict__.get("forward") is not self:
            return
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.restore()
        return self.run.pieces(self.forward, args, kwargs)


@contextmanager
def outside(node: Node) -> Iterator[None]:
    """Outside of the stage that runs: what is sent is the node's, and not the module's."""
    token = RUNNING.set(node)
    try:
        yield
    finally:
        RUNNING.reset(token)


class PieceRun:
    """One call of a stage in pieces.

    arriving: the switches of operands, by number; leaving: those of results; results: for each, its pieces that are not
    switched, or not yet.
    """

    def __init__(self, of: StageInPieces) -> None:
        self.of, self.planned = of, of.pieces
        self.arriving: dict[int, ChunkedSwitch] = {}
        self.leaving: dict[int, ChunkedSwitch] = {}
        self.results: list[list[Tensor]] = []
        self.stage_call = RUNNING.get()
        RUNNING.set(of.pieces.node)  # what is sent here is sent for the node
        self.recomputes = backward_pass() != -1

    def let_go(self) -> None:
        """Wait for the switches under way, whose results are no longer needed."""
        for switch in (*self.arriving.values(), *self.leaving.values()):
            switch.let_go()

    def start(self, args: Any, kwargs: Any) -> Any:
        """The arguments, with tokens for the pieces in the place of the tensors that arrive in pieces."""
        for k, src in sorted(self.planned.arriving.items()):
            cut, slot = self.planned.offer.needs[k], self.of.slots[k]
            arguments: Any = args if type(slot) is int else kwargs
            assert cut is not None
            self.arriving[k] = self.of.switch(cut, src, self.planned.node.operands[k].shape, back=True)
            with outside(self.planned.node):
                arguments[slot] = self.arriving[k].start(arguments[slot])
        return args, kwargs

    def pieces(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The output of a stage on this rank's part, of which `forward` makes one piece after the other."""
        of, needs = self.of, self.planned.offer.needs
        operands = [args[slot] if type(slot) is int else kwargs[slot] for slot in of.slots]
        cut = [x if k in self.arriving else self.split(x, need) for k, (x, need) in enumerate(zip(operands, needs))]
        out = None
        for i in range(self.planned.count):
            args, kwargs = list(args), dict(kwargs)
            tensors = [self.take(k, parts[i], i) for k, parts in enumerate(cut)]
            versions = [version(t) for t in tensors]
            for slot, t in zip(of.slots, tensors):
                (args if type(slot) is int else kwargs)[slot] = t
            RUNNING.set(self.stage_call)
            out = forward(*args, **kwargs)
            RUNNING.set(self.planned.node)
            if versions != [version(t) for t in tensors]:
                raise GlueError(WRITES.format(who=self.planned.stage.label))
            self.keep(i, out)
        return map_tensors(out, [self.joined(k) for k in range(len(self.results))])

    def split(self, x: Tensor, cut: Cut | None) -> Sequence[Tensor]:
        """The parts of a tensor, one for each piece."""
        if cut is None:
            return [x] * self.planned.count
        order = order_of(x)
        return [dense(part, order) for part in x.split(self.of.sizes, cut.dim)]

    def take(self, k: int, x: Tensor, i: int) -> Tensor:
        """Piece i of the k-th operand, waited for if it is under way; a dummy row if it is empty."""
        cut = self.planned.offer.needs[k]
        if k in self.arriving:
            with outside(self.planned.node):
                x = self.arriving[k].take(x, i)
        return x if cut is None or x.shape[cut.dim] else with_dummy(x, cut)

    def keep(self, i: int, out: Any) -> None:
        """Send the results of a piece, or keep them. A recomputation sends them last, since it may end before that."""
        planned, length = self.planned, self.of.sizes[i]
        tensors = [*map(waited, tensors_in(out))]
        planned.stage.outputs(tensors)
        self.results = self.results or [[] for _ in tensors]
        for k, (t, cut, ref) in enumerate(zip(tensors, planned.offer.gives, planned.node.results)):
            assert cut is not None
            shape = [*ref.shape]
            shape[cut.dim] = max(length, 1)
            refuse_shape(planned.stage, t, shape)
            self.results[k].append(t if length else t.narrow(cut.dim, 0, 0))
            if k in planned.leaving and not self.recomputes:
                self.send(k)

    def send(self, k: int) -> None:
        """Send the pieces of a result that are there."""
        cut = self.planned.offer.gives[k]
        assert cut is not None
        if k not in self.leaving:
            self.leaving[k] = self.of.switch(cut, self.planned.leaving[k], self.planned.node.results[k].shape)
        with outside(self.planned.node):
            for piece in self.results[k]:
                self.leaving[k].send(piece)
        self.results[k].clear()

    def joined(self, k: int) -> Tensor:
        """The k-th result in its last layout."""
        if k in self.planned.leaving:
            self.send(k)
            with outside(self.planned.node):
                return self.leaving[k].join()
        cut, pieces = self.planned.offer.gives[k], self.results[k]
        assert cut is not None
        return dense(torch.cat(pieces, cut.dim), order_of(pieces[0]))
