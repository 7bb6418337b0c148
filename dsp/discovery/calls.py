"""One call of a submodule: its tensors, the dims along which it is independent, the operations inside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from dsp.comm.layout import Cut
from dsp.core.record import Ref
from dsp.discovery.dims import Axes, Dim, GlueOp, atoms, places


@dataclass
class Group:
    """One dim along which a call is independent: its place in each tensor argument and in each output."""

    primary: tuple[int, Cut]  # the argument, and the place in it, from which the search started
    cuts: tuple[Cut | None, ...]
    outputs: tuple[Cut, ...]
    size: int


@dataclass(eq=False)
class ModuleCall:
    """One call of a submodule, number `index` of the record, with the findings of the last pass.

    params, operands: its tensor arguments; tensors: all tensors among its arguments; args, kwargs: copies of its
    arguments, to call it again; body: the operations and calls inside it, in order.
    """

    path: str
    module: nn.Module
    index: int
    params: list[str]
    operands: list[Ref]
    tensors: list[Ref]
    args: Any
    kwargs: Any
    results: list[Ref] = field(default_factory=list)
    body: list[Any] = field(default_factory=list)
    inputs: list[Axes] = field(default_factory=list)
    lives: list[bool] = field(default_factory=list)
    outputs: list[Axes] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    ops: list[GlueOp] = field(default_factory=list)
    hides: bool = False  # some of its tensors are inside lists and dicts, where no pattern can name them
    tested: bool = False
    local: bool = False  # acts on each position separately: computes over at most one axis, the channels

    @property
    def children(self) -> list[ModuleCall]:
        return [node for node in self.body if isinstance(node, ModuleCall)]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [t.shape for t in self.operands]

    @property
    def live(self) -> bool:
        return any(self.lives)

    def group(self, arg: int, cut: Cut) -> int | None:
        return next((n for n, g in enumerate(self.groups) if g.cuts[arg] == cut), None)

    def slots(self) -> Iterator[tuple[int, Dim, Cut]]:
        """Every dim of the arguments that may be sharded: (argument, dim, place)."""
        for i, axes in enumerate(self.inputs):
            if self.lives[i]:
                yield from ((i, d, c) for d, c in places(known(axes)))

    def free(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is not None}

    def blocked(self) -> set[Dim]:
        return {d for i, d, c in self.slots() if self.group(i, c) is None}

    def copy(self) -> ModuleCall:
        """A copy of this call and the calls inside it, whose groups may be changed."""
        return replace(self, groups=[*self.groups], body=[child.copy() for child in self.children])

    def walk(self) -> Iterator[ModuleCall]:
        yield self
        for child in self.children:
            yield from child.walk()


def known(axes: Axes) -> Axes:
    """The dims of a tensor, each replaced by the atoms known so far."""
    return [atoms(axis) for axis in axes]


def dim_at(axes: Axes, cut: Cut, size: int) -> tuple[Dim, ...] | None:
    """The dims at a place of a tensor; None if no dims fill exactly this place."""
    outer, dims = 1, []
    for d in axes[cut.dim]:
        if cut.folds <= outer and outer * d.size <= cut.folds * size:
            dims.append(d)
        outer *= d.size
    return tuple(dims) if math.prod(d.size for d in dims) == size else None


def acts_locally(node: ModuleCall, outputs: list[tuple[int, ...]]) -> bool:
    blocked = {(i, c.dim) for i, _, c in node.slots() if node.group(i, c) is None}
    if len(blocked) > len({i for i, _ in blocked}):
        return False
    for k, shape in enumerate(outputs):
        sizes = list(shape)
        for g in node.groups:
            sizes[g.outputs[k].dim] //= g.size
        if sum(s > 1 for s in sizes) > 1:
            return False
    return True


def structure(node: ModuleCall) -> Any:
    """The dims of a call's arguments as numbers: equal numbers are the same dim, several on one axis a fold."""
    numbers: dict[Dim, int] = {}
    return tuple(
        (live, tuple(tuple((numbers.setdefault(d, len(numbers)), d.size) for d in axis) for axis in known(axes)))
        for live, axes in zip(node.lives, node.inputs)
    )
