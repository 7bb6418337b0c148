"""The switches that travel while stages compute: the number of pieces, and the time hidden.

A stage that is independent along its sharded dim may run piece by piece along it. A switch of its result then sends
each piece as soon as it is computed; a switch right before it is waited for piece by piece. In backward the roles are
reversed. A switch that cannot be cut, or would not gain, is left alone; the plan shows the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dsp.hardware import Hardware
from dsp.overlap.hidden import Overlapped, Phase
from dsp.overlap.options import MOST, Overlap
from dsp.plan.cost import Loads
from dsp.plan.program import Program
from dsp.plan.record import StageNode
from dsp.plan.solve import Decision
from dsp.planner import MOVES, Layout, Move, Value, chunk_sizes, piece_sizes
from dsp.private import compiled_call, fsdp_precision
from dsp.stages import Option, Stage
from dsp.wire import Wire

LEAST = 0.05  # the share of the time of a stage and its switches that pieces have to save
NOBODY = "no stage makes what is switched, nor is its only reader"


class Overlaps:
    """The switches that travel while stages compute, by stage call in `found`; their pieces, by op and by move."""

    def __init__(self, loads: Loads, program: Program, overlap: Overlap, wire: Wire) -> None:
        found = loads.found
        self.loads, self.solved, self.program, self.trace = loads, found, program, found.trace
        self.size, self.overlap, self.wire = found.size, overlap, wire
        self.found: list[Overlapped] = []
        self.pieces: dict[int, int] = {}
        self.moves: dict[Move, int] = {}
        self.ahead: dict[int, set[int]] = {}  # op -> the values that arrive in pieces
        if overlap is None or found.size == 1:
            return
        behind, before, rest = self.places([m for m in found.solution.moves if m.kind == "switch"])
        for at in sorted({*behind, *before}):
            self.decide(found.steps[at], behind.get(at, []), before.get(at, []))
        if rest:
            self.found.append(Overlapped("", len(rest), (), reason=NOBODY))

    @cached_property
    def nodes(self) -> dict[int, StageNode]:
        return {f.node.index: f.node for f in self.trace.facts if isinstance(f.node, StageNode)}

    def places(self, moves: list[Move]) -> tuple[dict[int, list[Move]], dict[int, list[Move]], list[Move]]:
        """The switches behind the stage that makes the tensor, those right before a stage, and all others."""
        behind: dict[int, list[Move]] = {}
        before: dict[int, list[Move]] = {}
        rest = []
        for m in moves:
            makes = m.after >= 0 and self.program.pushed(m) and self.trace.events[m.after].kind == "stage"
            reads = self.comes_before(m)
            if makes and not (reads and self.refused(m.after) and not self.refused(m.before)):
                behind.setdefault(m.after, []).append(m)
            elif reads:
                before.setdefault(m.before, []).append(m)
            else:
                rest.append(m)
        return behind, before, rest

    def comes_before(self, m: Move) -> bool:
        """Tell whether the only use of a switch is one argument of a stage, outside of activation checkpoints."""
        step, value = self.solved.steps[m.before], self.trace.values[m.value]
        if step.event.kind != "stage" or step.event.region is not None:
            return False
        reads = [v for s in self.solved.steps for v in zip(s.op.inputs, s.choice.needs) if v == (m.value, m.dst)]
        other = [o for o in self.program.moves[m.value] if o.src == m.dst or (o.before == m.before and o != m)]
        syms = [(k, s) for k, s in enumerate(step.event.operands) if s is not None and s.value == m.value]
        if len(reads) != 1 or other or len(syms) != 1:
            return False
        [(k, sym)] = syms
        same = sym.cuts.get(m.src) == m.src and sym.cuts.get(m.dst) == m.dst
        option, operand = step.execution.option, self.nodes[step.event.index].operands[k]
        assert option is not None
        return same and option.cuts[k] == m.dst and operand.nbytes == value.nbytes

    def refused(self, at: int) -> str:
        """The reason against running a stage in pieces, if there is one."""
        step = self.solved.steps[at]
        stage, option, node = self.solved.stage(step), step.execution.option, self.nodes[step.event.index]
        assert stage is not None
        assert option is not None
        own = next(reasons(stage, node, option), "")
        if self.trace.record is None or not self.trace.record.measured:
            own = "the forward goes by what its tensors hold"
        if not own and chunk_sizes(option.size, self.size)[0] < 2:
            own = f"a rank has no more than 1 of {option.name!r}"
        return own

    def decide(self, step: Decision, behind: list[Move], before: list[Move]) -> None:
        moves, reason = [*behind, *before], self.refused(step.at)
        if not reason and not all(plain(m) for m in moves):
            reason = "a dim lies in a fold, or is a concatenation of pieces"
        best = Overlapped(step.op.name, len(moves), tuple(self.phases(step, moves)), reason=reason)
        if not reason:
            assert step.execution.option is not None
            most = chunk_sizes(step.execution.option.size, self.size)[0]
            counts = [self.overlap] if isinstance(self.overlap, int) else range(2, MOST + 1)
            best = self.best(best, [replace(best, pieces=min(k, most)) for k in counts])
        self.found.append(best)
        if best.pieces > 1:
            self.pieces[step.at] = best.pieces
            self.moves.update(dict.fromkeys(moves, best.pieces))
            self.ahead[step.at] = {m.value for m in before}
            for m in before:  # the move is made before the use, not by the producer
                self.program.push.pop(m.value, None)

    def best(self, whole: Overlapped, cut: list[Overlapped]) -> Overlapped:
        """The given number of pieces, or the one that takes the least time."""
        if not isinstance(self.overlap, Hardware):
            return cut[0]
        hardware, link = self.overlap, self.overlap.axis(self.size)
        least = min(cut, key=lambda o: (o.together(hardware, link), o.pieces))
        if least.together(hardware, link) <= (1 - LEAST) * whole.alone(hardware, link):
            return least
        return replace(whole, reason="it would save too little")

    def phases(self, step: Decision, moves: Sequence[Move]) -> Iterator[Phase]:
        event, share = step.event, self.loads.shares[step.at]
        forward = Phase(
            event.flops * share, sum(event.touched) * share, sum(m.bytes for m in moves), event.operations,
            self.packed(moves, 0),
        )  # fmt: skip
        yield forward
        if event.grad:  # recomputation runs while the gradients travel
            times = self.trace.forwards(event) - 1
            grads = [self.trace.values[m.value].gradient for m in moves]
            sent = sum(max(MOVES["switch"].sent(g, m.dst, m.src, self.size)) for g, m in zip(grads, moves))
            yield Phase(
                times * forward.flops, times * forward.touched, sent, times * event.operations, self.packed(moves, 1)
            )

    def packed(self, moves: Sequence[Move], way: int) -> tuple[str, ...]:
        """The formats in which switches are packed, forward (0) or backward (1)."""
        return tuple(self.wire.names[way] for m in moves if self.trace.values[m.value].packed[way] is not None)

    def sent(self, m: Move) -> Mapping[str, tuple[int, ...]]:
        """Bytes that each rank sends in a switch in pieces, forward and backward."""
        value, count = self.trace.values[m.value], self.moves[m]
        return sent_in(value, m.src, m.dst, self.size, count, m.value in self.ahead.get(m.before, ()))


def reasons(stage: Stage, node: StageNode, option: Option) -> Iterator[str]:
    """The reasons against running a stage in pieces along the dim of an option."""
    memories = {t.memory for t in node.given if t.memory >= 0}
    made = [r.tensor.memory for r in node.results if r.tensor.memory >= 0]
    patterns = [p for p in (*stage.pattern.inputs, *stage.pattern.outputs) if option.name in p.names]
    against = {
        "it communicates inside": bool(stage.inside) or stage.around is not None,
        "its results are sums, added up over ranks first": option.onto is not None,
        "it draws random numbers": node.measured.random,
        "it writes to what it keeps or was given": node.measured.writes or any(written for written, _ in node.writes),
        "it returns what it was given": any(memory in memories for memory in made),
        "its results share memory": len({*made}) < len(made),
        "fully_shard casts its results": casts(stage.module),
        "it returns more than tensors": bool(node.constants),
        "its compile() compiled it: compile its forward instead": compiled_call(stage.module) is not None,
        f"{option.name!r} lies in a fold": any((option.name,) not in p.axes for p in patterns),
    }
    return (reason for reason, holds in against.items() if holds)


def casts(module: nn.Module) -> bool:
    """Tell whether `fully_shard` casts a module's results, which would be after their pieces have been sent."""
    return isinstance(module, FSDPModule) and fsdp_precision(module)[2] is not None


def plain(m: Move) -> bool:
    """Tell whether a switch leads from one dim to a different one, both neither part of a fold nor joined."""
    return m.src.outer == m.dst.outer == 1 and m.src.dim != m.dst.dim


def sent_in(value: Value, src: Layout, dst: Layout, n: int, count: int, ahead: bool) -> Mapping[str, tuple[int, ...]]:
    """Bytes of each rank, by phase, in a switch in pieces of `src`; of `dst` if the switch comes `ahead` of a stage."""
    held, there = (chunk_sizes(value.extent(cut), n) for cut in (src, dst))
    rest = value.nbytes // value.itemsize // max(sum(held) * sum(there), 1)
    found = {}
    for phase, packed in zip(("forward", "backward"), value.packed):
        sent = [0] * n
        for r, own in enumerate(held):
            for q, part in enumerate(there):
                cut, other = (part, own) if ahead else (own, part)
                for piece in piece_sizes(cut, count) if q != r else ():
                    numbers = piece * other * rest
                    sent[r if phase == "forward" else q] += (
                        numbers * value.itemsize if packed is None else packed(numbers)
                    )
        found[phase] = tuple(sent)
    return found
