"""A check that a call sends what its plan says. Counting costs one addition for each collective.

A plan is made before the run and may be wrong about it: the forward takes another branch, or makes moves that the plan
did not foresee. A difference is logged once for each plan. If the forward ran the planned operations, the message adds
that the results are right.

Forward traffic is checked when the forward ends. Backward traffic, recomputation included, is counted in each backward
pass, in any thread, and checked when that pass ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dsp.comm.layout import Axis
from dsp.comm.node_routes import STRAIGHT
from dsp.comm.observers import OBSERVER, RUNNING, Observer
from dsp.comm.traffic_formulas import COLLECTIVES
from dsp.core.observed import Events, ModelCall
from dsp.core.record import Node, Record
from dsp.core.run import InStage
from dsp.report.legs import routed
from dsp.report.traffic import planned_transfers
from dsp.support.formatting import human
from dsp.support.private import after_backward, backward_pass
from dsp.support.tensors import tensors_in

log = logging.getLogger("dsp")

RECORDS = 64  # of which the planned traffic is kept
SIZES = 4096  # of collectives, of which the bytes are kept
RIGHT = "Its results are right"
SAID = {"forward": "this forward", "backward": "this backward", "recompute": "recomputation in this backward"}
MISSED = {"forward": "", "backward": ": no gradient came there", "recompute": ": that was not computed again"}


@dataclass(eq=False, slots=True)
class Counts:
    """The traffic of one rank in one phase of a step, sent or planned, in total and by place."""

    bytes: int = 0
    calls: int = 0
    entries: list[tuple[Any, str, int, int]] = field(default_factory=list)

    def add(self, place: Any, kind: str, calls: int, nbytes: int) -> None:
        self.bytes, self.calls = self.bytes + nbytes, self.calls + calls
        self.entries.append((place, kind, calls, nbytes))

    def by_place(self) -> dict[Any, Counter[str]]:
        places: dict[Any, Counter[str]] = {}
        for place, kind, calls, nbytes in self.entries:
            places.setdefault(place, Counter()).update({kind: nbytes, "calls": calls})
        return places


def difference(
    phase: str, sent: Counts, planned: Counts, departure: str, name: Callable[[str, Any, Counter[str]], str]
) -> str:
    """The difference between sent and planned traffic and its cause, as a sentence.

    departure: the place where the run left its plan, as a sentence; name: names a place of a phase, by what it sends.
    """
    return (
        f"{SAID[phase]} sent {human(sent.bytes)} in {sent.calls} calls where its plan says {human(planned.bytes)} "
        f"in {planned.calls}: " + (departure or f"{first_place(phase, sent, planned, name)}. {RIGHT}")
    )


def first_place(phase: str, sent: Counts, planned: Counts, name: Callable[[str, Any, Counter[str]], str]) -> str:
    """The first place where sent and planned traffic differ, as a sentence."""
    was, meant = sent.by_place(), planned.by_place()
    for place in dict.fromkeys((*was, *meant)):
        if was.get(place) != meant.get(place):
            why = MISSED[phase] if place not in was else ""
            kinds = was.get(place) or meant[place]
            return f"at {name(phase, place, kinds)} {shown(was.get(place))} instead of {shown(meant.get(place))}{why}"
    return "the same in other places"


def shown(sent: Counter[str] | None) -> str:
    kinds = [f"a {kind} of {human(nbytes)}" for kind, nbytes in (sent or {}).items() if kind != "calls"]
    return " and ".join(kinds) or "nothing"


def node_name(phase: str, node: Node | None, kinds: Counter[str]) -> str:
    """The name of a place: a node; in a forward, what the model's code sends by itself; or the inputs, whose gradients
    every rank gets."""
    if node is None:
        return "the inputs" if phase == "backward" else f"{next(iter(kinds))}()"
    return {"stage": f"stage {node.name!r}", "output": "the output"}.get(node.kind, f"{node.name}()")


class PlannedTraffic:
    """The traffic that a record plans for one rank, by phase.

    returns: backward sends something; grown: the record has nodes that earlier calls added, so that its plan covers
    several ways of the forward, and no backward.
    """

    def __init__(self, record: Record, axis: Axis) -> None:
        self.grown = record.replans > 0
        self.phases = {phase: Counts() for phase in SAID}
        for route in routed(record, planned_transfers(record), axis.ways or STRAIGHT):
            for t in route.legs if not route.transfer.by_method else ():
                self.phases[t.phase].add(t.node, t.kind, t.calls, t.sent[axis.rank])
        self.returns = not self.grown and any(self.phases[phase].calls for phase in ("backward", "recompute"))

    def holds(self, phase: str, sent: Counts) -> bool:
        """Tell whether traffic is as planned; of one of several ways, at most that of all."""
        planned = self.phases[phase]
        if self.grown:
            return phase != "forward" or (sent.bytes <= planned.bytes and sent.calls <= planned.calls)
        return (sent.bytes, sent.calls) == (planned.bytes, planned.calls)


class TrafficGuard:
    """Compares what the calls of a model send with their plans.

    before: is called before the first collective of a call; check: of the running call; logged: the keys of calls of
    which a difference was.
    """

    def __init__(self, axis: Axis, before: Callable[[], None]) -> None:
        self.axis, self.before = axis, before
        self.planned: dict[Record, PlannedTraffic] = {}
        self.sizes: dict[Any, Sequence[tuple[str, int, int]]] = {}  # by collective: its traffic
        self.logged = dict[Any, None]()
        self.check: CallTraffic | None = None
        self.token: Any = None

    def attach(self, events: Events) -> None:
        events.ready.append(self.ready)
        events.end.append(self.end)
        events.over.append(self.over)

    def ready(self, call: ModelCall) -> None:
        record = call.record
        if not record.planned:
            return
        planned = self.planned.get(record)
        if planned is None:
            if len(self.planned) >= RECORDS:
                del self.planned[next(iter(self.planned))]
            planned = self.planned[record] = PlannedTraffic(record, self.axis)
        self.check = CallTraffic(self, planned, call.key, len(record.nodes))
        self.token = OBSERVER.set(self.check)

    def end(self, call: ModelCall, out: Any) -> None:
        check = self.check
        if check is None:
            return
        if check.planned.returns:
            for t in tensors_in(out):
                if t.requires_grad and t.grad_fn is not None:
                    t.register_hook(check.note_pass)
        check.end(call.record)

    def over(self) -> None:
        if self.token is not None:
            OBSERVER.reset(self.token)
        self.check = self.token = None

    def sent(self, name: str, args: tuple[Any, ...]) -> Sequence[tuple[str, int, int]]:
        """The calls and bytes of a collective, by kind."""
        x = args[0]
        if not isinstance(x, Tensor):
            return COLLECTIVES[name](*args)
        key = name, x.shape, x.dtype, str(args[1:])
        sent = self.sizes.get(key)
        if sent is None:
            if len(self.sizes) >= SIZES:
                self.sizes.clear()
            sent = self.sizes[key] = COLLECTIVES[name](*args)
        return sent

    def say(self, key: Any, text: str) -> None:
        if key not in self.logged:
            if len(self.logged) >= RECORDS:
                del self.logged[next(iter(self.logged))]
            self.logged[key] = None
            (log.warning if self.axis.rank == 0 else log.info)(text)


class CallTraffic:
    """The traffic of one call and its backward passes: the observer of its collectives, in recomputations too. Traffic
    inside stages is not counted."""

    def __init__(self, guard: TrafficGuard, planned: PlannedTraffic, key: Any, nodes: int) -> None:
        self.guard, self.planned, self.key, self.nodes = guard, planned, key, nodes
        self.counts, self.ended, self.departure = Counts(), False, ""
        self.passes: dict[int, dict[str, Counts]] = {}  # the running backward passes, by number

    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        node = RUNNING.get()
        if type(node) is InStage:
            return
        counts: Counts | None = self.counts
        if self.ended:
            counts = (self.running() or {}).get("recompute")
        elif not self.counts.entries:
            self.guard.before()
        if counts is not None:
            for kind, calls, nbytes in self.guard.sent(name, args):
                counts.add(node, kind, calls, nbytes)

    def for_backward(self) -> Observer | None:
        node = RUNNING.get()
        return None if type(node) is InStage else BackwardTraffic(self, node)

    def end(self, record: Record) -> None:
        """Check the forward, which has ended."""
        self.ended = True
        if len(record.nodes) > self.nodes:
            name = node_name("forward", record.nodes[self.nodes], Counter())
            recorded = ", which is the record of earlier calls," if self.planned.grown else ""
            self.departure = f"it called {name} on tensors for which the plan{recorded} has no such call"
        planned = self.planned.phases["forward"]
        if (self.counts.bytes, self.counts.calls) != (planned.bytes, planned.calls):
            self.judge({"forward": self.counts})

    def judge(self, sent: dict[str, Counts]) -> None:
        for phase, counts in sent.items():
            if not self.planned.holds(phase, counts):
                text = difference(phase, counts, self.planned.phases[phase], self.departure, node_name)
                self.guard.say(self.key, text)
                return

    def running(self) -> dict[str, Counts] | None:
        """The counts of the running backward pass; None outside of one."""
        number = backward_pass()
        if number not in self.passes and number != -1:
            self.passes[number] = {"backward": Counts(), "recompute": Counts()}
            after_backward(lambda: self.judge(self.passes.pop(number)))
        return self.passes.get(number)

    def note_pass(self, _: Any) -> None:
        """A hook on the outputs' gradients: it registers a backward pass even if that sends nothing."""
        self.running()


class BackwardTraffic(NamedTuple):
    """Counts the backward of the collectives of one node."""

    call: CallTraffic
    node: Node | None

    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if (counts := self.call.running()) is not None:
            for kind, calls, nbytes in self.call.guard.sent(name, args):
                counts["backward"].add(self.node, kind, calls, nbytes)

    def for_backward(self) -> Observer | None:
        return self
