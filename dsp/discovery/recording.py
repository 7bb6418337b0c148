"""The nodes of a forward with all operations, inside submodules too, and the calls that contain them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.core.arguments import INDEXED, numbered, without_data_of
from dsp.core.record import Node, Operation, Ref
from dsp.core.torch_calls import replaced, tensor_args, usual_call
from dsp.core.torch_traits import Traits, traits_of
from dsp.discovery.calls import ModuleCall
from dsp.stages.signature import Signature
from dsp.support.private import maybe_current_level
from dsp.support.tensors import ByTensor, tensors_in
from dsp.verify.slices import copied


class Recording(TorchFunctionMode):
    """A mode that records operations and calls while it is entered.

    nodes: the operations and calls at the top; body: those inside the innermost call that runs; asleep: nothing is
    recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = ByTensor[int]()
        self.count = self.calls = 0
        self.nodes: list[Any] = []
        self.body, self.open = self.nodes, list[ModuleCall]()
        self.asleep = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, traits = kwargs or {}, traits_of(func)
        if self.asleep or (traits.metadata and maybe_current_level() is None):
            return func(*args, **kwargs)
        if maybe_current_level() is not None:  # a tensor hides another one and its shape: a node without an offer
            self.body.append(Node("plain", traits.name, []))
            return func(*args, **kwargs)
        if kwargs:
            args, kwargs = usual_call(func, args, kwargs)
        if traits.decomposition is not None and (out := traits.written_out(self, args, kwargs)) is not None:
            return out
        if traits.dtype_arg is not None:
            args = without_data_of(args, traits.dtype_arg)
        if traits.name in INDEXED:
            args = numbered(args, self)
        return self.operation(func, traits, args, kwargs)

    def refs(self, tensors: Iterable[Tensor]) -> list[Ref]:
        """References to tensors as they are now; equal numbers are one tensor."""
        return [Ref(tuple(t.shape), None, self.number(t), t.dtype) for t in tensors]

    def number(self, t: Tensor) -> int:
        if (number := self.numbers.get(t)) is None:
            number = self.numbers[t] = self.count
            self.count += 1
        return number

    def operation(self, func: Any, traits: Traits, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        refs, results = self.refs(tensor_args(args, kwargs)), self.refs(tensors_in(out))
        call = Operation(func, *replaced(args, kwargs, iter(refs)))
        self.body.append(Node("operation", traits.name, [*refs], call, results, in_place=traits.in_place))
        return out

    def enter(self, module: nn.Module, signature: Signature, args: Any, kwargs: Any) -> None:
        """Note that a module is called."""
        self.asleep = True
        bound = signature.bind(args, kwargs)[1]
        operands, tensors = self.refs(b.tensor for b in bound), self.refs(tensors_in((args, kwargs)))
        copies = copied(args, kwargs)
        self.asleep = False
        params = [b.param for b in bound]
        self.open.append(ModuleCall(signature.label, module, self.calls, params, operands, tensors, *copies))
        self.calls += 1
        self.body = self.open[-1].body

    def leave(self, output: Any) -> None:
        """Note that the module entered last returned."""
        call = self.open.pop()
        call.results = self.refs(tensors_in(output))
        self.body = self.open[-1].body if self.open else self.nodes
        self.body.append(call)


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
