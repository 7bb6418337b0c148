"""The slice test without numbers: by the rules of glue, on tensors that only have a shape.

For an operation with sharded operands, a rule says what each rank computes from its shard; `test_prover.py` compares
the rules with slices of full results. So a submodule is independent along a dim if on a slice it makes the same
operations with the same constants, and if by its rule each operation makes its shard locally: nothing narrowed, no
rows or sums from other ranks. An operation that has no rule, or uses a length as a number, counts as computing over
the dim: that may cost a layout, and is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple

from torch import Tensor

from dsp.comm.layout import Cut
from dsp.core.record import Node, Operation, Ref
from dsp.core.torch_calls import replaced
from dsp.discovery.dims import outcome_of, ranks_for
from dsp.discovery.recording import Recording
from dsp.glue.rules import Outcome
from dsp.stages.parts import call_part
from dsp.verify.slices import Probe, copied

Cuts = Sequence[Cut | None]


class Step(NamedTuple):
    """One operation of the full call, the cuts of its operands, and the outcome of its rule."""

    node: Node
    cuts: Cuts
    outcome: Outcome


class Call(Recording):
    """The record of one call by itself: its inputs, operations and outputs."""

    inputs: list[Ref]
    outputs: list[Ref]

    def steps(self, cuts: Cuts, n: int) -> tuple[list[Step], list[Cut]] | None:
        """The steps of a call cut into n parts, and the cuts of its results; None if an operation loses the cut."""
        at = {t.number: cut for t, cut in zip(self.inputs, cuts)}
        steps = []
        for node in self.nodes:
            reads = [at.get(t.number) for t in node.refs]
            if (outcome := carried(node, reads, n)) is None:
                return None
            steps.append(Step(node, reads, outcome))
            at.update((t.number, outcome.cut) for t in node.results)
        places = [cut for t in self.outputs if (cut := at.get(t.number)) is not None]
        return (steps, places) if len(places) == len(self.outputs) > 0 else None


def carried(node: Node, cuts: Cuts, n: int) -> Outcome | None:
    """The rule's outcome for operands in these cuts, if each part is computed locally; None if not."""
    if not isinstance(node.call, Operation):
        return None
    if not any(cuts):
        return Outcome(None)
    if (node.in_place and cuts[0] is None) or "out" in node.call.kwargs:  # a shard written into a replicated tensor
        return None
    outcome = outcome_of(node, dict(enumerate(cuts)), n)
    if outcome is None or outcome.reduce is not None:
        return None
    return None if outcome.narrow or outcome.rows or outcome.numbers or outcome.deal else outcome


class Shapes(Probe):
    """A `Probe` of a call whose tensors have no data."""

    def recorder(self) -> Any:
        return Call()

    def run(self, args: Any, kwargs: Any, seen: Any) -> tuple[list[Tensor], list[Any]]:
        seen.inputs = seen.refs(b.tensor for b in self.signature.bind(args, kwargs)[1])
        results, constants = super().run(args, kwargs, seen)
        seen.outputs = seen.refs(results)
        return results, constants

    def independent(self, cuts: Cuts, size: int) -> list[Cut] | None:
        """The place in each output of the dim that is at `cuts` in the inputs; None if the rules do not show it."""
        n = ranks_for(size)[0]
        if (outcome := self.draws.steps(cuts, n)) is None:
            return None
        steps, places = outcome
        call, part = call_part(self.signature, self.args, self.kwargs, cuts, size, 0, size // n), Call()
        args, kwargs = copied(tuple(call.args), call.kwargs)
        try:
            _, constants = self.run(args, kwargs, part)
            alike = constants == self.constants and len(part.outputs) == len(places) and len(part.nodes) == len(steps)
            return places if alike and all(is_part(*pair, n) for pair in zip(part.nodes, steps)) else None
        except Exception:  # a call that fails on a slice, for whatever reason, is not independent
            return None


def is_part(node: Node, step: Step, n: int) -> bool:
    """Tell whether a node is a step on one of n parts: the same operation and constants, on parts of its tensors."""
    whole, outcome = step.node, step.outcome
    if node.kind != "operation" or node.name != whole.name:
        return False
    if outcome.args is None and outcome.kwargs is None and numbers(node) != numbers(whole):
        return False  # a constant that depends on the length
    results = [outcome.cut] * len(whole.results)
    return are_parts(node.refs, whole.refs, step.cuts, n) and are_parts(node.results, whole.results, results, n)


def numbers(node: Node) -> Any:
    """The arguments of an operation without its tensors."""
    assert isinstance(node.call, Operation)
    return replaced(node.call.args, node.call.kwargs, repeat(None))


def are_parts(parts: Sequence[Ref], whole: Sequence[Ref], cuts: Cuts, n: int) -> bool:
    """Tell whether tensors have the shapes of one of n parts of the tensors `whole`."""
    shapes = [list(t.shape) for t in whole]
    for shape, cut in zip(shapes, cuts):
        if cut is not None:
            shape[cut.dim] //= n
    return [list(t.shape) for t in parts] == shapes
