"""Recipes: how operations with one key run on local shards, derived once from the rules and the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.calls import GlueError, Operand, replaced, without_operands
from dsp.layout import At, Axis, Cut
from dsp.plan.script import PlannedNode, Via
from dsp.rules import Frame, Outcome
from dsp.rules.functions import ALIASES, DENSE, FOLDS, draws
from dsp.run.lookup import NUMBERS, NoKey
from dsp.run.whole import GlueCall
from dsp.sharded import Sharded

log = logging.getLogger("dsp")


@dataclass(eq=False)
class Recipe:
    """How operations with one key run on local shards.

    node: the plan's node; frame: the call, with Operands for tensors; wanted: the cut that each tensor must have (None:
    replicated); via: the copies to make of each tensor first; outcome: the rule's outcome, None if the operation runs
    on full tensors; push: the plan's cut for each result; view: how to replay the operation, if its result is a view;
    draws: it draws random numbers; whole: it has no sharded operand, and at most shards its results; prepared: the
    local call, if it needs no care; ready: the prepared call may be used, because the recipe ran once. Then ats and
    numbers have the layouts of its results and their numbers in the record.
    """

    node: PlannedNode | None
    frame: Frame
    wanted: list[Cut | None]
    via: list[list[Via]]
    outcome: Outcome | None
    push: list[Cut | None]
    view: ViewCall | None
    draws: bool
    whole: bool
    prepared: PreparedCall | None = None
    ready: bool = False
    ats: tuple[At, ...] = ()

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        known = self.node.results[: len(self.ats)] if self.node is not None else ()
        return (*known, *[-1] * (len(self.ats) - len(known)))

    @cached_property
    def index(self) -> int:
        return -1 if self.node is None else self.node.index

    def of(self, node: PlannedNode | None) -> Recipe:
        """The same recipe for another node, on which the plan has no decision either."""
        return replace(self, node=node)


class PreparedCall(NamedTuple):
    """A local call that can be repeated without checks, on operands in the same layouts.

    call: the function; as_it_is: it takes the operation's own arguments, writes none and may return any; rest: the
    arguments after the first (None: the operation's own); kept: positions that keep the operation's own arguments;
    narrowed: positions of replicated arguments to shard, and their cuts; own: the slice of arguments that are sharded
    tensors, None if they are not adjacent; writes: it writes into the first argument; aliases: results may be views of
    the first argument; views: the result is a view on one device, but may be a copy on this rank; copies: the result is
    a copy by the plan, but may share memory with the argument on this rank; moves: operands move to other layouts
    first; pushes: results are switched.
    """

    call: Any
    as_it_is: bool
    rest: tuple[Any, ...] | None
    kept: list[int]
    narrowed: list[tuple[int, Cut]]
    own: slice | None
    writes: bool
    aliases: bool
    views: bool
    copies: bool
    moves: bool
    pushes: bool


HERE = object()  # in arguments: the place of the tensor that is viewed


class ReplayedCall(NamedTuple):
    """A view of a local tensor: the call, and the cut of its result."""

    call: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: Cut | None

    def of(self, local: Tensor) -> Any:
        return self.call(*[local if a is HERE else a for a in self.args], **self.kwargs)


class ViewCall:
    """An operation whose result is a view, and how to take that view under other cuts of its argument."""

    def __init__(self, func: Any, frame: Frame) -> None:
        self.func, self.frame = func, frame
        self.found: dict[Cut | None, ReplayedCall | None] = {}
        self.near: dict[Any, Cut | None] = {}  # the base's cuts found by `Views.source`, for chains that end here

    def under(self, cut: Cut | None) -> ReplayedCall | None:
        """The view of an argument in this cut (None: replicated); None if the view cannot be taken of such shards."""
        if cut not in self.found:
            self.found[cut] = self.again(cut)
        return self.found[cut]

    def again(self, cut: Cut | None) -> ReplayedCall | None:
        x = Operand(self.frame.args[0].shape, cut)
        frame = replace(self.frame, args=(x, *self.frame.args[1:]))
        try:
            outcome = frame.outcome() if cut is not None else Outcome(None)
        except GlueError:
            return None
        # other tensors, such as view_as's, contribute their shape only
        table: dict[int, Any] = {id(o): torch.empty(o.shape, device="meta") for o in frame.operands()} | {id(x): HERE}
        args = without_operands(frame.args if outcome.args is None else outcome.args, table)
        return ReplayedCall(
            outcome.func or self.func, args, frame.kwargs if outcome.kwargs is None else outcome.kwargs, outcome.cut
        )


def key_of(values: Iterable[Any], first: int | None) -> tuple[Any, ...]:
    """The key of arguments for a recipe. Equal numbers of two types make two keys: `x[True]` is not `x[1]`.

    first: see `Run.first`; None leaves the tensors' numbers in the record out of the key.
    """
    key: list[Any] = []
    for v in values:
        kind = type(v)
        if kind is Sharded:
            key.append(v.at)
            if first is not None:
                number = v.number - first
                if not -1 <= number < NUMBERS:
                    raise NoKey  # a tensor that an earlier call left behind
                key.append(number)
        elif kind is int or v is None:
            key.append(v)
        elif kind is Tensor or kind is nn.Parameter:
            key.append(v.shape)
            key.append(v.dtype)  # a mask is read otherwise than an index
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, key_of(v, first)))
        elif kind is slice:
            key.append((kind, key_of((v.start, v.stop, v.step), first)))
        elif isinstance(v, (DTensor, Sharded)):
            raise NoKey
        else:
            key.append((kind, (v.shape, v.dtype) if isinstance(v, Tensor) else v))
    return tuple(key)


@dataclass(eq=False)
class RuledCall(GlueCall):
    """A `GlueCall` with the properties that the rules need."""

    @property
    def known(self) -> bool:
        """Tell whether a plan or record says if the result is a view or a copy."""
        return self.node is not None and self.node.exact

    @property
    def numbers(self) -> Iterator[int]:
        """The numbers of its results in the record; -1 for results beyond those."""
        return chain(() if self.node is None else self.node.results, repeat(-1))

    @property
    def asked(self) -> Sequence[Cut | None]:
        """The cuts that its tensors must have by the plan; without a plan, the cuts that they have."""
        planned = None if self.step is None else self.step.cuts
        return list(map(cut_at, self.shells)) if planned is None else planned

    @property
    def planned(self) -> bool:
        """Tell whether a plan made ahead of the run has this very node."""
        return self.known and not self.run.script.recorded  # type: ignore[union-attr]

    @property
    def copies(self) -> bool | None:
        """Tell whether an operation of DENSE returns a copy, not a view; None for others, or without a plan."""
        return self.node.fresh if self.what.name in DENSE and self.planned else None  # type: ignore[union-attr]

    @property
    def views(self) -> bool:
        """Tell whether the result is a view on one device, but may be a copy on a rank, whose strides differ."""
        return self.what.name in FOLDS and (self.what.name not in DENSE or self.copies is False)

    def frame(self, cuts: Sequence[Cut | None]) -> Frame:
        """The call, with Operands in these cuts for its tensors."""
        stream = iter([Operand(tuple(t.shape), c) for t, c in zip(self.tensors, cuts)])
        axis = self.run.axis
        apart = self.step is not None and self.step.apart
        return Frame(self.what.name, *replaced(self.args, self.kwargs, stream), axis.size, axis.rank, self.func, apart)


def cut_at(t: Sharded | None) -> Cut | None:
    return None if t is None else t.at.cut


def derive(op: RuledCall) -> Recipe:
    """Derive the recipe of an operation from the plan and the rule; without a plan, only from the rule."""
    run, asked, changing = op.run, op.asked, op.what.in_place
    # a replicated tensor needs no move: the rule narrows it to the cuts of the others
    wanted = [c if s is not None else None for s, c in zip(op.shells, asked)]
    if not changing and not any(wanted):
        wanted = list(asked)  # no tensor is to stay sharded: each rank narrows the replicated ones as planned
    wanted, frame, outcome = on_cuts(op, wanted) if any(wanted) else (wanted, op.frame(wanted), None)
    # view or copy is decided by the plan, the same on all ranks; a local reshape may differ between ranks
    view = outcome is not None and outcome.view and run.script is not None and not (op.known and op.node.copied)  # type: ignore[union-attr]
    view = view and (op.what.name not in DENSE or op.known)  # without a plan it may be a copy, which misses writes
    via = op.step.via if op.step is not None else []
    random = draws(op.what.name, frame.args, frame.kwargs)
    whole = outcome is None and not (changing or any(via) or any(s is not None for s in op.shells))
    made = ViewCall(op.func, frame) if view else None
    recipe = Recipe(op.node, frame, wanted, via, outcome, op.push, made, random, whole)
    recipe.prepared = prepared(op, recipe)
    return recipe


def on_cuts(op: RuledCall, wanted: list[Cut | None]) -> tuple[list[Cut | None], Frame, Outcome | None]:
    """The cuts of the tensors, the frame and the rule's outcome, for the cuts `wanted`.

    If the rule refuses cuts that are not planned, other cuts are tried, then full tensors (no outcome). Raise GlueError
    if none of these works.
    """
    run, frame, whole = op.run, op.frame(wanted), op.shells[0] is None
    if op.kwargs.get("out") is not None:
        raise frame.refuse("out= has no rule for a sharded tensor")
    try:
        if op.what.in_place and whole:
            raise frame.refuse("it writes a sharded tensor into a whole one")
        return wanted, frame, frame.outcome()
    except GlueError as refusal:
        into_whole = op.what.in_place and whole  # then the written value has to be replicated, too
        if op.planned and not into_whole:  # planned with another float, such as the p of a norm
            run.unknown = run.unknown or ("glue", op.index, op.what.name)
        # not planned: try another dim, then full tensors
        found = None if into_whole else detour(op)
        if found is None and op.what.in_place and not into_whole:
            raise
        if found is None:
            log.info("gathered: %s", refusal)
        return found or ([None] * len(wanted), frame, None)


def prepared(op: RuledCall, recipe: Recipe) -> PreparedCall | None:
    """The local call of a recipe, if it can be repeated without checks; None otherwise."""
    outcome, name, in_place = recipe.outcome, op.what.name, op.what.in_place
    if outcome is None or outcome.cut is None or needs_care(op, recipe, outcome):
        return None
    arguments = local_arguments(recipe.frame, outcome)
    first = len(op.args) > 0 and isinstance(op.args[0], Sharded)
    if arguments is None or (in_place and not first):
        return None
    narrowed, rest, kept = arguments
    if narrowed and name in ALIASES:  # the results would have to be marked as views of a copy
        return None
    moves = moves_first(op, recipe)
    return PreparedCall(
        call=outcome.func or op.func,
        as_it_is=rest is None and not (in_place or op.copies),
        rest=rest,
        kept=kept,
        narrowed=narrowed,
        own=None if moves else next_to_each_other(op),
        writes=in_place,
        aliases=first and not in_place and (outcome.view or name in ALIASES),
        views=op.views,
        copies=bool(op.copies),
        moves=moves,
        pushes=any(recipe.push),
    )


def moves_first(op: RuledCall, recipe: Recipe) -> bool:
    """Tell whether operands move to other layouts first."""
    lie_otherwise = list(map(cut_at, op.shells)) != list(recipe.wanted)
    return lie_otherwise or any(via for s, via in zip(op.shells, recipe.via) if s is not None)


def needs_care(op: RuledCall, recipe: Recipe, outcome: Outcome) -> bool:
    """Tell whether a call cannot be repeated without checks: it exchanges more than its operands, draws random numbers,
    has an empty shard, views a moved tensor, or copies if it must and no plan says whether it does."""
    frame, name, axis = recipe.frame, op.what.name, op.run.axis
    if outcome.kwargs or recipe.draws or outcome.rows or outcome.numbers is not None or outcome.deal is not None:
        return True
    assert outcome.cut is not None
    if any(s is not None and 0 in s.at.local for s in op.shells) or not frame.own(outcome.cut, outcome.size):
        return True
    if (moves_first(op, recipe) or any(recipe.push)) and moves_with_care(op, recipe, outcome):
        return True
    return name in DENSE and (op.copies is None or looks_dense(axis, outcome, outcome.cut))


def moves_with_care(op: RuledCall, recipe: Recipe, outcome: Outcome) -> bool:
    """Tell whether a call with moves views or writes a moved tensor, or gets an empty shard by a move."""
    if op.what.name in ALIASES or outcome.view or op.what.in_place or outcome.args is not None:
        return True
    there = [(s, c) for s, c in zip(op.shells, recipe.wanted) if s is not None and c is not None]
    return any(0 in op.run.axis.local_shape(s.at.shape, c) for s, c in there)


def looks_dense(axis: Axis, outcome: Outcome, cut: Cut) -> bool:
    """Tell whether a shard is so short that it may be contiguous although the full tensor is not, and be viewed."""
    return axis.local_shape((outcome.size,), cut._replace(dim=0))[0] <= len(cut.pieces(0))


def local_arguments(frame: Frame, outcome: Outcome) -> tuple[list[tuple[int, Cut]], Any, list[int]] | None:
    """The arguments to narrow; the arguments after the first, if the rule replaces them; and the positions that keep
    the call's own. None if a tensor to narrow is inside a list, or the rule replaces the first argument."""
    operands = frame.operands()
    places = {id(o): i for i, o in enumerate(frame.args) if isinstance(o, Operand)}
    if any(id(operands[i]) not in places for i in outcome.narrow):
        return None
    narrowed = [(places[id(operands[i])], cut) for i, cut in outcome.narrow.items()]
    if outcome.args is None:
        return None if outcome.kwargs is not None and frame.kwargs else (narrowed, None, [])
    if outcome.args[0] is not frame.args[0]:
        return None
    kept = [i for i, (a, b) in enumerate(zip(outcome.args, frame.args)) if i and a is b and isinstance(a, Operand)]
    if any(has_operands(a) for i, a in enumerate(outcome.args) if i and i not in kept):
        return None
    return narrowed, outcome.args[1:], kept


def next_to_each_other(op: RuledCall) -> slice | None:
    """The positions of the sharded tensors among the arguments, if they are adjacent; None otherwise."""
    at = [i for i, a in enumerate(op.args) if isinstance(a, Sharded)]
    if not at or len(at) != sum(s is not None for s in op.shells) or at[-1] + 1 - at[0] > len(at):
        return None
    return slice(at[0], at[-1] + 1)


def has_operands(value: Any) -> bool:
    return isinstance(value, Operand) or (isinstance(value, (list, tuple)) and any(map(has_operands, value)))


def detour(op: RuledCall) -> tuple[list[Cut | None], Frame, Outcome] | None:
    """The first dim along which the rule accepts all sharded operands: their cuts, the frame and the outcome."""
    shapes = [s.at.shape for s in op.shells if s is not None]
    for dim in range(max(map(len, shapes), default=0)):
        if any(dim >= len(shape) or shape[dim] < 2 for shape in shapes):
            continue
        cuts = [Cut(dim) if s is not None else None for s in op.shells]
        frame = op.frame(cuts)
        try:
            return cuts, frame, frame.outcome()
        except GlueError:
            continue
    return None
