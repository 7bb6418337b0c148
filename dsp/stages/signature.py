"""The tensors of one call, matched to a pattern by the parameter names of the module's forward."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.stages.notation import BATCH_NAMES, Ambiguous, NotationError, StagePattern, TensorPattern, solve_sizes
from dsp.support.formatting import DIGITS
from dsp.support.private import children_of
from dsp.support.tensors import is_shard, tensors_in

Slot = int | str | tuple[int | str, int]  # a place in args or kwargs; of an item of a list there, with its index


@dataclass(frozen=True)
class Bound:
    """One tensor argument of a call and its pattern (None: no pattern mentions it, so it is replicated)."""

    param: str
    slot: Slot
    tensor: Tensor
    pattern: TensorPattern | None


class Arguments:
    """The arguments of one call, which can be replaced one by one."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = list(args), dict(kwargs)

    def replace(self, bound: Bound, tensor: Any) -> None:
        put(self.args, self.kwargs, bound.slot, tensor)


def put(args: list[Any], kwargs: dict[str, Any], slot: Slot, value: Any) -> None:
    """Replace an argument, or an item of a list or tuple argument, of which a copy is made."""
    place, item = slot if isinstance(slot, tuple) else (slot, None)
    container: Any = args if isinstance(place, int) else kwargs
    if item is not None:
        items = list(container[place])
        items[item] = value
        value = type(container[place])(items)
    container[place] = value


def got(args: Sequence[Any], kwargs: Mapping[str, Any], slot: Slot) -> Any:
    """The argument in a slot, or the item of it."""
    place, item = slot if isinstance(slot, tuple) else (slot, None)
    value = args[place] if isinstance(place, int) else kwargs[place]
    return value if item is None else value[item]


class Signature:
    """A pattern and the parameters of a module's forward: binds the tensors of a call to the pattern."""

    def __init__(self, module: nn.Module, pattern: StagePattern, label: str) -> None:
        self.label, self.pattern = label, pattern
        while "_orig_mod" in children_of(module):
            module = children_of(module)["_orig_mod"]
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
                    f"{label}: forward of {type(module).__name__} has no parameter {p.param!r}; it has "
                    f"{', '.join(self.names)}" + (f". Did you mean {close[0]!r}?" if close else "")
                )
        self.named = {p.param: p for p in pattern.inputs if p.param}
        self.bare = [p for p in pattern.inputs if not p.param]

    def attribute(self, p: TensorPattern) -> int | None:
        """The size of a dim by an attribute of the model or its config, as in 'num_frames=t'."""
        owners = (self.module, getattr(self.module, "config", None)) if self.pattern.root and len(p.axes) == 1 else ()
        sizes = (getattr(owner, p.param or "", None) for owner in owners)
        return next((value for value in sizes if type(value) is int), None)

    def integers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The int arguments of one call, defaults included."""
        arguments = {**self.defaults, **dict(zip(self.positional, args)), **kwargs}
        return {name: value for name, value in arguments.items() if type(value) is int}

    def numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
        """The sizes that the pattern states by numbers, int arguments or attributes."""
        sizes, integers = dict(self.pattern.sizes), self.integers(args, kwargs)
        for p in self.named.values():
            value = integers.get(p.param or "", self.attribute(p) if p.param not in self.names else None)
            if value is not None and len(p.names) == 1:
                sizes[p.names[0]] = value
        return sizes

    def slots(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, int | str, Any]]:
        """The name, place and value of each argument of one call, in the order of the signature."""
        positional, last = self.positional, len(self.names)
        slots: list[tuple[str, int | str, Any]] = [
            (positional[i] if i < len(positional) else f"{self.open_args}[{i - len(positional)}]", i, v)
            for i, v in enumerate(args)
        ]
        return slots + [(k, k, kwargs[k]) for k in sorted(kwargs, key=lambda k: self.names.get(k, last))]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Arguments, list[Bound]]:
        """The tensors of one call, in the order of the signature."""
        bare = iter(self.bare)
        bound: list[Bound] = []
        for param, slot, value in self.slots(args, kwargs):
            if isinstance(value, Tensor):
                pattern = self.named[param] if param in self.named else next(bare, None)
                bound.append(Bound(param, slot, value, pattern))
            elif value is None:
                continue
            elif listed(value) and self.pattern.root and (param in self.named or not self.pattern.inputs):
                bound += items(param, slot, value, self.named.get(param))
            elif param in self.named:
                if self.pattern.root and type(value) is int and len(self.named[param].names) == 1:
                    continue  # the size of a dim
                raise NotationError(
                    f"{self.label}: the pattern names {param!r}, whose value is a {type(value).__name__}, not a tensor"
                    + (", nor a list or tuple of tensors" if self.pattern.root else "")
                )
            elif any(isinstance(t, DTensor) or is_shard(t) for t in nested(value)):
                raise self.hidden(param, value)
        if self.bare and not any(b.pattern is self.bare[0] for b in bound):
            raise NotationError(f"{self.label}: no tensor argument is left for the pattern '{self.bare[0]}'")
        return Arguments(args, kwargs), bound

    def nested(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Tensor, NotationError]]:
        """The tensors inside lists and dicts of a call, which no pattern can name, each with the error for it."""
        for param, _, value in self.slots(args, kwargs):
            for t in nested(value):
                yield t, self.hidden(param, value)

    def hidden(self, param: str, value: Any) -> NotationError:
        return NotationError(
            f"{self.label} gets a sharded tensor inside the {type(value).__name__} {param!r}, where no pattern "
            "can name it; pass it as an argument of its own"
        )


def nested(value: Any) -> list[Tensor]:
    """The tensors inside a list, tuple or dict."""
    return tensors_in(value) if isinstance(value, (list, tuple, dict)) else []


def listed(value: Any) -> bool:
    """Tell whether a value is a list or tuple of tensors."""
    return type(value) in (list, tuple) and bool(value) and all(isinstance(t, Tensor) for t in value)


def items(param: str, slot: int | str, tensors: Sequence[Tensor], p: TensorPattern | None) -> list[Bound]:
    """The tensors of a list argument. A dim whose length differs between them gets a numbered name for each tensor."""
    if p is None:
        return [Bound(f"{param}[{n}]", (slot, n), t, None) for n, t in enumerate(tensors)]
    alike = [i for i, axis in enumerate(p.axes) if len({t.shape[i : i + 1] for t in tensors}) == 1]
    bounds = []
    for n, t in enumerate(tensors):
        uneven = [name for i, axis in enumerate(p.axes) if i not in alike for name in axis]
        names = {name: name + str(n + 1).translate(DIGITS) for name in uneven}
        axes = tuple(tuple(names.get(name, name) for name in axis) for axis in p.axes)
        computed = frozenset(names.get(name, name) for name in p.computed)
        item = f"{param}[{n}]"
        bounds.append(Bound(item, (slot, n), t, replace(p, axes=axes, computed=computed, param=item)))
    return bounds


def sizes_of_root(model: nn.Module, root: StagePattern | None, args: Any, kwargs: Any) -> dict[str, int]:
    """The dim sizes that the root pattern fixes for one call."""
    if root is None:
        return {}
    signature = Signature(model, root, "the model")
    _, bound = signature.bind(args, kwargs)
    tensors = [(b.pattern, tuple(b.tensor.shape)) for b in bound if b.pattern]
    numbers = signature.numbers(args, kwargs)
    try:
        sizes = solve_sizes(tensors, numbers, label="the model")
    except Ambiguous as error:
        # (b t) of 32, and one int argument that can be the length of t: num_frames=16
        integers = {k: v for k, v in signature.integers(args, kwargs).items() if v > 1 and error.size % v == 0}
        dims = [dim for dim in error.unknown if dim not in BATCH_NAMES]
        if len(dims) != 1 or len(error.unknown) != 2 or len(set(integers.values())) != 1:
            candidates = ", ".join(f"{k}={v}" for k, v in integers.items())
            hint = f". Int arguments of the model's forward that could state a size: {candidates}" if candidates else ""
            raise NotationError(f"{error}{hint}") from None
        numbers = {**numbers, dims[0]: next(iter(integers.values()))}
        sizes = solve_sizes(tensors, numbers, label="the model")
    for dim, size in numbers.items():
        if sizes.setdefault(dim, size) != size:
            raise NotationError(f"the model: '{root.text}' says {dim}={size}, but in the inputs it is {sizes[dim]}")
    return sizes
