"""Code between stages that carriers do not see: functions of plain tensors, transforms, TorchScript and C++.

A watch is on while a forward is recorded, and while one runs that has no plan; in a planned run only if the record has
a node without a carrier among its operands. It is off inside stages. What torch functions do not show would take this
rank's part for the full tensor. TorchScript, kernels that are called from C++ and methods of a process group are found
while a forward is recorded: an op below autograd gets a carrier that no torch function got. The backward of an
autograd.Function is found by its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsp.core.arguments import DIFFERENT, unrunnable, without_data_of
from dsp.core.carrier import LOCAL, Carrier, first_carrier
from dsp.core.record import Record
from dsp.core.torch_calls import NUMPY_NAMES, TENSORLESS, GlueError, tensor_args, usual_call
from dsp.core.torch_traits import UNRUNNABLE, WITHOUT_DATA, Traits, traits_of
from dsp.support.private import (
    CONTEXT,
    OpOverload,
    Recompute,
    UncompiledMode,
    _get_current_function_mode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
    checkpoint_frame,
    function_of,
    functions_seen,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_current_level,
    saving_hooks,
    schema_of,
)
from dsp.support.source_lines import line_now


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
            refuse_transforms(traits_of(func), args, kwargs)
            return func(*args, **kwargs)
        traits = traits_of(func)
        if kwargs and not (NUMPY_NAMES.keys().isdisjoint(kwargs) and TENSORLESS.issuperset(map(type, kwargs.values()))):
            args, kwargs = usual_call(func, args, kwargs)
        read = args if traits.dtype_arg is None else without_data_of(args, traits.dtype_arg)
        tensors = tensor_args(read, kwargs)
        carried = any(isinstance(t, Carrier) for t in tensors)
        if traits.metadata or traits.in_place or kwargs.get("out") is not None or carried:
            return func(*args, **kwargs)
        return self.on_plain(func, traits, read, kwargs, tensors)

    def on_plain(self, func: Any, traits: Traits, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
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
        function = traits_of(func).decomposition
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
    foreign = [m for m in modes if not isinstance(m, Watch)]
    for mode in foreign:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in foreign:
            _pop_mode()
        for mode in modes:
            _push_mode(mode)


def refuse(traits: Traits, args: Any, kwargs: Any) -> None:
    """Refuse a function that neither a rule nor a gather can make right, and any under a transform of torch.func."""
    if traits.name in UNRUNNABLE:
        raise unrunnable(traits)
    refuse_transforms(traits, args, kwargs)


def refuse_transforms(traits: Traits, args: Any, kwargs: Any) -> None:
    """Refuse a transform of torch.func over a carrier: its functions would get this rank's part as if it were the full
    tensor."""
    for t in tensor_args(args, kwargs) if maybe_current_level() is not None else ():
        while is_functorch_wrapped_tensor(t):
            t = get_unwrapped(t)
        if isinstance(t, Carrier):
            raise unrunnable(traits)


IN_STAGE = "Put it into a module of its own, and name that in stages, as 'layers.*.{name}': \"b t [s c]\""
UNSEEN = (
    "{name} between stages was called by TorchScript or by C++, where dsp does not see it: it would work on this "
    "rank's part of a tensor as if that were the full tensor. " + IN_STAGE
)
OF_GROUP = (
    "ProcessGroup.{name}() between stages would run on this rank's part of a tensor as if that were the full tensor; "
    "call the function of torch.distributed"
)
FUNCTION = (
    "the autograd.Function {name} between stages: its backward would work on this rank's part of tensors and gradients "
    "as if they were full tensors. " + IN_STAGE
)
REENTRANT = (
    "an activation checkpoint with use_reentrant=True between stages would compute again outside of the forward; use "
    "checkpoint(..., use_reentrant=False)"
)
COLLECTIVES = "torch.distributed.nn.functional"  # autograd.Functions whose backward communicates, too


class SeenOnly(UncompiledMode):
    """Refuses an op that gets a carrier although no torch function did. It is on while a forward is recorded.

    error: the refusal, of which TorchScript makes an error of another kind; inside: a stage runs, which gets carriers
    from autograd alone, for a write into a view of one.
    """

    error: GlueError | None = None
    inside = False

    @contextmanager
    def stage(self) -> Iterator[None]:
        """A stage."""
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if error is not None and self.error is not None:
            raise self.error from None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        saved = func is torch.ops.aten.detach.default  # autograd detaches what it saves
        seen = self.inside or saved or func.namespace == "prim" or not functions_seen()
        if not seen and first_carrier((*args, *kwargs.values())) is not None:
            name = schema_of(func).name.partition("::")[2].strip("_")
            self.error = GlueError((OF_GROUP if func.namespace == "c10d" else UNSEEN).format(name=name))
            self.error.line = line_now()
            raise self.error
        with LOCAL():
            return func(*args, **kwargs)


def refuse_functions(tensors: Iterable[Tensor]) -> None:
    """Raise GlueError for the result of an autograd.Function of the model's between stages, or what is made of one.

    A tensor that is no carrier may have several autograd nodes behind it that nobody saw.
    """
    for t in tensors:
        with LOCAL():
            last = t.grad_fn
        for node in [last] if isinstance(t, Carrier) else ancestors(last):
            if isinstance(node, CONTEXT):
                refuse_function(function_of(node))


def covered(t: Tensor) -> Tensor:
    """The result of a stage that may end in an autograd.Function: what reads it does not see that function."""
    with LOCAL():
        last = t.grad_fn
        return t.view_as(t) if isinstance(last, CONTEXT) and refusal(function_of(last)) else t


def ancestors(node: Any) -> set[Any]:
    """An autograd node with all from which its gradient goes on."""
    nodes, waiting = set[Any](), [node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [n for n, _ in node.next_functions]
    return nodes


def refuse_function(function: Any) -> None:
    if (error := refusal(function)) is not None:
        raise error


def refusal(function: Any) -> GlueError | None:
    """The reason why an autograd.Function cannot run between stages; None for one of torch or of dsp."""
    module, name = function.__module__, function.__name__
    if module == "torch.utils.checkpoint":
        return GlueError(REENTRANT)
    if module == COLLECTIVES:
        return GlueError(DIFFERENT.format(f"the backward of {COLLECTIVES}'s {name.strip('_')}"))
    return None if module.startswith(("torch.", "dsp.")) else GlueError(FUNCTION.format(name=name))
