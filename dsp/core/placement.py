"""The place of each move: a value's maker switches it as early as it can, or a node brings it before its use."""

from __future__ import annotations

from collections.abc import Sequence

from dsp.core.record import Base, Layout, Node, Offer, Record, Ref, Relayout
from dsp.planner import Choice, Move, Op, Problem, Solution, fuses


def place(
    record: Record, nodes: list[Node], problem: Problem, bases: Sequence[Base], picks: Sequence[Choice],
    solution: Solution,
) -> None:  # fmt: skip
    """Write the moves of a solution on the nodes; bases: of each of the problem's values.

    A value that nothing reads as it was made is switched by its maker, at the earliest place; other moves are made
    before the use. Operands that enter one node together move there, in one call.
    """
    for node in record.nodes:
        node.moves = []
    ops, used = problem.ops, dict[int, set[Layout]]()
    for op, pick in zip(ops, picks):
        for v, cut in zip(op.inputs, pick.needs):
            used.setdefault(v, set()).add(cut)
    settled = sources_in_place(nodes, ops, picks)
    entry: dict[int, Layout] = {}
    number = {v: i for i, v in reversed([*enumerate(bases)])}
    for param, ref in record.inputs.items():
        v = number[ref.base]
        cuts = used.get(v, set()) if ref.base.arrival == (None,) else {*ref.base.arrival}
        entry[v] = record.entry[param] = next(iter(cuts)) if len(cuts) == 1 else None
    moves: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.value not in settled and (m.kind != "split" or m.dst != entry.get(m.value)):
            moves.setdefault(m.value, []).append(m)
    push = pushes(problem, picks, moves, used)
    for node, op in zip(nodes, ops):  # a write in place makes nothing that could be switched
        for v in op.outputs[len(node.results) :]:
            push.pop(v, None)
    fuse_at_use(record.n, nodes, problem, bases, solution, push)
    for v, copies in moves.items():
        for m in copies:
            if push.get(v, "") != m.dst:
                nodes[m.before].moves.append(Relayout(bases[v], m.src, m.dst))
    for node, op in zip(nodes, ops):
        node.push = [push.get(v) for v in op.outputs[: len(node.results)]]


def sources_in_place(nodes: list[Node], ops: Sequence[Op], picks: Sequence[Choice]) -> set[int]:
    """Let what is made of sources alone, and read in one cut by all, be made in it, batch or not; return the values."""
    settled: set[int] = set()
    used: dict[int, set[Layout]] = {}
    for node, op, pick in reversed([*zip(nodes, ops, picks, strict=True)]):
        needs = pick.needs
        free = node.kind == "operation" and all(v.free for v in node.bases)
        if free and len(op.outputs) == 1 and not (node.writes or any(needs)):
            [v] = op.outputs
            offer = next((o for o in node.offers if {o.gives[0]} == used.get(v) and not o.inner), None)
            if offer is not None:
                node.offer, needs = offer, base_layouts(node, offer)
                settled.add(v)
        for v, cut in zip(op.inputs, needs):
            used.setdefault(v, set()).add(cut)
    return settled


def base_layouts(node: Node, o: Offer) -> tuple[Layout, ...]:
    """The layouts that an offer needs of the node's bases. One that two views need in different cuts is replicated."""
    needs: dict[Base, set[Layout]] = {v: set() for v in node.bases}
    for t, need in zip(node.operands, o.needs):
        if isinstance(t, Ref):
            needs[t.base].add(None if need is None else t.base_cut(need))
    return tuple(next(iter(cuts)) if len(cuts) == 1 else None for cuts in needs.values())


def pushes(
    problem: Problem, picks: Sequence[Choice], moves: dict[int, list[Move]], used: dict[int, set[Layout]]
) -> dict[int, Layout]:
    """By value, the layout to which its maker switches it."""
    gives = {v: cut for op, pick in zip(problem.ops, picks) for v, cut in zip(op.outputs, pick.gives)}
    push: dict[int, Layout] = {}
    for v, (first, *rest) in moves.items():
        if v not in gives or first.kind != "switch" or problem.values[v].fixed:
            continue
        if gives[v] not in used.get(v, set()) and all(m.src != gives[v] for m in rest):
            push[v] = first.dst
    return push


def fuse_at_use(
    n: int, nodes: list[Node], problem: Problem, bases: Sequence[Base], solution: Solution, push: dict[int, Layout]
) -> None:
    """Take moves of operands that enter one node together from their makers: before that node they share a call.

    Not in an activation checkpoint, which would repeat it; nor if all have one maker, where they share one.
    """
    uses: dict[int, list[int]] = {}
    for k, op in enumerate(problem.ops):
        for v in op.inputs:
            uses.setdefault(v, []).append(k)
    entering: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.kind == "switch" and fuses(bases[m.value].ref.nbytes, n):
            entering.setdefault(m.before, []).append(m)
    for k, moves in entering.items():
        pushed = [m for m in moves if push.get(m.value, "") == m.dst]
        movable = [m for m in pushed if uses[m.value] == [k] and not nodes[k].checkpointed]
        at_use = len(moves) - len(pushed)
        if len(movable) + at_use > 1 and (at_use or len({m.after for m in movable}) > 1):
            for m in movable:
                del push[m.value]
