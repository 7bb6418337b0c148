"""The names of dims in a plan: the user's own letters.

A layout is a cut; only people need its name. A dim that its maker's pattern does not name is called as the first stage
that may be sharded along it calls it, or as the dim computed from it is called; an einsum's by its letter. Any other
dim is named after the dim that it derives from, or the operation that made it, with a number: a Linear over ``c``
returns ``c₁``, an embedding ``embedding₁``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, count, groupby, takewhile
from operator import mul

from dsp.comm.layout import Cut
from dsp.core.decide import base_layouts
from dsp.core.offers import result_sizes
from dsp.core.record import Base, BoundStage, Layout, Node, Operation, Record, Ref
from dsp.glue.offers import JOINS
from dsp.stages.notation import BATCH_NAMES, TensorPattern
from dsp.stages.stage import cut_for
from dsp.support.formatting import DIGITS


class Names:
    """The names of the cuts of each base; bases: of each of the planner's values."""

    def __init__(self, record: Record, bases: Sequence[Base]) -> None:
        self.record, self.bases = record, bases
        self.names: dict[Base, dict[Cut, str]] = {base: dict.fromkeys(base.cuts, "") for base in record.bases}
        self.letters: dict[Ref, Sequence[str]] = {}  # of each dim of a tensor: the name that it derives from
        self.origins: dict[tuple[Base, Cut], tuple[Base, Cut]] = {}  # by result and cut: those of the operand
        for param, ref in record.inputs.items():
            if param in record.patterns:
                self.pattern(ref, record.patterns[param], record.sizes)
        for node in record.nodes:
            self.visit(node)
        self.complete()

    def of(self, v: int, cut: Layout) -> str | None:
        """The name of a layout of the v-th value; None if replicated."""
        return None if cut is None else self.names[self.bases[v]][cut]

    # --- by patterns, and by the operands of operations ---

    def pattern(self, ref: Ref, p: TensorPattern, sizes: dict[str, int]) -> None:
        """Name the dims of a tensor as its pattern does; a fold derives from its last dim."""
        self.letters[ref] = [axis[-1] if axis else "" for axis in p.axes]
        for name in p.names:
            cut = cut_for(p, ref.shape, name, sizes)
            if cut in ref.base.cuts:
                self.names[ref.base][cut] = name

    def visit(self, node: Node) -> None:
        if isinstance(node.call, BoundStage):
            patterns = node.call.stage.outputs(node.results)  # type: ignore[arg-type]
            for k, (ref, p) in enumerate(zip(node.results, patterns)):
                self.pattern(ref, p, result_sizes(self.record, node, k))
        elif node.view:
            [ref] = node.results
            self.letters[ref] = self.letters_of_view(ref)
        else:
            for ref in node.results:
                self.letters[ref] = self.letters_of_result(node, ref)
            for offer in node.offers if node.results else ():
                laid = [(b, cut) for b, cut in zip(node.bases, base_layouts(node, offer)) if cut is not None]
                for cut in dict.fromkeys(offer.gives[: len(node.results)]):
                    results = [r for r, give in zip(node.results, offer.gives) if give == cut]
                    if laid and cut is not None and not any(self.names[r.base].get(cut) for r in results):
                        self.carry(node, results, laid, cut)

    def letters_of_view(self, ref: Ref) -> list[str]:
        """The letters of a view: those of the dims of its base that it shows."""
        letters = [""] * ref.ndim
        for d, letter in enumerate(self.named(ref.base.ref)):
            cut = ref.cut_under(Cut(d))
            if cut is not None:
                letters[cut.dim] = letter
        for base_cut, name in self.names[ref.base].items():
            if name and (cut := ref.cut_under(base_cut)) is not None:
                letters[cut.dim] = name
        return letters

    def named(self, ref: Ref) -> Sequence[str]:
        """The letters of a tensor, with the names of its cuts first."""
        letters = [*self.letters.get(ref, [""] * ref.ndim)]
        known = [(cut, local) for cut, name in self.names[ref.base].items() if name and (local := ref.cut_under(cut))]
        for cut, local in sorted(known, key=lambda pair: -len(pair[1].pieces(0))):
            letters[local.dim] = self.names[ref.base][cut]
        return letters

    def letters_of_result(self, node: Node, ref: Ref) -> list[str]:
        """The letters of a result: of the first operand that may be sharded, except for an einsum."""
        args = node.call.args if isinstance(node.call, Operation) else ()
        if node.name == "einsum" and args and isinstance(args[0], str):
            wanted = list(args[0].replace(" ", "").partition("->")[2])
            if "." not in wanted:
                return wanted if len(wanted) == ref.ndim else [""] * ref.ndim
        if not node.refs:
            return [""] * ref.ndim
        letters = self.named(node.refs[0])
        return [letters[d] if d is not None else node.name for d in origins(node.refs[0].shape, ref.shape)]

    def carry(self, node: Node, results: Sequence[Ref], laid: Sequence[tuple[Base, Cut]], cut: Cut) -> None:
        """Name a cut of some results after the operand that brings it: a name of batch goes first."""
        bring = [pair for pair in laid if self.alone(node, *pair) == cut] or laid
        base, of = min(
            bring, key=lambda x: (self.names[x[0]].get(x[1], "") not in BATCH_NAMES, not self.names[x[0]].get(x[1]))
        )
        name = self.names[base].get(of, "")
        if node.name in JOINS and cut.outer != of.outer:
            name = self.pieces(node, dict(laid), cut)
        elif "+" in name and cut.outer != of.outer:
            part = cut.pieces(results[0].shape[cut.dim])
            name = piece(name, of.pieces(base.ref.shape[of.dim]), part)
        else:
            self.origins |= {(r.base, cut): (base, of) for r in results}
        for r in results:
            self.names[r.base][cut] = name

    def alone(self, node: Node, base: Base, cut: Cut) -> Layout:
        """The cut of the results if only this base is sharded."""
        wanted = tuple(cut if b is base else None for b in node.bases)
        return next((o.gives[0] for o in node.offers if o.gives and base_layouts(node, o) == wanted), None)

    def pieces(self, node: Node, laid: dict[Base, Cut], cut: Cut) -> str:
        """The name of a dim that an operation joins: the names of its pieces, as ``n+s``."""
        names = list[str]()
        for t in node.operands:
            of = None
            if isinstance(t, Ref):
                of = laid.get(t.base) or t.base_cut(Cut(cut.dim))
            names.append((of is not None and self.letter(t.base, of)) or "x")  # type: ignore[attr-defined]
        return "+".join(names)

    def letter(self, base: Base, cut: Cut) -> str:
        """The model's letter for a dim of a base, or for the dim that it derives from; "" if there is none."""
        return self.names[base].get(cut) or self.letters.get(base.ref, [""] * base.ref.ndim)[cut.dim]

    # --- the rest ---

    def complete(self) -> None:
        """Name every cut: as stages and later results call it, or after the dim that it derives from."""
        drafts, self.names = self.names, {base: {} for base in self.names}
        nodes = [node for node in self.record.nodes if not (node.view or node.identity)]

        def number(base: Base, cut: Layout) -> None:
            if cut is not None and cut not in self.names[base]:
                letter = drafts[base].get(cut) or self.letters.get(base.ref, [""] * base.ref.ndim)[cut.dim]
                names = self.names[base].values()
                self.names[base][cut] = next(x for x in numbered(letter or "x") if x not in names)

        for base, draft in drafts.items():
            for cut, name in draft.items():
                if name not in self.names[base].values():
                    self.call(base, cut, name)
        self.call_by_results(nodes)
        for node in nodes:  # the rest by the dims they derive from
            for offer in node.offers:
                for base, need in zip(node.bases, base_layouts(node, offer)):
                    number(base, need)
                for out, landing in zip(node.results, offer.gives):
                    if landing is not None and (origin := self.origins.get((out.base, landing))) is not None:
                        self.call(out.base, landing, self.names[origin[0]].get(origin[1]))
                    number(out.base, landing)
        for base, draft in drafts.items():
            for cut in draft:
                number(base, cut)

    def call_by_results(self, nodes: list[Node]) -> None:
        """Name the cuts of operands as stages and results call them; backwards, so that dims computed from a dim have
        names already."""
        for node in reversed(nodes):
            for offer in node.offers:
                give = offer.gives[0] if offer.gives and node.results else None
                wanted = offer.option.name if offer.option else give and self.names[node.results[0].base].get(give)
                for base, need in zip(node.bases, base_layouts(node, offer)):
                    self.call(base, need, wanted)

    def call(self, base: Base, cut: Layout, wanted: str | None) -> None:
        if cut is not None and cut not in self.names[base] and wanted:
            self.names[base][cut] = unlike(wanted, self.names[base].values())


def piece(name: str, pieces: Sequence[int], part: Sequence[int]) -> str:
    """The name of pieces taken from a joined dim, which are found by their lengths.

    >>> piece("w+x", (7, 7, 3), (7, 7)), piece("s+x", (5, 5), (5,)), piece("w", (7, 7), (7,))
    ('w', 's', 'w')
    """
    names, places = name.split("+"), list(range(len(pieces)))
    if len(names) < len(pieces):  # a fold has one name
        places = [k for k, (_, run) in enumerate(groupby(pieces)) for _ in run]
    start = next((i for i in range(len(pieces)) if tuple(pieces[i : i + len(part)]) == tuple(part)), None)
    if start is None or len({*places}) != len(names):
        return name
    return "+".join(names[i] for i in dict.fromkeys(places[start : start + len(part)]))


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


def unlike(wanted: str, names: Collection[str]) -> str:
    return wanted if wanted not in names else next(name for name in numbered(wanted) if name not in names)
