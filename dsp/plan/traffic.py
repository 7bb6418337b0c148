"""The traffic of a plan's training step, by phase and kind of collective, and by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from dsp.legs import DIRECT, STRAIGHT
from dsp.methods import Sent
from dsp.plan.overlap import Overlaps
from dsp.plan.program import Program
from dsp.plan.script import INPUTS, Where
from dsp.plan.solve import Decision, Goal, Solved
from dsp.planner import MOVES, Layout, Move, Value, dealt, fuses


class Sending(NamedTuple):
    """A collective of a plan outside of stages, or a tensor's share of one (calls 0): a move, or bytes of each rank.

    where: for a backward, the place of its forward. A move leads from `src` to `dst`, and its backward the other way;
    the backward of a gather is the reduce-scatter into `src`.
    """

    phase: str  # "forward", "backward", "recompute"
    where: Where
    kind: str
    calls: int
    value: Value | None = None
    src: Layout = None
    dst: Layout = None
    each: tuple[int, ...] = ()

    def sent(self, n: int) -> Sequence[int]:
        """Bytes that each of n ranks sends."""
        return self.each if self.value is None else MOVES[self.kind].sent(self.value, self.src, self.dst, n)


Each = dict[str, tuple[list[int], int]]  # by kind: bytes that each rank sends, and calls


def add(to: Each, kind: str, each: Sequence[int], calls: int) -> None:
    before, times = to.get(kind, ([0] * len(each), 0))
    to[kind] = [a + b for a, b in zip(before, each)], times + calls


class PlannedTraffic:
    """The collectives of a step. `sendings` are those outside of stages. `own` has for each move forward the bytes that
    the busiest rank sends, and its calls without those shared with an earlier move. `links` has the traffic of
    switches by link, on an axis of several nodes."""

    def __init__(self, found: Solved, program: Program, goal: Goal, overlaps: Overlaps) -> None:
        self.found, self.program, self.goal, self.trace, self.overlaps = found, program, goal, found.trace, overlaps
        self.ways = goal.ways or STRAIGHT
        self.recomputing = {event.region for event in self.trace.events if event.grad}
        self.each: dict[str, Each]  # by phase
        self.each = {phase: {} for phase in ("forward", "backward", "recompute")}
        self.sendings: list[Sending] = []
        self.own: dict[Move, tuple[int, int]] = {}
        self.links: dict[str, Each] = {phase: {} for phase in self.each}
        self.packs: dict[str, tuple[int, int]] = {}  # by format: numbers that the busiest rank packs, and how often
        self.rounds = self.in_turn()
        self.count_moves()
        for step in found.steps:
            self.count_step(step)
        self.count_inputs()
        self.sends = {phase: busiest(kinds) for phase, kinds in self.each.items()}
        if found.size == 1:
            self.sends, self.sendings, self.packs = {phase: {} for phase in self.sends}, [], {}

    def add(self, phase: str, kind: str, each: Sequence[int], calls: int) -> None:
        add(self.each[phase], kind, each, calls)

    def send(self, sending: Sending) -> None:
        self.add(sending.phase, sending.kind, sending.sent(self.found.size), sending.calls)
        self.sendings.append(sending)

    def count(self, phase: str, *sent: Sent) -> None:
        """Add traffic inside of stages, which is known for the busiest rank only, as if every rank sent as much."""
        for kind, (nbytes, calls) in (item for one in sent for item in one.items()):
            self.add(phase, kind, [nbytes] * self.found.size, calls)

    def where(self, at: int) -> Where:
        return self.trace.events[at].kind, self.trace.events[at].index, self.trace.ops[at].name

    # --- moves between layouts ---

    def count_moves(self) -> None:
        made = list(self.every_move())
        sizes: Counter[Hashable] = Counter()
        for m, s in made:
            sizes[s.phase, self.collective(m)] += s.value.travels if s.value is not None else 0
        seen: set[Hashable] = set()
        for m, s in made:
            one, pieces = (s.phase, self.collective(m)), self.overlaps.moves.get(m, 0)
            whole = s._replace(calls=pieces or int(one not in seen))
            seen.add(one)
            self.count_packing(whole)
            way = DIRECT if pieces else self.ways.way(sizes[one])
            legs = self.by_link(whole, way) if s.kind == "switch" and self.ways.node else []
            if pieces:
                there = "backward" if s.phase == "backward" else "forward"
                whole = whole._replace(value=None, each=self.overlaps.sent(m)[there])
            for sending in legs or [whole]:
                self.send(sending)
            if s.phase == "forward":
                most = max(map(sum, zip(*(leg.each for leg in legs)))) if legs else m.bytes
                self.own[m] = most, sum(sending.calls for sending in legs or [whole])

    def count_packing(self, switch: Sending) -> None:
        """Count the numbers that a switch in fewer bits packs; `Overlapped` has what pieces add."""
        value, src = switch.value, switch.src
        if switch.kind == "switch" and value is not None and src is not None and value.packed[0] is not None:
            name = self.goal.wire.names[switch.phase == "backward"]
            numbers, calls = self.packs.get(name, (0, 0))
            own = value.local_bytes(src, self.found.size) // value.itemsize
            self.packs[name] = numbers + own, calls + min(switch.calls, 1)

    def every_move(self) -> Iterator[tuple[Move, Sending]]:
        """The sendings of each move, as if no other move shared its collective."""
        by_grad = {(v, k) for s in self.found.steps if s.event.grad for v, k in zip(s.op.inputs, s.choice.needs)}
        by_grad |= {(m.value, m.src) for m in self.found.solution.moves}
        for m in (m for m in self.found.solution.moves if m.kind != "split"):
            value = self.trace.values[m.value]
            at = self.where(m.after if self.program.pushed(m) else m.before)
            for phase, kind, src, dst in self.phases(m, self.trace.grads[m.value] and (m.value, m.dst) in by_grad):
                yield m, Sending(phase, at, kind, 1, value.gradient if phase == "backward" else value, src, dst)

    def by_link(self, switch: Sending, way: str) -> list[Sending]:
        """The sendings of a switch that travels in legs; none if it is direct."""
        assert switch.value is not None
        ways, n, new = self.ways, self.found.size, switch.calls
        rows = dealt(switch.value, switch.src, switch.dst, n)
        legs = [ways.legs(way, rows.__getitem__, rank) for rank in range(n)]
        parts = [(kind, [leg[kind][0] for leg in legs], new * legs[0][kind][1]) for kind in legs[0]]
        if ways.nodes > 1:
            for kind, each, calls in parts:
                add(self.links[switch.phase], kind, each, calls)
        if way == DIRECT:
            return []
        return [Sending(switch.phase, switch.where, kind, calls, each=tuple(each)) for kind, each, calls in parts]

    def phases(self, m: Move, differentiated: bool) -> Iterator[tuple[str, str, Layout, Layout]]:
        """For each phase that makes a move: the phase, the kind of collective, and the layouts."""
        yield "forward", m.kind, m.src, m.dst
        if differentiated:
            yield "backward", MOVES[m.kind].adjoint, m.dst, m.src
        if self.recomputed(m):
            yield "recompute", m.kind, m.src, m.dst

    def collective(self, m: Move) -> Hashable:
        """A key that moves of one collective share: switches of small tensors at one place, not copies of copies."""
        if (
            m.kind != "switch"
            or m in self.overlaps.moves
            or not fuses(self.trace.values[m.value].nbytes, self.found.size)
        ):
            return m
        return ("push", m.after) if self.program.pushed(m) else ("use", m.before, self.rounds[m])

    def in_turn(self) -> dict[Move, int]:
        """The round of each move before an op: copies made of copies wait for the next round (`Run.copy_first`)."""
        rounds: dict[Move, int] = {}
        for k, event in enumerate(self.trace.events):
            now, made = 0, set[tuple[int, Layout]]()
            for v in dict.fromkeys(s.value for s in event.operands if s is not None):
                for m in (m for m in self.program.moves.get(v, []) if m.before == k and not self.program.pushed(m)):
                    if (v, m.src) in made:
                        now, made = now + 1, set()
                    rounds[m] = now
                    if m.kind == "switch":
                        made.add((v, m.dst))
        return rounds

    # --- recomputation ---

    def again(self, at: int, after: bool) -> bool:
        """Tell whether recomputation in backward gets past op `at`: it stops when it has all that was saved."""
        t = self.trace
        region = t.events[at].region if at >= 0 else None
        if region is None or region not in self.recomputing:
            return False
        if t.saves is None:
            return any(e.region == region and e.kind == "stage" for e in t.events[at + after :])
        last = t.saves.get(region, -1)
        return last > at or (last == at and not after)

    def recomputed(self, m: Move) -> bool:
        if self.program.pushed(m):
            return self.again(m.after, after=True)
        # a copy made of a tensor from outside the region still exists
        events = self.trace.events
        inside = m.after < 0 or events[m.after].region == events[m.before].region
        return inside and self.again(m.before, after=False)

    # --- collectives of ops ---

    def count_step(self, step: Decision) -> None:
        event, stage, inside = step.event, step.event.kind == "stage", step.execution.sends
        if (passing := step.passing) is not None:
            at, forward = self.where(step.at), tuple(passing.forward)
            self.send(Sending("forward", at, passing.kind, 1, each=forward))
            first = passing.kind in ("rows", "gather")  # these run before anything is saved; sums run last
            if self.again(step.at, after=not first) and (event.grad or not stage):
                self.send(Sending("recompute", at, passing.kind, 1, each=forward))
            for phase in ("forward", *["recompute"] * self.again(step.at, after=True)):
                for each in passing.after:
                    self.send(Sending(phase, at, passing.kind, 1, each=each))
            if event.grad and any(passing.backward):
                self.send(Sending("backward", at, passing.adjoint, passing.returns, each=tuple(passing.backward)))
        self.count("forward", inside.forward)
        if event.grad:
            self.count("backward", inside.backward)
        self.count("recompute", *[inside.recompute] * self.times_again(step))
        if event.grad:
            for around, after in ((inside.before, False), (inside.after, True)):
                if self.again(step.at, after):
                    self.count("recompute", around)

    def times_again(self, step: Decision) -> int:
        """The number of times that backward repeats an op's own collectives."""
        if step.event.kind != "stage":
            return int(self.again(step.at, after=True))
        if self.goal.kept_inside or not step.event.grad:
            return 0
        # a stage is recomputed to its end: it saves tensors after it sends. A stage that is a checkpoint inside a
        # checkpointed region is recomputed twice, unless it is the region's last: the region stops at its inputs
        itself = self.goal.again_inside or step.event.own
        return itself + self.again(step.at, after=itself)

    def count_inputs(self) -> None:
        """Count gradients of inputs, which arrive full: by an all-gather if the input was split, else an all-reduce."""
        t, n = self.trace, self.found.size
        summed = list(t.whole_grads)
        for v in t.inputs.values():
            if t.grads[v] and t.values[v].home == (None,):
                if (layout := self.program.entry.get(v)) is not None:
                    self.send(Sending("backward", INPUTS, "gather", 1, t.values[v], layout, None))
                else:
                    summed.append(t.values[v].nbytes)
        for size in summed:
            self.send(Sending("backward", INPUTS, "all_reduce", 1, each=(-(-2 * size * (n - 1) // n),) * n))


def busiest(kinds: Mapping[str, tuple[list[int], int]]) -> Sent:
    """The traffic of the rank that sends most, over all kinds, by kind."""
    total = [sum(each) for each in zip(*(each for each, _ in kinds.values()))]
    rank = total.index(max(total)) if total else 0
    return {kind: (each[rank], calls) for kind, (each, calls) in kinds.items()}


def of_links(links: Mapping[str, Each]) -> dict[str, Sent]:
    """The traffic of the rank that sends most over each link, by phase and link."""
    return {
        phase: {kind: (max(each), calls) for kind, (each, calls) in by.items()} for phase, by in links.items() if by
    }
