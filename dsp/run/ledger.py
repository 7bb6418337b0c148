"""Does a run send what its plan says? Counted where collectives are made, forward, at no cost worth mentioning.

A plan is made without the run, so it may be wrong of it: a forward that went another way, or moves that the plan did
not foresee. Numbers and gradients are right all the same; but what was promised is not kept, and that is said, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dsp.collectives import LISTENER
from dsp.plan.script import Where
from dsp.sent import COLLECTIVES
from dsp.text import human

if TYPE_CHECKING:
    from dsp.plan.script import Script
    from dsp.plan.table import Plan
    from dsp.run.forward import Run


class Ledger:
    """What this rank sent in one forward, outside of stages: these count for themselves."""

    def __init__(self, run: Run) -> None:
        self.run, self.bytes, self.calls = run, 0, 0
        self.entries: list[tuple[Where, str, int]] = []

    def hear(self, name: str, args: tuple[Any, ...]) -> None:
        if self.run.in_stage is None:
            kind, sent = COLLECTIVES[name]
            nbytes = sent(*args)
            self.bytes, self.calls = self.bytes + nbytes, self.calls + 1
            self.entries.append((self.run.where, kind, nbytes))

    @contextmanager
    def listening(self) -> Iterator[None]:
        token = LISTENER.set(self.hear)
        try:
            yield
        finally:
            LISTENER.reset(token)


class Word:
    """What a plan promises of this rank's forward."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.script = plan.script
        self.entries = [(s.where, s.kind, s.calls, s.sent(plan.size, rank)) for s in plan.sendings]
        self.bytes = sum(nbytes for *_, nbytes in self.entries)
        self.calls = sum(calls for _, _, calls, _ in self.entries)

    def kept(self, ledger: Ledger) -> bool:
        return (ledger.bytes, ledger.calls) == (self.bytes, self.calls)

    def tell(self, ledger: Ledger) -> str:
        return (
            f"this forward sent {human(ledger.bytes)} in {ledger.calls} calls where its plan says {human(self.bytes)} "
            f"in {self.calls}: {astray(self.script, ledger.run) or self.first(ledger)}. What it computes is right"
        )

    def first(self, ledger: Ledger) -> str:
        """The first place where the two differ."""
        planned: dict[Where, Counter[str]] = {}
        made: dict[Where, Counter[str]] = {}
        for where, kind, calls, nbytes in self.entries:
            planned.setdefault(where, Counter()).update({kind: nbytes, "calls": calls})
        for where, kind, nbytes in ledger.entries:
            made.setdefault(where, Counter()).update({kind: nbytes, "calls": 1})
        for where in dict.fromkeys((*made, *planned)):
            if planned.get(where, Counter()) != made.get(where, Counter()):
                return f"at {name(where)} {shown(made.get(where))} instead of {shown(planned.get(where))}"
        return "the same in other places"


def astray(script: Script, run: Run) -> str:
    """Where a run left the way of its plan."""
    recorded = ", which is the record of an earlier call," if script.recorded else ""
    if run.strayed is not None:
        took, planned = run.strayed
        return f"it came to {name(took)} where the plan{recorded} {'ends' if planned is None else f'has {planned!r}'}"
    if run.stage_index != len(script.stages):
        return f"it called {run.stage_index} stages, and the plan{recorded} has {len(script.stages)}"
    return ""


def name(where: Where) -> str:
    kind, _, own = where
    return f"stage {own!r}" if kind == "stage" else "the output" if kind == "output" else f"{own}()"


def shown(sent: Counter[str] | None) -> str:
    kinds = [f"a {kind} of {human(nbytes)}" for kind, nbytes in (sent or {}).items() if kind != "calls"]
    return " and ".join(kinds) or "nothing"
