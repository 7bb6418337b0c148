"""Layouts offered backwards: a tensor that an operation enlarges is switched before that operation.

A spare dim becomes a layout at the operation that needs it, such as the channels of a scan where the loop over time
begins. By then the tensor may be much larger than its operands: ``a = exp(dt[..., None] * A)`` has the channels of `dt`
times the states. So operations that keep a dim of their operands offer it as a layout too, back to the place where the
tensors are smallest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dsp.calls import GlueError
from dsp.layout import Cut
from dsp.plan.events import Sym
from dsp.planner import Choice

if TYPE_CHECKING:
    from dsp.plan.operation import Operation
    from dsp.plan.values import Values

DEPTH = 64  # most operations between the place where a dim becomes a layout and that where its tensor is smallest


class Backwards:
    """The operations of a draft that keep a dim, and the least bytes at which each value can be switched."""

    def __init__(self, draft: Values, taken: Mapping[int, Operation]) -> None:
        self.draft, self.taken = draft, taken
        self.makers = {draft.ops[at].outputs[0]: at for at in taken}
        self.known: dict[tuple[int, Cut], float] = {}

    def complete(self) -> None:
        """Offer each dim that became a layout late to earlier operations with smaller tensors."""
        draft = self.draft
        for v, at in sorted(self.makers.items(), key=lambda item: -item[1]):
            have = {c.gives[0] for c in draft.ops[at].choices}
            for cut in list(draft.names[v]):
                if cut not in have and self.least(v, cut) < self.size(v):
                    self.offer(at, cut)

    def least(self, v: int, cut: Cut, depth: int = 0) -> float:
        """The least bytes to switch for a value in this layout: its own or its operands'. A gather counts N times."""
        if (v, cut) not in self.known:
            self.known[v, cut] = own = self.size(v)
            if v in self.makers and depth < DEPTH and (ways := self.operands(self.makers[v], cut)) is not None:
                before = dict.fromkeys((s.value, c and self.made(s, c)) for s, c in ways)
                sizes = [self.draft.n * self.whole(u) if c is None else self.least(u, c, depth + 1) for u, c in before]
                self.known[v, cut] = min(own, sum(sizes))
        return self.known[v, cut]

    def size(self, v: int) -> int:
        """Bytes of a value; float64 counts as float32: a cast down in a test in float64 saves nothing real."""
        value = self.draft.values[v]
        return value.nbytes // value.itemsize * min(value.itemsize, 4)

    def whole(self, v: int) -> int:
        return 0 if self.draft.whole[v] else self.size(v)

    def made(self, sym: Sym, cut: Cut) -> Cut:
        """The cut of a value, as its producer returned it, that a view of it shows as `cut`."""
        return next(of for of, own in itertools.chain(sym.cuts.items(), sym.spare.items()) if own == cut)

    def operands(self, at: int, cut: Cut) -> list[tuple[Sym, Cut | None]] | None:
        """The operands and their cuts for a result with this cut; None if the operation does not keep that dim."""
        op, found = self.taken[at], list[tuple[Sym, Cut | None]]()
        out, places = op.outputs[0], dict[int, Cut]()
        for i, t in enumerate(op.tracked):
            sym = self.draft.sym(t)
            if sym is None:
                continue
            dim = cut.dim - out.ndim + t.ndim
            own = Cut(dim, cut.outer) if dim >= 0 and t.shape[dim] == out.shape[cut.dim] else None
            if own is not None and own not in itertools.chain(sym.cuts.values(), sym.spare.values()):
                return None
            if own is not None:
                places[i] = own
            found.append((sym, own))
        outcome = op.outcome(places) if places else None
        if outcome is None or isinstance(outcome, GlueError) or outcome.cut != cut or outcome.rows or outcome.deal:
            return None
        return None if outcome.numbers is not None or outcome.sizes else found

    def offer(self, at: int, cut: Cut) -> None:
        """Add a choice to an operation: its result in a layout that was offered later."""
        draft, op = self.draft, self.taken[at]
        needs: dict[int, Cut | None] = {}
        for sym, own in self.operands(at, cut) or ():
            if own is not None:
                draft.offer_spare(sym, own)
            need = None if own is None else self.made(sym, own)
            if needs.setdefault(sym.value, need) != need:
                return  # two views of one value that need different layouts
        if not needs:
            return
        made = draft.ops[at]
        new = Choice(tuple(needs[v] for v in op.values), (cut,))
        like = next((c for c in made.choices if any(c.needs)), made.choices[0])
        share = made.share(new, draft.values, draft.n) / made.share(like, draft.values, draft.n)
        new = replace(new, work=int(like.work * share), saved=int(like.saved * share))
        draft.ops[at] = replace(made, choices=(*made.choices, new))
