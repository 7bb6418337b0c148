"""Hooks on the gradients of tensors between stages: each sees the gradient of a single process, and may change it.

In backward a rank has its shard of a sharded tensor's gradient, N times that of a single process; of a replicated
tensor it has a summand of that (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsp.layout import At, Axis
from dsp.observers import OBSERVER, observing
from dsp.run.whole import Again
from dsp.sharded import Sharded, carry, plain


class GradientHook:
    """A hook on the gradient of a tensor, called with the gradient of a single process as glue holds it.

    at: where the tensor lies, None of a replicated one; again: a context of operations between stages, for backward;
    hook: of the user, None to have the gradient alone.
    """

    def __init__(self, t: Tensor, axis: Axis, again: Again, hook: Callable[[Tensor], Any] | None) -> None:
        self.at: At | None = t.at if isinstance(t, Sharded) else None
        self.axis, self.again, self.hook = axis, again, hook
        observer = OBSERVER.get()
        self.observer = None if observer is None else observer.for_backward()

    def __call__(self, grad: Tensor) -> Tensor | None:
        with observing(self.observer):
            if self.at is None:
                return self.of_whole(torch.ops.dsp.all_reduce(grad, self.axis.group) / self.axis.size)
            return self.of_shard(grad / self.axis.size)

    def of_whole(self, grad: Tensor) -> Tensor:
        """The gradient of a replicated tensor, alike on all ranks: each has one of N equal summands."""
        with self.again():
            found = self.hook(grad) if self.hook is not None else None
        return grad if found is None else found

    def of_shard(self, grad: Tensor) -> Tensor | None:
        assert self.at is not None
        assert self.hook is not None
        with self.again() as run:
            found = self.hook(carry(grad, self.at, run.first - 1))
            if not isinstance(found, Tensor):
                return found
            (local,) = run.views.bring([found], [run.open(found)], [self.at.cut], [])
        return plain(local) * self.axis.size
