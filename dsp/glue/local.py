"""An offer of a rule, run on parts, with all that it communicates inside: rows of neighbours, numbers that all ranks
gather, rows dealt out, sums."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from dsp.comm.balanced_rows import collect_rows, deal_rows
from dsp.comm.collectives import summed_in
from dsp.comm.halo import read_rows
from dsp.comm.layout import Axis
from dsp.comm.randomness import forked
from dsp.core.record import Layout, Node, Operation
from dsp.core.torch_calls import Operand, replaced, without_operands
from dsp.core.torch_traits import draws
from dsp.glue.rules import Frame, Outcome
from dsp.support.tensors import map_tensors, tensors_in

UNCHANGED = nullcontext()


def frame_of(node: Node, cuts: Any, n: int, side_by_side: bool = False) -> Frame:
    """The call of a node as a rule reads it, with its operands in the given cuts; side_by_side: see `Frame`."""
    assert isinstance(node.call, Operation)
    operands = iter([Operand(tuple(t.shape), c) for t, c in zip(node.operands, cuts)])
    args, kwargs = replaced(node.call.args, node.call.kwargs, operands)
    return Frame(node.name, args, kwargs, n, func=node.call.func, side_by_side=side_by_side)


def outcome_of(node: Node, cuts: Any, n: int) -> Outcome | None:
    """The outcome of a node's rule for operands in these cuts; None if it takes no such, by a refusal or a fault."""
    try:
        return frame_of(node, cuts, n).outcome()
    except Exception:  # `dsp.glue.offers` names what a rule did not mean to raise
        return None


class LocalRule:
    """Makes the function of an offer: `needs` are the cuts of the node's operands; side_by_side: see `Frame`."""

    def __init__(self, node: Node, needs: tuple[Layout, ...], side_by_side: bool = False) -> None:
        self.node, self.needs, self.side_by_side = node, needs, side_by_side

    def __call__(self, axis: Axis, func: Any, args: Any, kwargs: Any) -> Callable[[list[Tensor]], Any]:
        operands = [Operand(tuple(t.shape), c) for t, c in zip(self.node.operands, self.needs)]
        args, kwargs = replaced(args, kwargs, iter(operands))
        frame = Frame(self.node.name, args, kwargs, axis.size, axis.rank, func, self.side_by_side)
        return OnParts(axis, frame, operands, self.needs)


class OnParts:
    """An operation on the parts of one rank, by the outcome of its rule."""

    def __init__(self, axis: Axis, frame: Frame, operands: list[Operand], needs: tuple[Layout, ...]) -> None:
        o = frame.outcome()
        self.axis, self.outcome, self.operands, self.needs = axis, o, operands, needs
        self.args, self.kwargs = (
            frame.args if o.args is None else o.args,
            frame.kwargs if o.kwargs is None else o.kwargs,
        )
        self.name, self.func = frame.name, o.func or frame.func
        self.random = draws(frame.name, frame.args, frame.kwargs)

    def __call__(self, parts: list[Tensor]) -> Any:
        o, axis = self.outcome, self.axis
        args, kwargs = self.arguments(
            [axis.narrow(t, o.narrow[i]) if i in o.narrow else t for i, t in enumerate(parts)]
        )
        with quiet(parts), forked(axis) if self.random else UNCHANGED:
            if o.numbers is not None:
                numbers = o.numbers.of(*args)[None]
                args = torch.ops.dsp.gather(numbers, 0, axis.size, axis.group), *args
            if o.reduce is not None:
                return self.summed(parts, args, kwargs)
            out = self.func(*args, **kwargs)  # type: ignore[misc]
        if o.deal is not None:
            results = tensors_in(out)
            for i in o.deal.results:
                results[i] = collect_rows(results[i], o.cut.dim, o.deal.deal, axis.group)  # type: ignore[union-attr]
            return map_tensors(out, results)
        return out

    def summed(self, parts: list[Tensor], args: Any, kwargs: dict[str, Any]) -> Tensor:
        """The sum over ranks, divided as the rule says.

        In half precision the sum of a mean may overflow: there a rank takes a mean, if it has any element.
        """
        divisor, half = self.outcome.reduce, all(t.numel() and t.element_size() == 2 for t in parts)
        half = half and divisor != 1.0 and kwargs.get("dtype") is None
        if half and "reduction" in kwargs:
            kwargs["reduction"] = "mean"
        func: Any = Tensor.sum if self.name == "mean" and not half else self.func
        out = func(*args, **kwargs)
        total = out.to(summed_in(out.dtype))
        if half:
            total = total * (math.prod(torch.broadcast_shapes(*(t.shape for t in parts))) / out.numel())
        total = torch.ops.dsp.all_reduce(total, self.axis.group)
        return (total / divisor if divisor != 1.0 else total).to(out.dtype)

    def arguments(self, parts: list[Tensor]) -> tuple[Any, dict[str, Any]]:
        """The arguments with parts in the place of operands, with rows of neighbours or dealt rows where asked."""
        o = self.outcome
        table: dict[int, Any] = {id(x): t for x, t in zip(self.operands, parts)}
        if o.rows:
            table |= {id(self.operands[i]): rows for i, rows in rows_of(self.axis, o, parts, self.needs).items()}
        if o.deal is not None:
            i = o.deal.operand
            table[id(self.operands[i])] = deal_rows(parts[i], self.needs[i].dim, o.deal.deal, self.axis.group)  # type: ignore[union-attr]
        return without_operands(self.args, table), {k: without_operands(v, table) for k, v in self.kwargs.items()}


def quiet(parts: list[Tensor]) -> Any:
    """A context that ignores warnings on an empty part, such as those about statistics of no elements."""
    for t in parts:
        if not t.numel():
            return without_warnings()
    return UNCHANGED


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def rows_of(axis: Axis, o: Outcome, parts: list[Tensor], needs: Any) -> dict[int, Any]:
    """By operand, the spans of rows that this rank reads, in one exchange."""
    pairs = [(i, rows) for i, spans in o.rows.items() if needs[i] is not None for rows in spans]
    arrivals = iter(read_rows([parts[i] for i, _ in pairs], [rows for _, rows in pairs], axis.group))
    read = {}
    for i, spans in o.rows.items():
        if needs[i] is None:
            bounds = [(rows.dim, *rows.spans[axis.rank]) for rows in spans]
            tensors = [parts[i].narrow(dim, start, stop - start) for dim, start, stop in bounds]
        else:
            tensors = [next(arrivals) for _ in spans]
        read[i] = tensors[0] if len(tensors) == 1 else tensors
    return read
