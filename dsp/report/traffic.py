"""The collectives that a planned record makes in a training step: bytes of each rank, by phase and node.

The record is walked as a run walks it: each node brings its operands, runs, and gives its results; each checkpoint that
backward reaches is walked once more, to the last tensor that it saves. Backward repeats each collective as its adjoint,
if the copy that it made gets a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsp.comm.collectives import added_in
from dsp.comm.layout import separable
from dsp.core.decide import as_value
from dsp.core.record import Base, Collective, CollectivePart, Layout, Node, Offer, Record, Ref, Relayout, replicated
from dsp.planner import MOVES, Value, fuses
from dsp.planner.problem import kind_of
from dsp.stages.methods import Sent, add_sent

PHASES = ("forward", "backward", "recompute")


class Transfer(NamedTuple):
    """A collective of a step, or the part of one tensor in it.

    phase: "forward", "backward" or "recompute"; node: the node that makes it, or whose collective it is the adjoint of
    (None: a gradient of the model's inputs); calls: 0 where another part counts the call; sent: bytes of each rank;
    move: of a switch or gather; pieces: those in which it is made, each directly and in a call of its own; by_method: a
    module inside of a stage sends it itself, and its bytes are those of the busiest rank.
    """

    phase: str
    node: Node | None
    kind: str
    calls: int
    sent: tuple[int, ...]
    move: Relayout | None = None
    pieces: int = 1
    by_method: bool = False


def planned_transfers(record: Record, save_exchanges: bool = False) -> list[Transfer]:
    """The transfers of a step with a planned record: all of its outputs that can get a gradient get one.

    save_exchanges: a recomputation does not repeat what modules inside of stages send.
    """
    if record.n == 1:
        return []
    forward = Walk(record, "forward", {}, {})
    for param, ref in record.inputs.items():
        forward.start(ref, record.entry.get(param))
    for base in record.bases:
        if base.persistent:  # an earlier call left it
            forward.start(base.ref, *base.arrival)
    for node in record.nodes:
        forward.visit(node)
    transfers = [*forward.transfers, *forward.adjoints(), *gradients_of_inputs(record)]
    for region in range(len(record.saved)):
        transfers += recomputed(record, forward, region, save_exchanges)
    for node in record.nodes:
        transfers += by_methods(record, node, save_exchanges)
    return transfers


def by_methods(record: Record, node: Node, save_exchanges: bool) -> Iterator[Transfer]:
    """The transfers of modules inside of a stage, without those that checkpoints around it repeat."""
    if node.offer is None:
        return
    sends, grad = node.offer.methods.sends, any(node.result_grads)
    repeats = grad and node.cost.itself and not save_exchanges
    phases = ("forward", sends.forward), ("backward", sends.backward if grad else {})
    for phase, sent in (*phases, ("recompute", sends.recompute if repeats else {})):
        yield from by_modules(record, phase, node, sent)


def by_modules(record: Record, phase: str, node: Node, sent: Sent) -> Iterator[Transfer]:
    for kind, (nbytes, calls) in sent.items():
        yield Transfer(phase, node, kind, calls, (nbytes,) * record.n, by_method=True)


@dataclass(eq=False)
class Copy:
    """A base in one layout; source: the copy it was made from; grad: a gradient arrives at it."""

    layout: Layout
    source: Copy | None = None
    grad: bool = False

    def mark(self) -> None:
        """Note that a gradient arrives, here and at the copies that this one was made from."""
        copy: Copy | None = self
        while copy is not None:
            copy.grad, copy = True, copy.source


class NewCopy(NamedTuple):
    node: Node
    base: Base
    src: Layout
    dst: Layout
    copy: Copy


class Walk:
    """A walk past nodes.

    cuts: of each tensor, as its carrier has it; copies: of each base, the first as it was made; transfers: so far;
    collectives: those of which backward makes the adjoints, each as the switches that share calls, or as one collective
    of an offer.
    """

    def __init__(
        self, record: Record, phase: str, cuts: dict[Ref, Layout], copies: dict[Base, dict[Layout, Copy]]
    ) -> None:
        self.record, self.phase, self.n = record, phase, record.n
        self.cuts, self.copies = cuts, copies
        self.transfers: list[Transfer] = []
        self.groups: list[list[NewCopy]] = []
        self.collectives: list[tuple[Node, Collective]] = []

    def start(self, ref: Ref, cut: Layout) -> Copy:
        """Note a base that is made in a layout."""
        copy = Copy(cut)
        self.cuts[ref], self.copies[ref.base] = cut, {cut: copy}
        return copy

    def visit(self, node: Node, ends: bool = True) -> None:
        """Walk past a node; if not to its end, past what it does before it saves anything."""
        if node.identity or node.kind == "plain":
            return
        offer = self.offer(node)
        self.bring(node, offer)
        for c in offer.collectives:
            if c.early or ends:
                self.transfers += transfers_of(self.phase, node, c, c.parts)
                self.collectives.append((node, c))
        if not ends:
            return
        if node.in_place and isinstance(target := node.operands[0], Ref):
            self.write(target, offer.needs[0])
        for ref, cut in zip(node.results, offer.gives):
            if node.view:
                self.cuts[ref] = cut
        if not node.view:
            self.give(node, offer)

    def offer(self, node: Node) -> Offer:
        """The offer that a node runs by; a view takes its base's layout."""
        if not node.view:
            return node.offer or replicated(node, len(node.results))
        [operand] = node.refs
        at = node.operands.index(operand)
        return next((o for o in node.offers if o.needs[at] == self.cuts[operand]), replicated(node, 1))

    def bring(self, node: Node, offer: Offer) -> None:
        """Make the copies that a node needs."""
        waiting: list[NewCopy] = []
        bases = node.bases
        for base, src, dst in node.moves:
            if base in bases:
                self.want(node, waiting, base, dst, (src,))
        for t, need in zip(node.operands, offer.needs):
            if isinstance(t, Ref) and self.cuts[t] != need:
                self.want(node, waiting, t.base, t.base_cut(need))
        self.switch(waiting)
        for t, need, grad in zip(node.operands, offer.needs, node.operand_grads):
            if isinstance(t, Ref) and grad:
                copies = self.copies[t.base]
                copy = next(iter(copies.values())) if self.cuts[t] == need else copies[t.base_cut(need)]
                copy.mark()

    def want(
        self, node: Node, waiting: list[NewCopy], base: Base, dst: Layout, planned: tuple[Layout, ...] = ()
    ) -> None:
        """Make a copy, or note the switch that makes it."""
        copies = self.copies[base]
        if dst in copies or any(s.base is base and s.dst == dst for s in waiting):
            return
        first = next(iter(copies))
        src = planned[0] if planned else None if None in copies else first
        if src not in copies:
            self.switch(waiting)
            if src not in copies:
                return
        if src is None:
            copies[dst] = Copy(dst, copies[src])
        elif dst is None:
            copies[None] = Copy(None, copies[src])
            self.move([NewCopy(node, base, src, None, copies[None])])
        elif separable(base.ref.shape, src, dst, self.n):
            waiting.append(NewCopy(node, base, src, dst, Copy(dst, copies[src])))
        else:
            self.want(node, waiting, base, None, (src,))
            self.want(node, waiting, base, dst, (None,))

    def switch(self, waiting: list[NewCopy]) -> None:
        for s in waiting:
            self.copies[s.base][s.dst] = s.copy
        self.move([*waiting])
        waiting.clear()

    def write(self, target: Ref, layout: Layout) -> None:
        """Note a write in place: a tensor stays in the layout in which it was written, and other copies are out of
        date. A gradient that arrives later goes to what was there before if the node brings it there."""
        copies = self.copies[target.base]
        if target.maker is None and layout in copies:
            self.cuts[target] = layout
        else:
            layout = next(iter(copies))
        self.copies[target.base] = {layout: Copy(layout)}

    def give(self, node: Node, offer: Offer) -> None:
        """Note the results of a node, in the layouts to which it switches them."""
        moving = []
        for k, (ref, cut) in enumerate(zip(node.results, offer.gives)):
            dst = node.push[k] if k < len(node.push) and node.push[k] is not None else cut
            copy = self.start(ref, cut if cut is None else dst)
            copy.grad = k < len(node.result_grads) and node.result_grads[k]
            if cut is not None and dst != cut:
                moving.append(NewCopy(node, ref.base, cut, dst, copy))
        self.move(moving)

    def move(self, switches: list[NewCopy]) -> None:
        """Move copies at one place: small ones share a call."""
        if switches:
            self.groups.append(switches)
            self.transfers += self.moved(self.phase, switches)

    def moved(self, phase: str, switches: Sequence[NewCopy]) -> Iterator[Transfer]:
        """The transfers of moves at one place; in backward, of those whose copies get a gradient."""
        shared = False
        for node, base, src, dst, copy in sorted(switches, key=lambda s: not fuses(s.base.ref.nbytes, self.n)):
            if phase == "backward" and not copy.grad:
                continue
            kind, value = kind_of(src, dst), value_of(self.record, base, phase)
            small = kind == "switch" and fuses(base.ref.nbytes, self.n)
            calls, shared = int(not (small and shared)), shared or small
            if phase == "backward":
                kind, src, dst = MOVES[kind].adjoint, dst, src
            sent = tuple(MOVES[kind].sent(value, src, dst, self.n))
            yield Transfer(phase, node, kind, calls, sent, Relayout(base, src, dst))

    def adjoints(self) -> Iterator[Transfer]:
        """The transfers of backward."""
        for switches in self.groups:
            yield from self.moved("backward", switches)
        for node, c in self.collectives:
            back = [part for part in c.parts if differentiated(node, part)]
            if any(any(part.back) for part in back):
                yield from transfers_of("backward", node, c, back)


def value_of(record: Record, base: Base, phase: str) -> Value:
    """A tensor as the planner reads it; in backward its gradient, which may travel in another format."""
    value = record.priced(as_value("", base, record.n))
    return value.gradient if phase == "backward" else value


def differentiated(node: Node, part: CollectivePart) -> bool:
    """Tell whether a part of a collective inside a node has a backward."""
    by_operand = part.operand is None or node.operand_grads[part.operand : part.operand + 1] == (True,)
    each = node.result_grads if part.result is None else node.result_grads[part.result : part.result + 1]
    return by_operand and any(each)


def transfers_of(phase: str, node: Node, c: Collective, parts: Sequence[CollectivePart]) -> list[Transfer]:
    """One collective with several parts."""
    if phase != "backward":
        moves = [(part.sent, part.move) for part in parts]
        return [Transfer(phase, node, c.kind, c.calls * (k == 0), *each, c.calls) for k, each in enumerate(moves)]
    moves = [(part.back, part.move and Relayout(part.move.base, part.move.dst, part.move.src)) for part in parts]
    return [Transfer(phase, node, c.adjoint, c.calls * (k == 0), *each, c.calls) for k, each in enumerate(moves)]


def recomputed(record: Record, forward: Walk, region: int, save_exchanges: bool = False) -> list[Transfer]:
    """The transfers of a checkpoint that backward recomputes: from its first node to the last tensor that it saves.

    Copies of tensors from outside exist still; not in a checkpoint inside another one, which recomputes these tensors,
    too.
    """
    places = [(node, place) for node in record.nodes for place in node.regions if place.region == region]
    unread = sum(place.after - place.before for node, place in places if not any(node.result_grads))
    if unread == record.saved[region] or not any(any(node.result_grads) for node, _ in places):
        return []  # backward reads nothing that it saved
    inner = any(node.regions[0].region != region for node, _ in places)
    copies = {base: first_of(of) if inner else dict(of) for base, of in forward.copies.items()}
    walk = Walk(record, "recompute", dict(forward.cuts), copies)
    for node, place in places:
        if place.before >= record.saved[region]:
            break
        ends = place.after < record.saved[region]
        walk.visit(node, ends=ends)
        if node.offer is not None and any(node.result_grads):
            # a stage is recomputed to its end: it saves tensors after it sends; one that is itself a checkpoint, the
            # last that its region saves, is left at its inputs
            sends, entered = node.offer.methods.sends, not node.cost.itself or ends
            sent = [
                sends.before,
                sends.after if ends else {},
                sends.recompute if entered and not save_exchanges else {},
            ]
            walk.transfers += by_modules(record, "recompute", node, add_sent(*sent))
    return walk.transfers


def first_of(copies: dict[Layout, Copy]) -> dict[Layout, Copy]:
    layout = next(iter(copies))
    return {layout: copies[layout]}


def gradients_of_inputs(record: Record) -> Iterator[Transfer]:
    """The gradients of inputs, which every rank gets in full: an all-gather of a split one, else an all-reduce.

    One that arrived sharded has a gradient that is sharded alike.
    """
    n = record.n
    for param, t in record.input_grads.items():
        cut, ref = record.entry.get(param), record.inputs.get(param)
        if ref is not None and None not in ref.base.arrival:
            continue
        if cut is not None and ref is not None:
            sent = tuple(MOVES["gather"].sent(as_value("", ref.base, n), cut, None, n))
            yield Transfer("backward", None, "gather", 1, sent, Relayout(ref.base, cut, None))
        else:
            size = t.shape.numel() * added_in(t.dtype).itemsize  # type: ignore[attr-defined]
            yield Transfer("backward", None, "all_reduce", 1, (-(-2 * size * (n - 1) // n),) * n)
