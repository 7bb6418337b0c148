"""The gradients of sharded tensors: those that the gradient contract covers, and those that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.support.private import (
    LEAF,
    PASSING,
    AsyncCollectiveTensor,
    DTensorSpec,
    TensorMeta,
    backward_pass,
    dtensor,
    opened,
)

STARTS = frozenset({LEAF, "HandedOverBackward"})


def global_stride(local: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Dense strides for the global `shape` in the memory order of `local`."""
    stride_of = local.stride()
    order = sorted(range(len(shape)), key=lambda d: (-stride_of[d], d)) if local.numel() else range(len(shape))
    stride = [1] * len(shape)
    step = 1
    for d in reversed(list(order)):
        stride[d] = step
        step *= max(shape[d], 1)
    return tuple(stride)


class Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> Tensor:
        return x.trigger_wait().detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def waited(x: Tensor) -> Tensor:
    """The tensor, after a wait if one of torch's collectives still computes it."""
    return Waited.apply(x) if isinstance(x, AsyncCollectiveTensor) else x


class NoView(torch.autograd.Function):
    """The same data in the same memory, as a tensor that is not a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Wrap(torch.autograd.Function):
    """From a local tensor to the DTensor around it; in backward, this rank's part of the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.placements, ctx.size = spec.placements, spec.mesh.size()
        return dtensor(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if isinstance(grad, DTensor):
            if grad.placements != ctx.placements:
                _refuse(
                    f"the gradient of a sharded tensor arrived as {grad.placements}, and the tensor is {ctx.placements}"
                )
            grad = connected_local(grad)  # by autograd, which may differentiate once more
        return grad, None


class Unwrap(torch.autograd.Function):
    """From a DTensor to this rank's part; in backward, from the part's gradient to a DTensor.

    `to_local` would give uneven shards strides that no whole tensor has, and torch 2.11 gathers such a gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        local, ctx.spec = opened(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        spec, stride = ctx.spec, global_stride(grad, ctx.spec.shape)
        if stride != spec.stride:
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(spec.shape, stride, grad.dtype))
        with torch._C.DisableTorchFunction():
            return Wrap.apply(grad, spec)


class GuardedWrap(Wrap):
    """`Wrap` for a tensor that the caller gets: only gradients through `dsp.mean` or `dsp.gather` may pass."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if not ExitGuard.covered():
            _refuse("the loss was computed from a sharded tensor without dsp.mean or dsp.gather")
        return Wrap.backward(ctx, grad)


class HandedOver(Wrap):
    """`Wrap` for a tensor whose gradient comes from elsewhere: the gradient of a single process."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        local, _ = Wrap.backward(ctx, grad)
        ExitGuard.note(local)
        # gradients here are those of the sum over N ranks; the objective is the mean
        return local * ctx.size, None


def _refuse(reason: str) -> None:
    raise RuntimeError(
        f"this backward would give wrong gradients: {reason}. Compute the loss of each element, and reduce it with "
        "dsp.mean(losses) or dsp.mean(losses, weight); or call dsp.gather on the model's output before the loss. If "
        "the output is passed on to the next part of a pipeline, which sends its gradient back, pass on "
        "dsp.hand_over(output) instead"
    )


class ExitGuard:
    """The backward passes that came through `dsp.mean` or `dsp.gather`.

    The objective of a parallel run is the mean over ranks of each rank's scalar. Only these two functions hand the
    gradient of every rank to the others; any other loss would silently scale or lose gradients.
    """

    _recent: list[int] = []

    @classmethod
    def note(cls, grad: Tensor) -> None:
        task = backward_pass()
        if task not in cls._recent:
            cls._recent[:] = [*cls._recent[-63:], task]

    @classmethod
    def covered(cls) -> bool:
        return backward_pass() in cls._recent


def covered_exit(x: Tensor) -> Tensor:
    """The tensor, marked: backward passes that come through it may reach sharded tensors."""
    if x.requires_grad:
        x.register_hook(ExitGuard.note)
    return x


def connected_local(x: DTensor) -> Tensor:
    """This rank's part of a DTensor, connected to it by autograd."""
    with torch._C.DisableTorchFunction():
        return Unwrap.apply(x)


def is_graph_start(x: DTensor) -> bool:
    """Tell whether a sharded tensor is a leaf or was handed over, so that its gradient is not averaged over ranks."""
    node, index = x.grad_fn, x.output_nr
    while node is not None and node.name() in PASSING:
        node, index = node.next_functions[index]
    return node is None or node.name() in STARTS
