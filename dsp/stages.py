"""Stages of a model: patterns matched to submodules, and one call's tensors bound to a pattern."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.layout import Axis, Cut, chunk_sizes, fold_fits
from dsp.notation import BATCH_NAMES, Ambiguous, NotationError, StagePattern, TensorPattern, parse, solve_sizes
from dsp.private import _BatchNorm, pytree
from dsp.sharded import Sharded


@dataclass(frozen=True)
class Bound:
    """One tensor argument of a call and what the pattern says of it (None: not mentioned, so it passes whole)."""

    param: str
    slot: int | str  # its place in args or kwargs
    tensor: Tensor
    pattern: TensorPattern | None


class Call:
    """The arguments of one call, to be replaced one by one."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = list(args), dict(kwargs)

    def replace(self, bound: Bound, tensor: Any) -> None:
        if isinstance(bound.slot, int):
            self.args[bound.slot] = tensor
        else:
            self.kwargs[bound.slot] = tensor


class Signature:
    """Binds the tensors of a call to a pattern by the parameter names of the module's own forward."""

    def __init__(self, module: nn.Module, pattern: StagePattern, where: str) -> None:
        self.where, self.pattern = where, pattern
        while "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]  # type: ignore[assignment]
        self.module = module
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        self.positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.names = {p.name: i for i, p in enumerate(parameters)}
        self.defaults = {p.name: p.default for p in parameters}
        self.open_args = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
        self.open_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for p in pattern.inputs:
            if p.param and p.param not in self.names and not self.open_kwargs and self.attribute(p) is None:
                close = difflib.get_close_matches(p.param, list(self.names), 1)
                raise NotationError(
                    f"{where}: forward of {type(module).__name__} has no parameter {p.param!r}; it has "
                    f"{', '.join(self.names)}" + (f". Did you mean {close[0]!r}?" if close else "")
                )
        self.named = {p.param: p for p in pattern.inputs if p.param}
        self.bare = [p for p in pattern.inputs if not p.param]

    def attribute(self, p: TensorPattern) -> int | None:
        """The size of a dim that the model, or its config, has as an attribute: 'num_frames=t'."""
        owners = (self.module, getattr(self.module, "config", None)) if self.pattern.root and len(p.axes) == 1 else ()
        found = (getattr(owner, p.param or "", None) for owner in owners)
        return next((value for value in found if type(value) is int), None)

    def integers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The int arguments of one call, those left at their default included."""
        given = {**self.defaults, **dict(zip(self.positional, args)), **kwargs}
        return {name: value for name, value in given.items() if type(value) is int}

    def numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The sizes of dims that the pattern states other than by tensors."""
        found, integers = dict(self.pattern.sizes), self.integers(args, kwargs)
        for p in self.named.values():
            value = integers.get(p.param or "", self.attribute(p) if p.param not in self.names else None)
            if value is not None and len(p.names) == 1:
                found[p.names[0]] = value
        return found

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[Bound]]:
        """The tensors of one call, in the order of the signature."""
        slots: list[tuple[str, int | str, Any]] = [
            (self.positional[i] if i < len(self.positional) else f"{self.open_args}[{i - len(self.positional)}]", i, v)
            for i, v in enumerate(args)
        ]
        last = len(self.names)
        slots += [(k, k, kwargs[k]) for k in sorted(kwargs, key=lambda k: self.names.get(k, last))]
        bare = iter(self.bare)
        bound: list[Bound] = []
        for param, slot, value in slots:
            if isinstance(value, Tensor):
                pattern = self.named[param] if param in self.named else next(bare, None)
                bound.append(Bound(param, slot, value, pattern))
            elif value is None:
                continue
            elif param in self.named:
                if self.pattern.root and type(value) is int and len(self.named[param].names) == 1:
                    continue  # the size of a dim
                raise NotationError(
                    f"{self.where}: the pattern names {param!r}, but it is a {type(value).__name__}, not a tensor"
                )
            elif isinstance(value, (list, tuple, dict)) and any(
                isinstance(t, (DTensor, Sharded)) or hasattr(t, "_dsp_sym") for t in tensors_in(value)
            ):
                raise NotationError(
                    f"{self.where} gets a sharded tensor inside the {type(value).__name__} {param!r}, where no pattern "
                    "can name it; pass it as an argument of its own"
                )
        if self.bare and not any(b.pattern is self.bare[0] for b in bound):
            raise NotationError(f"{self.where}: the pattern '{self.bare[0]}' found no tensor argument to bind to")
        return Call(args, kwargs), bound


def sizes_of_root(model: nn.Module, root: StagePattern | None, args: Any, kwargs: Any) -> dict[str, int]:
    """The dim sizes that the root pattern fixes for one call."""
    if root is None:
        return {}
    signature = Signature(model, root, "the model")
    _, bound = signature.bind(args, kwargs)
    tensors = [(b.pattern, tuple(b.tensor.shape)) for b in bound if b.pattern]
    stated = signature.numbers(args, kwargs)
    try:
        sizes = solve_sizes(tensors, stated, where="the model")
    except Ambiguous as error:
        # (b t) of 32, and one int argument that can be the length of t: num_frames=16
        integers = {k: v for k, v in signature.integers(args, kwargs).items() if v > 1 and error.size % v == 0}
        dims = [dim for dim in error.unknown if dim not in BATCH_NAMES]
        if len(dims) != 1 or len(error.unknown) != 2 or len(set(integers.values())) != 1:
            candidates = ", ".join(f"{k}={v}" for k, v in integers.items())
            raise NotationError(f"{error}" + (f". Its int arguments: {candidates}" if candidates else "")) from None
        stated = {**stated, dims[0]: next(iter(integers.values()))}
        sizes = solve_sizes(tensors, stated, where="the model")
    for dim, size in stated.items():
        if sizes.setdefault(dim, size) != size:
            raise NotationError(f"the model: {dim!r} is stated to be {size} in '{root.text}', but it is {sizes[dim]}")
    return sizes


@dataclass(frozen=True)
class Option:
    """One dim a call may be sharded along: the cut it needs of every bound tensor (None: whole)."""

    name: str | None
    cuts: tuple[Cut | None, ...]
    size: int
    last_resort: bool = False

    def share(self, n: int) -> float:
        """What the busiest of n ranks has of the work: 7 frames on 4 ranks give it 2/7."""
        return 1.0 if self.name is None else chunk_sizes(self.size, n)[0] / self.size


Sent = dict[str, tuple[int, int]]  # by kind of collective: bytes of the busiest rank, and calls


def add_sent(*sents: Mapping[str, tuple[int, int]]) -> Sent:
    total: Sent = {}
    for kind, (nbytes, calls) in (item for sent in sents for item in sent.items()):
        before = total.get(kind, (0, 0))
        total[kind] = before[0] + nbytes, before[1] + calls
    return total


@dataclass(frozen=True)
class Sends:
    """Communication inside a stage call, by phase of a step; the kinds are those of `dsp.count_comm`."""

    forward: Sent = field(default_factory=dict)
    backward: Sent = field(default_factory=dict)
    recompute: Sent = field(default_factory=dict)  # if activation checkpointing runs the stage again
    before: Sent = field(default_factory=dict)  # of forward, where it is outside of what runs again: before the stage,
    after: Sent = field(default_factory=dict)  # and after it

    def __add__(self, other: Sends) -> Sends:
        return Sends(*(add_sent(getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(Sends)))


class Inside(Protocol):
    """A submodule of a stage that communicates by itself (`dsp.embedded`); `label` is for the table of the plan."""

    module: nn.Module
    label: str

    @property
    def cut(self) -> int:
        """How many numbers its weights have that are cut over ranks."""

    def sends(self, args: Any, kwargs: Any, along: str | None, sizes: Mapping[str, int], n: int) -> Sends:
        """What one call with these tensors, which are whole, would send if the stage were sharded `along` a dim.

        sizes: of the stage's dims.
        """


class Peers(NamedTuple):
    """Ranks of an axis that share a dim, in its order, and how much of it each of them holds."""

    ranks: tuple[int, ...]
    parts: tuple[int, ...]

    @classmethod
    def all(cls, size: int, n: int) -> Peers:
        """n ranks, each with its `torch.chunk` of `size`."""
        return cls(tuple(range(n)), chunk_sizes(size, n))


class Place(NamedTuple):
    """What a stage call runs on: this rank's part of `dim` (None: of no dim, it runs whole), which `peers` share."""

    axis: Axis
    dim: str | None
    peers: Peers

    @property
    def size(self) -> int:
        return sum(self.peers.parts)

    @property
    def own(self) -> int:
        """0: the stage sees one dummy row."""
        return self.peers.parts[self.peers.ranks.index(self.axis.rank)]


class Received(NamedTuple):
    """A tensor on its way into a stage: this rank's part, cut at `cut` (None: whole), of one of global `shape`."""

    local: Tensor
    cut: Cut | None
    pattern: TensorPattern | None
    shape: tuple[int, ...]


class Around(Protocol):
    """What a method does between a stage's layout for others and the one that it runs on (`dsp.embedded`)."""

    def enter(self, place: Place, sizes: Mapping[str, int], given: Sequence[Received]) -> tuple[Place, list[Received]]:
        """Where the stage runs, and what it is given there, without dummy rows."""

    def leave(
        self, place: Place, sizes: Mapping[str, int], patterns: Sequence[TensorPattern], made: Sequence[Tensor]
    ) -> list[Tensor]:
        """What it made there, with a dummy row where there is nothing else, in the layout that others see."""

    def share(self, sizes: Mapping[str, int], n: int) -> float:
        """What the busiest of n ranks has of the work."""


class Stage:
    """A submodule and its pattern.

    `inside` are those of its own submodules that communicate, so that it may be sharded along a dim that it computes
    over: `reach`. Then it is sharded along no other; with `whole` along none, whatever its pattern says. `around` leads
    to another layout still, that the stage alone sees.
    """

    def __init__(self, name: str, module: nn.Module, text: str) -> None:
        self.name, self.module = name, module
        self.where = f"stage {name!r}"
        try:
            self.pattern = parse(text)
        except NotationError as error:
            raise NotationError(f"{self.where}: {error}") from None
        self.signature = Signature(module, self.pattern, self.where)
        self.inside: list[Inside] = []
        self.around: Around | None = None
        self.reach: str | None = None
        self.whole = False

    def sizes(self, bound: Iterable[Bound], root: Mapping[str, int]) -> dict[str, int]:
        tensors = [(b.pattern, tuple(b.tensor.shape)) for b in bound if b.pattern]
        return solve_sizes(tensors, root, where=self.where)

    def options(self, bound: list[Bound], sizes: Mapping[str, int], n: int) -> list[Option]:
        """Every way to shard this call over n ranks, batch last; run whole if there is none."""
        found = []
        names = self.pattern.free if self.reach is None else (self.reach,)
        for name in names if not self.whole else ():
            if sizes.get(name, 1) < 2:
                continue
            cuts: list[Cut | None] = []
            fits = True
            for b in bound:
                cut = cut_for(b.pattern, b.tensor.shape, name, sizes) if b.pattern else None
                cuts.append(cut)
                fits = fits and (cut is None or fits_fold(b.pattern, name, sizes, n))
            if fits and any(c is not None for c in cuts):
                found.append(Option(name, tuple(cuts), sizes[name], name in BATCH_NAMES))
        if found:
            self.refuse_statistics(found)
        return found or [Option(None, (None,) * len(bound), 1)]

    def refuse_statistics(self, options: list[Option]) -> None:
        """A batch norm in training has statistics over more than a slice, whatever the pattern says."""
        for name, module in self.module.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training:
                where = f"its {clean(name)!r}" if name else "it"
                dims = " ".join(str(o.name) for o in options)
                raise NotationError(
                    f"{self.where}: {where} is a {type(module).__name__} in training, whose statistics run over all "
                    f"dims but the channels: it is not independent along {dims}. Write [{dims}] in "
                    f"'{self.pattern.text}', or use a norm that acts on each sample alone"
                )

    def outputs(self, tensors: list[Tensor]) -> list[TensorPattern]:
        """The pattern of each output tensor. Raises if they do not fit in number or rank."""
        patterns = self.pattern.outputs
        if len(tensors) != len(patterns):
            raise NotationError(
                f"{self.where} returns {len(tensors)} tensors, but its pattern '{self.pattern.text}' describes "
                f"{len(patterns)}; write one pattern for each after '->'"
            )
        for pattern, t in zip(patterns, tensors):
            if t.ndim != len(pattern.axes):
                how = "" if self.pattern.explicit_output else " (without '->' it is laid out like the first input)"
                raise NotationError(
                    f"{self.where} returned shape {tuple(t.shape)}, but its output pattern is '{pattern}'{how}"
                )
        return list(patterns)


def cut_for(pattern: TensorPattern | None, shape: Any, name: str, sizes: Mapping[str, int]) -> Cut | None:
    """Where the dim `name` lies in a tensor; None if the tensor lacks it or broadcasts along it."""
    if pattern is None or name not in pattern.names:
        return None
    axis = pattern.axis_of(name)
    names = pattern.axes[axis]
    product = 1
    for n in names:
        product *= sizes[n]
    if shape[axis] != product:
        return None
    outer = 1
    for n in names[: names.index(name)]:
        outer *= sizes[n]
    return Cut(axis, outer)


def fits_fold(pattern: TensorPattern | None, name: str, sizes: Mapping[str, int], n: int) -> bool:
    if pattern is None or name not in pattern.names:
        return True
    names = pattern.axes[pattern.axis_of(name)]
    inner = 1
    for other in names[names.index(name) + 1 :]:
        inner *= sizes[other]
    return fold_fits(sizes[name], inner, n)


def clean(name: str) -> str:
    """A module path as the user wrote the model: without the wrappers' `_orig_mod`, `_checkpoint_wrapped_module`."""
    skip = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
    return ".".join(part for part in name.split(".") if part not in skip)


def find_stages(model: nn.Module, stages: Mapping[str, str]) -> tuple[list[Stage], str | None]:
    """Match patterns (`*` is one path component) to submodules; and the root pattern, the one under the key ""."""
    if not isinstance(stages, Mapping) or not stages:
        raise NotationError(
            f"stages must be a dict of submodule pattern to stage string, got {stages!r}; for example "
            '{"blocks.*.spatial": "b t [s c]", "blocks.*.temporal": "b [t] s [c]"}'
        )
    for pattern, text in stages.items():
        if not (isinstance(pattern, str) and isinstance(text, str)):
            raise NotationError(f"stages maps a submodule pattern to one stage string, not {pattern!r} to {text!r}")
    root = stages.get("")
    stages_found = [Stage(*found) for found in find_modules(model, stages)]
    for stage in stages_found:
        inside = {id(m) for m in stage.module.modules() if m is not stage.module}
        for other in stages_found:
            if id(other.module) in inside:
                raise NotationError(
                    f"stage {other.name!r} lies inside stage {stage.name!r}; a stage sees local tensors only, so make "
                    "one of the two a stage"
                )
    return stages_found, root


def find_modules(model: nn.Module, texts: Mapping[str, str]) -> list[tuple[str, nn.Module, str]]:
    """(path, submodule, text) of every submodule that a pattern matches; the key "" matches none."""
    # a wrapped module and its wrapper share one clean path: the outer one is what the model calls
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        modules.setdefault(clean(path), module)
    found: dict[int, tuple[str, nn.Module, str]] = {}
    for pattern, text in texts.items():
        if pattern == "":
            continue
        parts = pattern.split(".")
        matched = [name for name in modules if name and matches(name.split("."), parts)]
        if not matched:
            raise NotationError(_unmatched(pattern, list(modules), type(model).__name__))
        for name in matched:
            *_, other = found.setdefault(id(modules[name]), (name, modules[name], text))
            if other != text:
                raise NotationError(
                    f"submodule {name!r} is matched twice, as {other!r} and as {text!r}; give it one pattern"
                )
    return list(found.values())


def matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(p == "*" or p == n for n, p in zip(name, pattern))


def _unmatched(pattern: str, names: list[str], model: str) -> str:
    generic = sorted({".".join("*" if p.isdigit() else p for p in n.split(".")) for n in names if n})
    close = difflib.get_close_matches(pattern, generic, 3, 0.5) or generic[:8]
    return (
        f"stage pattern {pattern!r} matches no submodule of {model}; '*' stands for one component of a path. "
        f"Some that exist: {', '.join(close)}"
    )


def _plain_dataclass(value: Any) -> bool:
    """A dataclass that pytree takes for a leaf."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a forward's output, in order: in lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif _plain_dataclass(leaf):
            found += tensors_in([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return found


def constants_in(value: Any) -> list[Any]:
    """The numbers among a forward's output: sizes, say."""
    if isinstance(value, Tensor):
        return []
    if _plain_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, (int, float, tuple))]


def map_tensors(value: Any, new: Iterable[Any]) -> Any:
    """The same output with its tensors replaced in order."""
    it = iter(new)

    def replaced(v: Any) -> Any:
        if isinstance(v, Tensor):
            return next(it)
        if _plain_dataclass(v):
            clone = copy.copy(v)
            for f in dataclasses.fields(v):
                object.__setattr__(clone, f.name, pytree.tree_map(replaced, getattr(v, f.name)))
            return clone
        return v

    return pytree.tree_map(replaced, value)
