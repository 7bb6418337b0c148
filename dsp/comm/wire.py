"""The names of the formats in which a switch and its adjoint travel; by default a tensor travels as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from dsp.comm.formats import Format
    from dsp.planner import Packed, Value

SAME, AUTO = "same", "auto"
STOCHASTIC = "-stochastic"  # suffix of a format's name: gradients are rounded stochastically


def formats() -> dict[str, Format]:
    """The formats in fewer bits, by name; their module is loaded when first needed."""
    return import_module("dsp.comm.formats").FORMATS


@lru_cache
def format_for(wire: str, real: bool, itemsize: int) -> Format | None:
    """The format of a tensor with elements of `itemsize` bytes, floating-point if `real`; None: it travels as it is."""
    name = wire.removesuffix(STOCHASTIC)
    if name == SAME or not real or itemsize <= formats()[name].dtype.itemsize:
        return None
    return replace(formats()[name], stochastic=wire != name)


def format_of(wire: str, dtype: torch.dtype) -> Format | None:
    return format_for(wire, dtype.is_floating_point, dtype.itemsize)


class Wire(NamedTuple):
    """The names of the formats in which switches travel: forward, and their gradients."""

    forward: str = SAME
    backward: str = SAME

    @classmethod
    def of(cls, given: Any) -> Wire:
        """The formats that a user names: one for both directions, or one for each. Raises ValueError for others."""
        if given == SAME:
            return cls()
        if given == AUTO:
            raise ValueError(
                f"wire={AUTO!r} is not accepted here: the best format depends on the links, so a plan chooses it, by "
                "its hardware=. Name the format that dsp.plan or dsp.choose finds, or train with parallel=auto"
            )
        named = given if isinstance(given, Mapping) else dict.fromkeys(cls._fields, given)
        valid = (SAME, *formats())
        if not named.keys() <= {*cls._fields} or any(name not in valid for name in named.values()):
            wrong = next((v for v in named.values() if v not in valid), given)
            raise ValueError(
                f"wire: expected one of {', '.join(valid)} (or {{'forward': ..., 'backward': ...}}), got {wrong!r}"
            )
        return cls(**named)

    @property
    def names(self) -> tuple[str, str]:
        """The formats of an op and of its adjoint, which rounds stochastically."""
        return self.forward, self.backward + STOCHASTIC * (self.backward != SAME)

    def priced(self, value: Value) -> Value:
        """The planner's value of a tensor, with the bytes that its switches, and those of its gradient, take."""

        def packed(name: str) -> Packed:
            form = format_for(name, value.real, value.itemsize)
            return None if form is None else form.nbytes

        return value if self == AS_IT_IS else replace(value, packed=(packed(self.forward), packed(self.backward)))

    def __str__(self) -> str:
        return f"switches travel as {self.forward}, their gradients as {self.backward}"


AS_IT_IS = Wire()


def permitted(choice: Any) -> tuple[Wire, ...]:
    """The formats that a user permits, from the exact one to the fewest bits. "auto" leaves int8 out: it has as many
    bytes as fp8, and larger errors in blocks with outliers."""
    return (AS_IT_IS, Wire.of("bf16"), Wire.of("fp8")) if choice == AUTO else (Wire.of(choice),)
