"""How one operation runs on local parts, for all operations of one key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.layout import At, Cut
from dsp.plan.script import Via
from dsp.rules import Frame, Outcome
from dsp.sharded import Sharded

RECIPES = 65536  # kept for a plan


@dataclass(eq=False)
class Recipe:
    """How one operation runs on local parts, for all operations of one key.

    frame: the call, with Operands for tensors; wanted: how each tensor has to be cut (None: whole); via: the copies to
    be made of each first; outcome: None where it runs on whole tensors; push: where the plan wants each result; view:
    the result is the same data. A `quick` one moves nothing: once it ran, `ats` tell where its results lie.
    """

    frame: Frame
    wanted: list[Cut | None]
    via: list[list[Via]]
    outcome: Outcome | None
    push: list[Cut | None]
    view: bool
    quick: Quick | None
    ats: tuple[At, ...] = ()


class Quick(NamedTuple):
    """A call on local parts: of what, with which arguments after the first (None: its own), and which to cut."""

    call: Any
    rest: tuple[Any, ...] | None
    parts: list[tuple[int, Cut]]
    aliases: bool  # its results may be views of the first argument


class Odd(Exception):
    """An argument that no key can be made of, or a tensor that has to be opened first."""


def key_of(value: Any) -> Any:
    """What of an argument a recipe depends on. Equal numbers of two types are two keys: `x[True]` is not `x[1]`."""
    kind = type(value)
    if kind is Sharded:
        return value.at
    if kind is int or value is None:
        return value
    if kind is Tensor or kind is nn.Parameter:
        return value.shape
    if kind is tuple or kind is list or kind is torch.Size:
        return kind, *map(key_of, value)
    if kind is slice:
        return kind, key_of(value.start), key_of(value.stop), key_of(value.step)
    if isinstance(value, (DTensor, Sharded)):
        raise Odd
    if isinstance(value, Tensor):
        return kind, value.shape
    return kind, value
