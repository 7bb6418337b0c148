"""The planner's values in a forward: tracked tensors, their layouts, and the ops between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from dsp.layout import Cut, separable
from dsp.notation import BATCH_NAMES
from dsp.plan.events import Event, Sym
from dsp.plan.record import Node, Record, Ref
from dsp.planner import Extent, Op, Value

Edges = set[int | None]  # numbers of the places where autograd takes a gradient; None: nowhere


def is_batch(name: str) -> bool:
    return name in BATCH_NAMES


class Values:
    """The tensors that may be sharded, each a value or a view of one. Layouts are cuts of the tensor as it was made."""

    def __init__(self, record: Record) -> None:
        self.record, self.n, self.root_sizes = record, record.n, record.root_sizes
        root_sizes = record.root_sizes
        self.batch = math.prod(size for name, size in root_sizes.items() if is_batch(name))
        self.batch_name = next(filter(is_batch, root_sizes), "")
        self.values: list[Value] = []
        self.edges: list[Edges] = []  # for each value: its edges in autograd; a write in place may add one
        self.made: list[list[Edges]] = []  # the same for the outputs of each op
        self.untracked: dict[int, Edges] = {}  # the same for outputs that are not values, by number
        self.syms: list[Sym] = []
        self.tracked: dict[int, Sym] = {}  # by number of the tensor
        self.names: list[dict[Cut, str]] = []  # for each value: layout -> the model's name of the dim, or ""
        self.origins: dict[tuple[int, Cut], tuple[int, Cut]] = {}  # (value, layout) -> the operand's (value, layout)
        self.shapes: list[tuple[int, ...]] = []
        self.letters: list[Sequence[str]] = []  # for each value: the name that each of its dims derives from
        self.sharing: dict[int, set[int]] = {}  # memory -> the values in it
        self.viewed: set[int] = set()  # values that have views
        self.whole: list[bool] = []  # whether a value may be replicated without a gather
        self.ops: list[Op] = []
        self.events: list[Event] = []

    def value(
        self, t: Ref, name: str, sizes: Mapping[Cut, Extent], names: Mapping[Cut, str], whole: bool,
        letters: Sequence[str],
    ) -> int:  # fmt: skip
        """Track a tensor as a new value. `sizes`: its cuts, and the sizes of these dims; `names`: the names of these
        dims; `letters`: the name that each dim of the tensor derives from."""
        self.values.append(
            Value(name, tuple(sizes.items()), t.element_size(), numel=t.numel(), real=t.dtype.is_floating_point)
        )
        self.edges.append({t.edge})
        self.names.append({cut: names.get(cut, "") for cut in sizes})
        self.shapes.append(tuple(t.shape))
        self.letters.append(letters)
        self.whole.append(whole)
        index = len(self.values) - 1
        self.sharing.setdefault(t.memory, set()).add(index)
        known = {cut.dim for cut in sizes}
        fresh = [self.spare_cut(index, d) for d in range(t.ndim) if d not in known]
        spare = {cut: cut for cut in fresh if t.shape[cut.dim] > cut.folds}
        self.track(t, Sym(index, {cut: cut for cut in sizes}, spare))
        return index

    def left_value(self, t: Ref, cut: Cut) -> None:
        """Track a tensor that an earlier call left, in the layout that it has."""
        index = self.value(t, "kept", {cut: cut.extent(t.shape[cut.dim])}, {}, False, [""] * t.ndim)
        self.values[index] = replace(self.values[index], home=(cut,))
        self.viewed.add(index)  # others may hold it, or a view

    def track(self, t: Ref, sym: Sym) -> None:
        self.syms.append(sym)
        self.tracked[t.number] = sym

    def sym(self, t: Ref) -> Sym | None:
        """The layouts of a tensor, including those that another use of its value has offered meanwhile."""
        found = self.tracked.get(t.number)
        if found is not None:
            for cut in found.spare.keys() & self.names[found.value].keys() if found.spare else ():
                found.cuts[cut] = found.spare.pop(cut)
        return found

    def spare_cut(self, value: int, d: int) -> Cut:
        """The cut of a dim that is not a layout yet. The first dim is batch, or a fold of batch and the dim to cut."""
        fold = d == 0 and not self.leads(value) and self.shapes[value][0] % self.batch == 0
        return Cut(d, self.batch if fold else 1)

    def leads(self, value: int) -> bool:
        """Tell whether the first dim of a value is as long as the batch, and is therefore taken for it."""
        return self.shapes[value][:1] == (self.batch,)

    def offer_spare(self, sym: Sym, wanted: Cut | None = None) -> None:
        """Let a value be sharded along all spare dims of this tensor, or only along the `wanted` one."""
        for cut, own in list(sym.spare.items()):
            if wanted is not None and own != wanted:
                continue
            sym.cuts[cut] = sym.spare.pop(cut)
            value, names = self.values[sym.value], self.names[sym.value]
            if cut not in names:  # else offered by another view of the value
                extent = cut.extent(self.shapes[sym.value][cut.dim])
                self.values[sym.value] = replace(value, sizes=(*value.sizes, (cut, extent)))
                names[cut] = self.batch_name if cut.dim == 0 and self.leads(sym.value) else ""

    def used(self, tensors: Iterable[Ref], syms: Iterable[Sym | None]) -> None:
        """Note where tensors get their gradients now: a write in place changes that."""
        for t, s in zip(tensors, syms):
            if s is not None:
                self.edges[s.value].add(t.edge)

    def edges_of(self, t: Ref, sym: Sym | None) -> Edges | None:
        """The edges of a value, or of a replicated tensor that is not a value."""
        return self.edges[sym.value] if sym is not None else self.untracked.get(t.number)

    def apart(self, v: int) -> frozenset[frozenset[Cut]]:
        """The pairs of a value's layouts that both shard one dim, and between which no single all-to-all leads."""
        pairs = itertools.combinations(self.names[v], 2)
        return frozenset(frozenset((a, b)) for a, b in pairs if not separable(self.shapes[v], a, b, self.n))

    def add(self, op: Op, event: Event, node: Node | None, outputs: Sequence[Ref] = ()) -> None:
        if node is not None:
            event.region, event.line = node.region, node.line
            event.module = node.module if event.kind != "stage" else ""
            own, read = [t.memory for t in outputs], {t.memory for t in node.operands}
            event.shares = [m >= 0 and (m in read or own.count(m) > 1) for m in own]
        made = [self.edges[v] for v in op.outputs]
        if not made:
            made = [{t.edge} for t in outputs]
            self.untracked.update({t.number: edges for t, edges in zip(outputs, made)})
        self.made.append(made)
        self.ops.append(op)
        self.events.append(event)
