"""Which switches travel while the stages that make them compute, in how many pieces, and what that hides.

A stage that is independent along the dim that it is sharded on may run piece by piece along it, and the switch of its
result sends each piece as soon as it is there. In backward the pieces' gradients start together, and the stage's
backward runs on each as it comes. What cannot be cut, or would not pay, is left alone: `reason` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from dsp.hardware import Hardware
from dsp.overlap import MOST, Overlap
from dsp.plan.cost import Loads
from dsp.plan.hidden import Overlapped, Phase
from dsp.plan.program import Program
from dsp.plan.record import StageNode
from dsp.plan.solve import Decision, Solved
from dsp.planner import MOVES, Layout, Move, Value, chunk_sizes, piece_sizes
from dsp.private import compiled_call
from dsp.stages import Stage

LEAST = 0.05  # of the time of a stage and its switches, that cutting them has to save


class Overlaps:
    """The switches of a plan that stages make: `found` by stage call, and `pieces` by op."""

    def __init__(self, found: Solved, program: Program, overlap: Overlap) -> None:
        self.solved, self.trace, self.size, self.overlap = found, found.trace, found.size, overlap
        self.found: list[Overlapped] = []
        self.pieces: dict[int, int] = {}
        self.moves: dict[Move, int] = {}
        self.others = 0  # switches that no stage makes
        if overlap is None or found.size == 1:
            return
        self.loads = Loads(found)
        nodes = {f.node.index: f.node for f in self.trace.facts if isinstance(f.node, StageNode)}
        behind: dict[int, list[Move]] = {}
        for m in (m for m in found.solution.moves if m.kind == "switch"):
            makes = program.pushed(m) and self.trace.events[m.after].kind == "stage"
            behind.setdefault(m.after if makes else -1, []).append(m)
        self.others = len(behind.pop(-1, []))
        for at, moves in sorted(behind.items()):
            step = found.steps[at]
            self.decide(step, nodes[step.event.index], moves)

    def decide(self, step: Decision, node: StageNode, moves: list[Move]) -> None:
        stage, option = self.solved.stage(step), step.execution.option
        assert stage is not None and option is not None
        reason = next(reasons(self.solved, step, stage, node, moves), "")
        whole = Overlapped(step.op.name, len(moves), tuple(self.phases(step, moves)), reason=reason)
        most, best = chunk_sizes(option.size, self.size)[0], whole
        if not reason:
            counts = [self.overlap] if isinstance(self.overlap, int) else range(2, MOST + 1)
            cut = [replace(whole, pieces=min(k, most)) for k in counts]
            best = self.best(whole, cut)
        self.found.append(best)
        if best.pieces > 1:
            self.pieces[step.at] = best.pieces
            self.moves.update(dict.fromkeys(moves, best.pieces))

    def best(self, whole: Overlapped, cut: list[Overlapped]) -> Overlapped:
        """The number of pieces that was asked for, or that takes the least time."""
        if not isinstance(self.overlap, Hardware):
            return cut[0]
        hardware, link = self.overlap, self.overlap.axis(self.size)
        least = min(cut, key=lambda o: (o.together(hardware, link), o.pieces))
        if least.together(hardware, link) <= (1 - LEAST) * whole.alone(hardware, link):
            return least
        return replace(whole, reason="it would save too little")

    def phases(self, step: Decision, moves: Iterable[Move]) -> Iterator[Phase]:
        event, share = step.event, self.loads.shares[step.at]
        forward = Phase(event.flops * share, sum(event.touched) * share, sum(m.bytes for m in moves))
        yield forward
        if event.grad:  # what is computed again is computed while the gradients travel
            times = self.trace.forwards(event) - 1
            grads = [self.trace.values[m.value].gradient for m in moves]
            sent = sum(max(MOVES["switch"].sent(g, m.dst, m.src, self.size)) for g, m in zip(grads, moves))
            yield Phase(times * forward.flops, times * forward.touched, sent)


def reasons(
    found: Solved, step: Decision, stage: Stage, node: StageNode, moves: Iterable[Move]
) -> Iterator[str]:
    """The reasons against running a stage piece by piece."""
    event, option, record = step.event, step.execution.option, found.trace.record
    assert option is not None and record is not None
    if stage.inside or stage.around is not None:
        yield "it communicates inside"
    if option.onto is not None:
        yield "its results are sums, added up over ranks first"
    if not record.measured:
        yield "its forward goes by what its tensors hold"
    if event.random:
        yield "it draws random numbers"
    if node.measured.writes or any(written for written, _ in node.writes):
        yield "it writes to what it keeps or was given"
    if {r.tensor.memory for r in node.results} & {t.memory for t in node.given if t.memory >= 0}:
        yield "it returns what it was given"
    if event.constants:
        yield "it returns more than tensors"
    if compiled_call(stage.module) is not None:
        yield "its compile() compiled it: compile its forward"
    if not all(plainly_cut(m.src) and plainly_cut(m.dst) and m.src.dim != m.dst.dim for m in moves):
        yield "a dim lies in a fold, or is joined of pieces"
    patterns = [p for p in (*stage.pattern.inputs, *stage.pattern.outputs) if option.name in p.names]
    if any(p.axes[p.axis_of(option.name)] != (option.name,) for p in patterns):
        yield f"{option.name!r} lies in a fold"
    if chunk_sizes(option.size, found.size)[0] < 2:
        yield f"a rank has no more than 1 of {option.name!r}"


def plainly_cut(cut: Layout) -> bool:
    return cut is not None and cut.outer == 1


def sent_in(value: Value, src: Layout, dst: Layout, n: int, count: int) -> Mapping[str, tuple[int, ...]]:
    """What each rank sends in a switch in so many pieces of `src`, and in its backward."""
    sizes = [chunk_sizes(value.extent(cut), n) for cut in (src, dst)]
    rest = value.nbytes // value.itemsize // max(sum(sizes[0]) * sum(sizes[1]), 1)
    found = {}
    for phase, packed, back in zip(("forward", "backward"), value.packed, (False, True)):
        sent = [0] * n
        for r, own in enumerate(sizes[0]):
            for q, part in enumerate(sizes[1]):
                for piece in piece_sizes(own, count) if q != r else ():
                    numbers = piece * part * rest
                    sent[q if back else r] += numbers * value.itemsize if packed is None else packed(numbers)
        found[phase] = tuple(sent)
    return found
