"""Views between stages, the base tensor that they view, and the base's copies in other layouts.

The base is copied once per layout, for itself and all its views; the views are then replayed on the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dsp.layout import Axis, Cut, separable
from dsp.moves import Part, gather_local, switch_all, switch_local
from dsp.plan.script import Via
from dsp.sharded import Sharded, plain
from dsp.tensors import NO, version

NOTHING = nullcontext()


def differentiable(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Enable autograd if a source has a gradient, even under no_grad: kept copies may have differentiable uses."""
    if torch.is_grad_enabled() or all(t.grad_fn is None for t in tensors):
        return NOTHING
    return torch.enable_grad()


@dataclass(eq=False)
class Copies:
    """A tensor's copies in other layouts (None: replicated), stored on the tensor.

    version, asks: the tensor's version counter and requires_grad when they were made (an autograd.Function's result
    requires no gradient until it ends). The own shard, a view of the tensor, is not stored: it would make a cycle.
    """

    version: int
    asks: bool
    made: dict[Cut | None, Tensor] = field(default_factory=dict)


class ViewBase:
    """The tensor that a chain of views started from, its shard, and its copies in other layouts."""

    def __init__(self, t: Sharded) -> None:
        self.tensor, self.cut, self.shape = t, t.at.cut, t.at.shape
        with NO():
            asks = t.requires_grad
        found: Copies | None = t.copies
        if found is None or (found.version, found.asks) != (version(t), asks):  # the copies are outdated
            found = t.copies = Copies(version(t), asks)
        self.copies = found

    @cached_property
    def local(self) -> Tensor:
        with NO():
            node, asks = self.tensor.grad_fn, self.tensor.requires_grad
        with NOTHING if node is None else torch.enable_grad():
            local = plain(self.tensor)
        # a view made under no_grad: torch says that it requires a gradient
        return local.detach() if asks and node is None else local

    @property
    def cuts(self) -> list[Cut | None]:
        """The cuts that are available: the base's own first, then those of the copies."""
        return [self.cut, *self.copies.made]

    def __contains__(self, cut: Cut | None) -> bool:
        return cut == self.cut or cut in self.copies.made

    def __getitem__(self, cut: Cut | None) -> Tensor:
        return self.local if cut == self.cut else self.copies.made[cut]

    def __setitem__(self, cut: Cut | None, copy: Tensor) -> None:
        self.copies.made[cut] = copy


class View(Protocol):
    """An operation that made the same data in another shape."""

    near: dict[Any, Cut | None]  # the base's cuts found by `Views.source`, for chains that end with this view

    def under(self, cut: Cut | None) -> Replay | None:
        """The view of an argument in this cut (None: replicated); None if the view cannot be taken of such shards."""


class Replay(Protocol):
    """A view as taken of a local tensor, and the cut of its result."""

    @property
    def cut(self) -> Cut | None: ...
    def of(self, local: Tensor) -> Any: ...


def viewed(t: Sharded) -> tuple[Sharded, View] | None:
    """The tensor that `t` views, and the view; None if t's backward is now an autograd.Function's, not the view's."""
    if t.viewed_from is not None:
        with NO():
            node = t.grad_fn
        if isinstance(node, BackwardCFunction):
            t.viewed_from = None
    return t.viewed_from


def view_base(t: Sharded) -> ViewBase:
    """The base of `t`, with its copies; `t` itself is the base if it is not a view."""
    while (view := viewed(t)) is not None:
        t = view[0]
    return ViewBase(t)


def forget(t: Sharded) -> None:
    """Drop the copies of the base of `t`, after a write in place into `t`."""
    view_base(t).copies.made.clear()


def views_of(t: Sharded) -> list[View]:
    """The views that lead from the base to `t`, in order."""
    views = []
    while (view := viewed(t)) is not None:
        t, made = view
        views.append(made)
    return views[::-1]


def seen(views: Sequence[View], cut: Cut) -> Cut | None:
    """The cut of a view of a base in this cut; None if one of the views cannot be taken of such shards."""
    found: Cut | None = cut
    for view in views:
        again = view.under(found)
        if again is None:
            return None
        found = again.cut
    return found


class Views:
    """Tensors between stages in other layouts: each copy is made once, for a tensor and all its views."""

    def __init__(self, axis: Axis, before_copy: Callable[[Tensor], None]) -> None:
        """before_copy: called with the local shard of a base before the base, or a view of it, moves to another cut."""
        self.axis, self.before_copy = axis, before_copy

    def bring(
        self, tensors: Sequence[Tensor], shells: Sequence[Sharded | None], cuts: Sequence[Cut | None],
        via: Sequence[Sequence[Via]],
    ) -> list[Tensor]:  # fmt: skip
        """The operands of an operation in its cuts (None: replicated); operands that have theirs stay `Sharded`."""
        if any(via):
            self.copy_first(shells, via)
        moving = [(s, c) for s, c in zip(shells, cuts) if s is not None and s.at.cut != c]
        moved = iter(self.move_all(moving) if moving else ())
        parts: list[Tensor] = []
        for t, s, c in zip(tensors, shells, cuts):
            if s is None:
                parts.append(t if c is None else self.axis.narrow(t, c))
            else:
                parts.append(s if s.at.cut == c else next(moved))
        return parts

    def move(self, t: Sharded, cut: Cut | None) -> Tensor:
        """This rank's shard under another cut (None: the full tensor)."""
        return self.move_all([(t, cut)])[0]

    def move_all(self, wanted: Sequence[tuple[Sharded, Cut | None]]) -> list[Tensor]:
        """Several moves at one place. A base moves once for all its views; small switches share one call."""
        if all(cut == t.at.cut for t, cut in wanted):
            return [plain(t) for t, _ in wanted]
        for t, cut in wanted:
            if cut != t.at.cut:  # a view may see a write that its base has missed, and a copy of the base would lack
                self.before_copy(view_base(t).local)
        todo: dict[tuple[int, Cut], tuple[ViewBase, Cut]] = {}
        bases = [view_base(t) for t, _ in wanted]
        sources = [self.source(t, cut, base) for (t, cut), base in zip(wanted, bases)]
        for base, source in zip(bases, sources):
            if isinstance(source, Cut) and source not in base:
                if None in base:
                    self.narrow(base, source)
                else:
                    todo.setdefault((id(base.copies), source), (base, base.cut))
        if todo:
            self.switch(todo)
        return [self.view(t, cut, source, base) for (t, cut), source, base in zip(wanted, sources, bases)]

    def source(self, t: Sharded, cut: Cut | None, base: ViewBase) -> Cut | Literal["whole", "view"]:
        """The cut of a tensor's base that gives the tensor in the wanted cut; "view" if no cut of the base does.

        If both cuts are of one dim, no all-to-all leads from one to the other: the base is gathered first.
        """
        if cut is None:
            return "whole"
        if cut == t.at.cut:
            return base.cut
        found, views = cut, views_of(t)
        if views:
            cuts = base.cuts
            key = (cut, *cuts, *views[:-1])
            known = views[-1].near
            if key not in known:
                dims = range(len(base.shape))
                folds = (Cut(d, k) for d, size in enumerate(base.shape) for k in range(2, size) if size % k == 0)
                folds = (Cut(d, cut.outer) for d in dims) if cut.joined else folds
                candidates = chain(cuts, map(Cut, dims), folds)
                known[key] = next((c for c in candidates if c is not None and seen(views, c) == cut), None)
            near = known[key]
            if near is None:
                return "view"
            found = near
        if found not in base and not separable(base.shape, base.cut, found, self.axis.size):
            self.gather(base)
        return found

    def gather(self, base: ViewBase, src: Cut | None = None) -> Tensor:
        made = base.copies.made
        if None not in made:
            with differentiable(base.local):
                src = src or base.cut
                made[None] = gather_local(base[src], src, base.shape, self.axis)
        return made[None]

    def narrow(self, base: ViewBase, dst: Cut) -> None:
        with differentiable(base.local):
            base[dst] = self.axis.narrow(base[None], dst)

    def switch(self, todo: Mapping[tuple[int, Cut], tuple[ViewBase, Cut]]) -> None:
        """Switch bases into new cuts, each from the cut named in `todo`; small switches share one call."""
        parts = [Part(base[src], src, dst, base.shape) for (_, dst), (base, src) in todo.items()]
        with differentiable(*[p.local for p in parts]):
            made = switch_all(parts, self.axis)
        for ((_, dst), (base, _)), local in zip(todo.items(), made):
            base[dst] = local

    def copy_first(self, tensors: Sequence[Sharded | None], via: Sequence[Sequence[Via]]) -> None:
        """Make the copies that the plan makes here, each from the copy that the plan found cheapest."""
        todo: dict[tuple[int, Cut], tuple[ViewBase, Cut]] = {}
        for base, src, dst in [(view_base(t), *way) for t, ways in zip(tensors, via) if t is not None for way in ways]:
            if src is not None and (id(base.copies), src) in todo:
                self.switch(todo)
                todo.clear()
            if dst in base or src not in base:
                continue
            if src is None and dst is not None:
                self.narrow(base, dst)
            elif dst is None and src is not None:
                self.gather(base, src)
            elif src is not None and dst is not None:
                todo[id(base.copies), dst] = base, src
        if todo:
            self.switch(todo)

    def view(self, t: Sharded, cut: Cut | None, source: Cut | Literal["whole", "view"], base: ViewBase) -> Tensor:
        if cut == t.at.cut:
            return plain(t)
        if source == "view":
            assert cut is not None
            if None not in base and separable(t.at.shape, t.at.cut, cut, self.axis.size):
                return switch_local(plain(t), t.at.cut, cut, t.at.shape, self.axis)
            return self.axis.narrow(self.view(t, None, "whole", base), cut)
        at = None if source == "whole" else source
        local = self.gather(base) if at is None else base[at]
        views = views_of(t)
        for view in views:
            again = view.under(at)
            assert again is not None  # `source` has checked this
            local, at = again.of(local), again.cut
        with NO():
            made = t.grad_fn
        # a view made under no_grad has no gradient in the new layout either
        return local.detach() if views and made is None else local
