"""Torch-function modes for what carriers do not see: functions of plain tensors, and transforms of torch.func.

A watch is on while a forward is recorded, and while one runs that has no plan; in a planned run only if the record has
a node without a carrier among its operands. It is off inside stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from dsp.core.arguments import unrunnable, without_data_of
from dsp.core.carrier import Carrier, first_carrier
from dsp.core.record import Record
from dsp.core.torch_calls import NUMBERS, by_position, tensor_args
from dsp.core.torch_traits import UNRUNNABLE, WITHOUT_DATA, Traits, traits
from dsp.support.private import (
    OpOverload,
    Recompute,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    checkpoint_frame,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    saving_hooks,
)


class Watch(TorchFunctionMode):
    """turns: as of a carrier: which of several nodes with one key is next."""

    def __init__(self, record: Record, turns: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.record, self.turns = record, turns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, record = kwargs or {}, self.record
        if record.planned:
            if record.sources_recompute and saving_hooks(False) is not None:
                self.watch_recomputation()
            if func not in record.sources:
                return func(*args, **kwargs)
        if isinstance(func, OpOverload):
            return func(*args, **kwargs)
        if maybe_current_level() is not None:
            refuse_transforms(traits(func), args, kwargs)
            return func(*args, **kwargs)
        what = traits(func)
        if kwargs and not NUMBERS.issuperset(map(type, kwargs.values())):
            args, kwargs = by_position(func, args, kwargs)
        read = args if what.dtype_arg is None else without_data_of(args, what.dtype_arg)
        tensors = tensor_args(read, kwargs)
        carried = any(isinstance(t, Carrier) for t in tensors)
        if what.metadata or what.in_place or kwargs.get("out") is not None or carried:
            return func(*args, **kwargs)
        return self.on_plain(func, what, read, kwargs, tensors)

    def on_plain(self, func: Any, what: Any, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
        """The result of a function of plain tensors between stages."""
        return func(*args, **kwargs)

    def watch_recomputation(self) -> None:
        """Let the checkpoint that the caller is in be watched when it recomputes, from the turn at which it began."""
        frame = checkpoint_frame()
        if frame is not None and Watch not in Recompute.keys(frame):
            turns = dict(self.turns or {})
            Recompute(frame, Watch, lambda: type(self)(self.record, {**turns, "run": None}))


class KernelCall(NamedTuple):
    """A call of a kernel: its written-out function, and the arguments."""

    function: Any
    args: Any
    kwargs: Any


class Kernels(TorchFunctionMode):
    """Gives the results of kernels on plain tensors, such as in stages, while a forward is recorded: kernels have no
    form for tensors without data. calls: those since a stage began."""

    calls: tuple[KernelCall, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = traits(func).decomposition
        if function not in WITHOUT_DATA or first_carrier((*args, *kwargs.values())) is not None:
            return func(*args, **kwargs)
        self.calls = *self.calls, KernelCall(function, args, kwargs)
        return WITHOUT_DATA[function](*args, **kwargs)


def watching(stage: Any) -> Watch | None:
    """The watch that leads a stage which reads no carrier."""
    for mode in reversed(_get_current_function_mode_stack()):
        if isinstance(mode, Watch) and stage in mode.record.stages:
            record = mode.record
            if record.planned and record.sources_recompute and saving_hooks(False) is not None:
                mode.watch_recomputation()
            return mode if not record.planned or stage in record.sources else None
    return None


def add_source(record: Record, func: Any) -> None:
    """Note a function, or a stage, of a node without a carrier among its operands."""
    record.sources.add(func)
    record.sources_recompute |= checkpoint_frame() is not None


def watched(record: Record) -> Any:
    """The watch that a forward needs, if it needs one."""
    if record.planned and not record.sources:
        return nullcontext()
    top = _get_current_function_mode()  # of a checkpoint around the model
    return nullcontext() if isinstance(top, Watch) and top.record is record else record.rules.watch(record)


@contextmanager
def unwatched() -> Iterator[None]:
    """No watch is on, such as in a stage; other modes are."""
    modes: list[Any] = []
    while _get_current_function_mode() is not None:
        modes.insert(0, _pop_mode())
    others = [m for m in modes if not isinstance(m, Watch)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def refuse(what: Traits, args: Any, kwargs: Any) -> None:
    """Refuse a function that neither a rule nor a gather can make right, and any under a transform of torch.func."""
    if what.name in UNRUNNABLE:
        raise unrunnable(what)
    refuse_transforms(what, args, kwargs)


def refuse_transforms(what: Traits, args: Any, kwargs: Any) -> None:
    """Refuse a transform of torch.func over a carrier: its functions would get this rank's part as if it were the full
    tensor."""
    for t in tensor_args(args, kwargs) if maybe_current_level() is not None else ():
        while is_functorch_wrapped_tensor(t):
            t = get_unwrapped(t)
        if isinstance(t, Carrier):
            raise unrunnable(what)
