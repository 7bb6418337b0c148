"""A stage that runs piece by piece along its sharded dim, so that the switch of each piece travels meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsp.chunked import ChunkedSwitch
from dsp.collectives import inexact
from dsp.exchange import dense, order_of
from dsp.gradients import waited
from dsp.layout import At, Cut
from dsp.private import compiled_call
from dsp.run.forward import Run
from dsp.sharded import ACTIVE
from dsp.tensors import map_tensors, tensors_in

if TYPE_CHECKING:
    from dsp.run.stage_calls import StageCalls, StageDecision


@contextmanager
def forwards_in_pieces(runtime: Any, run: Run) -> Iterator[None]:
    """While a run goes on, the stages that its script cuts run `InPieces`: within the hooks of others on them, such as
    fully_shard's, and around what their own forward was made since, such as an activation checkpoint."""
    names = frozenset[str]() if run.script is None else run.script.in_pieces
    modules = [s.module for s in runtime.stages if s.name in names and compiled_call(s.module) is None] if names else []
    before = [(m, m.__dict__.get("forward")) for m in dict.fromkeys(modules)]
    for m, _ in before:
        m.__dict__["forward"] = InPieces(m, m.forward)
    try:
        yield
    finally:
        for m, own in before:
            if own is None:
                del m.__dict__["forward"]
            else:
                m.__dict__["forward"] = own


class InPieces:
    """The forward of a stage, for a call that its plan cuts once for each piece."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = ACTIVE.get()
        inside = None if current is None else current[1].in_stage
        if inside is None or inside.stage.module is not self.module or not current[1].pieces:  # type: ignore[index]
            return self.forward(*args, **kwargs)
        runtime, run = current  # type: ignore[misc]
        return Pieces(runtime.stage_calls, run).run(self.forward, args, kwargs)


class Pieces:
    """One call of a stage, piece by piece."""

    def __init__(self, calls: StageCalls, run: Run) -> None:
        self.calls, self.run_, self.inside = calls, run, run.in_stage
        assert self.inside is not None
        self.decision, self.pieces, run.pieces = self.inside.decision, run.pieces, ()
        self.switches: dict[int, ChunkedSwitch] = {}
        self.made: list[list[Tensor]] = []  # of each result its pieces, or those that are still to be sent
        self.landings: list[At] = []

    def run(self, forward: Any, args: Any, kwargs: Any) -> Any:
        """The stage's output on this rank's part, with what the plan switches switched."""
        decision, out = self.decision, None
        try:
            given = [self.cut(args[s] if type(s) is int else kwargs[s], c) for s, c in zip(decision.slots, decision.cuts)]
            for i, piece in enumerate(self.pieces):
                args, kwargs = list(args), dict(kwargs)
                for slot, own in zip(decision.slots, given):
                    (args if type(slot) is int else kwargs)[slot] = own[i]
                out = forward(*args, **kwargs)
                self.take(piece, out)
            return map_tensors(out, self.results())
        except BaseException:
            for switch in self.switches.values():
                switch.let_go()
            raise

    def cut(self, x: Any, cut: Cut | None) -> Sequence[Any]:
        """What each piece is given of a tensor: of an empty one a dummy row."""
        count = len(self.pieces)
        if cut is None or not self.decision.place.own:  # a dummy row already
            return [x] * count
        sizes = [piece.place.own for piece in self.pieces]
        parts, order = x.split(sizes, cut.dim), order_of(x)
        return [
            dense(part, order) if own else torch.cat([part, dummy(part, cut)], cut.dim)
            for part, own in zip(parts, sizes)
        ]

    def take(self, piece: StageDecision, out: Any) -> None:
        """Send what a piece returned, or keep it."""
        calls, run, stage = self.calls, self.run_, self.inside.stage
        calls.refuse_sizes(run, self.inside, out)
        tensors = [*map(waited, tensors_in(out))]
        self.landings = calls.landings(stage, piece, tensors)
        tensors = calls.of_part(piece, (), tensors, self.landings)
        self.made = self.made or [[] for _ in tensors]
        for k, (t, own) in enumerate(zip(tensors, self.made)):
            if run.again or self.target(k) is None:  # computed again: what nobody asks for is not sent
                own.append(t)
            else:
                self.send(k, t)

    def target(self, k: int) -> Cut | None:
        """The cut that a result is switched to, if it is."""
        push = self.decision.step.push
        return push[k] if k < len(push) and push[k] != self.landings[k].cut else None

    def send(self, k: int, piece: Tensor) -> None:
        run, at, target = self.run_, self.landings[k], self.target(k)
        assert target is not None
        with run.outside_stage():
            if not run.began:
                run.began = True
                self.calls.agreement.before_switching()
            if k not in self.switches:
                sizes = at.shape[at.cut.dim], at.shape[target.dim]
                axis = run.axis
                self.switches[k] = ChunkedSwitch(
                    at.cut.dim, target.dim, sizes, axis.group, len(self.pieces), axis.wire
                )
            self.switches[k].send(piece)

    def results(self) -> list[Tensor]:
        """The results in one piece each, where the plan wants them; the run is told where they lie."""
        found, lie = [], []
        for k, (own, at) in enumerate(zip(self.made, self.landings)):
            target = self.target(k)
            for piece in own if target is not None else ():
                self.send(k, piece)
            if target is None:
                found.append(torch.cat(own, at.cut.dim))
            else:
                with self.run_.outside_stage():
                    found.append(self.switches[k].join())
            lie.append(at if target is None else self.run_.axis.at(at.shape, target))
        self.run_.landed = lie
        return found


def dummy(local: Tensor, cut: Cut) -> Tensor:
    """One row for a rank that holds none, so that every rank runs every stage: its hooks, collectives and gradients."""
    shape = [*local.shape]
    shape[cut.dim] = cut.folds
    if local.dtype == torch.bool:
        return local.new_ones(shape)
    if not inexact(local):
        return local.new_zeros(shape)
    line = torch.linspace(0.5, 1.5, math.prod(shape), device=local.device, dtype=torch.float32)
    return line.to(local.dtype).view(shape)
