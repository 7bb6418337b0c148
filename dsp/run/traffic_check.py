"""A check that a run sends what its plan says. Counting costs one addition per collective.

A plan is made before the run and may be wrong about it: the forward takes another branch, or makes moves that the plan
did not foresee. A difference is logged once. If the forward ran the planned operations, the message adds that the
results are right.

Forward traffic is checked when the forward ends. Backward traffic, recomputation included, is counted per backward
pass, in any thread, and checked when that pass ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dsp.observers import Observer
from dsp.plan.script import Where
from dsp.private import after_backward, backward_pass
from dsp.sent import COLLECTIVES
from dsp.text import human

if TYPE_CHECKING:
    from dsp.plan.script import Script
    from dsp.report.table import Plan
    from dsp.run.forward import Run

RIGHT = "Its results are right"
SAID = {"forward": "this forward", "backward": "this backward", "recompute": "recomputation in this backward"}
MISSED = {"forward": "", "backward": ": no gradient came there", "recompute": ": that was not computed again"}


@dataclass(eq=False, slots=True)
class Counts:
    """One rank's traffic in one phase of a step, sent or planned, in total and by place."""

    bytes: int = 0
    calls: int = 0
    entries: list[tuple[Where, str, int, int]] = field(default_factory=list)

    def add(self, where: Where, kind: str, calls: int, nbytes: int) -> None:
        self.bytes, self.calls = self.bytes + nbytes, self.calls + calls
        self.entries.append((where, kind, calls, nbytes))

    def on_collective(self, where: Where, name: str, args: tuple[Any, ...]) -> None:
        for kind, calls, nbytes in COLLECTIVES[name].counted(*args):
            self.add(where, kind, calls, nbytes)

    def by_place(self) -> dict[Where, Counter[str]]:
        places: dict[Where, Counter[str]] = {}
        for where, kind, calls, nbytes in self.entries:
            places.setdefault(where, Counter()).update({kind: nbytes, "calls": calls})
        return places


class PlannedCounts:
    """The traffic that a plan expects of this rank, by phase."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.script = plan.script
        self.phases = {phase: Counts() for phase in SAID}
        for s in plan.sendings:
            self.phases[s.phase].add(s.where, s.kind, s.calls, s.sent(plan.size)[rank])
        # whether the plan sends anything in backward
        self.returns = any(self.phases[phase].calls for phase in ("backward", "recompute"))

    def difference(self, phase: str, made: Counts, where_it_left: str) -> str:
        """The difference between sent and planned traffic and its cause, as a sentence; "" if they agree."""
        planned = self.phases[phase]
        if (made.bytes, made.calls) == (planned.bytes, planned.calls):
            return ""
        return (
            f"{SAID[phase]} sent {human(made.bytes)} in {made.calls} calls where its plan says {human(planned.bytes)} "
            f"in {planned.calls}: " + (where_it_left or f"{first(phase, made, planned)}. {RIGHT}")
        )


class TrafficCheck:
    """The traffic of one forward and its backward passes, compared with the planned one; `say` tells the user."""

    def __init__(self, planned: PlannedCounts, run: Run, say: Callable[[str], None]) -> None:
        self.planned, self.say, self.where_it_left = planned, say, ""
        self.forward = ForwardObserver(run, self, Counts())
        self.passes: dict[int, dict[str, Counts]] = {}  # the running backward passes, by number

    def end(self) -> None:
        """Check the forward, which has ended."""
        self.where_it_left = where_it_left(self.planned.script, self.forward.run)
        self.judge({"forward": self.forward.counts})
        del self.forward  # backward keeps this check alive; it must not keep the run

    def judge(self, made: dict[str, Counts]) -> None:
        for phase, counts in made.items():
            if text := self.planned.difference(phase, counts, self.where_it_left):
                self.say(text)
                return

    def running(self) -> dict[str, Counts] | None:
        """The counts of the running backward pass; None outside of one."""
        number = backward_pass()
        if number not in self.passes and number != -1:
            self.passes[number] = {"backward": Counts(), "recompute": Counts()}
            after_backward(lambda: self.judge(self.passes.pop(number)))
        return self.passes.get(number)

    def witness(self, _: Any) -> None:
        """A hook on the outputs' gradients: it registers a backward pass even if that sends nothing."""
        self.running()

    def again(self, run: Run) -> ForwardObserver:
        """The observer of a run that recomputes a part of the forward in backward."""
        return ForwardObserver(run, self, (self.running() or {"recompute": Counts()})["recompute"])


class ForwardObserver(NamedTuple):
    """Counts this rank's traffic in a forward or its recomputation; traffic inside stages is not counted."""

    run: Run
    check: TrafficCheck
    counts: Counts

    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if self.run.in_stage is None:
            self.counts.on_collective(self.run.where, name, args)

    def for_backward(self) -> Observer | None:
        return BackwardObserver(self.check, self.run.where) if self.run.in_stage is None else None


class BackwardObserver(NamedTuple):
    """Counts the backward of the collectives of one place."""

    check: TrafficCheck
    where: Where

    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if (counts := self.check.running()) is not None:
            counts["backward"].on_collective(self.where, name, args)

    def for_backward(self) -> Observer | None:
        return self


def first(phase: str, made: Counts, planned: Counts) -> str:
    """The first place where sent and planned traffic differ, as a sentence."""
    was, meant = made.by_place(), planned.by_place()
    for where in dict.fromkeys((*was, *meant)):
        if was.get(where) != meant.get(where):
            why = MISSED[phase] if where not in was else ""
            return f"at {name(where)} {shown(was.get(where))} instead of {shown(meant.get(where))}{why}"
    return "the same in other places"


def where_it_left(script: Script, run: Run) -> str:
    """The place where a run left its plan, as a sentence; "" if it did not."""
    recorded = ", which is the record of an earlier call," if script.recorded else ""
    if run.unknown is None:
        return ""
    return f"it called {name(run.unknown)} on tensors for which the plan{recorded} has no such call"


def name(where: Where) -> str:
    kind, _, own = where
    return {"stage": f"stage {own!r}", "glue": f"{own}()", "output": "the output", "input": own}[kind]


def shown(sent: Counter[str] | None) -> str:
    kinds = [f"a {kind} of {human(nbytes)}" for kind, nbytes in (sent or {}).items() if kind != "calls"]
    return " and ".join(kinds) or "nothing"
