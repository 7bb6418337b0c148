"""Advice where glue runs whole: `discover`'s question, asked of single modules at small sizes.

The trace knows how each module between stages is called, and which dims of the model its tensors carry. A copy of it
with random weights is called on slices (`dsp.slices`) of random tensors, as short as it takes them. The dims along
which it is independent make a line of `stages`, and a plan with that line tells what it is worth.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dsp.collectives import inexact
from dsp.layout import Cut
from dsp.notation import BATCH_NAMES, StagePattern, TensorPattern, parse
from dsp.private import applied, hooks_of, pytree
from dsp.signature import Bound, Signature
from dsp.slices import Probe
from dsp.stages import Stage, cut_for, find_stages
from dsp.text import generic

if TYPE_CHECKING:
    from dsp.plan.events import Trace
    from dsp.plan.table import Plan

log = logging.getLogger("dsp")

LIMIT = 1 << 23  # numbers of a module's weights, or of its inputs, with which it is tried
SHORT = 6
MODULES = 4  # that are looked at
ANY = StagePattern("", (), (), False)


def remedy(
    model: nn.Module,
    stages: Sequence[Stage],
    root: StagePattern | None,
    t: Trace,
    plan: Plan,
    replan: Callable[..., Plan],
) -> str:
    """A sentence on what would help where glue runs whole: lines of `stages`, if a plan is better for them.

    replan: a plan with more stages, and with another root pattern.
    """
    if not plan.whole:
        return ""
    lines: dict[str, str] = {}
    over: list[str] = []
    for key in list(dict.fromkeys(w.module for w in plan.whole if w.module))[:MODULES]:
        try:
            lines[key] = line(model, stages, t, next(path for path in t.entered if generic(path) == key))
        except NothingFree as reason:
            over.append(f"{key} computes over {reason}")
        except Exception as reason:
            log.debug("no line for %s: %s: %s", key, type(reason).__name__, reason)
    if lines and (better := tried_again(plan, lines, lambda: replan(find_stages(model, lines)[0]))):
        text = ", ".join(f'"{key}": "{own}"' for key, own in lines.items())
        return f"Add to stages {text}: {better}"
    text = "" if root is None else with_unnamed(root, t, plan)
    if text and (better := tried_again(plan, text, lambda: replan([], parse(text, root=True)))):
        return f'Name its other inputs in stages, too, "": "{text}": {better}'
    if over:
        return f"No stage would change that: {'; '.join(over)}"
    if any(not w.module for w in plan.whole):
        return "Make a submodule of what can be cut along some dim, and name it in stages"
    return ""


def tried_again(plan: Plan, what: Any, replan: Callable[[], Plan]) -> str:
    """The change that a better plan brings; an empty text if there is none, or if it cannot be made."""
    try:
        better = replan()
    except Exception as reason:
        log.debug("no plan with %s: %s: %s", what, type(reason).__name__, reason)
        return ""
    found, before = ((p.flops_whole, sum(w.bytes for w in p.whole)) for p in (better, plan))
    if found >= before:
        return ""
    return f"then the largest tensor of a rank is {better.share:.2f} of that of one process instead of {plan.share:.2f}"


def with_unnamed(root: StagePattern, t: Trace, plan: Plan) -> str:
    """The root pattern with those inputs that it leaves out and that are as long as a share of what runs whole."""
    names, least = Names(t), min(w.bytes for w in plan.whole) / plan.size
    more = [
        str(replace(names.of(x), param=param))
        for param, x in t.unnamed.items()
        if param.isidentifier() and x.ndim and x.numel() * x.element_size() >= least
    ]
    inputs, arrow, outputs = root.text.partition("->")
    return ", ".join([inputs.strip(), *more]) + (f" -> {outputs.strip()}" if arrow else "") if more else ""


class NothingFree(ValueError):
    """Nothing but the batch is left to shard."""


def line(model: nn.Module, stages: Sequence[Stage], t: Trace, path: str) -> str:
    """The stage string of one module between stages."""
    module = model.get_submodule(path)
    inside = list(module.modules())
    if any(stage.module in inside for stage in stages) or any(any(hooks_of(m)) for m in inside):
        raise ValueError("stages, or hooks, are inside of it")
    args, kwargs = t.entered[path]
    names = Names(t)
    bound = Signature(module, ANY, path).bind(args, kwargs)[1]
    own = [names.of(b.tensor) for b in bound]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        sizes, probe = tried(module, path, args, kwargs, bound, own, names.sizes)
        shapes = [b.tensor.shape for b in probe.bound]
        free: dict[str, list[Cut]] = {}
        for name in dict.fromkeys(name for p in own for name in p.names):
            cuts = [cut_for(p, shape, name, sizes) for p, shape in zip(own, shapes)]
            if sizes[name] > 1 and (outputs := probe.independent(cuts, sizes[name])) is not None:
                free[name] = outputs
    if not any(names.sizes[name] > 1 and name not in BATCH_NAMES for name in free):
        raise NothingFree("every dim of its tensors" + (" but the batch" if free else ""))
    return stage_string(names, bound, own, free, sizes, probe)


def stage_string(
    names: Names, bound: list[Bound], own: list[TensorPattern], free: dict[str, list[Cut]], sizes: dict[str, int],
    probe: Probe,
) -> str:  # fmt: skip
    """The stage string of a module that is independent along the dims of `free`, which lie so in its results."""
    shapes = [b.tensor.shape for b in probe.bound]
    made = [names.output(t.shape, {k: v[i] for k, v in free.items()}, sizes) for i, t in enumerate(probe.whole)]
    first = {name: cut_for(own[0], shapes[0], name, sizes) for name in free}
    same = all(
        out.shape == shapes[0] and all(cuts[i] == first[name] for name, cuts in free.items())
        for i, out in enumerate(probe.whole)
    )

    def shown(p: TensorPattern, param: str | None = None) -> str:
        return str(replace(p, computed=frozenset(p.names) - free.keys(), param=param))

    text = ", ".join(shown(p, b.param if len(bound) > 1 else None) for b, p in zip(bound, own))
    text += "" if same else " -> " + ", ".join(map(shown, made))
    parse(text)
    return text


class Names:
    """The names of dims: those of the root pattern, and letters for all others."""

    def __init__(self, t: Trace) -> None:
        self.trace, self.sizes = t, dict[str, int]()
        self.batch = next((name for name in t.sizes if name in BATCH_NAMES), "b")
        self.letters = (x for x in "xyzuvwpqrijkmndefgabchlost" if x not in t.sizes and x != self.batch)
        self.keys: dict[str, str] = {}

    def fresh(self, size: int) -> str:
        name = next(self.letters)
        self.sizes[name] = size
        return name

    def of(self, x: Tensor) -> TensorPattern:
        """The dims of a tensor as the trace knows them."""
        sym = self.trace.known.get(id(x))
        known: dict[Any, Any] = dict(self.trace.values[sym.value].sizes) if sym is not None else {}
        found: list[list[str]] = []
        for d, extent in enumerate(x.shape):
            axis, outer = list[str](), 1
            mine = [] if sym is None else [(k, c) for k, c in sym.cuts.items() if c.dim == d and not c.joined]
            cuts = [(c.folds, -known[k], k) for k, c in mine]
            for at, _, key in sorted(cuts):
                if at % outer == 0 and at >= outer and extent % (at * known[key]) == 0:
                    axis += [self.gap(at // outer, found, axis)] if at > outer else []
                    axis.append(self.named(self.trace.names[sym.value][key], known[key]))  # type: ignore[union-attr]
                    outer = at * known[key]
            if d == 0 and (extent == 1 or (axis and self.trace.sizes.get(self.batch) == 1)):
                axis.insert(0, self.batch)
                self.sizes[self.batch] = 1
            elif extent > outer:
                axis.append(self.gap(extent // outer, found, axis))
            found.append(axis)
        return TensorPattern(tuple(map(tuple, found)), frozenset())

    def gap(self, size: int, before: list[list[str]], axis: list[str]) -> str:
        """A dim that the trace does not follow: one of the model's that no rank can have a part of, or another."""
        taken = {name for own in (*before, axis) for name in own}
        alike = [name for name, known in self.trace.sizes.items() if known == size and name not in taken]
        return self.named(alike[0], size) if len(alike) == 1 else self.fresh(size)

    def named(self, key: str, size: int) -> str:
        if self.trace.sizes.get(key) == size:
            self.sizes[key] = size
            return key
        if key not in self.keys:
            self.keys[key] = self.fresh(size)
        return self.keys[key]

    def output(self, shape: Sequence[int], free: dict[str, Cut], sizes: dict[str, int]) -> TensorPattern:
        """The dims of a result: those that are free lie where they were found, all others are new."""
        found = []
        for d, extent in enumerate(shape):
            axis, outer = list[str](), 1
            for cut, name in sorted((c, n) for n, c in free.items() if c.dim == d):
                axis += [self.fresh(cut.folds // outer)] if cut.folds > outer else []
                axis.append(name)
                outer = cut.folds * sizes[name]
            if extent > outer or not axis:
                axis.append(self.fresh(extent // outer))
            found.append(tuple(axis))
        return TensorPattern(tuple(found), frozenset())


def tried(
    module: nn.Module, path: str, args: Any, kwargs: Any, bound: list[Bound], own: list[TensorPattern],
    full: dict[str, int],
) -> tuple[dict[str, int], Probe]:  # fmt: skip
    """A copy of a module, called on random tensors as short as it takes."""
    if sum(p.numel() for p in (*module.parameters(), *module.buffers())) > LIMIT:
        raise ValueError("it is too large to be tried")
    clone = applied(copy.deepcopy(module), _random)
    signature = Signature(clone, ANY, path)
    first: Exception | None = None
    for sizes in shorter(full):
        shapes = [[math.prod(sizes[name] for name in axis) for axis in p.axes] for p in own]
        if sum(map(math.prod, shapes)) > LIMIT:
            continue
        made = {id(b.tensor): _random(b.tensor, shape) for b, shape in zip(bound, shapes)}
        try:
            a, k = pytree.tree_map(lambda t, made=made: made.get(id(t), t), (args, kwargs))
            return sizes, Probe(clone, signature, a, k)
        except Exception as reason:
            first = first or reason
    raise first or ValueError("its tensors are too long")


def shorter(full: dict[str, int]) -> Iterator[dict[str, int]]:
    """Sizes to try: all short, then with ever more dims as they are; a batch of one is two, to be cut."""
    short = {name: 2 if size == 1 else min(size, SHORT) for name, size in full.items()}
    apart = [name for name in full if short[name] != full[name]]
    for many in range(len(apart) + 1):
        for kept in itertools.combinations(apart, many):
            yield {**short, **{name: full[name] for name in kept}}


def _random(t: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Numbers of the same kind that hide nothing by being alike, in float64."""
    own = t.shape if shape is None else shape
    if inexact(t):
        dtype = torch.complex128 if t.is_complex() else torch.float64
        return torch.randn(*own, dtype=dtype) / max(1, math.prod(t.shape[1:]) if shape is None else 1) ** 0.5
    if shape is None and not t.is_meta:
        return t.detach().cpu().clone()
    return torch.randint(0, 2, tuple(own)).to(t.dtype)
