"""The names of dims in a plan: the user's own letters.

A layout is a cut; only people need its name. A dim that its producer's pattern does not name is called as the first
stage that may be sharded along it calls it, or as the dim computed from it is called; an einsum's by its letter. Any
other dim is named after the dim that it derives from, or the operation that made it, with a number: a Linear over
``c`` returns ``c₁``, an embedding ``embedding₁``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, count, takewhile
from operator import mul
from typing import TYPE_CHECKING

from dsp.layout import Cut
from dsp.planner import Extent, Layout
from dsp.text import DIGITS

if TYPE_CHECKING:
    from dsp.plan.operation import Operation
    from dsp.plan.record import Ref
    from dsp.plan.values import Values


def letter(draft: Values, v: int, cut: Cut) -> str:
    """The model's letter for a dim of a value, or for the dim that it derives from; "" if there is none."""
    return draft.names[v][cut] or draft.letters[v][cut.dim]


def letters_of(draft: Values, op: Operation) -> Callable[[Ref], list[str]]:
    """The letters of an operation's results: those of its first tracked tensor, except for an einsum."""
    if op.name == "einsum" and op.node.args and isinstance(op.node.args[0], str):
        wanted = list(op.node.args[0].replace(" ", "").partition("->")[2])
        if "." not in wanted:
            return lambda t: wanted if len(wanted) == t.ndim else [""] * t.ndim
    x, sym = next((t, s) for t, s in zip(op.tracked, op.syms) if s is not None)
    own = [""] * x.ndim
    for of, cut in sym.spare.items():
        own[cut.dim] = draft.letters[sym.value][of.dim]
    for of, cut in sorted(sym.cuts.items(), key=lambda item: -len(item[1].pieces(0))):
        own[cut.dim] = letter(draft, sym.value, of)
    return lambda t: [own[d] if d is not None else op.name for d in origins(x.shape, t.shape)]


def of_pieces(draft: Values, op: Operation, combo: Sequence[Layout], cut: Cut) -> str:
    """The name of a dim that an operation joins: the names of its pieces, as ``n+s``."""
    laid, found = dict(zip(op.values, combo)), list[str]()
    for sym in op.syms:
        if sym is None:
            found.append("x")
            continue
        own = laid[sym.value] or next((of for of, own in sym.cuts.items() if own == Cut(cut.dim)), None)
        found.append((letter(draft, sym.value, own) if own is not None else "") or "x")
    return "+".join(found)


def of_piece(name: str, joined: Cut, taken: Extent) -> str:
    """The name of pieces taken from a joined dim, which are found by their lengths."""
    names, pieces = name.split("+"), joined.pieces(0)
    wanted = (taken,) if isinstance(taken, int) else taken
    starts = [i for i in range(len(pieces)) if pieces[i : i + len(wanted)] == wanted]
    return "+".join(names[starts[0] : starts[0] + len(wanted)]) if starts and len(names) == len(pieces) else name


def origins(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """For each dim of a result the dim that contains it: by places in memory if numel is equal, else by size."""
    starts, sizes = list(accumulate(old, mul, initial=1)), list(accumulate(new, mul, initial=1))
    if starts[-1] != sizes[-1] or not starts[-1]:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
        lag = len(old) - len(new)
        return [d if d < same else d + lag if d + lag >= same else None for d in range(len(new))]
    return [max((d for d in range(len(old)) if starts[d] <= at), default=None) for at in sizes[:-1]]


def numbered(base: str) -> Iterator[str]:
    return (base + str(n).translate(DIGITS) for n in count(1))


def unlike(wanted: str, taken: Collection[str]) -> str:
    return wanted if wanted not in taken else next(name for name in numbered(wanted) if name not in taken)


def names_of(draft: Values) -> list[dict[Cut, str]]:
    """For each value the names of its layouts."""
    names: list[dict[Cut, str]] = [{} for _ in draft.names]

    def call(v: int, cut: Layout, wanted: str | None) -> None:
        if cut is not None and cut not in names[v] and wanted:
            names[v][cut] = unlike(wanted, names[v].values())

    def number(v: int, cut: Layout) -> None:
        if cut is not None and cut not in names[v]:
            taken = names[v].values()
            names[v][cut] = next(x for x in numbered(letter(draft, v, cut) or "x") if x not in taken)

    for v, own in enumerate(draft.names):
        for cut, name in own.items():
            if name not in names[v].values():
                call(v, cut, name)
    for op in reversed(draft.ops):  # backwards, so that dims computed from a dim have names already
        for choice in op.choices:
            made = choice.gives[0] if choice.gives else None
            option = choice.execution.option if choice.execution else None
            wanted = option.name if option else made and names[op.outputs[0]].get(made)
            for v, cut in zip(op.inputs, choice.needs):
                call(v, cut, wanted)
    for op in draft.ops:  # the rest by the dims they derive from
        for choice in op.choices:
            for v, cut in zip(op.inputs, choice.needs):
                number(v, cut)
            for out, made in zip(op.outputs, choice.gives):
                if made is not None and (origin := draft.origins.get((out, made))) is not None:
                    call(out, made, names[origin[0]].get(origin[1]))
                number(out, made)
    for v, own in enumerate(draft.names):
        for cut in own:
            number(v, cut)
    return names
