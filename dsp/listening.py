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


class Listener(Protocol):
    def hear(self, name: str, args: tuple[Any, ...]) -> None:
        """A collective is made: the name and the arguments of its op."""

    def way_back(self) -> Listener | None:
        """The observer of the backward of what is made now."""


LISTENER: ContextVar[Listener | None] = ContextVar("dsp_listener", default=None)


def tell(name: str, *args: Any) -> None:
    if (listener := LISTENER.get()) is not None:
        listener.hear(name, args)


def remember(ctx: Any) -> None:
    """In the forward of an autograd node."""
    listener = LISTENER.get()
    ctx.listener = None if listener is None else listener.way_back()


def back(ctx: Any, op: Callable[..., Result], *args: Any) -> Result:
    """In its backward: a collective, told to whom its forward was."""
    token = LISTENER.set(ctx.listener)
    try:
        return op(*args)
    finally:
        LISTENER.reset(token)


@contextmanager
def listening(listener: Listener | None) -> Iterator[None]:
    token = LISTENER.set(listener)
    try:
        yield
    finally:
        LISTENER.reset(token)
