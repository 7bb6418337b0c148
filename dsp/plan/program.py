"""From a solution to the script of a run: where each move is made, at its producer or at its use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from dsp.layout import Cut
from dsp.plan.events import Sym
from dsp.plan.script import GlueStep, Script, StageStep, Via
from dsp.plan.solve import Decision, Solved
from dsp.planner import Layout, Move, fuses


class Program:
    """The decisions of a solution, by value."""

    def __init__(self, found: Solved) -> None:
        self.found, self.trace = found, found.trace
        self.used: dict[int, set[Layout]] = {}  # the layouts in which ops take each value
        for step in found.steps:
            for v, key in zip(step.op.inputs, step.choice.needs):
                self.used.setdefault(v, set()).add(key)
        inputs = {v: self.used.get(v, set()) for v in self.trace.inputs.values()}
        # the layout into which the model's input is split as it enters: the only one in which it is used
        self.entry = {v: next(iter(layouts)) for v, layouts in inputs.items() if len(layouts) == 1}
        self.moves: dict[int, list[Move]] = {}
        for m in found.solution.moves:
            if m.kind != "split" or m.dst != self.entry.get(m.value):
                self.moves.setdefault(m.value, []).append(m)
        self.push = self.pushes()
        self.meet()

    def pushed(self, m: Move) -> bool:
        """Tell whether the producer makes this move."""
        return self.push.get(m.value, "") == m.dst

    def pushes(self) -> dict[int, Layout]:
        """Where a value is switched by its producer.

        One that no use needs as its producer gave it is switched there: the earliest place, and in the producer's own
        dtype; all other moves happen at the use. So do those of what was written in place, which is read by way of the
        tensor that was written, and of a whole tensor that was stretched.
        """
        made = {v: (step, key) for step in self.found.steps for v, key in zip(step.op.outputs, step.choice.gives)}
        found: dict[int, Layout] = {}
        for v, (first, *rest) in self.moves.items():
            if v not in made or first.kind == "gather" or first.dst not in self.trace.cuts[v]:
                continue
            step, home = made[v]
            apart = step.event.written or step.event.kind == "source"
            if not apart and home not in self.used.get(v, set()) and all(m.src != home for m in rest):
                found[v] = first.dst
        return found

    def meet(self) -> None:
        """Leave to their use the pushes of tensors that enter one op together: there they share a collective.

        Not inside an activation checkpoint, which would repeat it; and not what only one op pushes, for it shares
        there.
        """
        t, uses = self.trace, dict[int, list[int]]()
        for k, op in enumerate(t.ops):
            for v in op.inputs:
                uses.setdefault(v, []).append(k)
        entering: dict[int, list[Move]] = {}
        for m in self.found.solution.moves:
            if m.kind == "switch" and fuses(t.values[m.value].nbytes, self.found.size):
                entering.setdefault(m.before, []).append(m)
        for k, moves in entering.items():
            pushed = [m for m in moves if self.pushed(m)]
            free = [m for m in pushed if uses[m.value] == [k] and t.events[k].region is None]
            at_use = len(moves) - len(pushed)
            if len(free) + at_use > 1 and (at_use or len({m.after for m in free}) > 1):
                for m in free:
                    del self.push[m.value]

    def cut(self, v: int, key: Layout) -> Cut | None:
        return None if key is None else self.trace.cuts[v].get(key)

    def via(self, operands: Iterable[Sym | None], at: int) -> list[list[Via]]:
        """The moves of each operand before an op, but for those that its use makes by itself."""
        return [
            [
                (self.cut(m.value, m.src), self.cut(m.value, m.dst))
                for m in (self.moves.get(s.value, []) if s is not None else [])
                if m.before == at and not self.pushed(m)
            ]
            for s in operands
        ]

    @cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The dims that each declared input is split along."""
        used = {param: self.used.get(v, set()) for param, v in self.trace.inputs.items()}
        return {param: tuple(sorted(k for k in layouts if k is not None)) for param, layouts in used.items()}

    def script(self) -> Script:
        t = self.trace
        copies, same, fresh = map(frozenset, (t.copies, t.same, t.fresh))
        script = Script({}, [], {}, t.random_glue, copies, same=same, fresh=fresh, names=tuple(t.names))
        script.spare = frozenset(t.spare)
        script.compiled = bool(t.compiled)
        for param, v in t.inputs.items():
            script.inputs[param] = self.cut(v, self.entry.get(v))
        homes = dict(self.found.solution.homes)
        for step in self.found.steps:
            homes.update(zip(step.op.outputs, step.choice.gives))
        homes |= self.push
        for step in self.found.steps:
            self.write(script, step, homes)
        return script

    def write(self, script: Script, step: Decision, homes: Mapping[int, Layout]) -> None:
        """Write into the script what the run has to know of one op."""
        event = step.event
        pushes = [self.cut(v, self.push.get(v)) for v in step.op.outputs]
        if event.kind == "stage":
            option, ways = step.execution.option, self.via(event.operands, step.at)
            assert option is not None
            how = pushes, event.random, ways, event.constants, option.onto
            script.stages.append(StageStep(event.name, option.name, *how))
            # run whole on every rank, it has to draw the same numbers there, as glue does
            script.random_glue |= event.random and option.name is None
        elif event.kind == "output":
            [script.outputs[event.index]] = self.via(event.operands, step.at)
        elif event.kind == "source":
            if step.execution.source is not None:
                script.glue[event.index] = GlueStep(event.name, source=step.execution.source)
        elif event.kind == "glue":
            layout = dict(zip(step.op.inputs, step.choice.needs))
            apart = step.execution.apart
            if any(pushes) or apart or any(homes[v] != key for v, key in layout.items()):
                cuts = [s.cuts[key] if s and (key := layout[s.value]) is not None else None for s in event.operands]
                via = self.via(event.operands, step.at)
                script.glue[event.index] = GlueStep(event.name, cuts, pushes, via=via, apart=apart)
