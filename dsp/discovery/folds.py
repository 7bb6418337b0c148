"""The dims of stages as patterns may name them: dims that are always adjacent, and folds that can be opened."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from dsp.discovery.calls import ModuleCall, known
from dsp.discovery.dims import Dim, places

Item = tuple[Dim, int | None]  # a dim of a tensor, and the number of its free group (None: not free)
Row = list[list[Item]]  # a tensor: for each axis the dims folded in it
Chain = tuple[Dim, ...]


class Symbol(NamedTuple):
    """Adjacent dims that share one name in a pattern, and the groups in which they are free (none: computed over)."""

    dims: Chain
    groups: tuple[int, ...]


class Folds:
    """The dims of a model's `declared` inputs, which have a pattern, and of the submodules `chosen` as stages."""

    root: ModuleCall
    declared: list[int]
    chosen: dict[str, ModuleCall]
    replacements: dict[ModuleCall, dict[Dim, Dim]]  # for dims that differ between a stage's calls
    merged: dict[ModuleCall, list[tuple[int, ...]]]

    def rows(self, node: ModuleCall) -> tuple[list[Row], list[Row]]:
        """The items of every axis of every tensor of a call: inputs, outputs."""
        inputs: list[Row] = []
        outputs: list[Row] = []
        replacements = self.replacements[node]
        for i, axes in enumerate(node.inputs):
            inputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                inputs[-1][c.dim].append((replacements.get(d, d), node.group(i, c)))
        for k, axes in enumerate(node.outputs):
            outputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                number = next((n for n, g in enumerate(node.groups) if g.outputs[k] == c), None)
                outputs[-1][c.dim].append((replacements.get(d, d), number))
        return inputs, outputs

    def chain(self) -> None:
        """Find, for each dim, the chain of dims from which it is never separated: a chain counts as one dim."""
        every = [[(d, False) for d in axis] for i in self.declared for axis in known(self.root.inputs[i])]
        for node in self.chosen.values():
            for row in itertools.chain(*self.rows(node)):
                every += [[(d, g is not None) for d, g in axis] for axis in row]
        after: dict[Dim, set[Dim | None]] = {}
        before: dict[Dim, set[Dim | None]] = {}
        for axis in every:
            for n, (d, is_free) in enumerate(axis):
                for links, m in ((after, n + 1), (before, n - 1)):
                    neighbour = axis[m] if 0 <= m < len(axis) else (None, False)
                    links.setdefault(d, set()).add(neighbour[0] if neighbour[1] == is_free else None)
        self.chains: dict[Dim, Chain] = {}
        for d in after:
            chain = [d]
            while len(nexts := after[chain[-1]]) == 1:
                (e,) = nexts
                if e is None or before[e] != {chain[-1]}:
                    break
                chain.append(e)
            if len(chain) > len(self.chains.get(d, ())):
                self.chains.update(dict.fromkeys(chain, tuple(chain)))

    def wholes(self, axis: tuple[Dim, ...]) -> list[Chain]:
        return list(dict.fromkeys(self.chains[d] for d in axis))

    def known_sizes(self) -> set[Chain]:
        """The dims whose sizes the root pattern fixes."""
        dims: set[Chain] = set()
        folds = [self.wholes(axis) for i in self.declared for axis in known(self.root.inputs[i])]
        for _ in folds:
            for fold in folds:
                unknown = [c for c in fold if c not in dims]
                if len(unknown) == 1:
                    dims.add(unknown[0])
        return dims

    def symbols(self, node: ModuleCall, axis: list[Item]) -> list[Symbol]:
        """The named units of an axis: each free dim has a name of its own, computed dims in between share one."""
        units: list[Symbol] = []
        for is_free, run in itertools.groupby(axis, lambda item: item[1] is not None):
            items = list(run)
            if not is_free:
                units.append(Symbol(tuple(d for d, _ in items), ()))
                continue
            for _, part in itertools.groupby(items, lambda item: self.chains[item[0]]):
                part_items = list(part)
                units.append(Symbol(tuple(d for d, _ in part_items), tuple(g for _, g in part_items if g is not None)))
        for merged in self.merged.get(node, ()):
            for n in range(len(units)):
                for m in range(n + 2, len(units) + 1):
                    if tuple(g for s in units[n:m] for g in s.groups) == merged:
                        units[n:m] = [Symbol(tuple(d for s in units[n:m] for d in s.dims), merged)]
                        break
        return units

    def settle_folds(self) -> bool:
        """Merge the dims of folds that cannot be opened: a fold can be opened if at most one of its sizes is unknown.

        Return True if a dim that was free no longer is: merged dims are all free or all not free.
        """
        dropped = False
        while True:
            self.chain()
            self.sizes = self.known_sizes()
            outcome = next((f for f in map(self.settle_fold, self.chosen.values()) if f), "")
            dropped |= outcome == "dropped"
            if not outcome:
                return dropped

    def settle_fold(self, node: ModuleCall) -> str:
        inputs, outputs = self.rows(node)
        axes = [self.symbols(node, axis) for row in inputs for axis in row]
        sizes = self.sizes | {axis[0].dims for axis in axes if len(axis) == 1}
        for axis in axes:
            unknown = [s for s in axis if s.dims not in sizes]
            if len(unknown) < 2:
                continue
            groups = tuple(g for s in unknown for g in s.groups)
            if adjacent(unknown, axis) and kept_together(groups, outputs):
                self.merged.setdefault(node, []).append(groups)
                return "merged"
            groups = groups or tuple(g for s in axis for g in s.groups)
            node.groups = [g for n, g in enumerate(node.groups) if n not in groups]
            self.merged.pop(node, None)
            return "dropped"
        return ""


def adjacent(some: list[Any], axis: list[Any]) -> bool:
    """Tell whether dims are adjacent in an axis and all free."""
    return axis[axis.index(some[0]) :][: len(some)] == some and all(s.groups for s in some)


def kept_together(groups: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Tell whether every output has these groups adjacent, in this order."""
    runs = [[g for _, g in line] for row in outputs for line in row]
    return sum(contains(run, groups) for run in runs) == len(outputs)


def contains(run: Sequence[Any], part: Sequence[Any]) -> bool:
    return any(tuple(run[n : n + len(part)]) == tuple(part) for n in range(len(run)))
