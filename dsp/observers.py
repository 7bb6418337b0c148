"""Observers of collectives. The backward of a collective tells the observer that was active in its forward.

Backward may run in another thread than its forward, on CUDA always, and such a thread knows nothing of who listens in
the first: so an autograd node keeps who is to be told of its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")


class Observer(Protocol):
    def on_collective(self, name: str, args: tuple[Any, ...]) -> None:
        """A collective is made: the name and the arguments of its op."""

    def for_backward(self) -> Observer | None:
        """The observer of the backward of what is made now."""


OBSERVER: ContextVar[Observer | None] = ContextVar("dsp_listener", default=None)


def notify(name: str, *args: Any) -> None:
    if (observer := OBSERVER.get()) is not None:
        observer.on_collective(name, args)


def save_observer(ctx: Any) -> None:
    """In the forward of an autograd node."""
    observer = OBSERVER.get()
    ctx.observer = None if observer is None else observer.for_backward()


def run_observed(ctx: Any, op: Callable[..., Result], *args: Any) -> Result:
    """In its backward: a collective, told to whom its forward was."""
    token = OBSERVER.set(ctx.observer)
    try:
        return op(*args)
    finally:
        OBSERVER.reset(token)


@contextmanager
def observing(observer: Observer | None) -> Iterator[None]:
    token = OBSERVER.set(observer)
    try:
        yield
    finally:
        OBSERVER.reset(token)
