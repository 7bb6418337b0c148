"""From what a search found to patterns: which submodules become stages, and what their dims are called."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from dsp.discover.dims import Dim, GlueOp, atoms, places
from dsp.discover.nodes import Group, Node, known
from dsp.discover.search import Search
from dsp.notation import TensorPattern
from dsp.stages import matches

Item = tuple[Dim, int | None]  # a dim of a tensor, and the number of the free group it belongs to
Row = list[list[Item]]  # a tensor: for each axis the dims it folds
Chain = tuple[Dim, ...]


class Symbol(NamedTuple):
    """What has one name in a pattern: dims that lie side by side, and the groups they are free in (none: computed)."""

    dims: Chain
    groups: tuple[int, ...]


class Patterns:
    """Which submodules become stages, and the patterns that say so."""

    def __init__(self, search: Search, root: Node, opened: Set[str] = frozenset()) -> None:
        self.search, self.root, self.opened = search, root.copy(), opened
        root = self.root
        self.sequence = search.sequence(root)
        self.batch = set(atoms(search.batch))
        self.calls: dict[str, list[Node]] = {}
        for node in root.walk():
            self.calls.setdefault(node.path, []).append(node)
        self.merged: dict[Node, list[tuple[int, ...]]] = {}
        self.own: dict[Node, dict[Dim, Dim]] = {}  # dims of a stage that are not the same in each of its calls
        self.choose_stages()
        while self.settle_folds():  # what no pattern can say is not free, and the choice is made without it
            self.choose_stages()

    # --- choice ---

    def choose_stages(self) -> None:
        self.chosen: dict[str, Node] = {}
        for child in self.root.children:
            self.visit(child)
        # to be named in the root pattern: the main input, and those with a dim that may be sharded
        self.declared = [
            i
            for i, axes in enumerate(self.root.inputs)
            if i == self.search.main or {d for axis in known(axes) for d in axis} & self.sequence
        ]

    def visit(self, node: Node) -> None:
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
        blocked = node.blocked() & self.sequence
        # what mixes positions is its own forward; or taken apart, it would not leave more dims free than as one
        whole = all(k.local for k in kids) or bool(
            node.free() & self.sequence
            and (any(self.refused(op) for op in node.ops if op.live) or any(k.blocked() >= blocked for k in kids))
        )
        scalar = any(not axes for axes in node.outputs)  # which no pattern can describe
        if whole and not (scalar and kids):
            self.choose(node)
        else:
            for k in kids:
                self.visit(k)

    def refused(self, op: GlueOp) -> bool:
        """Whether there is a sequence dim that an operation between submodules cannot run along."""
        return any(not ok for d, ok in op.accepts.items() if self.sequence & set(d.atoms()))

    def transparent(self, node: Node) -> bool:
        """Whether glue can do all that a submodule does, along every dim that it is independent along."""
        free = node.free()
        ops = [op for n in node.walk() for op in n.ops if op.live]
        return all(ok for op in ops for d, ok in op.accepts.items() if free & set(d.atoms()))

    def choose(self, node: Node) -> None:
        """All calls of a submodule have one pattern: keep what is free in each of them."""
        calls = [n for n in self.calls[node.path] if n.tested]
        base = max(calls, key=lambda n: (len(n.params), -n.index))
        kept = []
        for n, g in enumerate(base.groups):
            if all(any(aligned(base, g, other, h) for h in other.groups) for other in calls if other is not base):
                kept.append(base.groups[n])
        base.groups = kept
        self.chosen[node.path] = base
        self.own[base] = {
            d: Dim(d.size, d.order)
            for p, axes in zip(base.params, base.inputs)
            for n, axis in enumerate(known(axes))
            for d in axis
            for other in calls
            if p in other.params and all(d not in a for a in known(other.inputs[other.params.index(p)])[n : n + 1])
        }

    # --- patterns ---

    def stages(self) -> dict[str, str]:
        if not self.chosen and not self.sequence:
            raise ValueError(
                f"discover found no submodule of {type(self.search.model).__name__} that is independent along a dim; "
                "stages are submodules: move what the forward computes into some"
            )
        self.name()
        self.texts = {path: self.render(node) for path, node in self.chosen.items()}
        return {"": self.render_root(), **self.collapse(self.texts)}

    def repeated(self) -> list[frozenset[str]]:
        """The paths of the stages, those of repeated blocks together."""
        found: dict[Any, set[str]] = {}
        for path, text in self.texts.items():
            found.setdefault((role(path), text), set()).add(path)
        return [frozenset(paths) for paths in found.values()]

    def rows(self, node: Node) -> tuple[list[Row], list[Row]]:
        """The items of every axis of every tensor of a call: inputs, outputs."""
        inputs: list[Row] = []
        outputs: list[Row] = []
        own = self.own[node]
        for i, axes in enumerate(node.inputs):
            inputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                inputs[-1][c.dim].append((own.get(d, d), node.group(i, c)))
        for k, axes in enumerate(node.outputs):
            outputs.append([[] for _ in axes])
            for d, c in places(known(axes)):
                number = next((n for n, g in enumerate(node.groups) if g.outputs[k] == c), None)
                outputs[-1][c.dim].append((own.get(d, d), number))
        return inputs, outputs

    def chain(self) -> None:
        """Dims that never part are one dim: find for each the whole that it belongs to."""
        every = [[(d, False) for d in axis] for i in self.declared for axis in known(self.root.inputs[i])]
        for node in self.chosen.values():
            for row in itertools.chain(*self.rows(node)):
                every += [[(d, g is not None) for d, g in axis] for axis in row]
        after: dict[Dim, set[Dim | None]] = {}
        before: dict[Dim, set[Dim | None]] = {}
        for axis in every:
            for n, (d, is_free) in enumerate(axis):
                for links, m in ((after, n + 1), (before, n - 1)):
                    other = axis[m] if 0 <= m < len(axis) else (None, False)
                    links.setdefault(d, set()).add(other[0] if other[1] == is_free else None)
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
        found: set[Chain] = set()
        folds = [self.wholes(axis) for i in self.declared for axis in known(self.root.inputs[i])]
        for _ in folds:
            for fold in folds:
                unknown = [c for c in fold if c not in found]
                if len(unknown) == 1:
                    found.add(unknown[0])
        return found

    def symbols(self, node: Node, axis: list[Item]) -> list[Symbol]:
        """What an axis is called: each free dim of its own, what is computed over in between as one."""
        found: list[Symbol] = []
        for is_free, run in itertools.groupby(axis, lambda item: item[1] is not None):
            items = list(run)
            if not is_free:
                found.append(Symbol(tuple(d for d, _ in items), ()))
                continue
            for _, part in itertools.groupby(items, lambda item: self.chains[item[0]]):
                part_items = list(part)
                found.append(Symbol(tuple(d for d, _ in part_items), tuple(g for _, g in part_items if g is not None)))
        for merged in self.merged.get(node, ()):
            for n in range(len(found)):
                for m in range(n + 2, len(found) + 1):
                    if tuple(g for s in found[n:m] for g in s.groups) == merged:
                        found[n:m] = [Symbol(tuple(d for s in found[n:m] for d in s.dims), merged)]
                        break
        return found

    def settle_folds(self) -> bool:
        """A fold can be opened if all its sizes but one are known: elsewhere its parts are one dim, free or not.

        Returns whether something that was free is no longer.
        """
        dropped = False
        while True:
            self.chain()
            self.sizes = self.known_sizes()
            found = next((f for f in map(self.settle_fold, self.chosen.values()) if f), "")
            dropped |= found == "dropped"
            if not found:
                return dropped

    def settle_fold(self, node: Node) -> str:
        inputs, outputs = self.rows(node)
        axes = [self.symbols(node, axis) for row in inputs for axis in row]
        sizes = self.sizes | {axis[0].dims for axis in axes if len(axis) == 1}
        for axis in axes:
            unknown = [s for s in axis if s.dims not in sizes]
            if len(unknown) < 2:
                continue
            groups = tuple(g for s in unknown for g in s.groups)
            runs = [[g for _, g in line] for row in outputs for line in row]
            together = axis[axis.index(unknown[0]) :][: len(unknown)] == unknown and all(s.groups for s in unknown)
            if together and sum(contains(run, groups) for run in runs) == len(outputs):
                self.merged.setdefault(node, []).append(groups)
                return "merged"
            groups = groups or tuple(g for s in axis for g in s.groups)
            node.groups = [g for n, g in enumerate(node.groups) if n not in groups]
            self.merged.pop(node, None)
            return "dropped"
        return ""

    # --- names ---

    def name(self) -> None:
        """Labels for the dims of the model's own inputs and for those that stages are sharded along."""
        self.labels: dict[Chain, str] = {}
        roles: dict[Any, str] = {}  # of dims that no input has, the same in all repeated blocks
        main = known(self.root.inputs[self.search.main])
        units = [(n, c) for n, axis in enumerate(main) for c in self.units(axis)]
        free = self.sequence | {d for node in self.chosen.values() for d in node.free()}
        for _, c in units:
            if set(c) <= self.batch:
                self.labels[c] = "b"
        units = [(n, c) for n, c in units if c not in self.labels]
        channel = next((c for n, c in units if n in (1, len(main) - 1) and not set(c) & free), None)
        if channel is not None and len(main) > 2:
            self.labels[channel] = "c"
        rest = [c for _, c in units if c not in self.labels]
        image = len(main) == 4 and channel is not None and channel == units[0][1]
        for c, label in zip(rest, {1: "s", 2: "hw" if image else "ts", 3: "thw"}.get(len(rest), "thwuvxyz")):
            self.labels[c] = label
        for i in self.declared:
            for axis in known(self.root.inputs[i]):
                for c in self.units(axis):
                    if c not in self.labels:
                        self.labels[c] = fresh(POOL if set(c) & free else CHANNELS, self.labels.values())
        for path, node in self.chosen.items():
            rows = itertools.chain(*self.rows(node))
            free_symbols = [s for row in rows for axis in row for s in self.symbols(node, axis) if s.groups]
            for n, s in enumerate(free_symbols):
                if s.dims not in self.labels:
                    self.labels[s.dims] = roles.setdefault((role(path), n), fresh(POOL, self.labels.values()))

    def units(self, axis: tuple[Dim, ...]) -> list[Chain]:
        """What an axis of the model's own inputs is called: a fold if it can be opened."""
        wholes = self.wholes(axis)
        return wholes if len(wholes) < 2 or all(c in self.sizes for c in wholes) else [axis]

    def render(self, node: Node) -> str:
        inputs, outputs = self.rows(node)
        used: dict[Any, str] = {}

        def called(key: Any, wanted: str | None, pool: str) -> str:
            if key not in used:
                taken = set(used.values())
                if wanted is None or wanted in taken:
                    wanted = fresh(pool, {*taken, *self.labels.values()})
                used[key] = wanted
            return used[key]

        def pattern(row: Row, param: str | None, ones: Iterable[int]) -> TensorPattern:
            axes: list[tuple[str, ...]] = []
            computed = set()
            for n, axis in enumerate(row):
                names = []
                for s in self.symbols(node, axis):
                    pool = POOL if s.groups else CHANNELS if n == len(row) - 1 else LENGTHS
                    names.append(called(s.groups or s.dims, self.labels.get(s.dims), pool))
                    if not s.groups:
                        computed.add(names[-1])
                if not names and n in ones:  # a dim of size 1 was not tested
                    names.append(called(("one", n), None, LENGTHS))
                    computed.add(names[-1])
                axes.append(tuple(names))
            return TensorPattern(tuple(axes), frozenset(computed), param)

        bare = [not p.isidentifier() for p in node.params]
        mentioned = [
            i
            for i, row in enumerate(inputs)
            if row and (i == 0 or any(bare) or any(g is not None for axis in row for _, g in axis))
        ]
        ones = [n for n, axis in enumerate(inputs[mentioned[0]]) if not axis]
        patterns = [
            pattern(inputs[i], None if i == 0 or bare[i] else node.params[i], ones if i == mentioned[0] else ())
            for i in mentioned
        ]
        first = TensorPattern(patterns[0].axes, patterns[0].computed)
        results = [pattern(row, None, ones if len(row) == len(first.axes) else ()) for row in outputs]
        text = ", ".join(map(str, patterns))
        return text if results == [first] else text + " -> " + ", ".join(map(str, results))

    def render_root(self) -> str:
        taken = set(self.labels.values())
        texts, sizes = [], {}
        for i in self.declared:
            axes: list[tuple[str, ...]] = []
            for n, axis in enumerate(known(self.root.inputs[i])):
                names = [self.labels[c] for c in self.units(axis)]
                if i == self.search.main:
                    if not names:
                        names = [fresh(LENGTHS, taken)]
                        taken.add(names[0])
                    if len(names) == 1:
                        sizes[n, self.root.shapes[i][n], len(self.root.shapes[i])] = names[0]
                axes.append(tuple(names))
            param = self.root.params[i]
            texts.append(str(TensorPattern(tuple(axes), frozenset(), param if param.isidentifier() else None)))
        results = []
        for outs in self.root.outputs:
            names = []
            for n, axis in enumerate(known(outs)):
                whole = tuple(dict.fromkeys(e for d in axis for e in self.chains.get(d, (d,))))
                size = math.prod(d.size for d in axis)
                label = self.labels.get(whole) or sizes.get((n, size, len(outs)))
                if label is None or label in names:
                    label = fresh(CHANNELS, {*taken, *names})
                names.append(label)
            results.append(" ".join(names))
        return ", ".join(texts) + (" -> " + ", ".join(results) if results and all(results) else "")

    def collapse(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Repeated blocks under one pattern, where all that it matches agree."""
        called = {n.path for n in self.root.walk()}
        found: dict[str, str] = {}
        covered: set[str] = set()
        for path, text in texts.items():
            if path in covered:
                continue
            parts = path.split(".")
            numbers = [i for i, p in enumerate(parts) if p.isdigit()]
            for chosen in itertools.chain.from_iterable(
                itertools.combinations(numbers, n) for n in range(len(numbers), -1, -1)
            ):
                pattern = ["*" if i in chosen else p for i, p in enumerate(parts)]
                matched = [n for n in called if n and matches(n.split("."), pattern)]
                if all(texts.get(n) == text for n in matched):
                    break
            key = ".".join(pattern)
            others = [n for n in self.search.paths.values() if n and matches(n.split("."), pattern)]
            if len(others) == 1:
                key = path
            found[key] = text
            covered |= set(matched)
        return found


CHANNELS = "cdkefgmnopq"
LENGTHS = "lmnkopqefgd"
POOL = "sruvxyzpqijnmkl"


def role(path: str) -> str:
    """The same for repeated blocks."""
    return re.sub(r"\d+", "*", path)


def contains(run: Sequence[Any], part: Sequence[Any]) -> bool:
    return any(tuple(run[n : n + len(part)]) == tuple(part) for n in range(len(run)))


def fresh(pool: str, taken: Iterable[str]) -> str:
    taken = set(taken)
    more = (f"{p}{n}" for n in itertools.count(1) for p in pool)
    return next(name for name in itertools.chain(pool, more) if name not in taken)


def aligned(one: Node, g: Group, two: Node, h: Group) -> bool:
    """Whether two calls of a submodule are independent along the same dim of the arguments that they share."""

    def at(node: Node, group: Group, param: str) -> Any:
        i = node.params.index(param)
        cut = group.cuts[i]
        if cut is None:
            return None
        order = [c for _, c in places(known(node.inputs[i])) if c.dim == cut.dim]
        return cut.dim, order.index(cut) if cut in order else cut

    shared = [p for p in one.params if p in two.params]
    return all(at(one, g, p) == at(two, h, p) for p in shared)
