"""The reasons why no graph can stand for a forward: those that its recorded graph shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from dsp.core.torch_traits import RECURRENCES
from dsp.support.private import OF_AN_OP, FakeTensor, OpOverload, pytree, schema_of

SIMPLE = (bool, int, float, str, type(None), torch.dtype, torch.device)
CHANGES = "it changes what its modules hold"
RANDOM = "it draws random numbers"


class Unfit(Exception):
    """The reason why a forward cannot be one graph, as a sentence about "it"."""


class NotYet(Unfit):
    """The reason why a forward cannot be one graph in this call, but may be in a later one."""


def refuse_for(reasons: Sequence[str]) -> None:
    """Raise Unfit with all reasons, if there are any."""
    if reasons:
        raise Unfit("; ".join(dict.fromkeys(reasons)))


def reasons_in(graph: GraphModule, output: Any, tensors: Sequence[Tensor], backend: str) -> Iterator[str]:
    """The reasons against a graph that its recording shows; tensors: those that it returns, in its `output`."""
    if not tensors:
        yield "it returns no tensor"
    if function := custom_function(tensors):
        yield f"the autograd.Function {function} is in it, whose backward a graph would not call"
    for odd in (v for v in pytree.tree_leaves(output) if not (isinstance(v, (Tensor, *SIMPLE)) or is_dataclass(v))):
        yield f"it returns a {type(odd).__name__}, which may hold anything"
    yield from draws(graph)
    if torch.is_grad_enabled() and backend != "eager":
        yield from recurrences(graph)
    yield from strangers(graph)


def custom_function(tensors: Iterable[Tensor]) -> str:
    """The name of an autograd.Function, other than a custom op's, in the history of these tensors; "" if none is."""
    waiting, seen = [t.grad_fn for t in tensors], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not type(node).__name__.startswith(OF_AN_OP):
            return node.name().removesuffix("Backward")
        waiting += [of for of, _ in node.next_functions]
    return ""


def draws(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        op = node.target
        if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        named = {a.name: a.default_value if a.has_default_value() else 1 for a in schema_of(op).arguments}
        arguments = named | dict(zip(named, node.args)) | node.kwargs
        share = next((arguments[name] for name in ("dropout_p", "dropout", "p") if name in arguments), 1)
        if share and arguments.get("train", True):
            yield f"it draws random numbers ({op})"


def recurrences(graph: GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""
        if name in RECURRENCES:
            yield f"torch.compile takes no recurrence (aten.{name}) where there are gradients"


def strangers(graph: GraphModule) -> Iterator[str]:
    """Reasons against a graph: weights or fake tensors that neither inputs nor modules hold; others are constant."""
    for node in graph.graph.nodes:
        tensor = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(tensor, (nn.Parameter, FakeTensor)):
            yield "it uses a weight, or a tensor of its own making, that no module holds"


class RefuseUnseen(TorchFunctionMode):
    """A mode that refuses functions whose effect a graph would not repeat."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNSEEN:
            name = getattr(func, "__name__", "")
            raise Unfit(f"it uses Tensor.{'data' if name.startswith('__') else name}, which a graph does not see")
        return func(*args, **(kwargs or {}))


UNSEEN = (
    Tensor.data.__get__, Tensor.data.__set__, Tensor.register_hook, Tensor.retain_grad,  # type: ignore[attr-defined]
)  # fmt: skip
