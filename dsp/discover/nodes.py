"""One call of a submodule: its tensors, what it is independent along, what runs inside it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsp.discover.dims import Axes, Dim, GlueOp, atoms, places
from dsp.layout import Cut
from dsp.private import FakeTensor, buffers_of, children_of, parameters_of


@dataclass
class Group:
    """One dim along which a call is independent: where it lies in each tensor argument and in each output."""

    primary: tuple[int, Cut]  # the argument and place that the search began with
    cuts: tuple[Cut | None, ...]
    outputs: tuple[Cut, ...]
    size: int


@dataclass(eq=False)
class ModuleCall:
    """One call of a submodule: its tensor arguments, what it is independent along, what runs inside it."""

    path: str
    module: nn.Module
    index: int
    params: list[str] = field(default_factory=list)
    inputs: list[Axes] = field(default_factory=list)
    lives: list[bool] = field(default_factory=list)
    outputs: list[Axes] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    ops: list[GlueOp] = field(default_factory=list)
    children: list[ModuleCall] = field(default_factory=list)
    hides: bool = False  # takes some of its tensors inside lists and dicts, where no pattern can name them
    tested: bool = False
    local: bool = False  # acts on each position alone: computes over one axis at most, the channels

    @property
    def live(self) -> bool:
        return any(self.lives)

    @property
    def numel(self) -> int:
        return sum(math.prod(s) for s, live in zip(self.shapes, self.lives) if live)

    def group(self, arg: int, cut: Cut) -> int | None:
        return next((n for n, g in enumerate(self.groups) if g.cuts[arg] == cut), None)

    def slots(self) -> Iterator[tuple[int, Dim, Cut]]:
        """Every dim of the arguments that may be sharded, and where it lies."""
        for i, axes in enumerate(self.inputs):
            if self.lives[i]:
                yield from ((i, d, c) for d, c in places(known(axes)))

    def free(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is not None}

    def blocked(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is None}

    def copy(self) -> ModuleCall:
        """This call and those inside it, of which one may drop groups."""
        return replace(self, groups=[*self.groups], children=[child.copy() for child in self.children])

    def walk(self) -> Iterator[ModuleCall]:
        yield self
        for child in self.children:
            yield from child.walk()


def known(axes: Axes) -> Axes:
    """The dims of a tensor as far as they are known by now."""
    return [atoms(axis) for axis in axes]


def dim_at(axes: Axes, cut: Cut, size: int) -> tuple[Dim, ...] | None:
    """The dims that a place of a tensor holds."""
    outer, taken = 1, []
    for d in axes[cut.dim]:
        if cut.folds <= outer and outer * d.size <= cut.folds * size:
            taken.append(d)
        outer *= d.size
    return tuple(taken) if math.prod(d.size for d in taken) == size else None


def acts_locally(node: ModuleCall, outputs: list[tuple[int, ...]]) -> bool:
    blocked = {(i, c.dim) for i, _, c in node.slots() if node.group(i, c) is None}
    if len(blocked) > len({i for i, _ in blocked}):
        return False
    for k, shape in enumerate(outputs):
        left = list(shape)
        for g in node.groups:
            left[g.outputs[k].dim] //= g.size
        if sum(s > 1 for s in left) > 1:
            return False
    return True


def structure(node: ModuleCall) -> Any:
    """The dims of a call's arguments, numbered: which are the same, which are folds."""
    numbers: dict[Dim, int] = {}
    return tuple(
        (live, tuple(tuple((numbers.setdefault(d, len(numbers)), d.size) for d in axis) for axis in known(axes)))
        for live, axes in zip(node.lives, node.inputs)
    )


_MODULE = frozenset(vars(nn.Module()))
SMALL = 4096  # numbers of a buffer that are compared one by one


def held(buffer: Tensor) -> Any:
    """The fingerprint of a buffer's contents: two masks of one shape may differ."""
    if buffer.is_meta or isinstance(buffer, FakeTensor):
        return tuple(buffer.shape)
    return tuple(buffer.shape), tuple(buffer.flatten().tolist()) if buffer.numel() <= SMALL else id(buffer)


def fingerprint(value: Any, depth: int = 0) -> Any:
    """Equal for modules that compute the same function of their parameters."""
    if isinstance(value, nn.Module):
        own = tuple((k, fingerprint(v, depth)) for k, v in sorted(vars(value).items()) if k not in _MODULE)
        shapes = tuple((k, None if t is None else tuple(t.shape)) for k, t in parameters_of(value).items())
        buffers = tuple((k, None if t is None else held(t)) for k, t in buffers_of(value).items())
        children = tuple((k, fingerprint(m, depth)) for k, m in children_of(value).items())
        return type(value), own, shapes, buffers, children
    if value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.dtype, torch.device)):
        return (type(value).__name__, value)
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(fingerprint(v, depth) for v in value))
    if isinstance(value, Mapping):
        return tuple((str(k), fingerprint(v, depth)) for k, v in value.items())
    if inspect.isfunction(value) or inspect.isbuiltin(value) or isinstance(value, Tensor) or depth > 3:
        return id(value)
    attributes = sorted(getattr(value, "__dict__", {}).items())
    return (type(value), tuple((k, fingerprint(v, depth + 1)) for k, v in attributes))
