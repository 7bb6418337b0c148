"""Hooks on the gradients of tensors between stages: each gets the gradient of a single process, and may change it.

In backward, a rank's gradient of a sharded tensor is its part of N times the single-process gradient; its gradient of a
replicated tensor is a summand of N times that gradient (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsp.comm.observers import OBSERVER, observing
from dsp.core.carrier import LOCAL, READERS, Carrier, carry, plain
from dsp.core.record import Node, Record, Ref


class OnGradient:
    """A hook of the user's on the gradient of a tensor; None: the gradient is only converted."""

    def __init__(self, t: Carrier, hook: Callable[[Tensor], Any] | None) -> None:
        self.record, self.ref, self.cut, self.hook = t.record, gradient_of(t.record, t.ref), t.cut, hook
        observer = OBSERVER.get()
        self.observer = None if observer is None else observer.for_backward()

    def __call__(self, grad: Tensor) -> Tensor | None:
        driver: Any = self.record.driver  # no forward runs, or a checkpoint's does
        runner = getattr(driver, "runner", driver)
        axis, cut = runner.axis, self.cut
        with observing(self.observer):
            full = grad if cut is not None else torch.ops.dsp.all_reduce(grad, axis.group)
            local = full / axis.size
            if self.hook is None:
                return local
            changed = self.hook(carry(self.record, local, self.ref, cut))
            if changed is None:
                return None
            [part] = runner.copies.bring(Node("gradient", "gradient", []), [changed], [cut])
            return plain(part) if cut is None else plain(part) * axis.size


def gradient_of(record: Record, ref: Ref) -> Ref:
    """The reference to the gradient of a tensor."""
    if ref.gradient is None:
        ref.gradient = Ref(ref.shape, None, record.count, ref.dtype)
        record.count += 1
        base = record.new_base(ref.gradient)
        base.cuts = dict(ref.base.cuts)
    return ref.gradient


def register_hook(t: Carrier, hook: Callable[[Tensor], Any]) -> Any:
    with LOCAL():
        if t.is_leaf or not t.requires_grad or not hasattr(t.record.driver, "axis"):  # nothing, or it is recorded
            return t.register_hook(hook)
        return t.register_hook(OnGradient(t, hook))


def retain_grad(t: Carrier) -> None:
    with LOCAL():
        if t.cut is None and t.requires_grad and hasattr(t.record.driver, "axis"):
            t.register_hook(OnGradient(t, None))
        t.retain_grad()


def read_grad(t: Carrier) -> Any:
    """The gradient of a single process, as a DTensor if the tensor is sharded."""
    with LOCAL():
        grad = t.grad
        axis = t.record.driver.axis
    if grad is None or t.cut is None:
        return grad
    return axis.wrap(plain(grad) / axis.size, t.cut, t.ref.shape)


READERS |= {
    Tensor.register_hook: register_hook,
    Tensor.retain_grad: retain_grad,
    Tensor.grad.__get__: read_grad,  # type: ignore[union-attr]
}
