"""From a solution to the script of a run: each move is made by the value's producer or before its use."""

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
    """The decisions of a solution, for each value."""

    def __init__(self, found: Solved) -> None:
        self.found, self.trace = found, found.trace
        self.used: dict[int, set[Layout]] = {}  # the layouts in which ops take each value
        for step in found.steps:
            for v, key in zip(step.op.inputs, step.choice.needs):
                self.used.setdefault(v, set()).add(key)
        inputs = {v: self.used.get(v, set()) for v in self.trace.inputs.values()}
        # the layout to which a model input is split on entry: the only one in which it is used
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
        """The layout that a value's producer switches it to.

        A value that no op needs in the layout produced is switched by its producer: at the earliest place, in its own
        dtype. Other moves are made before the use. So are those of values written in place (which are read through the
        tensor that was written), of values that share memory with these, and of replicated tensors that were expanded.
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
        """Make moves of tensors that enter one op together before that op, not at their producers: one collective.

        Not inside an activation checkpoint, which would repeat it; nor if all have one producer, where they share one.
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
        """The moves of each operand before an op, without those that producers make."""
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
        """The dims along which each declared input is split."""
        return {
            param: tuple(sorted(self.trace.names[v][cut] for cut in self.used.get(v, ()) if cut is not None))
            for param, v in self.trace.inputs.items()
        }

    def script(self, pieces: Mapping[int, int] = NOTHING, ahead: Mapping[int, Container[int]] = NOTHING) -> Script:
        """Write the script; pieces: op -> pieces of a stage call; ahead: op -> the values that arrive in pieces."""
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
                # a stage that runs replicated must draw the same numbers on every rank, like glue
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
        """Write the nodes of the record, in order, into the script under their keys."""
        record = self.trace.record
        assert record is not None

        def reads(found: NodeFacts) -> list[Number | tuple[int, ...]]:
            """The tensors that a node reads: sharded if their value is sharded where it was made."""
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
        """The decision on an operation; None if it runs on its operands in their current layouts."""
        event = step.event
        if step.execution.narrowed:
            return GlueStep([*step.execution.narrowed], self.pushes_of(step), via=self.via(event.operands, step.at))
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
