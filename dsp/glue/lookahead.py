"""Offers that depend on later nodes: cuts that are offered earlier, and a gather for all steps of a loop.

A tensor that operations enlarge is switched before they do. A cut may be asked for where a later operation needs it,
such as the channels of a scan where the loop over time begins. By then the tensor may be much larger than what it is
made of: ``a = exp(dt[..., None] * A)`` has the channels of `dt` times the states. So operations that keep a dim of
their operands offer it, back to where the tensors are smallest.
"""

from __future__ import annotations

from collections import Counter

from dsp.comm.layout import Cut
from dsp.core.offers import cut_behind
from dsp.core.record import Base, Layout, Node, Offer, Record, Ref, replicated
from dsp.core.torch_traits import PRODUCTS
from dsp.glue.local import LocalRule, outcome_of
from dsp.glue.rules import Outcome
from dsp.glue.traffic import collectives_of

ROWS = frozenset({"getitem", "select"})
DEPTH = 64  # most operations between that which asks for a cut and the place where its tensor is smallest
Needs = tuple[Layout, ...]  # of the operands of a node


def gather_once(record: Record, longest: int) -> None:
    """Let a tensor be gathered once, of which most rows are read one by one: each is sent by the rank that has it else.

    Not one that is written, of which a copy would be old. longest: bytes of a tensor on all ranks, at most.
    """
    written = {t.memory for node in record.nodes for i in node.writes if isinstance(t := node.operands[i], Ref)}
    reads = Counter(node.refs[0] for node in record.nodes if node.name in ROWS and node.refs)
    for node in record.nodes:
        if node.name in ROWS and len(node.refs) == 1 and all(any(o.needs) for o in node.offers):
            [t] = node.refs
            may_be_full = t.memory not in written and record.n * t.nbytes <= longest
            if may_be_full and any(2 * reads[t] >= t.shape[cut.dim] for cut in cuts_of_sent_rows(node)):
                node.offers.append(replicated(node, len(node.results)))


def cuts_of_sent_rows(node: Node) -> list[Cut]:
    """The cuts of an operand under which one rank sends a row of it to all."""
    return [need for o in node.offers if o.collectives and not any(o.gives) for need in o.needs if need is not None]


class EarlierCuts:
    """The operations of a record that may give other cuts, and the least bytes at which each base can be switched."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.makers = {node.results[0].base: node for node in record.nodes if self.makes_one(node)}
        self.least_bytes: dict[tuple[Base, Cut], float] = {}

    @staticmethod
    def makes_one(node: Node) -> bool:
        changes = node.identity or node.view or node.in_place or node.name in PRODUCTS
        return node.kind == "operation" and not changes and len(node.results) == 1 and bool(node.refs)

    def offer(self) -> None:
        """Offer each cut that a later node asks for to earlier operations, if their tensors are smaller; or as long, of
        one that cannot be moved once it is made, because it is written."""
        for base, node in reversed(self.makers.items()):
            gives, most = {o.gives[0] for o in node.offers}, base.ref.nbytes - (base.last_write is None)
            for cut in [*base.cuts]:
                if cut not in gives and self.least(base, cut) <= most:
                    self.add(node, cut)

    def least(self, base: Base, cut: Cut, depth: int = 0) -> float:
        """The least bytes to switch for a base in this cut: its own or those of what it is made of. A gather counts N
        times."""
        if (base, cut) not in self.least_bytes:
            self.least_bytes[base, cut] = base.ref.nbytes
            if base in self.makers and depth < DEPTH and (way := self.needs(self.makers[base], cut)) is not None:
                read = dict.fromkeys(base_cuts(self.makers[base], way[0]))
                sizes = [self.gathered(v) if c is None else self.least(v, c, depth + 1) for v, c in read]
                self.least_bytes[base, cut] = min(base.ref.nbytes, sum(sizes))
        return self.least_bytes[base, cut]

    def gathered(self, base: Base) -> int:
        return 0 if base.replicable else self.record.n * base.ref.nbytes

    def needs(self, node: Node, cut: Cut) -> tuple[Needs, Outcome] | None:
        """The cuts of the operands for a result with this cut; None if the operation does not keep that dim."""
        [out], cuts = node.results, list[Layout]()
        for t in node.operands:
            dim = cut.dim - out.ndim + t.ndim
            keeps = isinstance(t, Ref) and dim >= 0 and t.shape[dim] == out.shape[cut.dim]
            cuts.append(Cut(dim, cut.outer) if keeps else None)
        needs = tuple(cuts)
        if not any(needs) or sum(of is not None for _, of in base_cuts(node, needs)) < sum(map(bool, needs)):
            return None  # a view cannot have the cut
        outcome = outcome_of(node, needs, self.record.n)
        if outcome is None:
            return None
        changes = outcome.cut != cut or outcome.sizes or collectives_of(node, needs, outcome, self.record.n)
        return None if changes else (needs, outcome)

    def add(self, node: Node, cut: Cut) -> None:
        """Add the offer of an operation that gives this cut of its result."""
        if (way := self.needs(node, cut)) is None:
            return
        needs, outcome = way
        cuts: dict[Base, Layout] = {}
        for base, of in base_cuts(node, needs):
            if cuts.setdefault(base, of) != of:
                return  # two views of one base that need different cuts
        batch = cut in node.results[0].base.batch
        for base, of in cuts.items():
            if of is not None:
                base.allow(of, batch)
        node.offers.append(Offer(needs, (cut,), (outcome.size,), (), batch, LocalRule(node, needs)))


def base_cuts(node: Node, needs: Needs) -> list[tuple[Base, Layout]]:
    """The base of each operand that is a `Ref`, and its cut under which the operand has the cut that it needs."""
    refs = [(t, need) for t, need in zip(node.operands, needs) if isinstance(t, Ref)]
    return [(t.base, None if need is None else cut_behind(t, need)) for t, need in refs]
