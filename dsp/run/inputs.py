"""The inputs of a call: their signature, how they are split, and the true gradient of each that asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.gradients import connected_local
from dsp.layout import Axis, Cut, cut_of, cuts_of
from dsp.moves import ScaleGradient, SplitInput, WholeInput
from dsp.private import LEAF, PASSING, FakeTensor, pytree
from dsp.sharded import Sharded, carry
from dsp.signature import Signature
from dsp.tensors import tensors_in

GIVEN = frozenset({LEAF, "HandedOverBackward"})


def without_data(value: Any) -> bool:
    return any(isinstance(t, FakeTensor) for t in tensors_in(value))


def given(x: DTensor) -> bool:
    """Whether a sharded input is a leaf or comes from elsewhere, so that nobody averages the gradient it receives."""
    node, index = x.grad_fn, x.output_nr
    while node is not None and node.name() in PASSING:
        node, index = node.next_functions[index]
    return node is None or node.name() in GIVEN


def describe(leaves: list[Any], spec: Any) -> Any:
    """The signature of a call's inputs: what a plan depends on."""
    return spec, *map(described, leaves)


def described(v: Any) -> Any:
    if isinstance(v, Tensor):
        placed = v.placements if isinstance(v, DTensor) else None
        return v.shape, v.dtype, v.requires_grad, placed
    if isinstance(v, (bool, int, str)) or v is None:
        return type(v), v
    return type(v).__qualname__


def given_cuts(signature: Signature | None, args: Any, kwargs: Any) -> dict[str, Cut]:
    """The inputs that arrive already sharded."""
    bound = signature.bind(args, kwargs)[1] if signature is not None else []
    return cuts_of({b.param: b.tensor.placements[0] for b in bound if isinstance(b.tensor, DTensor)})


def split(
    axis: Axis, signature: Signature, cuts: Mapping[str, Cut | None], args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    """The arguments with this rank's part of each declared input."""
    call, bound = signature.bind(args, kwargs)
    for b in bound:
        cut = cuts.get(b.param)
        if b.pattern is None or cut is None or isinstance(b.tensor, DTensor):
            continue
        if b.tensor.requires_grad and torch.is_grad_enabled():
            local = SplitInput.apply(b.tensor, axis, cut)
        else:
            local = axis.narrow(b.tensor, cut)
        shard = carry(local, axis.at(b.tensor.shape, cut))
        if local._is_view():  # of the caller's tensor
            shard._dsp_lent = f"the model's own input {b.param!r}"  # type: ignore[attr-defined]
        call.replace(b, shard)
    return tuple(call.args), call.kwargs


def with_true_gradients(axis: Axis, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments, so that each whose gradient is asked gets its true one."""

    def true_gradient(t: Tensor) -> Tensor:
        if not t.requires_grad or isinstance(t, Sharded):  # split above
            return t
        if not isinstance(t, DTensor):
            return WholeInput.apply(t, axis)
        if not given(t):  # split above, or computed: averaging over ranks is still to come
            return t
        cut = cut_of(t.placements[0])
        assert cut is not None
        return carry(ScaleGradient.apply(connected_local(t), axis.size), axis.at(t.shape, cut))

    if torch.is_grad_enabled():
        args, kwargs = pytree.tree_map_only(Tensor, true_gradient, (args, kwargs))
    return args, kwargs
