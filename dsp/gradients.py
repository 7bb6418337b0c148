"""The way of a gradient into a sharded tensor and out of it: what the gradient contract covers, and what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.private import AsyncCollectiveTensor, DTensorSpec, TensorMeta, backward_pass, dtensor, opened


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
    """A plain tensor, waited for, of one that a collective of torch still brings; any other as it is."""
    return Waited.apply(x) if isinstance(x, AsyncCollectiveTensor) else x


class Wrap(torch.autograd.Function):
    """local tensor -> DTensor shell; the gradient that comes back is this rank's part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.placements, ctx.size = spec.placements, spec.mesh.size()
        return dtensor(local.view_as(local), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if isinstance(grad, DTensor):
            if grad.placements != ctx.placements:
                _refuse(f"the gradient of a sharded tensor arrived as {grad.placements}, and it is {ctx.placements}")
            grad, _ = opened(grad)
        return grad, None


class Unwrap(torch.autograd.Function):
    """DTensor -> this rank's part, and back for its gradient.

    For `to_local` the strides of uneven shards are those of no whole tensor, and torch 2.11 gathers such a gradient.
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
        return dtensor(grad, spec)


class GuardedWrap(Wrap):
    """The same for a tensor handed to the caller: only gradients that came through a dsp exit may pass."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if not ExitGuard.covered():
            _refuse("the loss was computed from a sharded tensor without dsp.mean or dsp.gather")
        return Wrap.backward(ctx, grad)


class HandedOver(Wrap):
    """The same for a tensor whose gradient somebody else brings: that of a single process."""

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        local, _ = Wrap.backward(ctx, grad)
        ExitGuard.note(local)
        # here gradients are of the sum of N ranks' scalars, of which the objective is the mean
        return local * ctx.size, None


def _refuse(reason: str) -> None:
    raise RuntimeError(
        f"this backward would give wrong gradients: {reason}. Reduce it with dsp.mean(loss) or dsp.mean(loss, weight), "
        "or call dsp.gather on the model's output before reducing. If the output is passed on to the next part of a "
        "pipeline, which sends its gradient back, pass on dsp.hand_over(output) instead"
    )


class ExitGuard:
    """Which backward passes came through `dsp.mean` or `dsp.gather`.

    The objective of a parallel run is the mean over ranks of each rank's scalar. Only these exits hand every rank's
    gradient to the others; any other one would silently scale or lose gradients.
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
    """The same tensor, which lets backward passes that come through it reach sharded tensors."""
    if x.requires_grad:
        x.register_hook(ExitGuard.note)
    return x


def connected_local(x: DTensor) -> Tensor:
    """This rank's part of a DTensor, connected to it by autograd."""
    with torch._C.DisableTorchFunction():
        return Unwrap.apply(x)
