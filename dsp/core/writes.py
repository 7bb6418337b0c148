"""Writes in place, and the tensors that share memory on one device.

There they see each other's writes. On a rank one of them may be a copy: it was switched or gathered, or its part has
strides that allow no view. The tensors that share memory on one device are a family; after a write into one of them,
those whose part is in other memory are stale, and a read of one is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsp.comm.gradients import global_stride
from dsp.comm.layout import Axis
from dsp.core.carrier import Carrier, base_of, carry, copies_of, link, plain, shared_base
from dsp.core.record import Layout, Node, Offer, Record, Ref
from dsp.core.torch_calls import GlueError, replaced, tensor_args
from dsp.core.torch_traits import DENSE, WITHOUT_DATA, Traits, written
from dsp.core.watch import refuse_functions
from dsp.support.source_lines import line_now
from dsp.support.tensors import map_tensors, memory, overlap, tensors_in, version

MISSED = (
    "{who} wrote in place into a copy of a tensor. The copy was made when that tensor, or one that shares its "
    "memory, was switched or gathered. The original lacks that write, and the forward now reads the original. Use an "
    "out-of-place operation"
)
INTO_INPUT = "{who} writes in place into the model's own input {param!r}; use an out-of-place operation"
INTO_PART = (
    "{who} writes in place into this rank's part of a replicated tensor: the rest of the tensor, which the rank holds, "
    "too, would miss the write. Use an out-of-place operation"
)
INTO_OUT = "{name}() between stages: out= has no rule for a sharded tensor; use the result, as in y = {name}(...)"


# --- in a record ------------------------------------------------------------------------------------------------------


def written_operands(func: Any, traits: Traits, args: Any, kwargs: Any) -> tuple[int, ...]:
    """The numbers of the operands that a function writes into.

    Raises GlueError for `out=`.
    """
    if kwargs.get("out") is not None and any(isinstance(t, Carrier) for t in tensor_args(args, kwargs)):
        raise GlueError(INTO_OUT.format(name=traits.name))
    into = written(func, args, kwargs)
    return tuple(i for i, t in enumerate(tensor_args(args, kwargs)) if any(t is x for x in into)) if into else ()


def kin_of(operands: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """The results that have elements in common with others: the number of the first such tensor among the operands and
    the results, counted in both, and the number of the result."""
    kin, memories = [], [*map(memory, (*operands, *results))]
    for k, r in enumerate(results, len(operands)):
        every = zip((*operands, *results), memories[:k])
        first = next((i for i, (t, m) in enumerate(every) if m == memories[k] and overlap(t, r)), None)
        if first is not None:
            kin.append((first, k - len(operands)))
    return tuple(kin)


def on_meta(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]] | None:
    """The operands and the results of an operation as tensors without data; None if the results depend on data."""
    models = [*map(model_of, tensor_args(args, kwargs))]
    try:
        args, kwargs = replaced(args, kwargs, iter(models))
        args = [dict(v) if type(v) is dict else v for v in args]  # a memo of copies gets none of these
        with torch.no_grad():  # a checkpoint counts what is saved for backward
            return models, tensors_in(WITHOUT_DATA.get(func, func)(*args, **kwargs))
    except Exception:
        return None


def kin_on_meta(
    axis: Axis, name: str, operands: Sequence[Tensor], meta: tuple[list[Tensor], list[Tensor]] | None
) -> tuple[tuple[int, int], ...] | None:
    """The same for an operation that no record has, from a call on tensors without data; None if no rank can tell.

    A rank with one row, or none, does not know where the sharded dim is in memory: it asks rank 0, if that has more.
    """
    if meta is None:
        return ()
    kin = kin_of(*meta)
    if name not in DENSE or not isinstance(t := operands[0], Carrier) or t.cut is None:
        return kin
    rows = [t.cut.local_size(t.ref.shape[t.cut.dim], axis.size, rank) for rank in range(axis.size)]
    if rows[0] == 1:
        return None
    if min(rows) > 1:
        return kin
    answer = torch.tensor(int(axis.rank == 0 and bool(kin)), device=plain(t).device)
    return ((0, 0),) if bool(torch.ops.dsp.all_reduce(answer, axis.group)) else ()


def returns_operand(node: Node, meta: tuple[list[Tensor], list[Tensor]] | None) -> bool:
    """Tell whether an operation that no record has returns its first operand, as it does on tensors without data."""
    if meta is None or node.writes or node.kin_unknown or node.kin != ((0, 0),):
        return False
    (x, *_), results = meta
    return len(results) == 1 and (node.name == "contiguous" or results[0] is x)


def model_of(t: Tensor) -> Tensor:
    """A tensor without data, of the global shape and with the strides that it has on one device."""
    if not isinstance(t, Carrier):
        return t.to("meta")
    stride = plain(t).stride() if t.cut is None else global_stride(plain(t), t.ref.shape)
    return torch.empty_strided(tuple(t.ref.shape), stride, dtype=t.ref.dtype, device="meta")


def note_last_writes(record: Record) -> None:
    """Let the planner know until when it may move no tensor that is written, if others share its memory: they would
    miss the write."""
    refs = [*record.inputs.values(), *(r for node in record.nodes for r in node.results)]
    count: dict[int, int] = {}
    for r in refs:
        count[r.memory] = count.get(r.memory, 0) + 1 + r.detached
    writes = ((node, t) for node in record.nodes for i in node.writes if isinstance(t := node.operands[i], Ref))
    last = {t.memory: node for node, t in writes}
    for r in refs:
        if r.memory in last and count[r.memory] > 1:
            r.base.last_write = last[r.memory]


# --- families ---------------------------------------------------------------------------------------------------------


def relate(node: Node, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Note which results of a node share memory on one device, with operands or with each other."""
    every, siblings = [*operands, *results], object() if len(results) > 1 else None
    for first, k in node.kin:
        a, b = every[first], results[k]
        if isinstance(a, Carrier) and isinstance(b, Carrier) and a is not b:
            link(a, b, siblings if first < len(operands) else None)


class Stale(Carrier):
    """A tensor that missed a write in place: whatever reads its layout, to read the tensor, is refused.

    wrote: the operation that wrote, its line, and the tensor that it wrote into.
    """

    missed: tuple[str, str, weakref.ref[Carrier]]

    @property
    def cut(self) -> Layout:  # type: ignore[override]
        error = GlueError(MISSED.format(who=self.missed[0]))
        error.line = self.missed[1]
        raise error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__setitem__ and type(args[0]) is Stale:
            args[0].take_back(*args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def take_back(self, index: Any, value: Any) -> None:
        """Before `x[index] = value`: if value is the copy of x[index] that was written, x misses that write no more."""
        into = self.missed[2]
        copy = into()
        if copy is not None and copy is value and copy.index == index:
            for t in (x() for x in self.family or ()):
                if type(t) is Stale and t.missed[2] is into:
                    t.__class__ = Carrier  # type: ignore[assignment]


class Elsewhere(Carrier):
    """A tensor that was written in another layout than it had; now: the tensor since then."""

    now: Carrier

    @property
    def cut(self) -> Layout:  # type: ignore[override]
        return self.now.cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = tensor_args(args, kwargs)
        refuse_functions(t for t in tensors if type(t) is Elsewhere)
        args, kwargs = replaced(args, kwargs, iter([t.now if type(t) is Elsewhere else t for t in tensors]))
        out = func(*args, **kwargs)
        return next((t for t in tensors if type(t) is Elsewhere and t.now is out), out)


# --- in a run ---------------------------------------------------------------------------------------------------------


def refuse_write(record: Record, who: str, t: Tensor, need: Layout) -> None:
    """Raise GlueError for a write into `t`, brought into a layout, that the rest of it or the caller would miss.

    A replicated carrier is, after a write into its part, the sharded tensor.
    """
    if need is None and (not isinstance(t, Carrier) or t.cut is None):
        return
    if isinstance(t, Carrier):
        for param, ref in record.inputs.items():
            if ref is base_of(t).ref:
                raise GlueError(INTO_INPUT.format(who=who, param=param))
    else:
        raise GlueError(INTO_PART.format(who=who))


def note_writes(
    axis: Axis, node: Node, offer: Offer, operands: Sequence[Tensor], parts: Sequence[Tensor], versions: Sequence[int],
    out: Any,
) -> None:  # fmt: skip
    """Note the writes of an operation, which returned `out`, into `parts` in the layouts that its offer needs.

    versions: of the parts that it writes into, from before.
    """
    if hasattr(out, "wait"):  # async_op=True; the data that it receives may be copied next
        out.wait()
    for i, before in zip(node.writes, versions):
        counted = version(parts[i]) != before
        wrote(axis, f"{node.name}() between stages", operands[i], parts[i], offer.needs[i], counted)


def wrote(axis: Axis, who: str, t: Tensor, local: Tensor, cut: Layout, counted: bool = True) -> None:
    """Note a write into `local`, the part of `t` in a cut. counted: by torch's version counter."""
    if not isinstance(t, Carrier):
        return
    back = cut is None and t.cut is not None and not counted
    narrowed = cut is not None and t.cut is None
    if back:
        copy_back(axis, t, local)
    elif t.cut != cut:
        move(t, local, cut)
    miss(who, t, None if narrowed else memory(plain(t)))  # what shares the full tensor's memory lacks the other rows
    if back and (base := shared_base(t)).ref is t.ref:
        copies_of(base)[None] = local


def miss(who: str, t: Carrier, into: Any) -> None:
    """Bring the tensors that share memory with `t` on one device up to date after a write into the memory `into`.

    One in other memory is from now on its copy in that memory; without such a copy it is stale. into None: all are.
    """
    base_of(t).copies = None
    ref = weakref.ref(t)
    for x in (x() for x in t.family or ()):
        if x is None or x is t or type(x) is Stale or (x.siblings is not None and x.siblings is t.siblings):
            continue
        if in_other_memory(x, t, into):
            if (same := copy_in(x, t, into)) is not None:
                move(x, *same)
            else:
                stale(x, who, ref)
        base_of(x).copies = None


def in_other_memory(x: Carrier, t: Carrier, into: Any) -> bool:
    """Tell whether the part of `x` is in other memory than that of `t`, which is `into`.

    An empty part may have memory of its own where the others have a view: its rank goes by the layouts, as the others
    refuse what is stale.
    """
    if plain(x).numel():
        return memory(plain(x)) != into
    return 0 not in x.ref.shape and (in_other_cut(x, base_of(t)) or into is None or plain(t).numel() > 0)


def in_other_cut(x: Carrier, base: Carrier) -> bool:
    return base.ref.shape == x.ref.shape and x.cut != base.cut


def copy_in(x: Carrier, t: Carrier, into: Any) -> tuple[Tensor, Layout] | None:
    """The copy of `x` in the memory `into` of `t`, and its cut.

    A rank whose part of `t` is empty goes by the layout, to do what the others do: a stage ran there on a dummy, and
    returned that where the others returned their copy.
    """
    copies, base = x.copies or {}, base_of(t)
    if into is not None and not plain(t).numel() and in_other_cut(x, base):
        return (copies[base.cut], base.cut) if base.cut in copies else None
    return next(((copy, cut) for cut, copy in copies.items() if memory(copy) == into), None)


def stale(x: Carrier, who: str, into: weakref.ref[Carrier]) -> None:
    x.__class__ = Stale
    x.missed = who, line_now(), into  # type: ignore[attr-defined]


def copy_back(axis: Axis, t: Carrier, full: Tensor) -> None:
    """Copy this rank's rows of a full copy of `t` into its part, after a write that autograd did not see.

    On one device neither autograd nor the version counter notices such a write, as of a collective, nor do they here.
    """
    assert t.cut is not None
    with torch.no_grad():
        plain(t).data.copy_(axis.narrow(full.data, t.cut))


def move(t: Carrier, local: Tensor, cut: Layout) -> None:
    """Let `t` be, from now on, the tensor that was written in another layout."""
    if t.base is not None:
        link(t.base, t)
    now = carry(t.record, local, t.ref, cut)
    now.family, now.siblings, now.turns = t.family, t.siblings, t.turns
    t.__class__ = Elsewhere
    t.now = t.base = now


def one_device_result(node: Node, out: Any, parts: Sequence[Tensor]) -> Any:
    """The result of an operation on parts, as one device makes it.

    One that shares memory with its operand, but is no view of it in a plan, gets no gradient if it was made without:
    torch says of such a view that it requires one. Of an operation that copies if it must, which on this part it need
    not, the result is a copy, where one device makes one, or where no rank can tell.
    """
    if node.kin and not (node.view or torch.is_grad_enabled()):
        out = map_tensors(out, [t.detach() for t in tensors_in(out)])
    if not node.loose:
        return out
    [local] = tensors_in(out)
    shares = memory(local) == memory(parts[0])
    return local.clone() if shares and (node.kin_unknown or not node.kin) else out
