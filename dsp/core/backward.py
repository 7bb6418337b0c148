"""Facts of a recorded forward for its backward: which tensors get a gradient, and where checkpoints stop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dsp.core.carrier import LOCAL
from dsp.core.record import Node, Ref, RegionPlace
from dsp.core.torch_calls import Operand
from dsp.support.private import FakeTensor, base_of, checkpoint_frame, checkpoint_frames, saved_in
from dsp.support.tensors import Edge, edge, leading_to


class Regions:
    """The activation checkpoints of a forward that is recorded, but not those around it."""

    def __init__(self) -> None:
        self.around = len(checkpoint_frames())
        self.frames: list[Any] = []  # in the order in which they began
        self.running: list[Any] = []

    def saved(self) -> list[tuple[int, int]]:
        """The checkpoints that run, by number, with the tensors that each has saved so far."""
        last = checkpoint_frame()
        if last is None:
            return []
        if not self.running or self.running[-1] is not last:
            self.running = checkpoint_frames()[self.around :]
            self.frames += [f for f in self.running if not any(f is other for other in self.frames)]
        numbers = [next(i for i, other in enumerate(self.frames) if other is f) for f in self.running]
        return [(i, saved_in(f)) for i, f in zip(numbers, self.running)]

    def places(self, before: Sequence[tuple[int, int]]) -> tuple[RegionPlace, ...]:
        """The places of a node that has run, from the tensors saved before it."""
        return tuple(RegionPlace(i, saved, saved_in(self.frames[i])) for i, saved in before)

    def totals(self) -> list[float]:
        return [saved_in(frame) if frame.early_stop else math.inf for frame in self.frames]


def edges_into(tensors: Sequence[Tensor], in_place: bool) -> list[Edge | None]:
    """The edges to which the gradients of an operation's operands go, just before it runs.

    Of a view that is written in place it is that of its base, where autograd notes the write; and just after it that of
    the result.
    """
    edges = [*map(edge, tensors)]
    if in_place and (base := base_of(tensors[0])) is not None:
        edges[0] = edge(base)
    return edges


def pack(t: Tensor) -> Any:
    """The data of a tensor that a recorded forward saves for backward.

    A node that saves its own result, as tanh does, would hold itself for good. A backward inside of a forward needs no
    numbers of tensors without data.
    """
    with LOCAL():
        if t.grad_fn is None:
            return t
        return placeholder(t) if isinstance(t, FakeTensor) else t.detach()


def placeholder(t: Tensor) -> Any:
    """A function that makes another tensor like one without data."""
    return partial(torch.empty_strided, t.shape, t.stride(), dtype=t.dtype, device=t.device)


def unpack(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed()


class Gradients:
    """The places of autograd at which the tensors of nodes get their gradients.

    A stage gets views of its operands, which nothing else reads. An operation gets tensors that others read, too: of
    these a gradient comes through it to those that its results lead to.
    """

    def __init__(self) -> None:
        self.edges: list[tuple[Node, list[Edge | None], list[Edge | None]]] = []

    def note(self, node: Node, operands: Iterable[Edge | None], results: Iterable[Edge | None] = ()) -> None:
        self.edges.append((node, [*operands], [*results]))

    def finish(self, outputs: Sequence[Tensor]) -> set[Edge]:
        """Tell nodes which of their tensors get a gradient from the outputs; return all edges that do."""
        reached = leading_to(map(edge, outputs))
        edges = {e for _, _, results in self.edges for e in results}
        read = self.read_after_write(reached)
        for node, operands, results in self.edges:
            refs: list[Ref | None] = [*node.results] or [None] * len(results)
            later = [e is not None and r in read for r, e in zip(refs, results)]  # no edge: it had no gradient then
            node.result_grads = tuple(e in reached or written for e, written in zip(results, later))
            if any(later):
                node.operand_grads = tuple(e is not None for e in operands)
                continue
            entered = reached if node.kind != "operation" else reached & behind(results, {*operands}, edges, reached)
            node.operand_grads = tuple(e in entered for e in operands)
        return reached

    def read_after_write(self, reached: set[Edge]) -> set[Operand]:
        """The tensors that were written into, and are read where a gradient arrives.

        A write in place replaces the edge of a view that it wrote into: what reads the view later has the new one.
        """
        writing = [node for node, *_ in self.edges if node.in_place or node.kind == "stage"]
        written = {t for node in writing for i in node.writes if isinstance(t := node.operands[i], Ref)}
        pairs = (pair for node, operands, _ in self.edges for pair in zip(node.operands, operands))
        return {t for t, e in pairs if e in reached and t in written}


def behind(
    results: Sequence[Edge | None], operands: set[Edge | None], edges: set[Edge | None], reached: set[Edge]
) -> set[Edge]:
    """The edges of an operation's operands to which a gradient of its results goes on; edges: those of any results."""
    begin = {e for e in results if e is not None and e in reached}
    waiting, seen, entries = [*begin], set[Edge](), set[Edge]()
    while waiting:
        e = waiting.pop()
        if e in operands:
            entries.add(e)
        if e not in seen and (e in begin or not (e in edges or e in operands)):
            seen.add(e)
            waiting += [(node, k) for node, k in e[0].next_functions if node is not None]
    return entries
