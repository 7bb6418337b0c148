"""The names of dims in a plan: the user's own letters.

A dim that no pattern of its producer names is a stand-in (``dim2``) while a forward is recorded. Then it is called as
the first stage calls it that may be sharded along it, or as what is computed from it is; an einsum's by its letter; and
else after the dim that it is made of, or the operation that made it, with a number: the result of a Linear over ``c``
has ``c₁``, that of an embedding ``embedding₁``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
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

STAND_IN = re.compile(r"dim\d+'*|.+'")


def letter(draft: Values, v: int, key: str) -> str:
    """The model's letter for a dim of a value, or for what it is made of; "" where there is none."""
    if not STAND_IN.fullmatch(key) or not key.startswith("dim"):
        return key.rstrip("'")
    return draft.letters[v][draft.cuts[v][key].dim]


def letters_of(draft: Values, op: Operation) -> Callable[[Ref], list[str]]:
    """The letters of an operation's results: dims of its first tracked tensor, but for an einsum."""
    if op.name == "einsum" and op.node.args and isinstance(op.node.args[0], str):
        wanted = list(op.node.args[0].replace(" ", "").partition("->")[2])
        if "." not in wanted:
            return lambda t: wanted if len(wanted) == t.ndim else [""] * t.ndim
    x, sym = next((t, s) for t, s in zip(op.tracked, op.syms) if s is not None)
    own = [""] * x.ndim
    for d, cut in sym.spare.items():
        own[cut.dim] = draft.letters[sym.value][d]
    for key, cut in sorted(sym.cuts.items(), key=lambda item: -len(item[1].pieces(0))):
        own[cut.dim] = letter(draft, sym.value, key)
    return lambda t: [own[d] if d is not None else op.name for d in origins(x.shape, t.shape)]


def of_pieces(draft: Values, op: Operation, combo: Sequence[Layout], cut: Cut) -> str:
    """The name of a dim that an operation joins: its pieces, as ``n+s``."""
    laid, found = dict(zip(op.values, combo)), list[str]()
    for sym in op.syms:
        if sym is None:
            found.append("x")
            continue
        key = laid[sym.value] or next((k for k, c in sym.cuts.items() if c == Cut(cut.dim)), None)
        found.append((letter(draft, sym.value, key) if key is not None else "") or "x")
    return "+".join(found)


def of_piece(key: str, joined: Cut, taken: Extent) -> str:
    """The names of pieces taken of a joined dim, by their lengths."""
    names, pieces = key.rstrip("'").split("+"), joined.pieces(0)
    wanted = (taken,) if isinstance(taken, int) else taken
    starts = [i for i in range(len(pieces)) if pieces[i : i + len(wanted)] == wanted]
    return "+".join(names[starts[0] : starts[0] + len(wanted)]) if starts and len(names) == len(pieces) else key


def origins(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """For each dim of a result the one that it lies in: by places in memory if as many, else by equal sizes."""
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


def rename(draft: Values) -> None:
    """Call every dim of every value by its name, in place."""
    names = names_of(draft)

    def renamed(v: int, key: Layout) -> Layout:
        return None if key is None else names[v][key]

    for v, value in enumerate(draft.values):
        sizes = tuple((names[v][key], size) for key, size in value.sizes)
        draft.values[v] = replace(value, sizes=sizes, home=tuple(renamed(v, key) for key in value.home))
        draft.cuts[v] = {names[v][key]: cut for key, cut in draft.cuts[v].items()}
    for i, op in enumerate(draft.ops):
        choices = [
            replace(c, needs=tuple(map(renamed, op.inputs, c.needs)), gives=tuple(map(renamed, op.outputs, c.gives)))
            for c in op.choices
        ]
        draft.ops[i] = replace(op, choices=tuple(choices))
    for sym in draft.syms:
        sym.cuts = {names[sym.value][key]: cut for key, cut in sym.cuts.items()}


def names_of(draft: Values) -> list[dict[str, str]]:
    """For each value the names of its layouts."""
    names = [{key: key for key in cuts if not STAND_IN.fullmatch(key)} for cuts in draft.cuts]

    def call(v: int, key: Layout, wanted: Layout) -> None:
        if key is not None and key not in names[v] and wanted:
            names[v][key] = unlike(wanted, names[v].values())

    def number(v: int, key: Layout) -> None:
        if key is not None and key not in names[v]:
            taken = names[v].values()
            names[v][key] = next(x for x in numbered(letter(draft, v, key) or "x") if x not in taken)

    for op in reversed(draft.ops):  # backwards, so that what is made of a dim has its name already
        for choice in op.choices:
            made = choice.gives[0] if choice.gives else None
            option = choice.execution.option if choice.execution else None
            wanted = option.name if option else made and names[op.outputs[0]].get(made)
            for v, key in zip(op.inputs, choice.needs):
                call(v, key, wanted)
    for op in draft.ops:  # and what is left by what it is made of
        for choice in op.choices:
            for v, key in zip(op.inputs, choice.needs):
                number(v, key)
                for out, made in zip(op.outputs, choice.gives):
                    if made is not None and made == key:
                        call(out, made, names[v][key])
            for out, made in zip(op.outputs, choice.gives):
                number(out, made)
    for v, cuts in enumerate(draft.cuts):
        for key in cuts:
            number(v, key)
    return names
