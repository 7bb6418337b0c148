"""From a solution to the script of a run: where each move is made, at its producer or at its use."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dsp.layout import Cut
from dsp.plan.events import NodeFacts, Sym
from dsp.plan.record import LeftNode, OperationNode, StageNode
from dsp.plan.script import (
    Alike,
    GlueStep,
    Key,
    Number,
    PlannedNode,
    Script,
    StageStep,
    Via,
    key_of_operation,
    key_of_stage,
)
from dsp.plan.solve import Decision, Solved
from dsp.planner import Layout, Move, fuses

NOTHING: Mapping[int, Any] = MappingProxyType({})


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
        tensor that was written, of what shares memory with it, and of a whole tensor that was stretched.
        """
        made = {
            v: (step, key, k) for step in self.found.steps
            for k, (v, key) in enumerate(zip(step.op.outputs, step.choice.gives))
        }  # fmt: skip
        found: dict[int, Layout] = {}
        for v, (first, *rest) in self.moves.items():
            if v not in made or first.kind == "gather":
                continue
            step, home, k = made[v]
            shares = self.trace.values[v].fixed and step.event.shares[k]
            stays = step.event.written or step.event.kind == "source" or shares
            if not stays and home not in self.used.get(v, set()) and all(m.src != home for m in rest):
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

    def via(self, operands: Iterable[Sym | None], at: int) -> list[list[Via]]:
        """The moves of each operand before an op, but for those that its use makes by itself."""
        return [
            [
                (m.src, m.dst)
                for m in (self.moves.get(s.value, []) if s is not None else [])
                if m.before == at and not self.pushed(m)
            ]
            for s in operands
        ]

    @cached_property
    def inputs(self) -> dict[str, tuple[str, ...]]:
        """The dims that each declared input is split along."""
        return {
            param: tuple(sorted(self.trace.names[v][cut] for cut in self.used.get(v, ()) if cut is not None))
            for param, v in self.trace.inputs.items()
        }

    def script(self, pieces: Mapping[int, int] = NOTHING, ahead: Mapping[int, Container[int]] = NOTHING) -> Script:
        """By op, in how many pieces a stage call runs, and the values that come to it in pieces."""
        t = self.trace
        script = Script({param: self.entry.get(v) for param, v in t.inputs.items()}, t.random_glue)
        script.compiled = bool(t.compiled)
        homes = dict(self.found.solution.homes)
        for step in self.found.steps:
            homes.update(zip(step.op.outputs, step.choice.gives))
        homes |= self.push
        steps: dict[tuple[str, int], StageStep | GlueStep] = {}
        for step in self.found.steps:
            event = step.event
            if event.kind == "stage":
                steps["stage", event.index] = made = self.stage_step(step)
                if step.at in pieces:
                    made.pieces = pieces[step.at]
                    made.ahead = [s is not None and s.value in ahead[step.at] for s in event.operands]
                    made.via = [[] if comes else way for comes, way in zip(made.ahead, made.via)]
                # run whole on every rank, it has to draw the same numbers there, as glue does
                script.random_glue |= event.random and made.option is None
                script.random_stages |= event.random
            elif event.kind == "output":
                [script.outputs[event.index]] = self.via(event.operands, step.at)
            elif event.kind in ("glue", "source") and (glue := self.glue_step(step, homes)) is not None:
                steps["glue", event.index] = glue
        self.write(script, steps, homes | {v: layout for v, layout in self.entry.items() if layout is not None})
        return script

    def write(
        self, script: Script, steps: Mapping[tuple[str, int], StageStep | GlueStep], homes: Mapping[int, Layout]
    ) -> None:
        """Write the nodes of the record into the script by what they read, in order."""
        record = self.trace.record
        assert record is not None

        def reads(found: NodeFacts) -> list[Number | tuple[int, ...]]:
            """The tensors of a node as it reads them: sharded if their value is so where it was made."""
            tensors = found.node.given if isinstance(found.node, StageNode) else found.node.operands
            return [
                t.shape if v is None or homes.get(v) is None else Number(t.number, t.shape)
                for t, v in zip(tensors, found.values)
            ]

        def add(key: Key, node: PlannedNode) -> None:
            script.nodes.setdefault(key, Alike([])).nodes.append(node)

        script.numbers = {i.param: i.tensor.number for i in record.inputs}
        for k, left in enumerate(node for node in record.nodes if isinstance(node, LeftNode)):
            [t] = left.operands
            add(("left", "", (t.shape, left.cut)), PlannedNode("left", k, results=(t.number,)))
        operands = [reads(found) for found in self.trace.facts]
        by_facts = [(found, own, steps.get(kind_of(found.node))) for found, own in zip(self.trace.facts, operands)]
        script.on_wholes = frozenset(
            found.node.name
            for found, own, step in by_facts
            if isinstance(step, GlueStep) and not step.idle and not any(isinstance(t, Number) for t in own)
        )
        for found, own, step in by_facts:
            node, facts = found.node, (found.same, found.copied, found.fresh)
            if isinstance(node, StageNode):
                results = tuple(r.tensor.number for r in node.results)
                add(key_of_stage(node.name, own), PlannedNode(node.name, node.index, step, results))
            elif node.name in script.on_wholes or any(isinstance(t, Number) for t in own):
                key = key_of_operation(node.name, node.args, node.kwargs, own)
                results = tuple(t.number for t in node.results)
                add(key, PlannedNode(node.name, node.index, step, results, *facts))

    def stage_step(self, step: Decision) -> StageStep:
        """The decision on a stage call."""
        event, option = step.event, step.execution.option
        assert option is not None
        pushes, ways = self.pushes_of(step), self.via(event.operands, step.at)
        return StageStep(option.name, pushes, event.random, ways, event.constants, event.made, option.onto)

    def glue_step(self, step: Decision, homes: Mapping[int, Layout]) -> GlueStep | None:
        """The decision on an operation; None if it runs on its operands as they lie."""
        event = step.event
        if event.kind == "source":
            source = step.execution.source
            return None if source is None else GlueStep(source=source)
        layout, pushes, apart = dict(zip(step.op.inputs, step.choice.needs)), self.pushes_of(step), step.execution.apart
        if not (any(pushes) or apart or any(homes[v] != key for v, key in layout.items())):
            return None
        cuts = [s.cuts[key] if s and (key := layout[s.value]) is not None else None for s in event.operands]
        return GlueStep(cuts, pushes, via=self.via(event.operands, step.at), apart=apart)

    def pushes_of(self, step: Decision) -> list[Cut | None]:
        return [self.push.get(v) for v in step.op.outputs]


def kind_of(node: OperationNode | StageNode) -> tuple[str, int]:
    return "stage" if isinstance(node, StageNode) else "glue", node.index
