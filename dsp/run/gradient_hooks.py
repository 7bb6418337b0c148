"""Hooks on the gradients of tensors between stages: each sees the gradient of a single process, and may change it.

In backward, a rank's gradient of a sharded tensor is its shard of N times the single-process gradient; its gradient of
a replicated tensor is a summand of N times that gradient (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsp.layout import At, Axis
from dsp.observers import OBSERVER, observing
from dsp.run.forward import Run
from dsp.run.whole import Again
from dsp.sharded import Sharded, carry, plain


def at_of(t: Any) -> At | None:
    return t.at if isinstance(t, Sharded) else None


class InBackward:
    """The user's code that backward calls between stages: it takes and returns gradients of a single process.

    again: a context for operations between stages; in_function: the code is the backward of an autograd.Function.
    """

    in_function = False

    def __init__(self, axis: Axis, again: Again) -> None:
        self.axis, self.again = axis, again
        observer = OBSERVER.get()
        self.observer = None if observer is None else observer.for_backward()

    def called(
        self, code: Callable[..., Any], grads: Sequence[Any], made: Sequence[At | None], given: Sequence[At | None]
    ) -> Any:
        """Call `code` with `grads`, gradients of tensors in the layouts `made`, and return the gradients to propagate.

        These are for tensors in the layouts `given`: N times this rank's shard of the single-process gradient, or for a
        replicated tensor one of N equal summands.
        """
        with observing(self.observer):
            own = list(map(self.of_one_process, grads, made))
            with self.again() as run:
                run.in_function = self.in_function and not torch.is_grad_enabled()
                lie = zip(own, made)
                found = code(*[t if at is None or t is None else carry(t, at, run.first - 1) for t, at in lie])
                if not isinstance(found, tuple):
                    return self.returned(run, found, given[0])
                return *map(self.returned, [run] * len(given), found, given), *found[len(given) :]

    def of_one_process(self, gradient: Tensor | None, at: At | None) -> Tensor | None:
        """The single-process gradient, or this rank's shard of it."""
        if gradient is None:
            return None
        whole = gradient if at is not None else torch.ops.dsp.all_reduce(gradient, self.axis.group)
        return whole / self.axis.size

    def returned(self, run: Run, t: Any, at: At | None) -> Any:
        if not isinstance(t, Tensor):
            return t
        (local,) = run.views.bring([t], [run.open(t)], [None if at is None else at.cut], [])
        return plain(local) if at is None else plain(local) * self.axis.size


class GradientHook(InBackward):
    """A hook on the gradient of a tensor; `at`: the tensor's layout (None: replicated)."""

    def __init__(self, t: Tensor, axis: Axis, again: Again, hook: Callable[[Tensor], Any] | None) -> None:
        """hook: the user's hook; None to convert the gradient only."""
        super().__init__(axis, again)
        self.at, self.hook = at_of(t), hook

    def __call__(self, grad: Tensor) -> Any:
        return self.called(self.changed, [grad], [self.at], [self.at])

    def changed(self, grad: Tensor) -> Tensor | None:
        """The gradient after the hook; None if the hook left the gradient of a sharded tensor unchanged."""
        found = self.hook(grad) if self.hook is not None else None
        return grad if found is None and self.at is None else found
