"""What the operations of a plan take of the busiest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dsp.plan.events import Trace
from dsp.plan.table import StageRow, Switch, Whole
from dsp.planner import Choice, Move, Solution, Value, chunk_sizes, price
from dsp.stages import Stage
from dsp.text import generic


def share_of(t: Trace, stages: Mapping[str, Stage], i: int, c: int, n: int) -> float:
    """What the busiest rank computes of an op: its chunk of the sharded dim, or everything."""
    op, event = t.ops[i], t.events[i]
    if event.kind == "stage":
        stage = stages[event.name]
        if stage.whole and stage.inside:  # its weights are cut instead
            return 1 / n
        if stage.around is not None and event.options[c].name is not None:
            return stage.around.share(event.sizes, n)
        return event.options[c].share(n)
    choice = op.choices[c]
    for v, key in zip(op.inputs + op.outputs, choice.needs + choice.gives):
        if key is not None:
            return t.values[v].local_bytes(key, n) / max(t.values[v].nbytes, 1)
    return 1.0


def held_by(t: Trace, i: int, c: Choice, share: float, n: int) -> tuple[int, int]:
    """Bytes of the largest tensor that a rank holds of an op, and of the largest that one process does."""
    op, event = t.ops[i], t.events[i]
    if event.kind == "output":  # what the caller asked for
        return 0, 0
    layouts = list(zip(op.inputs + op.outputs, c.needs + c.gives))
    own = [t.values[v].local_bytes(k, n) for v, k in layouts]
    whole = [t.values[v].nbytes for v, _ in layouts]
    return max([*own, int(event.largest * share)]), max([*whole, event.largest])


def whole_glue(
    t: Trace, taken: Sequence[Choice], held: Sequence[tuple[int, int]], flops: Sequence[float], n: int
) -> list[Whole]:
    """The glue that runs whole, longer than 1.5/N of the longest: what takes most first."""
    longest, total = max((whole for _, whole in held), default=1), max(sum(flops), 1)
    found: dict[tuple[str, str], Whole] = {}
    for event, c, (own, _), work in zip(t.events, taken, held, flops):
        if event.kind in ("stage", "output", "source") or any(c.needs + c.gives) or own * n < 1.5 * longest or n == 1:
            continue
        if event.kind == "glue" and not event.largest:  # nothing is made: a view, or numbers that are read
            continue
        key = event.name, generic(event.module)
        known = found.get(key, Whole(*key, 0, 0.0, 0))
        found[key] = Whole(*key, max(known.bytes, own), known.part + work / total, known.calls + 1)
    return sorted(found.values(), key=lambda w: (w.part, w.bytes), reverse=True)


def touched_by(t: Trace, stages: Mapping[str, Stage], i: int, touched: tuple[int, ...], share: float) -> float:
    """What the busiest rank reads and writes of an op: as it computes, but for what lies outside of cut weights."""
    event = t.events[i]
    whole = event.kind == "stage" and stages[event.name].whole
    return touched[0] * (1.0 if whole else share) + touched[1] * share


def adjoint_bytes(value: Value, m: Move, n: int) -> int:
    """What the busiest rank sends in the backward of a move; with uneven chunks not always what it sends forward."""
    if m.kind == "switch":
        return price(value, m.dst, m.src, n)[0]
    if m.kind == "gather" and m.src is not None:  # a reduce-scatter: all but this rank's own chunk
        size = dict(value.sizes)[m.src]
        return value.nbytes // size * (size - chunk_sizes(size, n)[-1])
    return 0


def rows_of(
    t: Trace,
    stages: Mapping[str, Stage],
    solution: Solution,
    n: int,
    own_call: Mapping[Move, int],
    share: Sequence[float],
) -> tuple[list[StageRow], list[Switch]]:
    rows, switches = [], []
    before: dict[int, list[Move]] = {}
    for m in solution.moves:
        if m.kind != "split":
            before.setdefault(m.before, []).append(m)
            where = t.values[m.value].name, m.src, m.dst, t.ops[m.before].name
            switches.append(Switch(m.kind, *where, m.bytes, shared=not own_call[m]))
    saved = 0
    for i, (op, event, c) in enumerate(zip(t.ops, t.events, solution.choices)):
        choice = op.choices[c]
        saved += choice.saved
        own = before.get(i, [])
        text = ", ".join(f"gather {m.src}" if m.kind == "gather" else f"{m.src} → {m.dst}" for m in own)
        sent = sum(m.bytes for m in own) + choice.bytes
        if choice.bytes:
            inside = stages[event.name].inside if event.kind == "stage" else []
            passing = [p.kind.replace("_", "-") for p in event.passing[c : c + 1] if p is not None]
            what = ", ".join(dict.fromkeys([*(x.label for x in inside), *passing]))
            text = f"{text}, {what}" if text else what
        held = sum(t.values[v].local_bytes(k, n) for v, k in zip(op.inputs, choice.needs))
        held += sum(t.values[v].local_bytes(k, n) for v, k in zip(op.outputs, choice.gives))
        peak = t.resident + saved + held + choice.work
        calls = sum(own_call[m] for m in own) + choice.calls
        if event.kind == "stage":
            pattern = stages[event.name].pattern
            order = dict.fromkeys(x for p in pattern.inputs for x in p.names if x in p.computed)
            option = event.options[c]
            idle = chunk_sizes(option.size, n).count(0) if option.name is not None else 0
            rows.append(
                StageRow(op.name, pattern.text, tuple(order), option.name, text, sent, peak, calls, idle, share[i])
            )
        elif own or choice.bytes:
            along = next((k for k in choice.needs if k is not None), None)
            rows.append(StageRow(f"({op.name})", "", (), along, text, sent, peak, calls, share=share[i]))
    return rows, switches
