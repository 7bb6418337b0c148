"""The inputs of a call: their signature, and whether somebody averages the gradients that they receive."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.private import LEAF, PASSING, FakeTensor
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
