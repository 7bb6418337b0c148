"""Tensors between stages that outlive their call, such as a cache of keys: a later forward finds them as inputs.

A record is made for them in the layouts in which earlier calls left them. Each is known by its path from the model or
its arguments; at a call it is given its place in the record of that call. The caller may have put a DTensor there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.comm.layout import Axis, cut_of
from dsp.core.carrier import Carrier, carry
from dsp.core.inputs import dtensor_part
from dsp.core.record import Record, Ref
from dsp.support.private import opened
from dsp.support.python_state import Path, World, put_at, search, value_at


def is_persistent(it: Any) -> bool:
    """Tell whether an object is what a call may have left, or a DTensor in its place."""
    return isinstance(it, Carrier) or (
        isinstance(it, DTensor) and not isinstance(it, nn.Parameter) and len(it.placements) == 1
    )


def persistent_tensors(*roots: Any) -> list[tuple[Path, Tensor]]:
    """The tensors that calls left in the model or its arguments, with their paths; no argument itself is one."""
    return [(path, t) for path, t in search(is_persistent, *roots) if any(kind == "attr" for kind, _ in path)]


def layout_at(path: Path, *roots: Any) -> Any:
    """The properties of a tensor at the end of a path on which a record depends; None if nothing was left there."""
    t = value_at(path, *roots)
    if not is_persistent(t):
        return None
    return t.shape, t.dtype, t.requires_grad, t.cut if isinstance(t, Carrier) else cut_of(t.placements[0])


def adopt(record: Record, axis: Axis, *roots: Any) -> None:
    """Let what earlier calls left take the places that this record has for it."""
    for path, ref in record.persistent.items():
        t = value_at(path, *roots)
        if isinstance(t, Carrier):
            enter(t, record, ref)
        else:
            local, cut = dtensor_part(t, axis)
            put_at(path, carry(record, local, ref, cut), *roots)


def enter(t: Carrier, record: Record, ref: Ref) -> None:
    """Give a carrier a place in a record, as an input."""
    t.record, t.ref, t.base, t.copies, t.turns = record, ref, None, None, None


class PersistentTensors:
    """The tensors that earlier calls left, while a forward is recorded: it sees full ones without data.

    full: makes such a tensor; roots: the model and the arguments with which the forward is recorded.
    """

    def __init__(self, record: Record, full: Callable[[Carrier], Tensor], *roots: Any) -> None:
        self.record, self.full, self.roots = record, full, roots
        self.tensors: dict[Ref, Tensor] = {}

    @contextmanager
    def entered(self, world: World) -> Iterator[None]:
        """A context in which it belongs to the record, which keeps of it what it read. The world is that before."""
        paths: dict[int, Path] = {}
        carriers = {id(t): t for t in world.seen.values() if isinstance(t, Carrier)}
        for path, t in persistent_tensors(*self.roots):
            if isinstance(t, DTensor):
                t = stand_in(self.record, t)
                put_at(path, t, *self.roots)
            carriers[id(t)] = t  # type: ignore[assignment]
            paths[id(t)] = path
        before = [(t.record, t.ref, t.base, t.copies, t.turns) for t in carriers.values()]
        for t in carriers.values():
            ref = self.record.ref(t, t.ref.shape)
            self.tensors[ref] = self.full(t)
            enter(t, self.record, ref)
        try:
            yield
        finally:
            read = {ref for node in self.record.nodes for ref in node.refs}
            for t, state in zip(carriers.values(), before):
                if t.ref in read:
                    self.record.new_base(t.ref, persistent=True).arrive(t.cut)
                    if id(t) in paths:
                        self.record.persistent[paths[id(t)]] = t.ref
                t.record, t.ref, t.base, t.copies, t.turns = state


def stand_in(record: Record, x: DTensor) -> Carrier:
    """A carrier in the place of a DTensor, while a forward is recorded."""
    local = opened(x)[0].detach().requires_grad_(x.requires_grad)
    return carry(record, local, record.ref(local, x.shape), cut_of(x.placements[0]))
