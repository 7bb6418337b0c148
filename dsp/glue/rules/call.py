"""An operation between stages as a rule reads it, and the outcome that the rule returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from dsp.comm.balanced_rows import RowDeal
from dsp.comm.halo import Rows
from dsp.comm.layout import Cut
from dsp.core.torch_calls import GlueError, Operand, instead_of


class DealtRows(NamedTuple):
    """The number of an operand whose rows are dealt to the ranks, and the numbers of the results that are sent back."""

    operand: int
    deal: RowDeal
    results: tuple[int, ...] = (0,)


class Numbers(NamedTuple):
    """A function of a rank's arguments whose few numbers are gathered, and how many they are; fp32 at least."""

    of: Callable[..., torch.Tensor]
    numel: int


@dataclass
class Outcome:
    """How an operation runs on local shards.

    cut, size: the cut of the results and the global size of that dim (cut None: the result is replicated); narrow:
    replicated operands of which each rank takes its shard; args, kwargs: replacements with local sizes; func: a
    function to call instead; view: the result shows the same data; reduce: the local results have to be summed over
    ranks, and divided by this; rows: operands of which each rank reads other rows than its chunk, in one or more spans,
    which then take the operand's place; sizes, cuts: the size and the cut of each result, if these differ; numbers:
    what all ranks gather first, as first argument of `func`; deal: the operand dealt to the ranks, and the results sent
    back; load: the busiest rank's work, over that of its chunk if all rows cost the same.
    """

    cut: Cut | None
    size: int = 0
    narrow: dict[int, Cut] = field(default_factory=dict)
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] | None = None
    func: Callable[..., Any] | None = None
    view: bool = False
    reduce: float | None = None
    rows: dict[int, tuple[Rows, ...]] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    cuts: tuple[Cut, ...] = ()
    numbers: Numbers | None = None
    deal: DealtRows | None = None
    load: float = 1.0


@dataclass
class Frame:
    """One operation: its name, arguments with Operands for tensors, the number of ranks, and the function called.

    side_by_side: operands joined along the sharded dim stay sharded one by one (`Cut.joined`), and no rows are sent.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    rank: int = 0
    func: Callable[..., Any] | None = None
    side_by_side: bool = False

    def get(self, position: int, name: str, default: Any = None) -> Any:
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def operands(self) -> list[Operand]:
        operands: list[Operand] = []

        def visit(value: Any) -> None:
            if isinstance(value, Operand):
                operands.append(value)
            elif isinstance(value, (list, tuple)):
                for v in value:
                    visit(v)

        visit(self.args)
        visit(tuple(self.kwargs.values()))
        return operands

    def outcome(self) -> Outcome:
        """The rule's outcome. Raises GlueError if the rule refuses, or if there is no rule."""
        if self.name not in PIECEWISE and any(o.cut is not None and o.cut.joined for o in self.operands()):
            raise self.refuse(
                "its rule cannot take a sharded dim that was joined from pieces, each of which is sharded separately"
            )
        try:
            return RULES.get(self.name, no_rule)(self)
        except TypeError as error:
            if all(o.ndim for o in self.operands()):
                raise
            raise self.refuse(
                "a size or an index is a tensor, whose value is not known", "Write int(...) of it"
            ) from error

    def refuse(self, reason: str, advice: str = "") -> GlueError:
        shapes = ", ".join(
            f"{list(o.shape)}" + (f" sharded along dim {o.cut.dim}" if o.cut else "") for o in self.operands()
        )
        error = GlueError(
            f"{self.name}({shapes}) between stages: {reason}. "
            + (advice or "Move it into a stage (a submodule with a pattern), where tensors are local")
        )
        error.reason = reason
        return error

    def on_a_row(self, cut: Cut, size: int) -> Callable[..., Any] | None:
        """A function for a rank with an empty shard, where an operation refuses empty tensors: it adds a dummy row.

        The row is not returned. The first argument and the result are sharded along `cut`, of global `size`. None: the
        shard is not empty.
        """
        func = self.func
        if func is None or self.local_size(cut, size):
            return None

        def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            shape = [*x.shape[: cut.dim], 1, *x.shape[cut.dim + 1 :]]
            return func(torch.cat([x, x.new_zeros(shape)], cut.dim), *args, **kwargs).narrow(cut.dim, 0, 0)

        return run

    def local_size(self, cut: Cut, size: int) -> int:
        """The number of rows that this rank holds of a dim of `size` with this cut."""
        return cut.local_size(size, self.n, self.rank)

    def normal(self, dim: int, ndim: int) -> int:
        if not -ndim <= dim < ndim:
            raise self.refuse(f"dim {dim} is out of range")
        return dim % ndim

    def dims(self, dims: Any, ndim: int) -> list[int]:
        """One dim or several, as a list of non-negative numbers."""
        return [self.normal(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)]


class Recorded(Protocol):
    """An operation of a record, with its operands as arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def operands(self) -> Sequence[Operand]: ...


def sizes_of(sizes: Any) -> list[Any]:
    """Sizes that are passed one by one, or as one sequence."""
    return list(sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (list, tuple, torch.Size)) else sizes)


Rule = Callable[[Frame], Outcome]
RULES: dict[str, Rule] = {}
PIECEWISE: set[str] = set()  # operations that accept a sharded dim joined of pieces that are sharded one by one


def rule(*names: str, piecewise: bool = False) -> Callable[[Rule], Rule]:
    """Register a function as the rule of operations, by their plain names, one string or several.

    piecewise: it holds for dims joined of pieces that are sharded one by one, too. Raises ValueError for a name that
    has a rule of another module.
    """

    def register(f: Rule) -> Rule:
        for name in " ".join(names).split():
            if (module := RULES.get(name, f).__module__) != f.__module__:
                raise ValueError(f"{name}() has a rule already, in {module}: RULES[{name!r}] = ... replaces it")
            RULES[name] = f
            PIECEWISE.update({name} if piecewise else ())
        return f

    return register


def no_rule(f: Frame) -> Outcome:
    raise f.refuse("it has no rule for a sharded tensor", instead_of(f.name))


def only(f: Frame) -> tuple[Operand, Cut]:
    """The only sharded operand."""
    cut = [o for o in f.operands() if o.cut is not None]
    if len(cut) != 1:
        raise f.refuse("more than one sharded tensor")
    assert cut[0].cut is not None
    return cut[0], cut[0].cut


def first(f: Frame) -> tuple[Operand, Cut]:
    """The first argument, which must be the only sharded one."""
    x, cut = only(f)
    if not f.args or f.args[0] is not x:
        raise f.refuse("only the first argument may be sharded")
    return x, cut


def independent(
    names: str, why: str = "it works along the sharded dim", mixed: Callable[[Frame, Operand], Any] = lambda f, x: (),
    filled: bool = False, func: Callable[..., Any] | None = None,
) -> None:  # fmt: skip
    """Register a rule for operations that keep their first argument's dims, and mix no dims but those of `mixed`.

    filled: they refuse empty tensors; func: a function to call instead.
    """

    @rule(names, piecewise=True)
    def run(f: Frame) -> Outcome:
        x, cut = first(f)
        if cut.dim in mixed(f, x):
            raise f.refuse(why.format(cut.dim))
        alone = f.on_a_row(cut, x.shape[cut.dim]) if filled else None
        return Outcome(cut, x.shape[cut.dim], func=alone or func)


def align(f: Frame, operands: Sequence[Operand]) -> tuple[int, Outcome]:
    """Broadcasting from the right: the cut's shared position (negative), and an Outcome with operands to narrow.

    The result has as many dims as the operand with most dims.
    """
    sharded = [(o, o.cut) for o in operands if o.cut is not None]
    o, cut = sharded[0]
    position, size = cut.dim - o.ndim, o.shape[cut.dim]
    for operand, c in sharded[1:]:
        if (c.dim - operand.ndim, c.outer, operand.shape[c.dim]) != (position, cut.outer, size):
            raise f.refuse(
                "its tensors are sharded along different dims",
                "Compute them in stages that can share a layout, or in a submodule with a pattern of its own",
            )
    outcome = Outcome(Cut(max(o.ndim for o in operands) + position, cut.outer), size)
    for i, operand in enumerate(f.operands()):
        if not any(operand is x for x in operands) or operand.cut is not None or operand.ndim < -position:
            continue
        have = operand.shape[position]
        if have == size and size != 1:
            outcome.narrow[i] = Cut(operand.ndim + position, cut.outer)
        elif have > 1:
            raise f.refuse(f"one tensor has size {have} where the sharded dim has size {size}")
    return position, outcome
