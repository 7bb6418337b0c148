"""The tensors that a forward finds: the inputs of a model, and what its earlier calls left.

Of inputs each rank takes its part. What outlives its call, such as a cache of keys, is known by its path from the model
or its arguments; a record is made for the layouts in which earlier calls left it, and at a call it is given its place
in the record of that call. The caller may have put a DTensor there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.comm.gradients import connected_local, is_graph_start
from dsp.comm.layout import Axis, Cut, cut_of, cuts_of
from dsp.comm.moves import ScaleGradient, SplitInput, WholeInput
from dsp.core.carrier import Carrier, carry
from dsp.core.offers import allow_named
from dsp.core.record import Layout, Record, Ref
from dsp.core.torch_calls import GlueError
from dsp.stages.notation import BATCH_NAMES, StagePattern
from dsp.stages.signature import Bound, Signature, Slot, got, put
from dsp.stages.stage import cut_for
from dsp.support.private import opened, pytree
from dsp.support.python_state import Path, World, put_at, search, value_at
from dsp.support.tensors import tensors_in

UNNAMED = StagePattern("", (), (), False, root=True)  # of a model whose stages name no inputs of the model itself


def signature_of(model: nn.Module, root: StagePattern | None) -> Signature:
    return Signature(model, root or UNNAMED, "the model")


def properties(v: Any) -> Any:
    """The properties of an input on which a record depends."""
    if isinstance(v, DTensor):
        return v.shape, v.dtype, v.requires_grad, v.placements
    if isinstance(v, Tensor):
        dense = v.layout != torch.strided or v.is_contiguous()  # else a reshape of it may make a copy
        return v.shape, v.dtype, v.requires_grad, None if dense else v.stride()
    if isinstance(v, (bool, int, str)) or v is None:
        return type(v), v
    return type(v).__qualname__


def described_call(args: Any, kwargs: Any) -> Any:
    """The structure of a call's arguments, and the properties of each."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return spec, *map(properties, leaves)


def arrivals(bound: Sequence[Bound]) -> dict[str, Cut]:
    """The cuts of the inputs that arrive sharded, by parameter."""
    return cuts_of({b.param: b.tensor.placements[0] for b in bound if isinstance(b.tensor, DTensor)})


def add_inputs(record: Record, bound: Sequence[Bound], sharded: Mapping[str, Cut]) -> None:
    """Add the inputs that may be sharded to a record: those with a pattern, long ones, and `sharded` ones."""
    declared = [b for b in bound if b.pattern is not None]
    longest = max((b.tensor.nbytes for b in declared or bound), default=0)
    for b in bound:
        cut = sharded.get(b.param)
        if b.pattern is None and cut is None and record.n * b.tensor.nbytes <= longest:
            continue
        record.inputs[b.param] = record.ref(b.tensor)
        if b.pattern is not None:
            record.patterns[b.param] = b.pattern
        add_input_base(record, b.param, cut)


def add_input_base(record: Record, param: str, cut: Layout) -> None:
    """Add the base of an input that arrives in a cut."""
    base = record.new_base(record.inputs[param], free=param not in record.patterns and cut is None)
    if param in record.patterns:
        allow_named(base, record.patterns[param], record.sizes, record.n)
    base.arrive(cut)


def enter_sharded(record: Record) -> None:
    """Let inputs with patterns enter in shards, in a forward that no plan could be made of: along one dim, a long one
    rather than the batch."""
    cuts: dict[str, dict[str, Cut]] = {}
    for param, pattern in record.patterns.items():
        ref = record.inputs[param]
        sizes = {name: cut_for(pattern, ref.shape, name, record.sizes) for name in pattern.names}
        cuts[param] = {name: cut for name, cut in sizes.items() if cut in ref.base.cuts}
    names = {name for by_name in cuts.values() for name in by_name}
    if names:
        along = max(sorted(names), key=lambda name: (name not in BATCH_NAMES, record.sizes[name]))
        record.entry.update({param: by_name[along] for param, by_name in cuts.items() if along in by_name})


def carried_inputs(record: Record, signature: Signature, args: Any, kwargs: Any, sharded: Mapping[str, Cut]) -> Any:
    """The arguments of the model with carriers of replicated tensors in the place of its inputs, for recording."""
    call, bound = signature.bind(args, kwargs)
    add_inputs(record, bound, sharded)
    for b in bound:
        if (ref := record.inputs.get(b.param)) is not None:
            call.replace(b, carry(record, b.tensor, ref, None))
    return call.args, call.kwargs


class Entry(NamedTuple):
    """A tensor among the arguments of a model: its place, its reference (None: it carries nothing), and the cut in
    which it enters."""

    slot: Slot
    ref: Ref | None
    cut: Layout


class Inputs:
    """The inputs of calls of one signature, as each rank takes its part of them."""

    def __init__(self, record: Record, axis: Axis, bound: Sequence[Bound]) -> None:
        self.record, self.axis = record, axis
        self.entries = [Entry(b.slot, record.inputs.get(b.param), record.entry.get(b.param)) for b in bound]

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with this rank's part of each input; a gradient asked of one is its full, true gradient."""
        args, kwargs = list(args), dict(kwargs)
        for slot, ref, cut in self.entries:
            item = type(slot) is tuple
            holder: Any = args if type(slot) is int else kwargs
            x = got(args, kwargs, slot) if item else holder[slot]
            local, cut = part_of(x, self.axis, cut)
            if ref is not None:
                local = carry(self.record, local, ref, cut)
            if local is not x and item:
                put(args, kwargs, slot, local)
            elif local is not x:
                holder[slot] = local
        slots: list[tuple[Slot, Any]] = [*enumerate(args), *kwargs.items()]
        for slot, value in slots:
            if type(value) in (list, tuple, dict) and any(t.requires_grad for t in tensors_in(value)):
                put(args, kwargs, slot, pytree.tree_map_only(Tensor, self.true_gradient, value))
        return args, kwargs

    def true_gradient(self, t: Tensor) -> Tensor:
        """A tensor in a list or dict, so that every rank gets its true gradient."""
        return t if isinstance(t, Carrier) else part_of(t, self.axis, None)[0]


def part_of(x: Tensor, axis: Axis, cut: Layout) -> tuple[Tensor, Layout]:
    """This rank's part of an input that enters in a cut, and the cut; a DTensor enters as it arrives."""
    asks = x.requires_grad
    if isinstance(x, DTensor):
        return dtensor_part(x, axis)
    if cut is not None:
        return (SplitInput.apply(x, axis, cut) if asks else axis.narrow(x, cut)), cut
    return (WholeInput.apply(x, axis) if asks else x), None


def dtensor_part(x: DTensor, axis: Axis) -> tuple[Tensor, Cut]:
    """This rank's part of an input that arrives sharded, and its cut."""
    refuse_meshes([x], axis)
    cut = cut_of(x.placements[0])
    assert cut is not None
    local = connected_local(x)
    if x.requires_grad and is_graph_start(x):  # others were computed from parameters, of which the caller averages
        local = ScaleGradient.apply(local, axis.size)
    return local, cut


def refuse_meshes(tensors: Iterable[Tensor], axis: Axis) -> None:
    """Raise GlueError for a DTensor that is not sharded over the axis, and over nothing else."""
    for x in tensors:
        if not isinstance(x, DTensor):
            continue
        if x.device_mesh != axis.mesh or len(x.placements) > 1 or cut_of(x.placements[0]) is None:
            raise GlueError(
                f"a DTensor {x.placements} on mesh {x.device_mesh} meets a model that is sharded over {axis.mesh}. "
                "Inputs must be plain tensors or DTensors sharded over the sequence-parallel mesh. A module whose "
                "weights are on another mesh, such as tensor parallelism's, must be a stage or inside of one: name it "
                "in stages"
            )


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
