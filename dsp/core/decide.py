"""From a record to decisions: the planner picks an offer for each node, and each move between them has its place.

A value's maker switches it as early as it can, or a node brings it before its use.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from dsp.comm.layout import separable
from dsp.core.record import FREE, Base, Layout, Node, Offer, Record, Ref, Relayout, replicated
from dsp.planner import Choice, Infeasible, Move, Op, Problem, Solution, Value, chunk_sizes, fuses, length, solve


class Decision(NamedTuple):
    """The planner's problem of a record, its solution, the node of each op (all but views and identities), the choice
    that was made for it, and the base of each value."""

    problem: Problem
    solution: Solution
    nodes: list[Node]
    choices: list[Choice]
    bases: list[Base]


def decide(
    record: Record, gather: bool, memory: int | None = None, resident: int = 0, batch: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Decision:  # fmt: skip
    """Choose offers, and write them, and the moves, on the nodes.

    gather: outputs are gathered; memory: bytes that a rank may hold, of which `resident` are always taken; batch: it
    may be sharded to save bytes; say: gets progress. Raises `dsp.planner.Infeasible` if nothing fits in the memory.
    """
    nodes = [node for node in record.nodes if not (node.view or node.identity)]
    if gather:
        replicate_before_outputs(nodes)
    names = names_of(record, nodes)
    versions = Versions(record.bases)
    ops = []
    for node in nodes:
        if node.kind == "output":
            node.offers = output_offers(node, gather)
        choices = [choice(node, offer, k) for k, offer in enumerate(node.offers)]
        ops.append(Op(node.name, *versions.of(node), tuple(choices)))
    values = tuple(map(record.priced, versions.values(names, record.n)))
    ops = [op if node.cost is FREE else priced(op, node, values, record.n, memory) for op, node in zip(ops, nodes)]
    problem = Problem(values, tuple(ops), record.n, memory, resident)
    problem, solution = without_batch(problem, [node.kind == "stage" for node in nodes], batch, say)
    choices = [op.choices[k] for op, k in zip(problem.ops, solution.choices)]
    for node, pick in zip(nodes, choices):
        node.offer = node.offers[pick.execution]
    place(record, nodes, problem, versions.bases, choices, solution)
    # of a source, that by which it is made as it is read
    choices = [op.choices[node.offers.index(node.offer)] for node, op in zip(nodes, ops)]  # type: ignore[arg-type]
    record.planned = True
    drawing = [n for n in nodes if n.kind == "stage" and n.draws is not False]
    record.draws |= any(n.draws and n.offer is not None and not any(n.offer.needs) for n in drawing)
    record.stages_draw = bool(drawing)
    return Decision(problem, solution, nodes, choices, versions.bases)


class Versions:
    """The planner's values: the bases of a record, and each again after every write in place.

    A copy that was made before a write is no copy of what comes after it; so that is another value. fixed: the values
    before the last write into memory that others share, which would miss it if they were moved.
    """

    def __init__(self, bases: Sequence[Base]) -> None:
        self.bases = [*bases]
        self.latest = {v: i for i, v in enumerate(bases)}
        self.fixed = {i for i, v in enumerate(bases) if v.last_write is not None}
        self.passed: set[Node | None] = {None}

    def of(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The values that a node reads, and those that it makes: its results, then what it writes into."""
        inputs = tuple(self.latest[v] for v in node.bases)
        self.passed.add(node)
        written = written_bases(node)
        for v in written:
            self.latest[v] = len(self.bases)
            self.bases.append(v)
        outputs = [*(r.base for r in node.results), *written]
        for v in outputs:
            (self.fixed.discard if v.last_write in self.passed else self.fixed.add)(self.latest[v])
        return inputs, tuple(self.latest[v] for v in outputs)

    def values(self, names: dict[Base, str], n: int) -> Iterator[Value]:
        """The values as the planner reads them."""
        for i, v in enumerate(self.bases):
            cuts = v.cuts if None in v.arrival else ()  # a replicated input may arrive in each of them, too
            home = (*v.arrival, *cuts) if i < len(self.latest) else ()
            yield replace(as_value(names[v], v, n), fixed=i in self.fixed, home=home)


def written_bases(node: Node) -> list[Base]:
    """The bases that a node writes into, without repeats."""
    return list(dict.fromkeys(t.base for i in node.writes if isinstance(t := node.operands[i], Ref)))


def names_of(record: Record, nodes: Sequence[Node]) -> dict[Base, str]:
    """A name for each value: the input's, the stage's with the turn of the call, or the operation's with the shape."""
    names = {v: f"left by an earlier call {list(v.ref.shape)}" for v in record.bases}
    names |= {ref.base: param for param, ref in record.inputs.items()}
    turns = itertools.count()
    for node in nodes:
        turn = next(turns) if node.kind == "stage" else 0
        for r in node.results:
            names[r.base] = f"{node.name}[{turn}]" if node.kind == "stage" else f"{node.name} {list(r.shape)}"
    return names


def priced(op: Op, node: Node, values: Sequence[Value], n: int, memory: int | None) -> Op:
    """An op with the work and the kept bytes of its choices, from what its node costs on one process."""
    cost, choices = node.cost, list[Choice]()
    for c in op.choices:
        option = node.offers[c.execution].option
        share = op.share(c, values, n) if option is None else option.share(n)
        copied = copy_of_replicated(node, node.offers[c.execution])
        constant = copied if copied <= cost.saved else 0
        work, saved = 0, int((cost.saved - constant) * share) + constant
        if option is not None:
            work = int(cost.work * share) + (node.results[0].nbytes if option.onto else 0)
        elif node.kind == "plain" and memory is not None:
            work = cost.work
        if cost.restarts:
            saved += sum(values[v].local_bytes(k, n) for v, k in zip(op.inputs, c.needs))
        choices.append(replace(c, work=work, saved=saved))
    return replace(op, choices=tuple(choices))


def copy_of_replicated(node: Node, offer: Offer) -> int:
    """The bytes of the largest tensor inside a node, if that is no shorter on a rank: a copy of an operand that is
    replicated, such as a mask in the dtype of attention. 0 if it is not."""
    pairs = [(math.prod(t.shape), need) for t, need in zip(node.operands, offer.needs)]
    sharded = {math.prod(r.shape) for r in node.results} | {numel for numel, need in pairs if need is not None}
    copies = (node.cost.numel, None) in pairs and node.cost.numel not in sharded
    return node.cost.largest if node.kind == "operation" and any(offer.needs) and copies else 0


def replicate_before_outputs(nodes: Sequence[Node]) -> None:
    """Let operations run replicated that only rearrange numbers, or whose operands every rank can make, where nothing
    but gathered outputs is made of their results: these are replicated anyway. A copy that shares memory on one device
    would miss what is written there."""
    elsewhere: set[Base] = set()  # bases of which something else is made
    for node in reversed(nodes):
        bases = {*written_bases(node), *(r.base for r in node.results)}
        rearranges = node.rearranges and (node.view or all(v.last_write is None for v in bases))
        cheap = rearranges or (bool(node.bases) and all(v.free for v in node.bases))
        if node.kind == "operation" and cheap and bases.isdisjoint(elsewhere):
            if all(any(o.needs) for o in node.offers):
                node.offers.append(replicated(node, len(node.results)))
        elif node.kind != "output":
            elsewhere.update(node.bases)


def output_offers(node: Node, gather: bool) -> list[Offer]:
    """The layouts in which an output may be returned."""
    [ref] = node.refs
    cuts = [] if gather else [(of, cut) for of in ref.base.cuts if (cut := ref.cut_under(of)) and not cut.joined]
    return [Offer((cut,), last_resort=of in ref.base.batch) for of, cut in cuts] or [Offer((None,))]


def as_value(name: str, v: Base, n: int) -> Value:
    """A value as the planner reads it."""
    pairs = itertools.combinations(v.cuts, 2)
    inseparable = frozenset(frozenset(p) for p in pairs if not separable(v.ref.shape, *p, n))
    return Value(
        name, tuple(v.cuts.items()), v.ref.dtype.itemsize, v.arrival, numel=math.prod(v.ref.shape),
        detours=inseparable, real=v.ref.dtype.is_floating_point, alone=v.free,
    )  # fmt: skip


def choice(node: Node, o: Offer, k: int) -> Choice:
    """An offer as the planner reads it: by values, in the cuts of their bases."""
    layouts = base_layouts(node, o)
    into = written_bases(node)
    gives = *o.gives[: len(node.results)], *(layouts[node.bases.index(v)] for v in into)
    return Choice(layouts, gives, bytes=o.nbytes, calls=o.calls, rank=int(o.last_resort), execution=k)


def without_batch(
    problem: Problem, stages: Sequence[bool], batch: bool, say: Callable[[str], None]
) -> tuple[Problem, Solution]:  # fmt: skip
    """The cheapest plan that does not shard batch where another dim will do, unless nothing else fits the memory; and
    the problem of the choices that were compared.

    An op sharded only along batch sends nothing, but with 2 samples on 3 ranks it is data parallelism with an idle
    rank. Another dim is sharded then, if that makes the largest shard smaller. stages: which ops are stages; batch: it
    may be sharded to save bytes.
    """

    def among(admitted: Sequence[Sequence[int]]) -> tuple[Problem, Solution]:
        pairs = zip(problem.ops, admitted)
        ops = tuple(replace(op, choices=tuple(op.choices[c] for c in picks)) for op, picks in pairs)
        compared = replace(problem, ops=ops)
        return compared, solve(compared, say)

    try:
        compared, solution = among(admitted_choices(problem, stages, batch))
    except Infeasible:
        return among([range(len(op.choices)) for op in problem.ops])
    if batch_alone(compared, solution):
        with suppress(Infeasible):
            without = among(admitted_choices(problem, stages, batch=False))
            return min((compared, solution), without, key=lambda pair: pair[1].largest)
    return compared, solution


def batch_alone(problem: Problem, solution: Solution) -> bool:
    """Tell whether only batch is sharded, and a shard of it is at least 1.5/N of it."""
    n, picks = problem.size, [op.choices[c] for op, c in zip(problem.ops, solution.choices)]
    cuts = [(c, v, k) for op, c in zip(problem.ops, picks) for v, k in op.layouts(c) if k is not None]
    sizes = (problem.values[v].extent(k) for _, v, k in cuts)
    return any(2 * n * chunk_sizes(size, n)[0] >= 3 * length(size) for size in sizes) and all(
        c.rank for c, _, _ in cuts
    )


def admitted_choices(problem: Problem, stages: Sequence[bool], batch: bool) -> list[list[int]]:
    """The choices of every op that are compared by bytes.

    To divide the batch is the task of data parallelism, and the batch may be 1. So stages are not sharded along it if
    each of them has another dim. Any op that has another dim is not sharded along it unevenly either: uneven means, for
    a stage, shards of unequal sizes; for an operation, a shard longer than 1.5/N of the dim.
    """
    n = problem.size
    spared = all(any(not c.rank for c in op.choices) for op, stage in zip(problem.ops, stages) if stage)

    def uneven(op: Op, c: Choice, stage: bool) -> bool:
        sizes = (problem.values[v].extent(k) for v, k in op.layouts(c) if k is not None)
        return any(
            length(size) % n > 0 if stage else 2 * n * chunk_sizes(size, n)[0] > 3 * length(size) for size in sizes
        )

    def admitted(op: Op, stage: bool) -> list[int]:
        spares = any(not c.rank and any(c.needs + c.gives) for c in op.choices)
        refused = [c.rank and spares and (not batch or (stage and spared) or uneven(op, c, stage)) for c in op.choices]
        return [i for i, out in enumerate(refused) if not out]

    return [admitted(op, stage) for op, stage in zip(problem.ops, stages)]


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
            offer = next((o for o in node.offers if {o.gives[0]} == used.get(v) and not o.collectives), None)
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
    for v, (first, *later) in moves.items():
        if v not in gives or first.kind != "switch" or problem.values[v].fixed:
            continue
        if gives[v] not in used.get(v, set()) and all(m.src != gives[v] for m in later):
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
