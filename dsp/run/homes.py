"""Copies of a tensor in other layouts: each is made once for the tensor and all its views."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dsp.layout import Cut
from dsp.rules import RULES, Frame, GlueError, Operand
from dsp.sharded import Sharded, plain
from dsp.tensors import version


def differentiable(*tensors: Tensor) -> AbstractContextManager[Any]:
    """Copies are kept for later uses: made under no_grad, too, they lead back to what was made with a gradient."""
    return torch.set_grad_enabled(torch.is_grad_enabled() or any(t.grad_fn is not None for t in tensors))


@dataclass(eq=False)
class Home:
    """The tensor that a chain of views started from, and its copies in other layouts (None: whole)."""

    local: Tensor
    cut: Cut
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.version = version(self.local)
        self._copies: dict[Cut | None, Tensor] = {self.cut: self.local}

    @property
    def copies(self) -> dict[Cut | None, Tensor]:
        if version(self.local) != self.version:  # written in place: the copies are of the past
            self.forget()
        return self._copies


def home_of(t: Sharded) -> Home:
    """Of the tensor that `t` is a view of, or of itself."""
    while (view := t.__dict__.get("_dsp_view")) is not None:
        t = view[0]
    home = t.__dict__.get("_dsp_home")
    if home is None:
        with differentiable(t):
            local = plain(t)
        if t.requires_grad and t.grad_fn is None:  # a view that was made without gradient: torch says it has one
            local = local.detach()
        home = t._dsp_home = Home(local, t.at.cut, t.at.shape)  # type: ignore[attr-defined]
    return home


def views_of(t: Sharded) -> list[tuple[Any, Frame]]:
    """What made `t` of its home, in order."""
    views = []
    while (view := t.__dict__.get("_dsp_view")) is not None:
        t, func, frame = view
        views.append((func, frame))
    return views[::-1]


def seen(views: Sequence[tuple[Any, Frame]], cut: Cut) -> Cut | None:
    """Where a cut of the home lies in its view; None if it cannot pass."""
    found: Cut | None = cut
    for _, frame in views:
        again = replace(frame, args=(Operand(frame.args[0].shape, found), *frame.args[1:]))
        try:
            found = RULES[frame.name](again).cut
        except GlueError:
            return None
    return found
