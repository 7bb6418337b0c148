"""Rules as offers: the combinations of layouts in which an operation between stages can run on parts.

A rule (`dsp.rules`) says what an operation does to a sharded dim. Each outcome of a rule becomes an offer that runs
itself (`dsp.glue.local`), so the planner and the run know nothing of rules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsp.calls import GlueError, replaced
from dsp.core.record import MOST, Base, Layout, Node, Offer, Operation, Record, Ref, replicated
from dsp.glue.local import LocalRule, frame_of
from dsp.glue.sources import SourceWatch, source_offers
from dsp.glue.traffic import inner_collectives
from dsp.layout import Axis, Cut
from dsp.rules import Frame, Outcome
from dsp.rules.functions import PRODUCTS, draws

COMBINATIONS = 256  # of layouts to try; if there are more, only those in which one dim is cut everywhere


class ShardingRules:
    """The rules of `dsp.rules` as the core asks for them."""

    def of(self, record: Record, node: Node) -> list[Offer]:
        if not node.bases:
            return source_offers(record, node)
        if node.in_place and node.operands[0] in node.refs:
            node.refs[0].base.fixed = True
        combinations = Combinations(record, node)
        if node.name in PRODUCTS:
            combinations.along_all_dims()
        else:
            combinations.align()
            combinations.combine(only_small=True)
            if combinations.stuck:  # no dim passes freely: try those that no stage has named, such as heads
                combinations.along_all_dims()
        return combinations.offers_for_node()

    def view(self, node: Node, axis: Axis, cut: Layout, local: Tensor) -> Tensor:
        assert isinstance(node.call, Operation)
        func, args, kwargs = node.call
        if cut is None:
            args, kwargs = replaced(args, kwargs, iter([local, *node.operands[1:]]))
            return func(*args, **kwargs)
        offer = next(o for o in node.offers if o.needs[0] == cut)
        parts = [local, *(torch.empty(t.shape, device="meta") for t in node.operands[1:])]
        if offer.local is not None:
            return offer.local(axis, func, args, kwargs)(parts)
        args, kwargs = replaced(args, kwargs, iter(parts))
        return func(*args, **kwargs)

    def watch(self, record: Record) -> SourceWatch:
        return SourceWatch(record)


class Combinations:
    """The combinations of layouts of a node's operands that its rule takes.

    offers: those found; refusal: the first error of the rule; views: all outcomes are views; passes: one passes a dim
    freely, and not the batch.
    """

    def __init__(self, record: Record, node: Node) -> None:
        self.record, self.node, self.batch = record, node, record.batch
        self.restart()

    def restart(self) -> None:
        self.offers: list[Offer] = []
        self.refusal: GlueError | None = None
        self.views, self.passes = True, False

    @property
    def stuck(self) -> bool:
        return (self.refusal is not None or any(o.inner for o in self.offers)) and not self.passes

    def align(self) -> None:
        """Let operands be cut along the dims that others are, where they broadcast together."""
        refs = self.node.refs
        cuts = {
            (c.dim - t.ndim, c.outer, t.shape[c.dim]) for t in refs for base in t.base.cuts if (c := t.cut_under(base))
        }
        for t in refs:
            for d, size in enumerate(t.shape):
                if t.maker is None and (d - t.ndim, 1, size) in cuts and size > 1:
                    t.base.allow(Cut(d))

    def along_all_dims(self) -> None:
        """Let the operands be cut along any dim, and gathered; try again."""
        for t in self.node.refs:
            base = t.base.ref
            for d, size in enumerate(base.shape):
                fold = d == 0 and size != self.batch and self.batch > 1 and size % self.batch == 0
                if size > (self.batch if fold else 1) and not any(c.dim == d for c in t.base.cuts):
                    t.base.allow(Cut(d, self.batch if fold else 1))
        self.restart()
        self.combine(only_small=False)

    def combine(self, only_small: bool) -> None:
        """Try the combinations of the operands' layouts. only_small: replicate only operands that are at most half as
        long as the result."""
        node = self.node
        largest = max((math.prod(r.shape) for r in node.results), default=0)
        layouts: list[list[Layout]] = []
        for v in node.bases:
            views = [t for t in node.refs if t.base is v]
            small = any(2 * math.prod(t.shape) <= largest for t in views)
            cuts = [c for c in v.cuts if all(t.cut_under(c) is not None for t in views)]
            layouts.append([*cuts, *([None] if v.replicable or small or not only_small else [])])
        if any(not k for k in layouts):
            self.refusal = self.refusal or GlueError("no dim of it can be sharded")
        combinations: Any = itertools.product(*layouts)
        if math.prod(map(len, layouts)) > COMBINATIONS:
            combinations = [(c,) * len(layouts) for c in layouts[0] if all(c in k for k in layouts)]
        for combination in combinations:
            layout = dict(zip(node.bases, combination))
            written = node.in_place and node.operands[0] in node.refs
            if written and any(combination) and layout[node.refs[0].base] is None:
                continue
            if any(combination):
                self.attempt(layout)
            elif all(v.replicable for v in node.bases):
                self.offers.append(replicated(node, len(node.results)))

    def attempt(self, layout: Mapping[Base, Layout]) -> None:
        """Ask the rule for one combination."""
        node, n = self.node, self.record.n
        needs = tuple(t.cut_under(layout[t.base]) if isinstance(t, Ref) else None for t in node.operands)
        frame = frame_of(node, needs, n)
        try:
            outcome = frame.outcome()
        except GlueError as error:
            self.refusal, self.views = self.refusal or error, False
            return
        inner = inner_collectives(node, needs, outcome, n)
        cut = outcome.cut
        self.views &= cut is not None and outcome.view
        batch = cut is not None and self.is_batch(cut)
        self.passes |= cut is not None and not (inner or batch or cut.joined)
        results = len(node.results) or MOST
        sizes = outcome.sizes or (outcome.size,) * results
        unchanged = runs_unchanged(frame, outcome) and all(last_parts(needs, node, n))
        local = None if unchanged else LocalRule(node, needs)
        self.offers.append(Offer(needs, (cut,) * results, sizes, inner, batch, local))

    def is_batch(self, cut: Cut) -> bool:
        r = self.node.results
        return cut.dim == 0 and cut.outer == 1 and self.batch > 1 and bool(r) and r[0].shape[0] == self.batch

    def offers_for_node(self) -> list[Offer]:
        """The offers; what no rule takes is replicated, and nothing long is replicated without need."""
        node, record = self.node, self.record
        longest = max((v.ref.nbytes for v in record.bases if not (v.free or v.persistent)), default=0)
        parts = [o for o in self.offers if any(o.needs)]
        refs = [*node.refs, *node.results]
        if parts and any(not o.last_resort for o in parts) and record.n * max(t.nbytes for t in refs) > longest:
            self.offers = parts
        if not self.offers:
            self.offers, self.views = [replicated(node, len(node.results))], False
        one = len(node.results) == 1 and len(node.refs) == 1 and not node.in_place
        node.view = one and self.views and node.results[0].memory == node.refs[0].memory
        node.view_cut = self.view_cut
        return self.offers

    def view_cut(self, cut: Cut) -> Layout:
        """The cut of a view under a cut of its operand, which a later node may have asked for."""
        node = self.node
        gives = next((o.gives[0] for o in node.offers if o.needs[0] == cut), None)
        if gives is not None:
            return gives
        needs = (cut, *[None] * (len(node.operands) - 1))
        try:
            outcome = frame_of(node, needs, self.record.n).outcome()
        except GlueError:
            return None
        if outcome.cut is None or not outcome.view:
            return None
        self.offers.append(Offer(needs, (outcome.cut,), (outcome.size,), local=LocalRule(node, needs)))
        return outcome.cut


def runs_unchanged(frame: Frame, o: Outcome) -> bool:
    """Tell whether an operation's call, as it is, runs on parts."""
    changed = o.args is not None or o.kwargs is not None or o.func is not None
    communicates = bool(o.rows) or o.deal is not None or o.numbers is not None or o.reduce is not None
    return not (changed or o.narrow or communicates or draws(frame.name, frame.args, frame.kwargs))


def last_parts(needs: Any, node: Node, n: int) -> list[int]:
    """The lengths that the last rank has of each operand."""
    return [c.own(t.shape[c.dim], n, n - 1) for c, t in zip(needs, node.operands) if c is not None]
