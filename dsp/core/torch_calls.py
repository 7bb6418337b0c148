"""An operation between stages as a call: the tensors among its arguments, and the error of one that cannot run."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from dsp.comm.layout import Cut
from dsp.support.private import schemas
from dsp.support.source_lines import lines_of


class GlueError(RuntimeError):
    """An operation between stages that cannot run on a sharded tensor without communication or wrong numbers.

    Its text ends with a line of the user's code: `line`, or else the innermost one that the error came through.
    reason: the explanation of a rule, without the rest of the text.
    """

    line = reason = ""

    def __str__(self) -> str:
        lines = lines_of(self)
        line = self.line or (lines[-1].short if lines else "")
        return super().__str__() + (f" (at {line})" if line else "")


def instead_of(name: str) -> str:
    """The advice to make a new tensor, for the name of an operation that changes its tensor in place; "" for others."""
    plain, in_place, _ = name.partition("_in_place")
    return f"Make a new tensor instead, as in y = y.{plain}(...)" if in_place else ""


@dataclass(eq=False)
class Operand:
    """A tensor argument: its global shape and its cut (None: replicated)."""

    shape: tuple[int, ...]
    cut: Cut | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


def tensor_args(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operation's arguments, in the order in which `Frame` numbers them."""
    tensors: list[torch.Tensor] = []
    for a in (*args, *kwargs.values()):
        if isinstance(a, torch.Tensor):
            tensors.append(a)
        elif type(a) in (list, tuple):
            tensors.extend(tensor_args(a, {}))
    return tensors


@lru_cache(maxsize=8192)
def positions(func: Any) -> tuple[tuple[str, ...], ...]:
    """The names of a function's positional arguments, for each form in which it may be called."""
    signatures = [[a.name for a in schema.arguments if not a.kwarg_only] for schema in schemas(func)]
    if not signatures:
        with suppress(TypeError, ValueError):
            kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.POSITIONAL_ONLY
            signatures = [[p.name for p in inspect.signature(func).parameters.values() if p.kind in kinds]]
    return tuple(dict.fromkeys(tuple("input" if name == "self" else name for name in names) for names in signatures))


TENSORLESS = frozenset({bool, int, float, str, type(None), torch.dtype})  # types of values that hold no tensor
# NumPy's names of arguments, which torch's functions written in C++ take as well as those of their schemas
NUMPY_NAMES = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}


def usual_call(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call as rules read it: its arguments have torch's names, and its tensors are in their positions, where keywords
    named them and all before them are given. It stays as it is if no keyword is one of `NUMPY_NAMES`, and the types of
    all that keywords name are `TENSORLESS`."""
    if not NUMPY_NAMES.keys().isdisjoint(kwargs):
        kwargs = in_torch_names(func, kwargs)
    if not tensor_args((), kwargs) or kwargs.get("out") is not None:
        return args, kwargs
    for names in positions(func):
        placed, named = list(args), dict(kwargs)
        while tensor_args((), named) and len(placed) < len(names) and names[len(placed)] in named:
            placed.append(named.pop(names[len(placed)]))
        if not tensor_args((), named):
            return tuple(placed), named
    return args, kwargs


def in_torch_names(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by their names in a function's schemas, where NumPy's were given."""
    names = {a.name for schema in schemas(func) for a in schema.arguments}
    names |= {"input"} if "self" in names else set()
    numpy_names = {k: name for k, name in NUMPY_NAMES.items() if k not in names and name in names}
    return {numpy_names.get(k, k): v for k, v in kwargs.items()}


def with_operands(value: Any, new: Iterator[Any]) -> Any:
    if isinstance(value, (torch.Tensor, Operand)):
        return next(new)
    if type(value) in (list, tuple):
        return type(value)(with_operands(v, new) for v in value)
    return value


def replaced(args: Any, kwargs: Mapping[str, Any], new: Iterator[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with the tensors among its arguments replaced, in order."""
    return with_operands(tuple(args), new), {k: with_operands(v, new) for k, v in kwargs.items()}


def without_operands(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return tensors[id(value)]
    if type(value) in (list, tuple):
        nested = (Operand, list, tuple)
        return type(value)([without_operands(v, tensors) if isinstance(v, nested) else v for v in value])
    return value
