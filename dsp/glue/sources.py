"""Sources: operations on plain tensors whose long result no rank need make whole, such as masks and position tables.

A source is a node like any other. Its offers need no carrier and give the result in a cut, or replicated; the result is
a carrier, so all that is computed from it is in the record, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from dsp.comm.layout import Axis, Cut
from dsp.core.keys import node_key
from dsp.core.offers import operands_of
from dsp.core.record import Node, Offer, Operation, Record, Ref, replicated
from dsp.core.recording import Recorder
from dsp.core.torch_calls import Operand, replaced, without_operands
from dsp.core.torch_traits import FILLED, PRODUCTS, SOURCES, Traits, grows
from dsp.core.watch import Watch, add_source
from dsp.glue.local import LocalRule, frame_of, outcome_of
from dsp.glue.rules import Frame, localize_source, source_cuts
from dsp.support.tensors import memory


class SourceWatch(Watch):
    """Makes nodes of sources while a forward is recorded; in a run it leads them to their nodes."""

    def on_plain(self, func: Any, traits: Traits, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        record, key = self.record, node_key(func, traits.name, args, kwargs)
        recorded, driver = key in record.by_key, record.driver
        if key in record.no_sources:
            return func(*args, **kwargs)
        if not isinstance(driver, Recorder):
            return driver.operation(func, traits, args, kwargs, self) if recorded else func(*args, **kwargs)
        driver.meter.start()
        out = func(*args, **kwargs)
        if not recorded:
            long = key in record.filled or record.n * getattr(out, "nbytes", 0) > record.longest
            if not long or not is_source(traits.name, tensors, out):
                if traits.name in FILLED and isinstance(out, Tensor):
                    driver.fills[memory(out)] = key
                return out
            refs = operands_of(tensors)
            node = Node("operation", traits.name, refs, Operation(func, *replaced(args, kwargs, iter(refs))))
            node.results = [Ref(tuple(out.shape))]
            if len(record.rules.of(record, node)) == 1:  # only replicated
                return out
        add_source(record, func)
        return driver.note(func, traits, args, kwargs, out)


def is_source(name: str, tensors: list[Tensor], out: Any) -> bool:
    if not isinstance(out, Tensor) or any(out is t for t in tensors):
        return False
    if name == "outer" or (name in PRODUCTS and len(tensors) > 1):
        return out.numel() >= 2 * max(t.numel() for t in tensors)
    return name in FILLED or (name in SOURCES and bool(tensors)) or grows(name, tensors, out)


def source_offers(record: Record, node: Node) -> list[Offer]:
    """The cuts in which a rank can make a source from replicated tensors."""
    [out], offers = node.results, dict[Cut, Offer]()
    for cut, needs, local in source_ways(record, node):
        batch = cut.dim == 0 and cut.outer == 1 and record.batch > 1 and out.shape[0] == record.batch
        offers.setdefault(cut, Offer(tuple(needs), (cut,), last_resort=batch, local=local))
    return [*offers.values(), replicated(node, 1)]


def source_ways(record: Record, node: Node) -> Iterator[tuple[Cut, Any, Any]]:
    """The cuts of a source with what each needs of its operands, and its local function."""
    [out], count, n = node.results, len(node.operands), record.n
    if node.name in FILLED:
        yield from ((Cut(d), [None] * count, Shard(node, Cut(d))) for d, size in enumerate(out.shape) if size > 1)
    elif node.name == "outer":  # no rule: it has no batch dims, and no carrier is as short
        yield Cut(0), (Cut(0), None), None
        yield Cut(1), (None, Cut(0)), None
    else:
        if node.name in SOURCES:
            frame = frame_of(node, [None] * count, n)
            yield from ((cut, [None] * count, Shard(node, cut)) for cut in source_cuts(frame))
        for i, t in enumerate(node.operands):
            for d in (d for d, size in enumerate(t.shape) if size > 1):
                needs = [Cut(d) if j == i else None for j in range(count)]
                outcome = outcome_of(node, needs, n)
                if outcome is not None and outcome.cut is not None and outcome.cut.outer == 1 and not outcome.rows:
                    yield outcome.cut, needs, LocalRule(node, tuple(needs))


class Shard:
    """The local function of an offer by which a rank makes its part without a carrier."""

    def __init__(self, node: Node, cut: Cut) -> None:
        self.node, self.cut = node, cut

    def __call__(self, axis: Axis, func: Any, args: Any, kwargs: Any) -> Callable[[list[Tensor]], Any]:
        operands = [Operand(tuple(t.shape)) for t in self.node.operands]
        frame = Frame(self.node.name, *replaced(args, kwargs, iter(operands)), axis.size, axis.rank, func)
        call, shard_args, _ = localize_source(frame, self.cut)
        return lambda parts: call(*without_operands(shard_args, {id(o): t for o, t in zip(operands, parts)}))
