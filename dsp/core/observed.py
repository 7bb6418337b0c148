"""Observers of the calls of a parallel model, such as guards. The core runs without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import nn

from dsp.comm.layout import Axis
from dsp.core.record import Record
from dsp.stages.notation import StagePattern
from dsp.stages.stage import Stage


class Observed(Protocol):
    """A parallel model as its observers see it (`dsp.core.parallel.Parallel`).

    reason: what the last forward did that could not be recorded before it ran (`dsp.core.reads`).
    """

    model: nn.Module
    axis: Axis
    stages: list[Stage]
    root: StagePattern | None
    gather: bool
    reason: str
    forward: Callable[..., Any]


class ModelCall(NamedTuple):
    """A call of a parallel model: its arguments; the same as leaves and spec; the key by which its record is kept; and
    the record."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: Any
    key: Any
    record: Record


class Events:
    """The events of a call, each with the functions that are called then. One that raises ends the call.

    begin: a call begins; record: a record was made for it, or made again; ready: its record is there, and nothing has
    been sent; end: it has run, and returns this output; fail: it raised this error; over: it has ended in either way.
    instead: a function that may run a call, with this rank's part of its arguments, in the place of the model's code,
    and return its output; NotImplemented: it does not. Such a call has no end.
    """

    def __init__(self) -> None:
        self.begin: list[Callable[[], None]] = []
        self.record: list[Callable[[ModelCall], None]] = []
        self.ready: list[Callable[[ModelCall], None]] = []
        self.end: list[Callable[[ModelCall, Any], None]] = []
        self.fail: list[Callable[[BaseException], None]] = []
        self.over: list[Callable[[], None]] = []
        self.instead: Callable[[ModelCall, Any, Any], Any] | None = None


# an observer of the calls of a model: it adds its functions to the events
Observe = Callable[[Observed, Events], None]
