"""Code between stages that torch functions do not show: it would take this rank's part for the full tensor.

TorchScript, kernels that are called from C++ and methods of a process group are found while a forward is recorded: an
op below autograd gets a carrier that no torch function got. The backward of an autograd.Function is found by its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsp.core.arguments import DIFFERENT
from dsp.core.carrier import LOCAL, Carrier
from dsp.core.torch_calls import GlueError
from dsp.support.private import CONTEXT, TorchDispatchMode, function_of, functions_seen, schema_of
from dsp.support.source_lines import line_now
from dsp.support.tensors import tensors_in

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


class SeenOnly(TorchDispatchMode):
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
        if not seen and any(isinstance(t, Carrier) for t in tensors_in((args, kwargs))):
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
        for node in [last] if isinstance(t, Carrier) else behind(last):
            if isinstance(node, CONTEXT):
                refuse_function(function_of(node))


def covered(t: Tensor) -> Tensor:
    """The result of a stage that may end in an autograd.Function: what reads it does not see that function."""
    with LOCAL():
        last = t.grad_fn
        return t.view_as(t) if isinstance(last, CONTEXT) and refusal(function_of(last)) else t


def behind(node: Any) -> set[Any]:
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
