"""Rules as offers: the combinations of layouts in which an operation between stages can run on parts.

A rule (`dsp.glue.rules`) says what an operation does to a sharded dim. Each outcome of a rule becomes an offer that
runs itself (`dsp.glue.local`), so the planner and the run know nothing of rules.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsp.comm.layout import Axis, Cut
from dsp.core.offers import allow
from dsp.core.record import MOST, Base, Layout, Node, Offer, Operation, Record, Ref, replicated
from dsp.core.torch_calls import GlueError, replaced
from dsp.core.torch_traits import PRODUCTS, REARRANGING, draws
from dsp.core.watch import KernelCall
from dsp.glue.local import LocalRule, frame_of, outcome_of
from dsp.glue.lookahead import EarlierCuts, gather_once
from dsp.glue.positions import refuse_positions
from dsp.glue.rules import Frame, Outcome
from dsp.glue.sources import SourceWatch, source_offers
from dsp.glue.traffic import collectives_of

log = logging.getLogger("dsp")

FAILED = (
    "the rule of {name}({shapes}) between stages failed{at} with {error}: the operation may run replicated. That is "
    "right, but takes more memory; please report it"
)
SHORT = 8  # a tensor counts as short if it is this many times shorter than a rank's share of the longest of all
JOINS = frozenset({"cat", "concat", "concatenate"})
COMBINATIONS = 256  # of layouts to try; if there are more, only those that cut all operands along one dim, or not


class ShardingRules:
    """The rules of `dsp.glue.rules` as the core asks for them."""

    def of(self, record: Record, node: Node) -> list[Offer]:
        if not node.bases:
            return source_offers(record, node)
        for i in node.writes:
            if isinstance(into := node.operands[i], Ref):
                into.base.free &= all(v.free for v in node.bases)
        combinations = Combinations(record, node)
        if node.name in PRODUCTS:
            combinations.along_all_dims()
        else:
            combinations.align()
            combinations.combine(only_small=True)
            if combinations.views and combinations.torn:
                combinations.along_all_dims()
                combinations.views = False
            elif combinations.stuck:  # no dim passes freely: try those that no stage has named, such as heads
                combinations.along_all_dims()
        return combinations.offers_for_node()

    def complete(self, record: Record) -> None:
        gather_once(record, max(record.long, record.longest // SHORT))
        EarlierCuts(record).offer()

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

    def refuse_kernels(
        self, node: Node, args: Any, kwargs: Any, calls: Sequence[KernelCall],
        run: Callable[[Any, Any], Sequence[KernelCall]],
    ) -> None:  # fmt: skip
        refuse_positions(node, args, kwargs, calls, run)


class Combinations:
    """The combinations of layouts of a node's operands that its rule takes.

    offers: those found; refusal: the first error of the rule; views: all outcomes are views of the one operand;
    rearranges: so are all but the refused ones; passes: one passes a dim freely, and not the batch.
    """

    def __init__(self, record: Record, node: Node) -> None:
        self.record, self.node, self.batch = record, node, record.batch
        self.brings: dict[tuple[Base, Cut], Layout] = {}
        self.failed = False  # its rule raised what it did not mean to
        self.restart()

    def restart(self) -> None:
        self.offers: list[Offer] = []
        self.refusal: GlueError | None = None
        node = self.node
        one = len(node.results) == 1 and len(node.refs) == 1 and not node.in_place
        self.views = one and node.results[0].memory == node.refs[0].memory
        self.rearranges, self.passes = True, False

    @property
    def stuck(self) -> bool:
        return (self.refusal is not None or any(o.collectives for o in self.offers)) and not self.passes

    @property
    def torn(self) -> bool:
        """Tell whether a view splits a dim where shards would not end: into heads whose number N does not divide.

        The result can be sharded along the heads if it is switched by itself; as a view it could not.
        """
        node = self.node
        [x], [out] = node.refs, node.results
        if first_part(x.shape, out.shape, 0) == self.batch and self.batch % self.record.n:
            return True
        cut = {c.dim for base in x.base.cuts if (c := x.cut_under(base))}
        splits = [d for d in range(x.ndim) if d not in cut and first_part(x.shape, out.shape, d)]
        return any(
            outcome_of(node, [Cut(d), *[None] * (len(node.operands) - 1)], self.record.n) is None for d in splits
        )

    def align(self) -> None:
        """Let operands be cut along the dims that others are, where they broadcast together."""
        refs = self.node.refs
        cuts = {
            (c.dim - t.ndim, c.outer, t.shape[c.dim]) for t in refs for base in t.base.cuts if (c := t.cut_under(base))
        }
        for t in refs:
            for d, size in enumerate(t.shape):
                if t.maker is None and (d - t.ndim, 1, size) in cuts and size > 1:
                    t.base.allow(Cut(d), batch=d == 0 and self.record.leads(t))

    def along_all_dims(self) -> None:
        """Let the operands be cut along any dim, and gathered; try again."""
        for t in self.node.refs:
            cut = {c.dim for base in t.base.cuts if (c := t.cut_under(base))}
            for d, size in enumerate(t.shape):
                fold = d == 0 and size != self.batch and self.batch > 1 and size % self.batch == 0
                if size > (self.batch if fold else 1) and d not in cut:
                    allow(t, Cut(d, self.batch if fold else 1), batch=d == 0 and self.record.leads(t))
        self.restart()
        self.combine(only_small=False)

    def combine(self, only_small: bool) -> None:
        """Try the combinations of the operands' layouts. only_small: replicate only operands that are at most half as
        long as the result."""
        node, layouts = self.node, self.layouts(only_small)
        if any(not k for k in layouts):
            self.refusal = self.refusal or GlueError("no dim of it can be sharded")
        for combination in self.combinations(layouts):
            layout = dict(zip(node.bases, combination))
            written = node.in_place and node.operands[0] in node.refs
            if written and any(combination) and layout[node.refs[0].base] is None:
                continue
            if any(combination):
                self.attempt(layout)
                if node.name in JOINS:
                    self.attempt(layout, side_by_side=True)
            elif all(v.replicable for v in node.bases):
                self.offers.append(replicated(node, len(node.results)))

    def combinations(self, layouts: list[list[Layout]]) -> Iterable[tuple[Layout, ...]]:
        """The combinations of layouts that are tried, one of each base."""
        if math.prod(map(len, layouts)) <= COMBINATIONS:
            return itertools.product(*layouts)
        along = dict.fromkeys(p for v, cuts in zip(self.node.bases, layouts) for c in cuts for p in self.places(v, c))
        alike = [
            [[c for c in cuts if c is None or p in self.places(v, c)] for v, cuts in zip(self.node.bases, layouts)]
            for p in along
        ]
        if sum(math.prod(map(len, few)) for few in alike) > COMBINATIONS:
            alike = [[cuts[:1] for cuts in few] for few in alike]  # whatever has the dim is cut along it
        return dict.fromkeys(itertools.chain.from_iterable(itertools.product(*few) for few in alike))

    def places(self, base: Base, layout: Layout) -> list[tuple[int, Any]]:
        """The dims, counted from the last, and folds along which a base in this layout cuts the operands."""
        cuts = ((t, t.cut_under(layout)) for t in self.node.refs if t.base is base)
        return [(cut.dim - t.ndim, cut.outer) for t, cut in cuts if cut is not None]

    def layouts(self, only_small: bool) -> list[list[Layout]]:
        """The layouts of each of the node's bases; see `combine`."""
        node, choices = self.node, list[list[Layout]]()
        makes = [*node.results, *(node.operands[i] for i in node.writes)]
        largest = max((math.prod(t.shape) for t in makes), default=0)
        for v in node.bases:
            views = [t for t in node.refs if t.base is v]
            small = any(2 * math.prod(t.shape) <= largest for t in views)
            cuts = [c for c in v.cuts if all(t.cut_under(c) is not None for t in views)]
            choices.append([*cuts, *([None] if v.replicable or small or not only_small else [])])
        return choices

    def attempt(self, layout: Mapping[Base, Layout], side_by_side: bool = False) -> None:
        """Ask the rule for one combination; side_by_side: tensors joined along their cut stay sharded one by one."""
        node = self.node
        needs = tuple(t.cut_under(layout[t.base]) if isinstance(t, Ref) else None for t in node.operands)
        frame = frame_of(node, needs, self.record.n, side_by_side)
        try:
            outcome = frame.outcome()
        except Exception as error:
            if not side_by_side:
                self.refuse(error)
            return
        if side_by_side and any(o.needs == needs and o.gives[0] == outcome.cut for o in self.offers):
            return  # as without
        if any(i in outcome.narrow and not isinstance(node.operands[i], Ref) for i in node.writes):
            return self.refuse(GlueError("each rank would write its part of a tensor that all ranks have"))
        unchanged = runs_unchanged(frame, outcome) and all(last_parts(needs, node, self.record.n))
        self.add(layout, needs, outcome, None if unchanged else LocalRule(node, needs, side_by_side))

    def add(
        self, layout: Mapping[Base, Layout], needs: tuple[Layout, ...], outcome: Outcome, local: LocalRule | None
    ) -> None:
        """Add the offer of an outcome, and what it says of the node."""
        node, cut = self.node, outcome.cut
        collectives = collectives_of(node, needs, outcome, self.record.n)
        view = cut is not None and outcome.view
        self.views, self.rearranges = self.views and view, self.rearranges and view
        batch = cut is not None and self.is_batch(cut, layout)
        self.passes |= cut is not None and not (collectives or batch or any_joined((cut, *needs)))
        results = len(node.results) or MOST
        sizes = outcome.sizes or (outcome.size,) * results
        self.offers.append(Offer(needs, outcome.cuts or (cut,) * results, sizes, collectives, batch, local))

    def refuse(self, error: Exception) -> None:
        """Note that the rule takes no such layout. An error that it did not mean to raise is logged: the node may run
        replicated for it."""
        if not isinstance(error, GlueError):
            node = self.node
            shapes = ", ".join(str([*t.shape]) for t in node.operands)
            if not self.failed:
                log.warning(
                    FAILED.format(
                        name=node.name, shapes=shapes, at=node.line and f" (at {node.line})", error=repr(error)
                    )
                )
            self.failed, error = True, GlueError(f"its rule failed, with {error!r}")
        self.refusal, self.views = self.refusal or error.with_traceback(None), False  # no frames, which hold tensors

    def is_batch(self, cut: Cut, layout: Mapping[Base, Layout]) -> bool:
        """Tell whether a cut of the results divides the batch: if it comes from an operand that is cut along it."""
        laid = {v: of for v, of in layout.items() if of is not None}
        batch = [v for v, of in laid.items() if of in v.batch]
        if not batch or len(batch) == len(laid):
            return bool(batch)
        brings = [v for v, of in laid.items() if self.brought(v, of) == cut]
        return any(v in batch for v in brings or laid)

    def brought(self, base: Base, of: Cut) -> Layout:
        """The cut of the results if only this base is cut."""
        if (base, of) not in self.brings:
            operands = self.node.operands
            needs = [t.cut_under(of) if isinstance(t, Ref) and t.base is base else None for t in operands]
            outcome = outcome_of(self.node, needs, self.record.n)
            self.brings[base, of] = None if outcome is None else outcome.cut
        return self.brings[base, of]

    def offers_for_node(self) -> list[Offer]:
        """The offers; what no rule takes is replicated, and nothing long is replicated without need."""
        node, record = self.node, self.record
        batch = {o.gives[0] for o in self.offers if o.last_resort}  # whichever operand brings it
        self.offers = [replace(o, last_resort=o.gives[0] in batch) for o in self.offers]
        if free := all(v.free for v in node.bases):
            self.cut_weights()
        parts = [o for o in self.offers if any(o.needs)]
        long = record.n * max(t.nbytes for t in [*node.refs, *node.results]) > max(record.long, record.longest // SHORT)
        if free:  # of offers of equal cost the planner takes the first
            self.offers.sort(key=lambda o: not any((*o.needs, *o.gives)))
        elif long and any(not o.last_resort for o in parts):
            self.offers = parts
        if not self.offers:
            self.offers, self.views = [replicated(node, len(node.results))], False
        node.view = self.views
        node.rearranges = (self.rearranges or node.name in REARRANGING) and bool(parts) and not node.in_place
        node.view_cut = self.view_cut
        return self.offers

    def cut_weights(self) -> None:
        """Add the cuts that weights bring to a result made of replicated tensors, as a bias is cut along heads."""
        node = self.node
        if len(node.results) != 1:
            return
        gives = {o.gives[0] for o in self.offers}
        for i, t in enumerate(node.operands):
            for cut in (Cut(d) for d, size in enumerate(t.shape) if not isinstance(t, Ref) and size > 1):
                needs = tuple(cut if k == i else None for k in range(len(node.operands)))
                outcome = outcome_of(self.node, needs, self.record.n)
                if outcome is None or outcome.cut is None:
                    continue
                if outcome.cut.outer == 1 and not outcome.rows and outcome.cut not in gives:
                    gives.add(outcome.cut)
                    self.offers.append(Offer(needs, (outcome.cut,), (outcome.size,), local=LocalRule(node, needs)))

    def view_cut(self, cut: Cut) -> Layout:
        """The cut of a view under a cut of its operand, which a later node may have asked for."""
        node = self.node
        gives = next((o.gives[0] for o in node.offers if o.needs[0] == cut), None)
        if gives is not None:
            return gives
        needs = (cut, *[None] * (len(node.operands) - 1))
        outcome = outcome_of(self.node, needs, self.record.n)
        if outcome is None or outcome.cut is None or not outcome.view:
            return None
        self.offers.append(Offer(needs, (outcome.cut,), (outcome.size,), local=LocalRule(node, needs)))
        return outcome.cut


def first_part(old: Sequence[int], new: Sequence[int], d: int) -> int:
    """The size of the first of the dims into which a reshape splits a dim; 0 if it does not split it."""
    before = math.prod(old[:d])
    into = next((size for j, size in enumerate(new) if math.prod(new[:j]) == before and size > 1), 0)
    return into if 1 < into < old[d] else 0


def any_joined(layouts: Iterable[Layout]) -> bool:
    """Tell whether one of the cuts is along a dim joined of pieces that are sharded one by one."""
    return any(cut is not None and cut.joined for cut in layouts)


def runs_unchanged(frame: Frame, o: Outcome) -> bool:
    """Tell whether an operation's call, as it is, runs on parts."""
    changed = o.args is not None or o.kwargs is not None or o.func is not None
    communicates = bool(o.rows) or o.deal is not None or o.numbers is not None or o.reduce is not None
    return not (changed or o.narrow or communicates or draws(frame.name, frame.args, frame.kwargs))


def last_parts(needs: Any, node: Node, n: int) -> list[int]:
    """The lengths that the last rank has of each operand."""
    return [c.local_size(t.shape[c.dim], n, n - 1) for c, t in zip(needs, node.operands) if c is not None]
