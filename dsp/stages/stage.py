"""Stages of a model: patterns matched to submodules, and the dims that a call may be sharded along."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dsp.comm.layout import Cut, fold_fits
from dsp.planner import chunk_sizes
from dsp.stages.methods import StageMethod, StageWrapper
from dsp.stages.notation import BATCH_NAMES, NotationError, StagePattern, TensorPattern, parse, solve_sizes
from dsp.stages.signature import Bound, Signature
from dsp.support.private import _BatchNorm


@dataclass(frozen=True)
class Option:
    """One dim that a call may be sharded along, with the cut that each bound tensor must have (None: whole).

    onto: for a dim that is summed over, the dim of the results that the reduce-scatter of the sums leaves sharded.
    """

    name: str | None
    cuts: tuple[Cut | None, ...]
    size: int
    last_resort: bool = False
    onto: str | None = None

    @property
    def lands(self) -> str | None:
        """The dim that its results are sharded along."""
        return self.onto or self.name

    def share(self, n: int) -> float:
        """The busiest rank's share of the work: 7 frames on 4 ranks give it 2/7."""
        return 1.0 if self.name is None else chunk_sizes(self.size, n)[0] / self.size


class Stage:
    """A submodule and its pattern.

    methods: its submodules that communicate by themselves. reach: a dim that the stage computes over, and is sharded
    along (and along no other) thanks to them. whole: the stage is sharded along no dim, whatever its pattern says.
    around: a method that runs the stage in another layout, which only the stage sees. local: makes the local function
    of an offer (`dsp.core.record.LocalFunction`), where the module's own call will not do.
    """

    def __init__(self, name: str, module: nn.Module, text: str) -> None:
        self.name, self.module = name, module
        self.label = f"stage {name!r}"
        try:
            self.pattern = parse(text)
        except NotationError as error:
            raise NotationError(f"{self.label}: {error}") from None
        self.signature = Signature(module, self.pattern, self.label)
        self.methods: list[StageMethod] = []
        self.around: StageWrapper | None = None
        self.reach: str | None = None
        self.whole = False
        self.local: Callable[[Stage, Option], Any] | None = None

    def sizes(self, bound: Iterable[Bound], root: Mapping[str, int]) -> dict[str, int]:
        tensors = [(b.pattern, tuple(b.tensor.shape)) for b in bound if b.pattern]
        return solve_sizes(tensors, root, label=self.label)

    def result_sizes(
        self, t: Tensor, p: TensorPattern, sizes: Mapping[str, int], root: Mapping[str, int]
    ) -> dict[str, int]:
        """The sizes of the dims of a result; the stage may change those that it computes over."""
        lengths = dict(sizes)
        for name in [n for n in p.names if n in self.pattern.computed]:
            if len(p.axes[p.axis_of(name)]) == 1:
                lengths[name] = t.shape[p.axis_of(name)]
        for name, size in solve_sizes([(p, tuple(t.shape))], {**root, **lengths}, label=self.label).items():
            if name in self.pattern.free and size != sizes.get(name, size):
                raise NotationError(
                    f"{self.label} returned {tuple(t.shape)}: dim {name!r} is {size} where its input has "
                    f"{sizes[name]}; a dim outside brackets keeps its size"
                )
            lengths[name] = size
        return lengths

    def options(self, bound: list[Bound], sizes: Mapping[str, int], n: int) -> list[Option]:
        """The dims that this call can be sharded along over n ranks, batch last; if there is none, it runs whole."""
        options = []
        names = self.pattern.free if self.reach is None else (self.reach,)
        sums = self.pattern.summed if not (self.methods or self.around or self.reach) else ()
        for name in (*names, *sums) if not self.whole else ():
            if sizes.get(name, 1) < 2:
                continue
            cuts = tuple(cut_for(b.pattern, b.tensor.shape, name, sizes) for b in bound)
            if any(cuts) and self.fit([b.pattern for b, c in zip(bound, cuts) if c is not None], name, sizes, n):
                along = [None] if name in names else [d for d in self.pattern.free if self.adds_up(d, sizes)]
                options += [Option(name, cuts, sizes[name], (d or name) in BATCH_NAMES, d) for d in along]
        if options:
            self.refuse_statistics(options)
        return options or [Option(None, (None,) * len(bound), 1)]

    def fit(self, inputs: Sequence[TensorPattern | None], name: str, sizes: Mapping[str, int], n: int) -> bool:
        """Tell whether all inputs and results that have the dim `name` can be cut along it."""
        return all(fits_fold(p, name, sizes, n) for p in (*inputs, *self.pattern.outputs))

    def adds_up(self, name: str, sizes: Mapping[str, int]) -> bool:
        """Tell whether a reduce-scatter of the results can leave them sharded along a dim."""
        return sizes.get(name, 1) > 1 and all((name,) in p.axes for p in self.pattern.outputs)

    def refuse_statistics(self, options: list[Option]) -> None:
        """Raise NotationError for a batch norm in train mode, whose statistics run over all slices."""
        for name, module in self.module.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training:
                owner = f"its {clean(name)!r}" if name else "it"
                dims = " ".join(str(o.name) for o in options)
                raise NotationError(
                    f"{self.label}: {owner} is a {type(module).__name__} in training, whose statistics run over all "
                    f"dims but the channels: so the stage is not independent along {dims}. Put {dims} in brackets "
                    f"in '{self.pattern.text}', or use a norm that acts on each sample alone"
                )

    def outputs(self, tensors: list[Tensor]) -> list[TensorPattern]:
        """The pattern of each output tensor. Raises if they do not fit in number or rank."""
        patterns = self.pattern.outputs
        if len(tensors) != len(patterns):
            raise NotationError(
                f"{self.label} returns {len(tensors)} tensors, but its pattern '{self.pattern.text}' describes "
                f"{len(patterns)}; write one pattern for each after '->'"
            )
        for pattern, t in zip(patterns, tensors):
            if t.ndim != len(pattern.axes):
                hint = "" if self.pattern.explicit_output else " (without '->' it is laid out like the first input)"
                raise NotationError(
                    f"{self.label} returned shape {tuple(t.shape)}, but its output pattern is '{pattern}'{hint}"
                )
        return list(patterns)


def cut_for(pattern: TensorPattern | None, shape: Any, name: str, sizes: Mapping[str, int]) -> Cut | None:
    """The cut of a tensor along the dim `name`; None if the tensor lacks the dim or broadcasts along it."""
    if pattern is None or name not in pattern.names:
        return None
    axis = pattern.axis_of(name)
    names = pattern.axes[axis]
    if shape[axis] != math.prod(sizes[n] for n in names):
        return None
    return Cut(axis, math.prod(sizes[n] for n in names[: names.index(name)]))


def fits_fold(pattern: TensorPattern | None, name: str, sizes: Mapping[str, int], n: int) -> bool:
    """Tell whether the axis that has the dim `name`, if there is one, can be sharded along it. Dims of unknown size
    count as longer than 1."""
    if pattern is None or name not in pattern.names:
        return True
    names = pattern.axes[pattern.axis_of(name)]
    return fold_fits(sizes[name], math.prod(sizes.get(inner, 2) for inner in names[names.index(name) + 1 :]), n)


def clean(name: str) -> str:
    """A module path as the user wrote the model: without the wrappers' `_orig_mod`, `_checkpoint_wrapped_module`."""
    skip = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in skip)


def declared(model: nn.Module, stages: Mapping[str, str] | None) -> tuple[list[Stage], StagePattern | None]:
    """The stages of a dict, and the pattern of the model's own inputs and outputs."""
    if stages is None:
        first = next(iter(inspect.signature(model.forward).parameters), "x")
        raise NotationError(
            f"{type(model).__name__} has no stages attribute, and dsp does not know its class. Name the dims of its "
            f'inputs, such as stages={{"": "{first}=b t h w c"}}, or what its submodules compute over, such as '
            'stages={"blocks.*.spatial": "b t [s c]", "blocks.*.temporal": "b [t] s [c]"}'
        )
    matches, root = find_stages(model, stages)
    return matches, parse(root, root=True) if root is not None else None


def find_stages(model: nn.Module, stages: Mapping[str, str]) -> tuple[list[Stage], str | None]:
    """Match patterns (`*` is one path component) to submodules; and the root pattern, the one under the key ""."""
    if not isinstance(stages, Mapping) or not stages:
        raise NotationError(
            f"stages must be a dict of submodule pattern to stage string, got {stages!r}; for example "
            '{"blocks.*.spatial": "b t [s c]", "blocks.*.temporal": "b [t] s [c]"}'
        )
    for pattern, text in stages.items():
        if not (isinstance(pattern, str) and isinstance(text, str)):
            raise NotationError(
                f"stages maps the path of a submodule to a pattern, a string; got {pattern!r}: {text!r}"
            )
    root = stages.get("")
    matches = [Stage(*match) for match in find_modules(model, stages)]
    for stage in matches:
        inside = {id(m) for m in stage.module.modules() if m is not stage.module}
        for inner in matches:
            if id(inner.module) in inside:
                raise NotationError(
                    f"stage {inner.name!r} lies inside stage {stage.name!r}; stages cannot be nested: inside the outer "
                    "stage, tensors are already local. Remove one of the two from stages"
                )
    return matches, root


def find_modules(model: nn.Module, texts: Mapping[str, str]) -> list[tuple[str, nn.Module, str]]:
    """(path, submodule, text) of every submodule that a pattern matches; the key "" matches none."""
    # a module and its wrapper have the same clean path; the model calls the wrapper
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules.setdefault(clean(path), module)
    entries: dict[int, tuple[str, nn.Module, str]] = {}
    for pattern, text in texts.items():
        if pattern == "":
            continue
        parts = pattern.split(".")
        matched = [name for name in modules if name and matches(name.split("."), parts)]
        if not matched:
            raise NotationError(_unmatched(pattern, list(modules), type(model).__name__))
        for name in matched:
            if type(modules[name]) in (nn.ModuleList, nn.ModuleDict):
                kind = type(modules[name]).__name__
                raise NotationError(
                    f"stage key {pattern!r} names a {kind}, which is not called itself; write '{pattern}.*'"
                )
            *_, earlier = entries.setdefault(id(modules[name]), (name, modules[name], text))
            if earlier != text:
                raise NotationError(
                    f"submodule {name!r} is matched twice, as {earlier!r} and as {text!r}; give it one pattern"
                )
    return list(entries.values())


def matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(p == "*" or p == n for n, p in zip(name, pattern))


def _unmatched(pattern: str, names: list[str], model: str) -> str:
    generic = sorted({".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names if n})
    close = difflib.get_close_matches(pattern, generic, 3, 0.5) or generic[:8]
    return (
        f"stage key {pattern!r} matches no submodule of {model}; '*' stands for one component of a path. "
        f"Some that exist: {', '.join(close)}"
    )
