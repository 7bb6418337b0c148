"""Offers: a pass over a record that says how each node may run. Stages by their patterns; operations by their rules.

What operations between stages can do is asked of `Rules`; `dsp.glue` has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dsp.comm.layout import Axis, Cut
from dsp.core.carrier import Carrier
from dsp.core.record import (
    Base,
    BoundStage,
    Collective,
    CollectivePart,
    Layout,
    Node,
    Offer,
    Record,
    Ref,
)
from dsp.core.torch_calls import Operand
from dsp.core.watch import KernelCall, Watch
from dsp.core.writes import note_last_writes
from dsp.planner import MOVES, Value
from dsp.stages.methods import NO_METHODS
from dsp.stages.notation import BATCH_NAMES, TensorPattern
from dsp.stages.stage import Option, Stage, cut_for, fits_fold


class Rules(Protocol):
    """The knowledge of operations between stages."""

    def of(self, record: Record, node: Node) -> list[Offer]:
        """The ways to run an operation; its operands and those of earlier nodes have their bases."""

    def complete(self, record: Record) -> None:
        """Add offers that depend on later nodes; all nodes have their others."""

    def view(self, node: Node, axis: Axis, cut: Layout, local: Tensor) -> Tensor:
        """The view that a node took, of another part of its operand."""

    def watch(self, record: Record) -> Watch:
        """A mode that sees functions of plain tensors between stages."""

    def refuse_kernels(
        self, node: Node, args: Any, kwargs: Any, calls: Sequence[KernelCall],
        run: Callable[[Any, Any], Sequence[KernelCall]],
    ) -> None:  # fmt: skip
        """Raise NotationError if kernels that a stage calls would work otherwise on a part of its arguments.

        run: calls the module of the stage, and returns its calls of kernels.
        """


def operands_of(tensors: Sequence[Tensor]) -> list[Operand]:
    return [t.ref if isinstance(t, Carrier) else Operand(tuple(t.shape)) for t in tensors]


def stage_node(record: Record, stage: Stage, args: Any, kwargs: Any) -> tuple[Node, list[Any]]:
    """The node of a stage call, and its bound arguments.

    Its last operands are carriers in lists and dicts, which no pattern can name: they have to be replicated.
    """
    _, bound = stage.signature.bind(args, kwargs)
    sizes = stage.sizes(bound, record.sizes)
    info = BoundStage(stage, sizes, stage.options(bound, sizes, record.n))
    nested = [t for t, _ in stage.signature.nested(args, kwargs) if isinstance(t, Carrier)]
    operands = operands_of([*(b.tensor for b in bound), *nested])
    return Node("stage", stage.name, operands, info, no_grad=not torch.is_grad_enabled()), bound


def makes_parts(node: Node) -> bool:
    """Tell whether a rank can make its part of a stage's results from replicated tensors; batch does not count."""
    assert isinstance(node.call, BoundStage)
    return any(option.name is not None and not option.last_resort for option in node.call.options)


def lay_out(record: Record) -> None:
    """Give every node its offers, and every tensor its base."""
    for node in record.nodes:
        if node.kind == "stage":
            node.offers = [*stage_offers(record, node)]
        elif node.kind == "operation" and not node.identity:
            node.offers = record.rules.of(record, node)
        elif node.kind == "plain":
            node.offers = [Offer(())]
        for k, ref in enumerate(node.results):
            if node.view:
                [source] = node.refs
                ref.base, ref.maker = source.base, node
            else:
                add_base(record, node, ref, k)
    note_last_writes(record)
    record.rules.complete(record)


def add_base(record: Record, node: Node, ref: Ref, k: int) -> None:
    """Add the base of a node's k-th result, with the cuts that its offers give."""
    base = record.new_base(ref, free=all(v.free for v in node.bases) and node.kind == "operation")
    if isinstance(node.call, BoundStage):
        allow_named(base, node.call.stage.outputs(node.results)[k], result_sizes(record, node, k), record.n)  # type: ignore[arg-type]
        base.replicable = node.call.options[0].name is None
        return
    for o in node.offers:
        if (cut := o.gives[k]) is None:
            base.replicable = True
        else:
            base.allow(cut, o.last_resort)


def allow_named(base: Base, pattern: TensorPattern, sizes: dict[str, int], n: int) -> None:
    """Let a base with a pattern be cut along its dims."""
    for name in pattern.names:
        cut = cut_for(pattern, base.ref.shape, name, sizes)
        if cut is not None and sizes[name] > 1 and fits_fold(pattern, name, sizes, n):
            base.cuts[cut] = sizes[name]
            base.batch.update([cut] if name in BATCH_NAMES else [])


def result_sizes(record: Record, node: Node, k: int) -> dict[str, int]:
    """The sizes of the dims of a stage's k-th result."""
    assert isinstance(node.call, BoundStage)
    stage, ref = node.call.stage, node.results[k]
    return stage.result_sizes(ref, stage.outputs(node.results)[k], node.call.sizes, record.sizes)  # type: ignore[arg-type]


def stage_offers(record: Record, node: Node) -> Iterator[Offer]:
    """A stage's offers: the dims that its pattern leaves free."""
    assert isinstance(node.call, BoundStage)
    stage, _, options = node.call
    patterns = stage.outputs(node.results)  # type: ignore[arg-type]
    results = [(r, p, result_sizes(record, node, k)) for k, (r, p) in enumerate(zip(node.results, patterns))]
    for option in options:
        allow_needed(node, option)
        along = option.lands
        gives = tuple(None if along is None else cut_for(p, r.shape, along, sizes) for r, p, sizes in results)
        yield stage_offer(node, option, gives, sums(record, option, results) if option.onto else ())


def stage_offer(
    node: Node, option: Option, gives: tuple[Layout, ...], collectives: tuple[Collective, ...] = ()
) -> Offer:
    assert isinstance(node.call, BoundStage)
    stage, nested = node.call.stage, [None] * (len(node.operands) - len(option.cuts))
    local = None if stage.local is None else stage.local(stage, option)
    methods = node.methods.get(option.name, NO_METHODS)
    return Offer((*option.cuts, *nested), gives, (), collectives, option.last_resort, local, option, methods=methods)


def unrecorded_offers(node: Node) -> list[Offer]:
    """The offers of a stage whose results nobody knows yet."""
    assert isinstance(node.call, BoundStage)
    for option in node.call.options:
        allow_needed(node, option)
    return [stage_offer(node, option, ()) for option in node.call.options]


def allow_needed(node: Node, option: Option) -> None:
    """Let the operands of a stage be cut as an option needs them."""
    for t, cut in zip(node.operands, option.cuts):
        if isinstance(t, Ref) and cut is not None:
            allow(t, cut, option.last_resort)


def allow(t: Ref, cut: Cut, batch: bool) -> None:
    """Let a tensor be cut so, with its base, if that has such a cut. batch: the cut divides the batch."""
    if (base_cut := cut_behind(t, cut)) is not None:
        t.base.allow(base_cut, batch)


def cut_behind(t: Ref, cut: Cut) -> Layout:
    """The cut of its base under which a tensor has `cut`: one that the base may have, or another one, along any dim and
    any fold that the view opens."""
    if t.maker is None:
        return cut
    return t.base_cut(cut) or next((c for c in cuts_behind(t) if t.cut_under(c) == cut), None)


def cuts_behind(t: Ref) -> Iterator[Cut]:
    """The cuts of its base that a cut of a view may be."""
    shape = t.base.ref.shape
    folds = {math.prod(t.shape[i:j]) for i in range(t.ndim) for j in range(i, t.ndim)}
    for d, size in enumerate(shape):
        yield from (Cut(d, outer) for outer in sorted(folds) if size and size % outer == 0)


def sums(
    record: Record, option: Option, results: list[tuple[Ref, TensorPattern, dict[str, int]]]
) -> tuple[Collective, ...]:
    """The sums over ranks of a stage's results, of which each rank keeps its shard."""
    collectives = []
    for k, (ref, _, sizes) in enumerate(results):
        total = Value("", ((option.onto, sizes[option.onto]),), ref.dtype.itemsize, numel=ref.shape.numel())  # type: ignore[index, attr-defined]
        sent = MOVES["reduce_scatter"].sent(total, None, option.onto, record.n)
        back = MOVES["gather"].sent(total, option.onto, None, record.n)
        part = CollectivePart(tuple(sent), tuple(back), result=k)
        collectives.append(Collective("reduce_scatter", "gather", (part,)))
    return tuple(collectives)
