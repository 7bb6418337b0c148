"""A check that a run sends what its plan says. Counting costs one addition per collective.

A plan is made before the run and may be wrong about it: the forward takes another branch, or makes moves that the plan
did not foresee. A difference is logged once. If the forward ran the planned operations, the message adds that the
results are right.

Forward traffic is checked when the forward ends. Backward traffic, recomputation included, is counted per backward
pass, in any thread, and checked when that pass ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from dsp.guard.traffic import SAID, Counts, difference
from dsp.observers import Observer
from dsp.plan.script import Where
from dsp.private import after_backward, backward_pass
from dsp.sent import COLLECTIVES

if TYPE_CHECKING:
    from dsp.plan.script import Script
    from dsp.report.table import Plan
    from dsp.run.forward import Run


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
        return difference(phase, made, planned, where_it_left, lambda phase, where, kinds: name(where))


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
            add(self.counts, self.run.where, name, args)

    def for_backward(self) -> Observer | None:
        return BackwardObserver(self.check, self.run.where) if self.run.in_stage is None else None


class BackwardObserver(NamedTuple):
    """Counts the backward of the collectives of one place."""

    check: TrafficCheck
    where: Where

    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        if (counts := self.check.running()) is not None:
            add(counts["backward"], self.where, name, args)

    def for_backward(self) -> Observer | None:
        return self


def add(counts: Counts, where: Where, name: str, args: tuple[Any, ...]) -> None:
    for kind, calls, nbytes in COLLECTIVES[name].counted(*args):
        counts.add(where, kind, calls, nbytes)


def where_it_left(script: Script, run: Run) -> str:
    """The place where a run left its plan, as a sentence; "" if it did not."""
    recorded = ", which is the record of an earlier call," if script.recorded else ""
    if run.unknown is None:
        return ""
    return f"it called {name(run.unknown)} on tensors for which the plan{recorded} has no such call"


def name(where: Where) -> str:
    kind, _, own = where
    return {"stage": f"stage {own!r}", "glue": f"{own}()", "output": "the output", "input": own}[kind]
