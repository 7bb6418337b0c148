"""The slice test where there are no numbers: by the rules of glue, on tensors that have a shape alone.

The rules say of an operation with one operand sharded what each rank computes of its part, and `test_prover.py`
holds them to slices of the whole. So a submodule is independent along a dim if on a slice it makes the same operations
of the same numbers, and each of them gives its part by its rule alone: nothing narrowed, no rows, no sums of others.
Whatever has no rule, or counts in lengths of its own, is computed over: that costs a layout, and is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from dsp.discover.dims import ranks_for
from dsp.layout import Cut
from dsp.rules import Frame, Operand, Outcome, replaced, tensor_args, without_operands
from dsp.rules.between import Between
from dsp.rules.functions import Traits
from dsp.slices import Probe, call_part, copied
from dsp.tensors import ByTensor, tensors_in


class Dependent(RuntimeError):
    """A slice goes another way than the whole."""


class Step(NamedTuple):
    """One operation, and an Operand for each of its results."""

    frame: Frame
    given: list[Operand]


def numbers(frame: Frame) -> Any:
    """All but the tensors."""
    nothing: dict[int, Any] = {id(o): None for o in frame.operands()}
    return without_operands((frame.args, tuple(sorted(frame.kwargs.items()))), nothing)


def sharded(frame: Frame, cuts: Sequence[Cut | None], n: int) -> Frame:
    cut: dict[int, Any] = {id(o): Operand(o.shape, c) for o, c in zip(frame.operands(), cuts)}
    kwargs = {k: without_operands(v, cut) for k, v in frame.kwargs.items()}
    return Frame(frame.name, without_operands(frame.args, cut), kwargs, n)


class Walk(Between):
    """Records the operations of a call, or, given those of the whole call, follows the part of a slice through them.

    size, length: of the dim, and of the slice, which is what the first of size / length ranks holds.
    """

    def __init__(self, whole: Walk | None = None, size: int = 1, length: int = 1) -> None:
        super().__init__()
        self.whole, self.size, self.length = whole, size, length
        self.steps: list[Step] = []
        self.cuts = ByTensor[Cut | None]()  # of the slice's tensors: where they lie in the whole call's

    def transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.whole is not None:
            raise Dependent  # a tensor hides another, and its shape
        return func(*args, **kwargs)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        tensors = tensor_args(args, kwargs)
        frame = Frame(what.name, *replaced(args, kwargs, iter([Operand(tuple(t.shape)) for t in tensors])), n=1)
        cut = self.follow(frame, [self.cuts.get(t) for t in tensors], what.in_place) if self.whole is not None else None
        out = func(*args, **kwargs)
        results = tensors_in(out)
        step = Step(frame, [Operand(tuple(t.shape)) for t in results])
        if self.whole is not None:
            given = self.whole.steps[len(self.steps)].given
            if not self.parts(step.given, given, [cut] * len(given)):
                raise Dependent
            for t in results:
                self.cuts[t] = cut
        self.steps.append(step)
        return out

    def follow(self, own: Frame, cuts: list[Cut | None], changing: bool) -> Cut | None:
        """Where the results of a step on the slice will lie in those of the whole, for all that its rule says."""
        assert self.whole is not None
        if len(self.steps) == len(self.whole.steps):
            raise Dependent
        frame = self.whole.steps[len(self.steps)].frame
        if own.name != frame.name or not self.parts(own.operands(), frame.operands(), cuts):
            raise Dependent
        outcome = Outcome(None)
        if any(cuts):
            if (changing and cuts[0] is None) or "out" in own.kwargs:
                raise Dependent  # a part written into what is whole
            outcome = sharded(frame, cuts, self.size // self.length).outcome()
            if outcome.narrow or outcome.rows or outcome.numbers or outcome.reduce is not None:
                raise Dependent
        if outcome.args is None and outcome.kwargs is None and numbers(own) != numbers(frame):
            raise Dependent  # a length that is counted
        return outcome.cut

    def parts(self, own: list[Operand], whole: list[Operand], cuts: Sequence[Cut | None]) -> bool:
        """Tell whether tensors of the slice have the shapes of parts of the whole call's tensors."""
        if len(own) != len(whole):
            return False
        for o, w, cut in zip(own, whole, cuts):
            shape = list(w.shape)
            if cut is not None:
                shape[cut.dim] = shape[cut.dim] * self.length // self.size
            if list(o.shape) != shape:
                return False
        return True


class Shapes(Probe):
    """`Probe` of a call whose tensors have no data."""

    def recorder(self) -> Any:
        return Walk()

    def independent(self, cuts: Sequence[Cut | None], size: int) -> list[Cut] | None:
        """Where each output carries the dim that `cuts` point at in the inputs; None if the rules do not show that."""
        length = size // ranks_for(size)[0]
        call = call_part(self.signature, self.args, self.kwargs, cuts, size, 0, length)
        args, kwargs = copied(tuple(call.args), call.kwargs)
        walk = Walk(self.draws, size, length)
        for b, cut in zip(self.signature.bind(args, kwargs)[1], cuts):
            walk.cuts[b.tensor] = cut
        with suppress(Exception):  # what does not run on a slice is not independent, for whatever reason
            found, constants = self.run(args, kwargs, walk)
            places = [cut for t in found if (cut := walk.cuts.get(t)) is not None]
            alike = constants == self.constants and len(walk.steps) == len(self.draws.steps)
            if alike and found and len(found) == len(self.whole) == len(places):
                return places
        return None
