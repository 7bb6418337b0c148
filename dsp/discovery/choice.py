"""The choice of the submodules that become stages, from the results of `discover`'s search."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from dsp.discovery.calls import Group, ModuleCall, known
from dsp.discovery.dims import Dim, GlueOp, atoms, places
from dsp.discovery.folds import Folds
from dsp.discovery.search import Search


class StageChoice(Folds):
    """The submodules that become stages. Those in `opened` do not; submodules inside them may."""

    def __init__(self, search: Search, root: ModuleCall, opened: Set[str] = frozenset()) -> None:
        self.search, self.root, self.opened = search, root.copy(), opened
        root = self.root
        self.sequence = search.sequence(root)
        self.batch = set(atoms(search.batch))
        self.calls: dict[str, list[ModuleCall]] = {}
        for node in root.walk():
            self.calls.setdefault(node.path, []).append(node)
        self.merged = {}
        self.replacements = {}
        self.choose_stages()
        while self.settle_folds():  # a dim that no pattern can name is not free: choose again without it
            self.choose_stages()

    def choose_stages(self) -> None:
        self.chosen = {}
        for child in self.root.children:
            self.visit(child)
        # inputs to name in the root pattern: the main input, and those with a dim that may be sharded
        self.declared = [
            i
            for i, axes in enumerate(self.root.inputs)
            if i == self.search.main or {d for axis in known(axes) for d in axis} & self.sequence
        ]

    def visit(self, node: ModuleCall) -> None:
        if not node.live or not node.tested or not node.outputs:
            return
        if node.path in self.opened or node.hides:
            for k in node.children:
                self.visit(k)
            return
        if node.local:
            if not self.transparent(node):
                self.choose(node)
            return
        kids = [k for k in node.children if k.live and k.tested]
        scalar = any(not axes for axes in node.outputs)  # no pattern can describe a scalar output
        if self.as_one(node, kids) and not (scalar and kids):
            self.choose(node)
        else:
            for k in kids:
                self.visit(k)

    def as_one(self, node: ModuleCall, kids: list[ModuleCall]) -> bool:
        """Tell whether a module becomes one stage.

        It does if only its own forward, and no submodule, mixes positions; or if its submodules as stages would not
        leave more dims free.
        """
        if all(k.local for k in kids):
            return True
        if not node.free() & self.sequence:
            return False
        blocked = node.blocked() & self.sequence
        return any(self.refused(op) for op in node.ops if op.live) or any(k.blocked() >= blocked for k in kids)

    def refused(self, op: GlueOp) -> bool:
        """Tell whether an operation between submodules cannot run with some sequence dim sharded."""
        return any(not ok for d, ok in op.accepts.items() if self.sequence & set(d.atoms()))

    def transparent(self, node: ModuleCall) -> bool:
        """Tell whether glue can run a submodule's operations along every dim where the submodule is independent."""
        free = node.free()
        ops = [op for n in node.walk() for op in n.ops if op.live]
        return all(ok for op in ops for d, ok in op.accepts.items() if free & set(d.atoms()))

    def choose(self, node: ModuleCall) -> None:
        """Choose a submodule. All its calls share one pattern, so only dims that are free in each call stay free."""
        calls = [n for n in self.calls[node.path] if n.tested]
        base = max(calls, key=lambda n: (len(n.params), -n.index))
        groups = []
        for n, g in enumerate(base.groups):
            if all(any(aligned(base, g, call, h) for h in call.groups) for call in calls if call is not base):
                groups.append(base.groups[n])
        base.groups = groups
        self.chosen[node.path] = base
        self.replacements[base] = {
            d: Dim(d.size, d.order)
            for p, axes in zip(base.params, base.inputs)
            for n, axis in enumerate(known(axes))
            for d in axis
            for call in calls
            if p in call.params and all(d not in a for a in known(call.inputs[call.params.index(p)])[n : n + 1])
        }


def aligned(one: ModuleCall, g: Group, two: ModuleCall, h: Group) -> bool:
    """Tell whether groups of two calls of a submodule lie along the same dims of the arguments that both have."""

    def at(node: ModuleCall, group: Group, param: str) -> Any:
        i = node.params.index(param)
        cut = group.cuts[i]
        if cut is None:
            return None
        order = [c for _, c in places(known(node.inputs[i])) if c.dim == cut.dim]
        return cut.dim, order.index(cut) if cut in order else cut

    shared = [p for p in one.params if p in two.params]
    return all(at(one, g, p) == at(two, h, p) for p in shared)
