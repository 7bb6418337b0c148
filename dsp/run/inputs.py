"""The inputs of a call: their signature, their splits, and their true gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.gradients import connected_local, is_graph_start
from dsp.layout import At, Axis, Cut, cut_of, cuts_of
from dsp.moves import ScaleGradient, SplitInput, WholeInput
from dsp.private import FakeTensor, is_view, pytree
from dsp.sharded import Sharded, carry
from dsp.signature import Signature, Slot, got, put
from dsp.tensors import tensors_in

LEAVES = frozenset({Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None)})  # the usual arguments


def without_data(value: Any) -> bool:
    return any(isinstance(t, FakeTensor) for t in tensors_in(value))


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's inputs, and the spec of their places: a pytree's, or (number of args, *keyword names)."""
    leaves = [*args, *kwargs.values()]
    if LEAVES.issuperset(map(type, leaves)):
        return leaves, (len(args), *kwargs)
    return pytree.tree_flatten((args, kwargs))


def describe(leaves: list[Any], spec: Any) -> Any:
    """The signature of a call's inputs: the properties on which a plan depends."""
    return spec, *map(described, leaves)


def described(v: Any) -> Any:
    if isinstance(v, Tensor):
        if isinstance(v, DTensor):
            return v.shape, v.dtype, v.requires_grad, v.placements
        dense = v.layout != torch.strided or v.is_contiguous()  # else a reshape of it may make a copy
        return v.shape, v.dtype, v.requires_grad, None if dense else v.stride()
    if isinstance(v, (bool, int, str)) or v is None:
        return type(v), v
    return type(v).__qualname__


def given_cuts(signature: Signature | None, args: Any, kwargs: Any) -> dict[str, Cut]:
    """The cuts of the inputs that are passed sharded, by parameter."""
    bound = signature.bind(args, kwargs)[1] if signature is not None else []
    return cuts_of({b.param: b.tensor.placements[0] for b in bound if isinstance(b.tensor, DTensor)})


class DeclaredInput(NamedTuple):
    """A declared input. slot: where it stands in args or kwargs; at: the layout of this rank's shard; number: its
    number in the record."""

    slot: Slot
    param: str
    at: At
    number: int


def places(
    axis: Axis, signature: Signature, cuts: Mapping[str, Cut | None], numbers: Mapping[str, int], args: Any, kwargs: Any
) -> list[DeclaredInput]:
    """The declared inputs that are passed replicated and have to be split: the same for all calls of one signature."""
    return [
        DeclaredInput(b.slot, b.param, axis.at(b.tensor.shape, cut), numbers[b.param])
        for b in signature.bind(args, kwargs)[1]
        if b.pattern is not None and (cut := cuts.get(b.param)) is not None and not isinstance(b.tensor, DTensor)
    ]


def split(found: Iterable[DeclaredInput], first: int, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """The arguments with this rank's shard of each declared input; `first`: see `Run.first`."""
    args, kwargs = list(args), dict(kwargs)
    for slot, param, at, number in found:
        item = type(slot) is tuple
        held: Any = args if type(slot) is int else kwargs
        x = got(args, kwargs, slot) if item else held[slot]
        if x.requires_grad and torch.is_grad_enabled():
            local = SplitInput.apply(x, at.axis, at.cut)
        else:
            local = at.axis.narrow(x, at.cut)
        shard = carry(local, at, first + number)
        if item:
            put(args, kwargs, slot, shard)
        else:
            held[slot] = shard
        if is_view(local):  # it shares the caller's memory
            shard._dsp_copy_of = f"the model's own input {param!r}"  # type: ignore[attr-defined]
    return tuple(args), kwargs


def with_true_gradients(axis: Axis, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, prepared so that each that requires a gradient receives its true gradient."""

    def true_gradient(t: Tensor) -> Tensor:
        if not t.requires_grad or isinstance(t, Sharded):  # split above
            return t
        if not isinstance(t, DTensor):
            return WholeInput.apply(t, axis)
        if not is_graph_start(t):  # computed from parameters, whose gradients are averaged over ranks later
            return t
        cut = cut_of(t.placements[0])
        assert cut is not None
        return carry(ScaleGradient.apply(connected_local(t), axis.size), axis.at(t.shape, cut))

    def prepared(v: Any) -> Any:  # a list that the forward is to fill stays the caller's
        asks = any(t.requires_grad for t in tensors_in(v))
        return pytree.tree_map_only(Tensor, true_gradient, v) if asks else v

    return tuple(map(prepared, args)), {k: prepared(v) for k, v in kwargs.items()}
