"""A machine that proves the rules of glue: every layout of every operand, on simulated ranks, in one process.

A `Call` is an operation on whole tensors. For every combination of its operands' layouts the rule refuses in words, or
says how the operation runs on local parts: then the parts are made here, each rank's call runs in turn, and what comes
out has to be that rank's slice of the whole result; gradients likewise. No process group: the moves and sums that a run
makes are narrows and additions here.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsp.comm.balanced_rows import RowDeal
from dsp.comm.layout import Cut, chunk
from dsp.comm.randomness import seed
from dsp.core.torch_calls import GlueError, Operand, replaced, tensor_args, usual_call, without_operands
from dsp.core.torch_traits import in_place, op_name
from dsp.glue.rules import RULES, Frame, Outcome, localize_source, source_cuts
from dsp.support.tensors import tensors_in

Layout = Cut | None


@dataclass
class Call:
    """An operation on whole tensors, as it enters a rule. `values` False: random or unset, so that only shapes can be
    compared."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    values: bool = True

    def __post_init__(self) -> None:
        self.args, self.kwargs = usual_call(self.func, self.args, self.kwargs)

    @property
    def name(self) -> str:
        return op_name(self.func)[0]

    def __str__(self) -> str:
        def show(v: Any) -> str:
            if isinstance(v, Tensor):
                return str(list(v.shape))
            if isinstance(v, (tuple, list)):
                return f"({', '.join(map(show, v))})"
            return repr(v)

        kwargs = [f"{k}={show(v)}" for k, v in self.kwargs.items()]
        return f"{torch.overrides.resolve_name(self.func) or self.name}({', '.join([*map(show, self.args), *kwargs])})"


@dataclass
class Proof:
    """A rule's answer to one call over n ranks: for every combination of layouts "ok", "refused" or what is wrong."""

    call: Call
    n: int
    verdicts: dict[tuple[Layout, ...], str] = field(default_factory=dict)

    @property
    def accepted(self) -> int:
        return sum(v == "ok" for v in self.verdicts.values())

    @property
    def wrong(self) -> list[str]:
        return [f"{_show(layouts)}: {v}" for layouts, v in self.verdicts.items() if v not in ("ok", "refused")]

    def __str__(self) -> str:
        rows = [f"    {_show(layouts):40} {v}" for layouts, v in self.verdicts.items()]
        unknown = "" if self.call.name in RULES else f": no rule has the name {self.call.name!r}"
        return "\n".join([f"{self.call} over {self.n} ranks{unknown}", *rows])


def _show(layouts: Sequence[Layout]) -> str:
    def one(c: Layout) -> str:
        return "whole" if c is None else f"dim {c.dim}" + (f" of {c.outer}" if c.outer != 1 else "")

    return " | ".join(map(one, layouts))


def layouts_of(shape: Sequence[int], folds: bool, joins: int = 0) -> list[Layout]:
    """Whole, every dim, and every dim as the inner of a fold, or joined of two pieces: in so many ways at most."""
    cuts: list[Layout] = [None]
    for d, size in enumerate(shape):
        outers: list[Any] = [o for o in range(1, size) if size % o == 0] if folds and size > 1 else [1]
        outers += [(k, size - k) for k in [*range(size // 3, size), *range(size // 3)] if k][:joins]
        cuts += [Cut(d, outer) for outer in outers]
    return cuts


def part(t: Tensor, cut: Layout, n: int, rank: int) -> Tensor:
    """One rank's part of a whole tensor."""
    if cut is None:
        return t
    if isinstance(cut.outer, tuple):
        return torch.cat([part(piece, Cut(cut.dim), n, rank) for piece in t.split(cut.outer, cut.dim)], cut.dim)
    extent = t.shape[cut.dim] // cut.outer
    start, length = chunk(extent, n, rank)
    opened = t.unflatten(cut.dim, (cut.outer, extent)).narrow(cut.dim + 1, start, length)
    return opened.flatten(cut.dim, cut.dim + 1)


def prove(
    call: Call, n: int, *, folds: bool = False, only: Sequence[tuple[Layout, ...]] | None = None, joins: int = 0
) -> Proof:
    """Try every combination of layouts, at least one tensor being sharded; of many tensors three at once at most.

    joins: of those in which a dim is joined of pieces, and nothing else; of `cat`, which joins them, all.
    """
    tensors = tensor_args(call.args, call.kwargs)
    whole = _Whole(call, tensors)
    proof = Proof(call, n)
    every = itertools.product(*(layouts_of(t.shape, folds, joins) for t in tensors))
    most = 3 if len(tensors) > 5 else len(tensors)  # of a recurrence's ten there would be 20,000
    side_by_side = bool(joins) and RULES[call.name] is RULES["cat"]
    for combo in every if only is None else only:
        if joins and not side_by_side and not any(c is not None and c.joined for c in combo):
            continue
        if 0 < sum(map(bool, combo)) <= most and not (in_place(call.func) and combo[0] is None):
            try:
                proof.verdicts[combo] = whole.compare(combo, n, side_by_side)
            except GlueError as refusal:
                words = str(refusal)
                proof.verdicts[combo] = "refused" if " between stages: " in words else f"refused without words: {words}"
            except Exception as error:
                proof.verdicts[combo] = f"{type(error).__name__}: {str(error)[:150]}"
    return proof


class _Whole:
    """The operation on whole tensors: its results, and its gradients for random gradients of the results."""

    def __init__(self, call: Call, tensors: list[Tensor]) -> None:
        self.call, self.tensors = call, tensors
        self.writes = in_place(call.func)
        leaves = self.leaves(tensors)
        self.out = self.run(call.func, call.args, call.kwargs, leaves)
        seed(1)
        self.upstream = [torch.randn_like(t) if t.requires_grad else None for t in self.out]
        self.grads = _gradients(self.out, self.upstream, leaves)

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]

    def run(
        self, func: Any, args: Any, kwargs: Any, leaves: list[Tensor], operands: Any = None, rows: Any = None
    ) -> list[Tensor]:
        """The results. In args and kwargs `operands` stand for the leaves, if given; else the call's own tensors do.

        Of those in `rows` the spans of a dim are taken, or rows by their numbers.
        """
        inputs: list[Any] = [t * 1 if t.requires_grad and self.writes else t for t in leaves]  # no leaf may be written
        for i, spans in (rows or {}).items():
            if isinstance(spans, DealtRows):
                inputs[i] = spans.of(inputs[i])
                continue
            read = [inputs[i].narrow(dim, a, b - a) for dim, (a, b) in spans]
            inputs[i] = read[0] if len(read) == 1 else read
        if operands is None:
            stream: Any = iter(inputs)
            args, kwargs = replaced(args, kwargs, stream)
        else:
            table = {id(o): t for o, t in zip(operands, inputs)}
            args, kwargs = without_operands(args, table), {k: without_operands(v, table) for k, v in kwargs.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed(0)
            out = func(*args, **kwargs)
        if self.writes:
            return [inputs[0]]
        if out is not None and not tensors_in(out):
            raise TypeError(f"it returns {out!r}, no tensor, of what a rank holds")
        return tensors_in(out)

    def compare(self, cuts: tuple[Layout, ...], n: int, side_by_side: bool = False) -> str:
        call = self.call
        totals = [torch.zeros_like(t) for t in self.tensors]  # gradients, put together from the ranks
        sums = [torch.zeros_like(t) for t in self.out]
        refusals: list[GlueError] = []
        outcomes: list[Outcome] = []
        ranks: list[_Rank] = []
        for rank in range(n):
            operands = [Operand(tuple(t.shape), c) for t, c in zip(self.tensors, cuts)]
            stream = iter(operands)
            args, kwargs = replaced(call.args, call.kwargs, stream)
            try:
                outcome = Frame(call.name, args, kwargs, n, rank, call.func, side_by_side).outcome()
            except GlueError as refusal:
                refusals.append(refusal)
                continue
            outcomes.append(outcome)
            taken = [c or outcome.narrow.get(i) for i, c in enumerate(cuts)]
            # what is read of other ranks' chunks, too, is cut out of the whole
            dealt = () if outcome.deal is None else (outcome.deal.operand,)
            taken = [None if i in (*outcome.rows, *dealt) else c for i, c in enumerate(taken)]
            if any(r.size != t.shape[r.dim] for i, t in enumerate(self.tensors) for r in outcome.rows.get(i, ())):
                return "rows are read of a dim of another size"
            locals_ = self.leaves([part(t, c, n, rank) for t, c in zip(self.tensors, taken)])
            named = kwargs if outcome.kwargs is None else outcome.kwargs
            spans: dict[int, Any] = {i: [(r.dim, r.spans[rank]) for r in rows] for i, rows in outcome.rows.items()}
            spans |= {i: DealtRows.to(rank, outcome.deal.deal, cuts[i].dim) for i in dealt}
            call_args = args if outcome.args is None else outcome.args
            ranks.append(_Rank(rank, taken, locals_, (call_args, named), operands, spans))
        if refusals and outcomes:
            return f"some ranks refuse: {refusals[0]}"
        if refusals:
            raise refusals[0]
        every: list[Tensor] = []
        if outcomes[0].numbers is not None:  # what each says of its part, put together
            said = [self.run(o.numbers.of, *r.call, r.leaves, r.operands)[0] for o, r in zip(outcomes, ranks)]
            if len({t.shape for t in said}) > 1 or said[0].numel() != outcomes[0].numbers.numel:
                return f"ranks say {[list(t.shape) for t in said]}, not {outcomes[0].numbers.numel} numbers"
            every = [torch.stack(said)]
        for outcome, (rank, _, locals_, (args, kwargs), operands, spans) in zip(outcomes, ranks):
            out = self.run(self.summed(outcome), (*every, *args), kwargs, locals_, operands, spans)
            if len(out) != len(self.out):
                return f"rank {rank} has {len(out)} results, not {len(self.out)}"
            upstream = []
            for i, (mine, one) in enumerate(zip(out, self.out)):
                if outcome.reduce is not None:
                    if mine.shape != one.shape:
                        return f"rank {rank} sums {list(mine.shape)}, not {list(one.shape)}"
                    sums[i] = sums[i] + (mine.detach() / outcome.reduce).to(one.dtype)
                    upstream.append(None if self.upstream[i] is None else self.upstream[i] / outcome.reduce)
                    continue
                if outcome.cut is None and outcome.numbers is not None:
                    if not _close(mine, one):
                        return f"WRONG result on rank {rank}"
                    upstream.append(None if self.upstream[i] is None else self.upstream[i] / n)
                    continue
                cut = outcome.cuts[i] if outcome.cuts else outcome.cut
                if cut is None:
                    return "the result is said to be whole"
                size = outcome.sizes[i] if outcome.sizes else outcome.size
                if cut.dim >= one.ndim or one.shape[cut.dim] != size:
                    return f"{cut} of {size} is said of a result of {list(one.shape)}"
                held = partial(part, cut=cut, n=n, rank=rank)
                if outcome.deal is not None and i in outcome.deal.results:
                    held = DealtRows.to(rank, outcome.deal.deal, outcome.cut.dim).of
                expected = held(one)
                if mine.dtype != one.dtype or mine.shape != expected.shape:
                    return f"rank {rank} has {mine.dtype} {list(mine.shape)}, not {one.dtype} {list(expected.shape)}"
                if self.call.values and not _close(mine, expected):
                    return f"WRONG result on rank {rank}"
                g = self.upstream[i]
                upstream.append(None if g is None else held(g))
            asked = ranks if every else [r for r in ranks if r.rank == rank]
            grads = iter(_gradients(out, upstream, [t for r in asked for t in r.leaves], retain=bool(every)))
            for r in asked:
                for total, cut in zip(totals, r.taken):
                    if (g := next(grads)) is None:
                        continue
                    into = part(total, cut, n, r.rank)
                    if total.numel() and into._base is None and cut is not None:  # a fold that had to be copied
                        _scatter(total, cut, n, r.rank, g)
                    else:
                        into.add_(g)
        like = [(o.cut, o.size, o.sizes, o.cuts, o.view, o.reduce, o.deal) for o in outcomes]
        said = {(*of, *o.narrow.items(), *o.rows.items()) for of, o in zip(like, outcomes)}
        if len(said) > 1:
            return "ranks disagree on the layout of the result"
        if outcomes[0].reduce is not None and not all(map(_close, sums, self.out)):
            return "WRONG sum over ranks"
        if self.call.values and not all(g is None or _close(t, g) for t, g in zip(totals, self.grads)):
            return "WRONG gradient"
        return "ok"

    def summed(self, outcome: Outcome) -> Any:
        """The function that a rank calls: a mean over all ranks is a sum first."""
        if outcome.reduce is not None and self.call.name == "mean":
            return torch.Tensor.sum
        return outcome.func or self.call.func


def _scatter(total: Tensor, cut: Cut, n: int, rank: int, g: Tensor) -> None:
    index = part(torch.arange(total.shape[cut.dim]), Cut(0, cut.outer), n, rank)
    total.index_add_(cut.dim, index, g)


class DealtRows(NamedTuple):
    """Rows of a dim that are dealt to one rank."""

    dim: int
    rows: Tensor

    @classmethod
    def to(cls, rank: int, deal: RowDeal, dim: int) -> DealtRows:
        return cls(dim, torch.tensor([row for span in deal.spans(rank) for row in range(*span)], dtype=torch.long))

    def of(self, whole: Tensor) -> Tensor:
        return whole.index_select(self.dim, self.rows)


class _Rank(NamedTuple):
    """One simulated rank: what it holds, how each tensor is cut, and its call with operands for them."""

    rank: int
    taken: list[Layout]
    leaves: list[Tensor]
    call: tuple[Any, Any]
    operands: list[Operand]
    spans: dict[int, list[Any]]


def _gradients(
    out: Sequence[Tensor], upstream: Sequence[Tensor | None], leaves: Sequence[Tensor], retain: bool = False
) -> list[Any]:
    asks = [t for t in leaves if t.requires_grad]
    pairs = [(t, g) for t, g in zip(out, upstream) if t.requires_grad and g is not None]
    if not asks or not pairs:
        return [None] * len(leaves)
    outputs, given = zip(*pairs)
    grads = iter(torch.autograd.grad(outputs, asks, given, allow_unused=True, retain_graph=retain))
    return [next(grads) if t.requires_grad else None for t in leaves]


def _close(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point or a.is_complex():
        return torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    return torch.equal(a, b)


def prove_source(call: Call, n: int, cuts: Sequence[Cut] | None = None) -> Proof:
    """A stretch of a whole tensor, or zeros, of which each rank makes its part alone."""
    proof = Proof(call, n)
    (whole,) = tensors_in(call.func(*call.args, **call.kwargs))
    for cut in source_cuts(_frame(call, n, 0)[0]) if cuts is None else cuts:
        good = True
        for rank in range(n):
            frame, table = _frame(call, n, rank)
            stretch, args, size = localize_source(frame, cut)
            mine = stretch(*without_operands(args, table))
            good &= size == whole.shape[cut.dim] and mine.dtype == whole.dtype
            good &= torch.equal(mine, part(whole, cut, n, rank))
        proof.verdicts[(cut,)] = "ok" if good else "WRONG part"
    return proof


def _frame(call: Call, n: int, rank: int) -> tuple[Frame, dict[int, Tensor]]:
    tensors = tensor_args(call.args, call.kwargs)
    operands = [Operand(tuple(t.shape)) for t in tensors]
    stream = iter(operands)
    args, kwargs = replaced(call.args, call.kwargs, stream)
    return Frame(call.name, args, kwargs, n, rank, call.func), {id(o): t for o, t in zip(operands, tensors)}


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every torch function that glue may meet, with its name in the rules: torch's own list, and what it leaves out."""
    missing = [
        torch.nn.functional.hardswish, torch.nn.functional.hardsigmoid, torch.nn.functional.logsigmoid,
        torch.rand_like, torch.randn_like, torch.nn.functional.conv3d,
    ]  # fmt: skip
    listed = itertools.chain(*torch.overrides.get_overridable_functions().values(), missing)
    for func in {id(f): f for f in listed}.values():
        yield op_name(func)[0], func
