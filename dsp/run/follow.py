"""Run an operation between stages by its recipe: move its tensors, call it on local shards, wrap the results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.calls import without_operands
from dsp.collectives import summed_in
from dsp.deal import collect_rows, deal_rows
from dsp.gradients import global_stride
from dsp.layout import Cut
from dsp.moves import Part
from dsp.randomness import forked
from dsp.rows import Rows, read_rows
from dsp.rules import DealtRows, Outcome, localize_source
from dsp.rules.functions import ALIASES, DENSE
from dsp.run.forward import Run
from dsp.run.recipes import Recipe, RuledCall
from dsp.run.whole import on_wholes, parted, writes
from dsp.run.writes import copy_source
from dsp.sharded import Sharded, plain
from dsp.tensors import NO, map_tensors, memory, plainly, tensors_in, version


def follow(op: RuledCall, recipe: Recipe) -> Any:
    """Run an operation by its recipe."""
    run = op.run
    run.where = ("glue", recipe.index, op.what.name)
    parts = run.views.bring(op.tensors, op.shells, recipe.wanted, recipe.via)
    if recipe.outcome is None:
        return on_wholes(op, parts, recipe.wanted)
    narrow = recipe.outcome.narrow
    parts = [run.axis.narrow(t, narrow[i]) if i in narrow else t for i, t in enumerate(parts)]
    before = [version(t) for t in parts]
    if op.what.in_place:
        with NO():
            _ = parts[0].grad_fn  # updates the grad_fn of a view whose base got one by a write through another view
    out = on_parts(op, recipe, recipe.outcome, parts)
    if recipe.outcome.cut is None:
        return parted(run, out, recipe.node, recipe.push, parts)
    made = results(op, recipe, recipe.outcome.cut, parts, out)
    written = 1 if op.what.in_place else 0
    call = recipe.prepared
    if call is not None and before[written:] == [version(t) for t in parts[written:]]:
        # a result that is an operand, unchanged, may be a copy that is kept: such a recipe is not `ready`
        own = not (call.moves or call.pushes) or set(map(memory, tensors_in(out))).isdisjoint(map(memory, parts))
        recipe.ready, recipe.ats = own, tuple(t.at for t in made)
    return map_tensors(out, made)


def on_parts(op: RuledCall, recipe: Recipe, outcome: Outcome, parts: list[Tensor]) -> Any:
    """Call the operation on local shards as its rule says, and sum the result over ranks if the rule asks for it."""
    run, frame, operands, name = op.run, recipe.frame, recipe.frame.operands(), op.what.name
    table: dict[int, Any] = {id(o): t for o, t in zip(operands, parts)}
    if outcome.rows:
        came = read(run, [(plain(parts[i]), recipe.wanted[i], rows) for i, rows in outcome.rows.items()])
        table |= {id(operands[i]): own for i, own in zip(outcome.rows, came)}
    if outcome.deal is not None:
        i, deal, _ = outcome.deal
        table[id(operands[i])] = deal_rows(plain(parts[i]), recipe.wanted[i].dim, deal, run.axis.group)  # type: ignore[union-attr]
    args = without_operands(frame.args if outcome.args is None else outcome.args, table)
    named = frame.kwargs if outcome.kwargs is None else outcome.kwargs
    kwargs = {k: without_operands(v, table) for k, v in named.items()}
    call, half = outcome.func or op.func, outcome.reduce not in (None, 1.0) and in_half(parts, kwargs)
    if outcome.reduce is not None:
        call = summing(call, name, half, kwargs)
    with writes(op, parts, recipe.wanted) as views:
        own = [t for t in parts if isinstance(t, Sharded)]
        with bare(own), quiet(parts), forked(run.axis) if recipe.draws else nullcontext():
            if outcome.numbers is not None:
                mine = outcome.numbers.of(*args)[None]
                args = (torch.ops.dsp.gather(mine, 0, run.axis.size, run.axis.group), *args)
            out = plainly(call(*args, **kwargs))
            if outcome.deal is not None:
                out = collected(op, outcome, outcome.deal, out)
        return views(out) if outcome.reduce is None else summed(op, outcome, parts, out, half)


def summing(call: Any, name: str, half: bool, kwargs: dict[str, Any]) -> Any:
    """The function by which a rank sums its part of a mean, or takes its mean: in half precision a sum may overflow."""
    if half and "reduction" in kwargs:
        kwargs["reduction"] = "mean"
    return torch.Tensor.sum if name == "mean" and not half else call


def summed(op: RuledCall, outcome: Outcome, parts: list[Tensor], out: Tensor, means: bool) -> Tensor:
    """The ranks' results, which may be means of their parts, summed and divided as the rule says."""
    own = out.to(summed_in(out.dtype))
    if means:
        own = own * (math.prod(torch.broadcast_shapes(*(plain(t).shape for t in parts))) / out.numel())
    total = torch.ops.dsp.all_reduce(own, op.run.axis.group)
    out = (total / outcome.reduce if outcome.reduce != 1.0 else total).to(out.dtype)
    if op.what.name in ("select", "getitem"):  # a view on one device
        as_copy(op, out, parts[0])
    return out


def in_half(parts: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Tell whether a rank's mean is computed in half precision; on an empty rank it is not."""
    return kwargs.get("dtype") is None and all(plain(t).numel() and t.element_size() == 2 for t in parts)


def read(run: Run, wanted: Sequence[tuple[Tensor, Cut | None, tuple[Rows, ...]]]) -> list[Any]:
    """The spans of rows that this rank reads of each tensor, in one exchange; none for replicated ones (cut None)."""
    pairs = [(t, rows) for t, cut, spans in wanted if cut is not None for rows in spans]
    came = iter(read_rows([t for t, _ in pairs], [rows for _, rows in pairs], run.axis.group))
    found: list[Any] = []
    for t, cut, spans in wanted:
        if cut is None:
            ends = [(rows.dim, *rows.spans[run.axis.rank]) for rows in spans]
            own = [t.narrow(dim, start, stop - start) for dim, start, stop in ends]
        else:
            own = [next(came) for _ in spans]
        found.append(own[0] if len(own) == 1 else own)
    return found


def collected(op: RuledCall, outcome: Outcome, dealing: DealtRows, out: Any) -> Any:
    """The results of dealt rows, brought back to the ranks that hold those rows."""
    cut, group = outcome.cut, op.run.axis.group
    assert cut is not None
    every = tensors_in(out)
    for i in dealing.results:
        every[i] = collect_rows(every[i], cut.dim, dealing.deal, group)
    return map_tensors(out, every)


class Landed(NamedTuple):
    """One local result. part: its layout now and in the plan; source: the memory of which it is a copy; itself: the
    sharded tensor that it already is, if any."""

    part: Part
    source: Any
    itself: Sharded | None


def results(op: RuledCall, recipe: Recipe, cut: Cut, parts: list[Tensor], out: Any) -> list[Sharded]:
    """The local results as sharded tensors, in the plan's layouts."""
    run = op.run
    found = [landed(op, recipe, cut, parts, k, own) for k, own in enumerate(tensors_in(out))]
    made: list[Any] = [
        run.carry(t, r.part.dst, r.part.shape, r.source, number) if r.itself is None else r.itself
        for t, r, number in zip(run.push_all([r.part for r in found]), found, op.numbers)
    ]
    related(op, recipe, parts[0], [r.part for r in found], made, [r.itself is None for r in found])
    return made


def related(
    op: RuledCall, recipe: Recipe, x: Tensor, parts: Sequence[Part], made: Sequence[Any], fresh: Sequence[bool]
) -> None:
    """Mark results as views of the first argument, whose shard is `x`, or as copies where a view was impossible."""
    run, first, outcome = op.run, op.shells[0], recipe.outcome
    if op.what.name in ALIASES and not recipe.view:  # a result that was switched misses later writes into its source
        moved = [(p.local, t) for p, t in zip(parts, made) if p.dst != p.src]
        run.writes.copied += [(memory(own), memory(t)) for own, t in moved if memory(own) == memory(x)]
    if recipe.view is not None and first is not None:
        for t in (t for t, is_fresh in zip(made, fresh) if is_fresh):
            t.viewed_from = first, recipe.view
    for t in made if outcome.rows and op.what.name in ALIASES else ():  # type: ignore[union-attr]  # would be a view
        as_copy(op, t, x)
    if op.views and first is not None and memory(parts[0].local) != memory(x):
        run.writes.reshape_copied(first, made[0])


def landed(op: RuledCall, recipe: Recipe, cut: Cut, parts: list[Tensor], k: int, own: Tensor) -> Landed:
    """The k-th result, `own`, with its global shape; it is cloned if on one device it would not share memory."""
    outcome, loose = recipe.outcome, op.what.name in DENSE and op.copies is None
    assert outcome is not None
    t, shell = plain(own), op.shells[0]
    shape = list(t.shape)
    shape[cut.dim] = outcome.sizes[k] if outcome.sizes else outcome.size
    target = recipe.push[k] if k < len(recipe.push) else None
    if target is None or not target.fits(shape):
        target = cut
    dense = t
    if op.copies and memory(t) == memory(parts[0]):
        dense = t.clone()
    elif loose:
        dense = dense_result(op, t, parts[0], shape)
    stays, itself = dense is t and target == cut, None
    source = copy_source(dense) or (copy_source(own) if stays else None)
    if op.what.in_place:
        if own is parts[0]:  # the operation returns the argument that it wrote into
            itself = op.tensors[0].__dict__.get("now", shell)
    # an unchanged argument keeps its copies, on empty ranks too. Excluded are operations that return the argument on
    # some ranks and a new tensor on others: dropout (on empty ranks), and unplanned operations that may copy
    elif own is shell and stays and not (recipe.draws or loose):
        itself = shell
    return Landed(Part(dense, cut, target, tuple(shape)), source, itself)


def as_copy(op: RuledCall, t: Tensor, local: Tensor) -> None:
    """Mark a result as a copy of the operation's first argument, of which it is a view on one device.

    local: this rank's shard of that argument.
    """
    if memory(t) == memory(local):  # still a view: no rank read rows of another rank
        return
    op.run.writes.mark(t, copy_source(op.tensors[0]) or memory(op.tensors[0]))
    if op.what.name == "getitem":
        t._dsp_read = op.args  # type: ignore[attr-defined]


def source(op: RuledCall, cut: Cut) -> Any:
    """The shard that each rank makes by itself, of an expanded replicated tensor or of a constant one such as zeros."""
    frame = op.frame([None] * len(op.tensors))
    stretch, args, size = localize_source(frame, cut)
    out = stretch(*without_operands(args, {id(o): t for o, t in zip(frame.operands(), op.tensors)}))
    shape = list(out.shape)
    shape[cut.dim] = size
    return op.run.carry(out, cut, tuple(shape), number=next(op.numbers))


def dense_result(op: RuledCall, t: Tensor, local: Tensor, out_shape: list[int]) -> Tensor:
    """The result of an operation that copies only if it must; used if no plan says whether it does.

    A shard may need a copy where the full tensor needs none, and the other way round. A copy is made where one device
    makes one. Where one device makes a view, or no rank can tell, the copy is marked: after a write into it or into its
    source, a read of the other is refused.
    """
    view, shared = on_one_device_a_view(op, out_shape), memory(t) == memory(local)
    if view is shared:
        return t
    own = t.clone() if shared else t
    if view is not False:
        op.run.writes.mark_copy(own, op.tensors[0])
    return own


def on_one_device_a_view(op: RuledCall, out_shape: list[int]) -> bool | None:
    """Tell whether the full result is a view of the full argument, equally on all ranks; None if no rank can tell.

    A rank with one row does not know where the sharded dim lies in memory: it asks rank 0, if that has more rows.
    """
    whole, axis = op.tensors[0], op.run.axis

    def is_view(stride: tuple[int, ...]) -> bool:
        model = torch.empty_strided(whole.shape, stride, device="meta")
        same = tuple(out_shape) == tuple(whole.shape)
        return memory(model.contiguous() if same else model.reshape(out_shape)) == memory(model)

    if not isinstance(whole, Sharded):
        return is_view(whole.stride())
    cut, shape = whole.at.cut, whole.at.shape
    rows = [cut.own(shape[cut.dim], axis.size, rank) for rank in range(axis.size)]
    if rows[0] == 1:
        return None
    view = is_view(global_stride(plain(whole), shape))
    if 1 not in rows:
        return view
    told = torch.tensor(int(axis.rank == 0 and view), device=whole.device)
    return bool(torch.ops.dsp.all_reduce(told, axis.group))


@contextmanager
def bare(tensors: Iterable[Sharded]) -> Iterator[None]:
    """Turn sharded tensors into plain ones for a while: the code inside, and autograd, see local shards."""
    kinds = {id(t): (t, type(t)) for t in tensors}
    for t, kind in kinds.values():
        t.__class__ = kind.part  # type: ignore[assignment]
    try:
        yield
    finally:
        for t, kind in kinds.values():
            t.__class__ = kind


def quiet(tensors: list[Tensor]) -> AbstractContextManager[Any]:
    """Ignore warnings on an empty rank, such as those about statistics of no elements."""
    if all(t.numel() for t in tensors):
        return nullcontext()
    return _ignored()


@contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
