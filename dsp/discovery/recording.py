"""The record of a forward with all operations, inside submodules too, and the calls that contain them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from dsp.between import Between, unrunnable
from dsp.discovery.calls import ModuleCall
from dsp.plan.record import Ref, WholeNode
from dsp.plan.recorder import Recorder
from dsp.signature import Signature
from dsp.slices import copied
from dsp.tensors import tensors_in
from dsp.traits import Traits, traits


class Recording(Between):
    """A mode that records operations and calls while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.recorder = Recorder(1, {})
        self.nodes: list[Any] = self.recorder.record.nodes  # top-level operations and calls; each call has a `body`
        self.open: list[ModuleCall] = []
        self.calls = 0

    def refs(self, tensors: Iterable[Tensor]) -> list[Ref]:
        return [self.recorder.ref(t) for t in tensors]

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        out = func(*args, **kwargs)
        self.recorder.operation(what.name, args, kwargs, out, what.in_place)
        return out

    def transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an operation without a rule: under a transform a tensor hides another one and its shape."""
        self.recorder.record.nodes.append(WholeNode(operands=[], error=unrunnable(traits(func))))
        return func(*args, **kwargs)

    def enter(self, module: nn.Module, signature: Signature, args: Any, kwargs: Any) -> None:
        """Note that a module is called."""
        self.asleep = True
        bound = signature.bind(args, kwargs)[1]
        operands, given = self.refs(b.tensor for b in bound), self.refs(tensors_in((args, kwargs)))
        own = copied(args, kwargs)
        self.asleep = False
        self.open.append(
            ModuleCall(signature.where, module, self.calls, [b.param for b in bound], operands, given, *own)
        )
        self.calls += 1
        self.recorder.record.nodes = self.open[-1].body

    def leave(self, output: Any) -> None:
        """Note that the module entered last returned."""
        call = self.open.pop()
        call.results = self.refs(tensors_in(output))
        outer = self.open[-1].body if self.open else self.nodes
        outer.append(call)
        self.recorder.record.nodes = outer


def record_of(
    model: nn.Module, args: Any, kwargs: Any, modules: Iterable[nn.Module], signature: Callable[[nn.Module], Signature]
) -> ModuleCall:
    """The recorded call of a model, with the calls of `modules` inside it, arguments bound by their signatures."""
    recording = Recording()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        recording.enter(module, signature(module), args, kwargs)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        recording.leave(output)

    handles: list[Any] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with recording:
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    root: ModuleCall = recording.nodes[0]
    return root
