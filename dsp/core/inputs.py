"""The inputs of a model: which of them carry the record, and this rank's part of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsp.core.carrier import carry
from dsp.core.offers import allow_named
from dsp.core.record import Record
from dsp.layout import Axis
from dsp.moves import SplitInput, WholeInput
from dsp.notation import StagePattern
from dsp.private import pytree
from dsp.signature import Arguments, Bound, Signature

UNNAMED = StagePattern("", (), (), False, root=True)  # of a model whose stages name no inputs of the model itself


def signature_of(model: nn.Module, root: StagePattern | None) -> Signature:
    return Signature(model, root or UNNAMED, "the model")


def call_key(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The properties of a call's inputs on which its record depends."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return spec, *map(properties, leaves)


def properties(v: Any) -> Any:
    if isinstance(v, Tensor):
        dense = v.layout != torch.strided or v.is_contiguous()  # else a reshape of it may make a copy
        return v.shape, v.dtype, v.requires_grad, None if dense else v.stride()
    if isinstance(v, (bool, int, str)) or v is None:
        return type(v), v
    return type(v).__qualname__


def add_inputs(record: Record, bound: Sequence[Bound]) -> None:
    """Add the inputs that may be sharded to a record: those with a pattern, and others that are long."""
    declared = [b for b in bound if b.pattern is not None]
    longest = max((b.tensor.nbytes for b in declared or bound), default=0)
    for b in bound:
        if b.pattern is None and record.n * b.tensor.nbytes <= longest:
            continue
        ref = record.inputs[b.param] = record.ref(b.tensor)
        base = record.new_base(ref)
        base.replicable = True
        if b.pattern is not None:
            record.patterns[b.param] = b.pattern
            allow_named(base, b.pattern, record.sizes, record.n)


def carried_inputs(record: Record, signature: Signature, args: Any, kwargs: Any) -> Any:
    """The arguments of the model with carriers of replicated tensors in the place of its inputs, for recording."""
    call, bound = signature.bind(args, kwargs)
    add_inputs(record, bound)
    for b in bound:
        if (ref := record.inputs.get(b.param)) is not None:
            ref.base.arrival = (None,)
            call.replace(b, carry(record, b.tensor, ref, None))
    return call.args, call.kwargs


def split_inputs(record: Record, axis: Axis, signature: Signature, args: Any, kwargs: Any) -> Arguments:
    """The arguments with this rank's part of each input; a gradient asked of one is its full, true gradient."""
    call, bound = signature.bind(args, kwargs)
    for b in bound:
        local, cut = b.tensor, record.entry.get(b.param)
        if cut is not None:
            local = split_input(local, axis, cut)
        elif local.requires_grad:
            local = WholeInput.apply(local, axis)
        if (ref := record.inputs.get(b.param)) is not None:
            local = carry(record, local, ref, cut)
        if local is not b.tensor:
            call.replace(b, local)
    return call


def split_input(x: Tensor, axis: Axis, cut: Any) -> Tensor:
    return SplitInput.apply(x, axis, cut) if x.requires_grad else axis.narrow(x, cut)
