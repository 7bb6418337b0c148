"""The chosen stages as text: names for their dims, a pattern for each stage, one entry for repeated blocks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from dsp.discovery.calls import ModuleCall, known
from dsp.discovery.choice import StageChoice
from dsp.discovery.dims import Dim
from dsp.discovery.folds import Chain, Row
from dsp.stages.notation import TensorPattern
from dsp.stages.stage import matches

CHANNELS = "cdkefgmnopq"
LENGTHS = "lmnkopqefgd"
POOL = "sruvxyzpqijnmkl"


class Patterns(StageChoice):
    """The patterns of a choice."""

    def stages(self) -> dict[str, str]:
        if not self.chosen and not self.sequence:
            raise ValueError(
                f"discover found no submodule of {type(self.search.model).__name__} that is independent along a dim; "
                "a stage is a submodule: move operations of the forward into submodules"
            )
        self.name()
        self.texts = {path: self.render(node) for path, node in self.chosen.items()}
        return {"": self.render_root(), **self.collapse(self.texts, {n.path for n in self.root.walk()})}

    def everywhere(self) -> dict[str, str]:
        """The result of `stages`, extended to the stages in layers that were skipped."""
        repeats, called = self.search.repeats, {n.path for n in self.root.walk()}
        texts = {path: self.texts[ran] for path, ran in repeats.everywhere(self.texts).items()}
        return {"": self.render_root(), **self.collapse(texts, set(repeats.everywhere(called)))}

    def repeated(self) -> list[frozenset[str]]:
        """The paths of the stages, grouped by repeated blocks."""
        groups: dict[Any, set[str]] = {}
        for path, text in self.texts.items():
            groups.setdefault((role(path), text), set()).add(path)
        return [frozenset(paths) for paths in groups.values()]

    def name(self) -> None:
        """Choose labels for the dims of the model's own inputs, and for the dims along which stages may be sharded."""
        self.labels: dict[Chain, str] = {}
        free = self.sequence | {d for node in self.chosen.values() for d in node.free()}
        self.name_main(free)
        for c in (c for i in self.declared for axis in known(self.root.inputs[i]) for c in self.units(axis)):
            if c not in self.labels:
                self.labels[c] = free_label(POOL if set(c) & free else CHANNELS, self.labels.values())
        roles: dict[Any, str] = {}  # labels of dims that no input has, the same in all repeated blocks
        for path, node in self.chosen.items():
            rows = itertools.chain(*self.rows(node))
            free_symbols = [s for row in rows for axis in row for s in self.symbols(node, axis) if s.groups]
            for n, s in enumerate(free_symbols):
                if s.dims not in self.labels:
                    self.labels[s.dims] = roles.setdefault((role(path), n), free_label(POOL, self.labels.values()))

    def name_main(self, free: Set[Dim]) -> None:
        """Choose labels for the dims of the main input: b, c, and letters for the sequence dims by their number."""
        main = known(self.root.inputs[self.search.main])
        units = [(n, c) for n, axis in enumerate(main) for c in self.units(axis)]
        for _, c in units:
            if set(c) <= self.batch:
                self.labels[c] = "b"
        units = [(n, c) for n, c in units if c not in self.labels]
        channel = next((c for n, c in units if n in (1, len(main) - 1) and not set(c) & free), None)
        if channel is not None and len(main) > 2:
            self.labels[channel] = "c"
        nameless = [c for _, c in units if c not in self.labels]
        image = len(main) == 4 and channel is not None and channel == units[0][1]
        for c, label in zip(nameless, {1: "s", 2: "hw" if image else "ts", 3: "thw"}.get(len(nameless), "thwuvxyz")):
            self.labels[c] = label

    def units(self, axis: tuple[Dim, ...]) -> list[Chain]:
        """The named units of an axis of the model's own inputs: several if the axis is a fold that can be opened."""
        wholes = self.wholes(axis)
        return wholes if len(wholes) < 2 or all(c in self.sizes for c in wholes) else [axis]

    def render(self, node: ModuleCall) -> str:
        inputs, outputs = self.rows(node)
        used: dict[Any, str] = {}

        def called(key: Any, wanted: str | None, pool: str) -> str:
            if key not in used:
                labels = set(used.values())
                if wanted is None or wanted in labels:
                    wanted = free_label(pool, {*labels, *self.labels.values()})
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
                if not names and n in ones:  # a dim of size 1, which was not tested
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
        labels = set(self.labels.values())
        texts, sizes, lists = [], {}, set[str]()
        for i in self.declared:
            param = self.root.params[i]
            if (of := self.search.lists.get(param)) is not None:  # one pattern for all items of a list
                if of in lists:
                    continue
                lists.add(of)
                param = of
            axes: list[tuple[str, ...]] = []
            for n, axis in enumerate(known(self.root.inputs[i])):
                names = [self.labels[c] for c in self.units(axis)]
                if i == self.search.main:
                    if not names:
                        names = [free_label("b" if n == 0 else LENGTHS, labels)]  # a dim of size 1, such as one sample
                        labels.add(names[0])
                    if len(names) == 1:
                        sizes[n, self.root.shapes[i][n], len(self.root.shapes[i])] = names[0]
                axes.append(tuple(names))
            texts.append(str(TensorPattern(tuple(axes), frozenset(), param if param.isidentifier() else None)))
        results = [self.render_output(outs, sizes, labels) for outs in (() if lists else self.root.outputs)]
        return ", ".join(texts) + (" -> " + ", ".join(results) if results and all(results) else "")

    def render_output(self, outs: Any, sizes: Mapping[tuple[int, int, int], str], labels: Set[str]) -> str:
        """The names of a model output's dims: those of input dims, and new names for other dims."""
        names: list[str] = []
        for n, axis in enumerate(known(outs)):
            whole = tuple(dict.fromkeys(e for d in axis for e in self.chains.get(d, (d,))))
            size = math.prod(d.size for d in axis)
            label = self.labels.get(whole) or sizes.get((n, size, len(outs)))
            if label is None or label in names:
                label = free_label(CHANNELS, {*labels, *names})
            names.append(label)
        return " ".join(names)

    def collapse(self, texts: Mapping[str, str], called: Set[str]) -> dict[str, str]:
        """One entry for repeated blocks, if all `called` modules that its pattern matches have the same text."""
        entries: dict[str, str] = {}
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
            paths = [n for n in self.search.paths.values() if n and matches(n.split("."), pattern)]
            if len(paths) == 1:
                key = path
            entries[key] = text
            covered |= set(matched)
        return entries


def role(path: str) -> str:
    """The path with numbers replaced, so that repeated blocks have the same role."""
    return re.sub(r"\d+", "*", path)


def free_label(pool: str, labels: Iterable[str]) -> str:
    labels = set(labels)
    more = (f"{p}{n}" for n in itertools.count(1) for p in pool)
    return next(name for name in itertools.chain(pool, more) if name not in labels)
