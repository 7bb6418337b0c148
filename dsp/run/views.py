"""Copies of a tensor in other layouts: each is made once for the tensor and all its views."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.layout import Cut
from dsp.rules import Frame, GlueError, Operand, Outcome, without_operands
from dsp.sharded import Sharded, plain
from dsp.tensors import NO, version

NOTHING = nullcontext()


def differentiable(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Copies are kept for later uses: made under no_grad, too, they lead back to what was made with a gradient."""
    if torch.is_grad_enabled() or all(t.grad_fn is None for t in tensors):
        return NOTHING
    return torch.enable_grad()


@dataclass(eq=False)
class Copies:
    """A tensor's copies in other layouts (None: whole), made when it had been written `version` times; it holds them.

    The tensor's own part is not stored: it is a view of the tensor, and storing it would make a reference cycle.
    """

    version: int
    made: dict[Cut | None, Tensor] = field(default_factory=dict)


class ViewBase:
    """The tensor that a chain of views started from, its part, and its copies in other layouts."""

    def __init__(self, t: Sharded) -> None:
        self.tensor, self.cut, self.shape = t, t.at.cut, t.at.shape
        found: Copies | None = t.copies
        if found is None or found.version != version(t):  # written in place: the copies are of the past
            found = t.copies = Copies(version(t))
        self.copies = found

    @cached_property
    def local(self) -> Tensor:
        with NO():
            node, asks = self.tensor.grad_fn, self.tensor.requires_grad
        with NOTHING if node is None else torch.enable_grad():
            local = plain(self.tensor)
        # a view that was made without gradient: torch says it has one
        return local.detach() if asks and node is None else local

    @property
    def cuts(self) -> list[Cut | None]:
        """Those in which there is a copy, its own first."""
        return [self.cut, *self.copies.made]

    def __contains__(self, cut: Cut | None) -> bool:
        return cut == self.cut or cut in self.copies.made

    def __getitem__(self, cut: Cut | None) -> Tensor:
        return self.local if cut == self.cut else self.copies.made[cut]

    def __setitem__(self, cut: Cut | None, copy: Tensor) -> None:
        self.copies.made[cut] = copy


def view_base(t: Sharded) -> ViewBase:
    """The base of a view, or `t` itself, with its copies."""
    while (view := t.viewed_from) is not None:
        t = view[0]
    return ViewBase(t)


def forget(t: Sharded) -> None:
    """Drop the copies of a tensor that was written, or a view of it."""
    view_base(t).copies.made.clear()


def views_of(t: Sharded) -> list[View]:
    """The operations that made `t` of its base, in order."""
    views = []
    while (view := t.viewed_from) is not None:
        t, made = view
        views.append(made)
    return views[::-1]


def seen(views: Sequence[View], cut: Cut) -> Cut | None:
    """The cut of a view when its base is cut so; None if the cut cannot pass."""
    found: Cut | None = cut
    for view in views:
        again = view.under(found)
        if again is None:
            return None
        found = again.cut
    return found


HERE = object()  # in arguments, where the tensor comes that a view is taken of


class Replay(NamedTuple):
    """A view of a part: the call, and where the result is cut."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: Cut | None

    def of(self, local: Tensor) -> Any:
        return self.call(*[local if a is HERE else a for a in self.args], **self.kwargs)


class View:
    """An operation that made the same data in another shape, and how it does so under other cuts of its argument."""

    def __init__(self, func: Any, frame: Frame) -> None:
        self.func, self.frame = func, frame
        self.found: dict[Cut | None, Replay | None] = {}
        self.near: dict[Any, Cut | None] = {}  # of chains that end here, see `source` of a run

    def under(self, cut: Cut | None) -> Replay | None:
        """With its argument cut so, or whole; None if the cut cannot pass."""
        if cut not in self.found:
            self.found[cut] = self.again(cut)
        return self.found[cut]

    def again(self, cut: Cut | None) -> Replay | None:
        x = Operand(self.frame.args[0].shape, cut)
        frame = replace(self.frame, args=(x, *self.frame.args[1:]))
        try:
            outcome = frame.outcome() if cut is not None else Outcome(None)
        except GlueError:
            return None
        # others give a shape alone, as those of view_as
        table: dict[int, Any] = {id(o): torch.empty(o.shape, device="meta") for o in frame.operands()} | {id(x): HERE}
        args = without_operands(frame.args if outcome.args is None else outcome.args, table)
        return Replay(
            outcome.func or self.func, args, frame.kwargs if outcome.kwargs is None else outcome.kwargs, outcome.cut
        )
