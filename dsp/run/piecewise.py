"""A stage that runs piece by piece along its sharded dim: one piece is switched while the next is computed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsp.exchange import dense, order_of
from dsp.gradients import waited
from dsp.guard.agreement import Agreement
from dsp.guard.notes import MISFITS, Argument, StageShard, misread, of_a_collective
from dsp.layout import At, Axis, Cut
from dsp.methods import Peers
from dsp.overlap.chunked import ChunkedSwitch
from dsp.plan.script import PlannedNode, Script, StageStep
from dsp.planner import piece_sizes
from dsp.private import compiled_call
from dsp.run.forward import InStage, Run
from dsp.run.stage_calls import StageCalls, StageDecision, with_dummy
from dsp.sharded import ACTIVE, Sharded, carry, plain
from dsp.signature import Bound
from dsp.stages import Stage
from dsp.tensors import map_tensors, tensors_in


def in_pieces(stages: Sequence[Stage], script: Script) -> list[InPieces]:
    """Make the stages that a script cuts run piece by piece, until `let_go` is called on each."""
    modules = dict.fromkeys(stage.module for stage in stages if stage.name in script.in_pieces)
    return [InPieces(m) for m in modules if compiled_call(m) is None]


class InPieces:
    """A stage's forward during a run. If the plan cuts the call, it calls the stage's own forward once per piece.

    It runs inside the hooks of others on the stage, such as fully_shard's, and outside of wrappers of the stage's own
    forward, such as an activation checkpoint.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward, self.before = module, module.forward, module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def let_go(self) -> None:
        """Restore the stage's own forward."""
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = ACTIVE.get()
        pieces = None if current is None else current[1].pieces
        if pieces is None or pieces.begun or pieces.stage.module is not self.module:
            return self.forward(*args, **kwargs)
        return pieces.run(self.forward, args, kwargs)


class PieceCalls(StageCalls):
    """The hooks of stages, some of which run piece by piece; `agreement` is checked before the first switch."""

    def __init__(self, axis: Axis, agreement: Agreement) -> None:
        super().__init__(axis)
        self.agreement = agreement

    def __deepcopy__(self, memo: dict[int, Any]) -> PieceCalls:
        return PieceCalls(self.axis, copy.deepcopy(self.agreement, memo))

    def before_switching(self, run: Run) -> None:
        run.began = True
        self.agreement.before_switching()

    def failed(self, run: Run, inside: InStage, error: BaseException) -> None:
        """Keep a message on what the pattern of a stage that raised may lack."""
        super().failed(run, inside, error)
        parted = run.script is not None and inside.decision.option.name is not None
        if parted and type(error) in MISFITS and not of_a_collective(error):
            decision, place, tensors = inside.decision, inside.place, [x.tensor for x in inside.given]
            slots = zip(decision.slots, decision.patterns, (tuple(t.shape) for t in tensors))
            arguments = [Argument(*of) for of in slots]
            shard = StageShard(inside.stage, decision.option.name, place.own, place.size, decision.sizes, arguments)
            run.misread = error, misread(shard, error)

    def derived(self, run: Run, stage: Stage, node: PlannedNode | None, bound: list[Bound]) -> StageDecision:
        found = super().derived(run, stage, node, bound)
        if found.step is not None and found.step.pieces > 1:
            cut_up(found, found.step, [run.open(b.tensor) for b in bound])
        return found

    def wanted(
        self, run: Run, stage: Stage, decision: StageDecision, shells: Sequence[Sharded | None]
    ) -> Sequence[Cut | None]:
        if type(stage.module.__dict__.get("forward")) is not InPieces:  # it was compiled since it was planned
            return decision.cuts
        run.pieces = Pieces(self, run, stage, decision)
        return run.pieces.wanted(shells)


def cut_up(decision: StageDecision, step: StageStep, shells: Sequence[Sharded | None]) -> None:
    """Turn a decision into one that runs in pieces, on tensors in the layouts of `shells`."""
    ranks, parts = decision.place.peers
    cut = zip(*[piece_sizes(part, step.pieces) for part in parts])
    decision.pieces = [
        replace(decision, place=decision.place._replace(peers=Peers(ranks, own)), landings={}) for own in cut
    ]
    comes = enumerate(zip(shells, step.ahead, decision.cuts))
    decision.ahead = frozenset(k for k, (s, ahead, c) in comes if ahead and s is not None and s.at.cut != c)


class Pieces:
    """One call of a stage, piece by piece. `landed`: the layouts of its results after the call."""

    def __init__(self, calls: StageCalls, run: Run, stage: Stage, decision: StageDecision) -> None:
        self.calls, self.run_, self.stage, self.decision = calls, run, stage, decision
        self.begun, self.landed = False, list[At]()
        self.coming: dict[int, ChunkedSwitch] = {}  # the switches of arguments that arrive in pieces, by position
        self.leaving: dict[int, ChunkedSwitch] = {}  # the switches of results, by position
        self.made: list[list[Tensor]] = []  # for each result, its pieces that are kept or not yet sent

    def let_go(self) -> None:
        """Wait for the switches under way, whose results are no longer needed."""
        for switch in (*self.coming.values(), *self.leaving.values()):
            switch.let_go()

    # --- in ---

    def wanted(self, shells: Sequence[Sharded | None]) -> list[Cut | None]:
        """The cuts that the tensors must have at the start; tensors that arrive in pieces keep their present cut."""
        cuts = enumerate(zip(shells, self.decision.cuts))
        return [s.at.cut if s is not None and k in self.decision.ahead else c for k, (s, c) in cuts]

    def start(self, shells: Sequence[Sharded | None], args: Any, kwargs: Any) -> None:
        """Start to switch the tensors that arrive in pieces; tokens for the pieces replace them in the arguments."""
        for k in sorted(self.decision.ahead):
            x, cut, slot = shells[k], self.decision.cuts[k], self.decision.slots[k]
            assert x is not None
            assert cut is not None
            self.coming[k] = self.switch(cut, x.at.cut, x.at.shape, back=True)
            with self.run_.outside_stage():
                (args if type(slot) is int else kwargs)[slot] = self.coming[k].start(plain(x))

    def switch(self, cut: Cut, other: Cut, shape: Sequence[int], back: bool) -> ChunkedSwitch:
        sizes, axis = (shape[cut.dim], shape[other.dim]), self.run_.axis
        formats = axis.formats[::-1] if back else axis.formats
        return ChunkedSwitch(cut.dim, other.dim, sizes, axis.group, len(self.decision.pieces), formats)

    def run(self, forward: Any, args: Any, kwargs: Any) -> Any:
        """The stage's output on this rank's shard, with the results switched as planned."""
        self.begun, decision = True, self.decision
        given = [args[slot] if type(slot) is int else kwargs[slot] for slot in decision.slots]
        cut = [x if k in self.coming else self.taken_apart(x, c) for k, (x, c) in enumerate(zip(given, decision.cuts))]
        for i, piece in enumerate(decision.pieces):
            args, kwargs = list(args), dict(kwargs)
            for k, slot in enumerate(decision.slots):
                (args if type(slot) is int else kwargs)[slot] = self.piece_of(k, cut[k][i], i)
            out = forward(*args, **kwargs)
            self.keep(piece, out)
        return map_tensors(out, self.results())

    def taken_apart(self, x: Any, cut: Cut | None) -> Sequence[Any]:
        """The parts of a tensor, one for each piece."""
        sizes = [piece.place.own for piece in self.decision.pieces]
        if cut is None or not any(sizes):  # replicated, or already a dummy row
            return [x] * len(sizes)
        order = order_of(x)
        return [dense(part, order) for part in x.split(sizes, cut.dim)]

    def piece_of(self, k: int, x: Any, i: int) -> Any:
        """Piece i's part of the k-th tensor, waited for if it is in transfer; a dummy row if it is empty."""
        cut, own = self.decision.cuts[k], self.decision.pieces[i].place.own
        if k in self.coming:
            with self.run_.outside_stage():
                x = self.coming[k].take(x, i)
        if cut is None or x.shape[cut.dim]:
            return x
        assert not own
        return with_dummy(x, cut)

    # --- out ---

    def carried(self, tensors: Sequence[Tensor]) -> list[Sharded]:
        """The stage's results, made by `run`, as the model sees them."""
        numbers = self.decision.node.results  # type: ignore[union-attr]
        return [carry(t, at, self.run_.first + number) for t, at, number in zip(tensors, self.landed, numbers)]

    def keep(self, piece: StageDecision, out: Any) -> None:
        """Send the results of a piece, or keep them."""
        calls, run = self.calls, self.run_
        calls.refuse_sizes(run, self.stage, self.decision, out)
        tensors = [*map(waited, tensors_in(out))]
        self.landed = calls.landings(run, self.stage, piece, tensors)
        tensors = calls.of_part(piece, [], tensors, self.landed)
        self.made = self.made or [[] for _ in tensors]
        for k, (t, own) in enumerate(zip(tensors, self.made)):
            if run.again or self.target(k) is None:  # in recomputation, results are sent only if they are needed
                own.append(t)
            else:
                self.send(k, t)

    def target(self, k: int) -> Cut | None:
        """The cut to which the plan switches a result; None if it is not switched."""
        push = self.decision.step.push  # type: ignore[union-attr]
        return push[k] if k < len(push) and push[k] != self.landed[k].cut else None

    def send(self, k: int, piece: Tensor) -> None:
        run, at, target = self.run_, self.landed[k], self.target(k)
        assert target is not None
        with run.outside_stage():
            if not run.began:
                self.calls.before_switching(run)
            if k not in self.leaving:
                self.leaving[k] = self.switch(at.cut, target, at.shape, back=False)
            self.leaving[k].send(piece)

    def results(self) -> list[Tensor]:
        """The results, joined, in the plan's layouts."""
        found, lie = list[Tensor](), list[At]()
        for k, (own, at) in enumerate(zip(self.made, self.landed)):
            if (target := self.target(k)) is None:
                found.append(dense(torch.cat(own, at.cut.dim), order_of(own[0])))
                lie.append(at)
                continue
            for piece in own:
                self.send(k, piece)
            with self.run_.outside_stage():
                found.append(self.leaving[k].join())
            lie.append(self.run_.axis.at(at.shape, target))
        self.landed = lie
        return found
