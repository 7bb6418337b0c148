"""Observers of collectives. The backward of a collective tells the observer that was active in its forward.

Backward may run in another thread than its forward (on CUDA it always does), where context variables of the forward's
thread are not visible. So each autograd node keeps the observer for its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Observer(Protocol):
    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        """Take note of a collective: the name and the arguments of its op."""

    def for_backward(self) -> Observer | None:
        """The observer to be told of the backward of collectives that run now."""


OBSERVER: ContextVar[Observer | None] = ContextVar("dsp_observer", default=None)
# the node for which collectives run now (`dsp.core.record.Node`); a stage's call while its module runs; None elsewhere
RUNNING: ContextVar[Any] = ContextVar("dsp_running", default=None)


def notify(name: str, *args: Any) -> None:
    """Tell the active observer of a collective."""
    if (observer := OBSERVER.get()) is not None:
        observer.on_collective(name, args)


def save_observer(ctx: Any) -> None:
    """Keep, on an autograd node, the observer for its backward; called in its forward."""
    observer = OBSERVER.get()
    ctx.observer = None if observer is None else observer.for_backward()


def run_observed(ctx: Any, op: Callable[..., Result], *args: Any) -> Result:
    """Run a collective in the backward of an autograd node, under the observer that its forward kept."""
    token = OBSERVER.set(ctx.observer)
    try:
        return op(*args)
    finally:
        OBSERVER.reset(token)


class observing:
    """Make an observer the active one, while no node runs yet."""

    def __init__(self, observer: Observer | None) -> None:
        self.observer = observer

    def __enter__(self) -> None:
        self.tokens = OBSERVER.set(self.observer), RUNNING.set(None)

    def __exit__(self, *error: object) -> None:
        observer, running = self.tokens
        OBSERVER.reset(observer)
        RUNNING.reset(running)  # it may hold tensors, where an error ended a stage
