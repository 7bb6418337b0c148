"""Nodes that a record does not have: another branch, a forward that reads its data.

They are noted as they run, and take the offer that moves least. The next call is planned with them (`dsp.core.growth`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsp.comm.layout import Axis, Cut
from dsp.core.carrier import Carrier
from dsp.core.keys import Prepared
from dsp.core.offers import Rules, operands_of, unrecorded_offers
from dsp.core.record import Layout, Node, Offer, Operation, Record, Ref, replicated
from dsp.core.torch_calls import GlueError, replaced, tensor_args
from dsp.core.torch_traits import DENSE, Traits
from dsp.core.writes import kin_on_meta, on_meta, returns_operand, written_operands
from dsp.stages.stage import Stage, cut_for
from dsp.support.source_lines import line_now


class Unplanned:
    """Adds nodes to a record while it runs on one rank; count: of those added."""

    def __init__(self, record: Record, rules: Rules, axis: Axis, prepared: Prepared) -> None:
        self.record, self.rules, self.axis, self.prepared = record, rules, axis, prepared
        self.count = 0

    def operation(self, key: Any, func: Any, traits: Traits, args: Any, kwargs: Any) -> Node:
        """Add an operation. One that differs from a planned node in numbers alone follows its decision."""
        operands = tensor_args(args, kwargs)
        refs = operands_of(operands)
        node = Node(
            "operation", traits.name, refs, in_place=traits.in_place, loose=traits.name in DENSE, line=line_now()
        )
        node.writes, meta = written_operands(func, traits, args, kwargs), on_meta(func, args, kwargs)
        kin = () if traits.in_place else kin_on_meta(self.axis, traits.name, operands, meta)
        node.kin, node.kin_unknown = ((0, 0),) if kin is None else kin, kin is None
        node.call, node.dynamic = Operation(func, *replaced(args, kwargs, iter(refs))), meta is None
        if returns_operand(node, meta):
            node.identity = True
            return self.add(key, node, operands)
        if meta is not None and not traits.in_place:  # what its rules ask for; it gets its results when it has run
            node.results = [Ref(t.shape, dtype=t.dtype, memory=-1 << 32) for t in meta[1]]
        node.offers = self.rules.of(self.record, node)
        node.results, node.view = [], False
        return node if self.follow(key, node, func) else self.add(key, node, operands)

    def stage(self, key: Any, node: Node, operands: Sequence[Tensor]) -> Node:
        """Add a call of a stage."""
        node.offers, node.draws = unrecorded_offers(node), None
        return self.add(key, node, operands)

    def output(self, k: int, t: Carrier) -> Node:
        """Add the forward's k-th output."""
        self.count += 1
        return self.record.add(("output", k, t.ref), Node("output", "output", [t.ref], offer=Offer((t.cut,))))

    def add(self, key: Any, node: Node, operands: Sequence[Tensor]) -> Node:
        node.offer = least(self.record, node, operands)
        self.count += 1
        return self.record.add(key, node)

    def follow(self, key: Any, node: Node, func: Any) -> bool:
        """Let a node that differs from a planned one in numbers alone follow its decision, if its rule can."""
        like = self.prepared.variant(func, node.operands)
        if like is None or like.offer is None or like.in_place != node.in_place:
            return False
        count = len(like.results)
        same = [o for o in node.offers if o.needs == like.offer.needs and o.gives[:count] == like.offer.gives[:count]]
        if not same:
            return False
        node.offer, node.moves, node.push, node.like = same[0], like.moves, like.push, like
        self.prepared.add_variant(key, node)
        return True

    def results(self, node: Node, offer: Offer, tensors: Sequence[Tensor]) -> None:
        """Number the results of an operation, when it has run for the first time."""
        sizes = offer.sizes or (None,) * len(tensors)
        shapes = [global_shape(t.shape, cut, size) for t, cut, size in zip(tensors, offer.gives, sizes)]
        if node.like is not None:
            if shapes == [tuple(r.shape) for r in node.like.results]:
                node.results = node.like.results
                return
            self.count += 1
            self.record.nodes.append(node)
        self.add_results(node, offer, tensors, shapes)

    def of_sizes(self, node: Node, offer: Offer, tensors: Sequence[Tensor]) -> Node:
        """The node for results of these sizes: `node`, or another one if data say the sizes."""
        triples = zip(tensors, offer.gives, node.results)
        shapes = tuple(global_shape(t.shape, cut, None if cut is None else r.shape[cut.dim]) for t, cut, r in triples)
        if all(shape == r.shape for shape, r in zip(shapes, node.results)):
            return node
        if shapes not in node.by_sizes:
            self.count += 1
            node.by_sizes[shapes] = new = replace(node, results=[], push=[], by_sizes={})
            self.record.nodes.append(new)
            self.add_results(new, offer, tensors, shapes)
        return node.by_sizes[shapes]

    def add_results(self, node: Node, offer: Offer, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> None:
        """Give a node its results, of these global shapes."""
        for t, cut, shape in zip(tensors, offer.gives, shapes):
            self.result(node, t, shape, cut)
        share_memory(node)

    def stage_results(self, stage: Stage, node: Node, results: Sequence[Tensor], rows: int) -> Offer:
        """Give a stage's node its results, from those on this rank's part, and return the offer with their cuts."""
        assert node.offer is not None
        assert node.offer.option is not None
        sizes, option, gives = node.call.sizes, node.offer.option, list[Layout]()  # type: ignore[union-attr]
        for t, p in zip(results, stage.outputs([*results])):
            if option.name is None or option.onto:
                shape, cut = [*t.shape], None if not option.onto else Cut(p.axis_of(option.onto))
            else:
                local = stage.result_sizes(t, p, {**sizes, option.name: max(rows, 1)}, self.record.sizes)
                full = {**local, option.name: option.size}
                shape = [math.prod(full[n] for n in axis) for axis in p.axes]
                cut = cut_for(p, shape, option.lands, full)  # type: ignore[arg-type]
            gives.append(cut)
            self.result(node, t, shape, cut)
        at = node.offers.index(node.offer)
        node.offers[at] = node.offer = replace(node.offer, gives=tuple(gives))
        self.prepared.by_key.clear()
        share_memory(node)
        return node.offer

    def result(self, node: Node, t: Tensor, shape: Sequence[int], cut: Layout) -> None:
        ref = self.record.ref(t, shape)
        base = self.record.new_base(ref)
        if cut is not None:
            base.allow(cut)
        node.results.append(ref)


def global_shape(shape: Sequence[int], cut: Layout, size: int | None) -> torch.Size:
    """The global shape of a result of which a rank holds `shape`, cut along a dim of `size`."""
    shape = list(shape)
    if cut is not None and size is not None:
        shape[cut.dim] = size
    return torch.Size(shape)


def runs_by_rule(node: Node, axis: Axis, func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether the decision on a node holds for these arguments, too, of which floats may be others."""
    if node.offer is None or node.offer.local is None:
        return True
    try:
        node.offer.local(axis, func, args, kwargs)
    except GlueError:
        return False
    return True


def share_memory(node: Node) -> None:
    """Let the results of a node that no recording saw have the memory of those that they share it with."""
    for first, k in node.kin:
        source = (*node.operands, *node.results)[first]
        if isinstance(source, Ref):
            node.results[k].memory = source.memory


def least(record: Record, node: Node, operands: Sequence[Tensor]) -> Offer:
    """The offer that moves least, for a node that the record does not have: the same on every rank. Among those that
    move nothing one that shards what is long."""
    long = record.n * max((t.nbytes for t in node.refs), default=0) > record.longest

    def moved(o: Offer) -> tuple[int, bool, bool]:
        pairs = zip(operands, o.needs)
        moving = [(t, need) for t, need in pairs if isinstance(t, Carrier) and t.cut not in (None, need)]
        nbytes = o.nbytes + sum(t.ref.nbytes * (1 if need else 1000) for t, need in moving)
        return nbytes, o.last_resort, any((*o.needs, *o.gives)) != long

    return min([*node.offers, *([] if node.kind == "stage" else [replicated(node)])], key=moved)
