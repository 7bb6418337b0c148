"""The switches that travel while stages compute: the number of pieces, and the time hidden; a pass over planned nodes.

A stage that is independent along its sharded dim may run piece by piece along it. A switch of its result then sends
each piece as soon as it is computed; a switch right before it is waited for piece by piece. In backward the roles are
reversed. A switch that cannot be cut, or would not gain, is left alone; the plan shows the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dsp.comm.hardware import Hardware
from dsp.comm.wire import Wire
from dsp.core.decide import Decision
from dsp.core.meter import forwards
from dsp.core.module_calls import StageCall
from dsp.core.record import BoundStage, Collective, CollectivePart, Node, Offer, Record, Ref, Relayout
from dsp.overlap.hidden import Overlapped, Phase
from dsp.overlap.options import MOST, Overlap
from dsp.overlap.pieces import InPieces
from dsp.planner import MOVES, Layout, Move, Value, chunk_sizes, piece_sizes
from dsp.stages.stage import Option
from dsp.support.private import compiled_call, fsdp_precision

LEAST = 0.05  # the share of the time of a stage and its switches that pieces have to save
NOBODY = "no stage makes what is switched, nor is its only reader"


class CutStages:
    """The pass: lets stages of a record run in pieces. overlap: their number, or the hardware to decide by."""

    def __init__(self, overlap: int | Hardware, wire: Wire) -> None:
        self.overlap, self.wire = overlap, wire

    def __call__(self, record: Record, decision: Decision, reads: bool = False) -> Overlaps:
        return Overlaps(record, decision, self.overlap, self.wire, reads)


class Overlaps:
    """The stages of a record that run in pieces: `rows` by stage call, and the pieces of each move.

    reads: the forward reads its data, as one may whose record grew in a run.
    """

    def __init__(
        self, record: Record, decision: Decision, overlap: Overlap, wire: Wire, reads: bool = False
    ) -> None:  # fmt: skip
        self.decision, self.size, self.overlap, self.wire = decision, record.n, overlap, wire
        self.reads = reads or record.replans > 0
        self.values, self.nodes = decision.problem.values, decision.nodes
        self.rows: list[Overlapped] = []
        self.moves: dict[Move, int] = {}
        if overlap is None or record.n == 1:
            return
        behind, before, idle = self.places([m for m in decision.solution.moves if m.kind == "switch"])
        for at in sorted({*behind, *before}):
            self.decide(at, behind.get(at, []), before.get(at, []))
        if idle:
            self.rows.append(Overlapped("", len(idle), (), reason=NOBODY))

    # --- places ---

    def places(self, moves: list[Move]) -> tuple[dict[int, list[Move]], dict[int, list[Move]], list[Move]]:
        """The switches behind the stage that makes the tensor, those right before a stage, and all others."""
        behind: dict[int, list[Move]] = {}
        before: dict[int, list[Move]] = {}
        idle = []
        for m in moves:
            makes = m.after >= 0 and self.nodes[m.after].kind == "stage" and self.result(m) is not None
            reads = self.operand(m) is not None
            if makes and not (reads and self.refused(m.after) and not self.refused(m.before)):
                behind.setdefault(m.after, []).append(m)
            elif reads:
                before.setdefault(m.before, []).append(m)
            else:
                idle.append(m)
        return behind, before, idle

    def result(self, m: Move) -> int | None:
        """The number of the result that is switched by its maker in this move; None if it is not."""
        node, outputs = self.nodes[m.after], self.decision.problem.ops[m.after].outputs
        k = outputs.index(m.value)
        return k if k < len(node.push) and node.push[k] == m.dst else None

    def operand(self, m: Move) -> int | None:
        """The number of the operand of a stage that is the only use of a switch, outside of activation checkpoints."""
        node, base = self.nodes[m.before], self.decision.bases[m.value]
        if node.kind != "stage" or node.regions or node.checkpointed or node.offer is None:
            return None
        operands = [(k, t) for k, t in enumerate(node.operands) if isinstance(t, Ref) and t.base is base]
        if len(operands) != 1 or not self.read_once(m):
            return None
        [(k, t)] = operands
        same = t.cut_under(m.src) == m.src and t.cut_under(m.dst) == m.dst and t.nbytes == base.ref.nbytes
        return k if same and node.offer.needs[k] == m.dst else None

    def read_once(self, m: Move) -> bool:
        """Tell whether the copy that a move makes is read once, and no other is made of it, or beside it."""
        pairs = zip(self.decision.problem.ops, self.decision.choices)
        reads = [v for op, choice in pairs for v in zip(op.inputs, choice.needs) if v == (m.value, m.dst)]
        moves = [o for o in self.decision.solution.moves if o.value == m.value and o != m]
        return len(reads) == 1 and not any(o.src == m.dst or o.before == m.before for o in moves)

    def refused(self, at: int) -> str:
        """The reason against running a stage in pieces, if there is one."""
        node = self.nodes[at]
        assert node.offer is not None
        assert node.offer.option is not None
        option, reason = node.offer.option, next(reasons(node, node.offer, node.offer.option), "")
        if self.reads:
            return "the forward goes by what its tensors hold"
        if not reason and chunk_sizes(option.size, self.size)[0] < 2:
            return f"a rank has no more than 1 of {option.name!r}"
        return reason

    # --- decisions ---

    def decide(self, at: int, behind: list[Move], before: list[Move]) -> None:
        node, moves, reason = self.nodes[at], [*behind, *before], self.refused(at)
        if not reason and not all(plain(m) for m in moves):
            reason = "a dim lies in a fold, or is a concatenation of pieces"
        best = Overlapped(node.name, len(moves), tuple(self.phases(node, moves)), reason=reason)
        if not reason:
            assert node.offer is not None
            assert node.offer.option is not None
            most = chunk_sizes(node.offer.option.size, self.size)[0]
            counts = [self.overlap] if isinstance(self.overlap, int) else range(2, MOST + 1)
            best = self.best(best, [replace(best, pieces=min(k, most)) for k in counts])
        self.rows.append(best)
        if best.pieces > 1:
            self.moves.update(dict.fromkeys(moves, best.pieces))
            self.cut(node, best.pieces, behind, before)

    def best(self, one: Overlapped, cut: list[Overlapped]) -> Overlapped:
        """The given number of pieces, or the one that takes the least time."""
        if not isinstance(self.overlap, Hardware):
            return cut[0]
        hardware, link = self.overlap, self.overlap.axis(self.size)
        least = min(cut, key=lambda o: (o.together(hardware, link), o.pieces))
        if least.together(hardware, link) <= (1 - LEAST) * one.alone(hardware, link):
            return least
        return replace(one, reason="it would save too little")

    def phases(self, node: Node, moves: Sequence[Move]) -> Iterator[Phase]:
        cost, share = node.cost, 1.0
        if node.offer is not None and node.offer.option is not None:
            share = node.offer.option.share(self.size)
        forward = Phase(
            cost.flops * share, cost.touched * share, sum(m.bytes for m in moves), cost.operations,
            self.packed(moves, 0),
        )  # fmt: skip
        yield forward
        if any(node.result_grads):  # recomputation runs while the gradients travel
            times = forwards(node) - 1
            grads = [self.values[m.value].gradient for m in moves]
            sent = sum(max(MOVES["switch"].sent(g, m.dst, m.src, self.size)) for g, m in zip(grads, moves))
            yield Phase(
                times * forward.flops, times * forward.touched, sent, times * cost.operations, self.packed(moves, 1)
            )

    def packed(self, moves: Sequence[Move], way: int) -> tuple[str, ...]:
        """The formats in which switches are packed, forward (0) or backward (1)."""
        return tuple(self.wire.names[way] for m in moves if self.values[m.value].packed[way] is not None)

    def cut(self, node: Node, count: int, behind: list[Move], before: list[Move]) -> None:
        """Let a node run in pieces: by an offer that makes these switches."""
        one = node.offer
        assert one is not None
        arriving = {k: m for m in before if (k := self.operand(m)) is not None}
        leaving = {k: m for m in behind if (k := self.result(m)) is not None}
        parts = [self.part(m, count, True)._replace(operand=k) for k, m in arriving.items()]
        parts += [self.part(m, count, False)._replace(result=k) for k, m in leaving.items()]
        pieces = InPieces(node, one, count, cuts(arriving, "src"), cuts(leaving, "dst"))
        node.offer = replace(
            one,
            needs=tuple(pieces.arriving.get(k, need) for k, need in enumerate(one.needs)),
            gives=tuple(pieces.leaving.get(k, cut) for k, cut in enumerate(one.gives)),
            collectives=(*one.collectives, *(Collective("switch", "switch", (part,), calls=count) for part in parts)),
            local=pieces,  # type: ignore[arg-type]  # of a stage, whose function takes the arguments of its module
            takes_empty=True,
        )
        for k in leaving:
            node.push[k] = None
        for m in before:  # the stage makes the move, not the producer, nor the run before the use
            moved = Relayout(self.decision.bases[m.value], m.src, m.dst)
            node.moves = [move for move in node.moves if move != moved]
            if m.after >= 0 and (number := self.result(m)) is not None:
                self.nodes[m.after].push[number] = None

    def part(self, m: Move, count: int, arrives: bool) -> CollectivePart:
        """A switch as what an offer sends inside."""
        sent, back = sent_in_pieces(self.values[m.value], m.src, m.dst, self.size, count, arrives)
        return CollectivePart(sent, back, move=Relayout(self.decision.bases[m.value], m.src, m.dst))


def cuts(moves: Mapping[int, Move], end: str) -> dict[int, Layout]:
    return {k: getattr(m, end) for k, m in moves.items()}


def reasons(node: Node, offer: Offer, option: Option) -> Iterator[str]:
    """The reasons against running a stage in pieces along the dim of an option."""
    assert isinstance(node.call, BoundStage)
    stage, count = node.call.stage, len(node.operands)
    memories = {t.memory for t in node.refs}
    outputs = [r.memory for r in node.results]
    patterns = [p for p in (*stage.pattern.inputs, *stage.pattern.outputs) if option.name in p.names]
    against = {
        "it communicates inside": bool(stage.methods) or stage.around is not None or offer.local is not None,
        "its results are sums, added up over ranks first": option.onto is not None,
        "it draws random numbers": node.draws,
        "it writes to what it keeps or was given": node.stateful or bool(node.writes),
        "it returns what it was given": any(m in memories for m in outputs) or any(i < count for i, _ in node.kin),
        "its results share memory": len({*outputs}) < len(outputs),
        "fully_shard casts its results": casts(stage.module),
        "it returns more than tensors": bool(node.constants),
        "its compile() compiled it: compile its forward instead": compiled(stage.module),
        f"{option.name!r} lies in a fold": any((option.name,) not in p.axes for p in patterns),
        f"a result has no {option.name!r}": None in offer.gives,
    }
    return (reason for reason, holds in against.items() if holds)


def compiled(module: nn.Module) -> bool:
    """Tell whether a module's compile() compiled it, before or after it became a stage of a parallel model."""
    call = compiled_call(module)
    if isinstance(call, StageCall):
        return getattr(call.call, "__func__", None) is not nn.Module._call_impl
    return call is not None


def casts(module: nn.Module) -> bool:
    """Tell whether `fully_shard` casts a module's results, which would be after their pieces have been sent."""
    return isinstance(module, FSDPModule) and fsdp_precision(module)[2] is not None


def plain(m: Move) -> bool:
    """Tell whether a switch leads from one dim to a different one, both neither part of a fold nor joined."""
    return m.src.outer == m.dst.outer == 1 and m.src.dim != m.dst.dim


def sent_in_pieces(
    value: Value, src: Layout, dst: Layout, n: int, count: int, arrives: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes that each rank sends, forward and backward, in a switch in pieces of `src`; of `dst` if it arrives so."""
    src_sizes, dst_sizes = (chunk_sizes(value.extent(cut), n) for cut in (src, dst))
    unit, (sent, back) = value.nbytes // value.itemsize // max(sum(src_sizes) * sum(dst_sizes), 1), ([0] * n, [0] * n)
    for r, local in enumerate(src_sizes):
        for q, part in enumerate(dst_sizes):
            cut, across = (part, local) if arrives else (local, part)
            for piece in piece_sizes(cut, count) if q != r else ():
                numbers = piece * across * unit
                for rank, each, packed in ((r, sent, value.packed[0]), (q, back, value.packed[1])):
                    each[rank] += numbers * value.itemsize if packed is None else packed(numbers)
    return tuple(sent), tuple(back)
