"""How one operation runs on local parts, for all operations of one key: derived once, by the rules and the plan."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.layout import At, Cut
from dsp.plan.script import GlueStep, Via
from dsp.rules import Frame, GlueError, Operand, Outcome, replaced
from dsp.rules.functions import ALIASES, DENSE, FOLDS, Traits, draws
from dsp.run.forward import Run
from dsp.run.views import View
from dsp.sharded import Sharded

log = logging.getLogger("dsp")


@dataclass(eq=False)
class Recipe:
    """How one operation runs on local parts, for all operations of one key.

    frame: the call, with Operands for tensors; wanted: how each tensor has to be cut (None: whole); via: the copies to
    be made of each first; outcome: None where it runs on whole tensors; push: where the plan wants each result; view:
    the result is the same data; draws: it takes random numbers. A `quick` one needs no care: once it ran, it is `ready`
    and `ats` tell where its results lie. One `whole` has no sharded tensor: at the most it shares out its results.
    """

    frame: Frame
    wanted: list[Cut | None]
    via: list[list[Via]]
    outcome: Outcome | None
    push: list[Cut | None]
    view: View | None
    draws: bool
    whole: bool
    quick: Quick | None = None
    ready: bool = False
    ats: tuple[At, ...] = ()


class Quick(NamedTuple):
    """A call on local parts: of what, with which arguments after the first (None: its own), and which to cut."""

    call: Any
    rest: tuple[Any, ...] | None
    kept: list[int]  # of those given the places where its own stand
    parts: list[tuple[int, Cut]]
    own: slice | None  # where its sharded tensors stand; None: not next to each other among the arguments themselves
    changes: bool  # it writes into the first argument
    aliases: bool  # its results may be views of the first argument
    views: bool  # on one device its result is a view, though on this rank it may be a copy
    copies: bool  # by the plan its result is a copy, though on this rank it may look like the argument
    anew: bool  # its result is another tensor, though on this rank it is the argument: see `follow.results`
    moves: bool  # its tensors are brought elsewhere first
    pushes: bool  # its results are switched


class NoKey(Exception):
    """An argument that no key can be made of, or a tensor that has to be opened first."""


def key_of(values: Iterable[Any]) -> tuple[Any, ...]:
    """The key of arguments for a recipe. Equal numbers of two types are two keys: `x[True]` is not `x[1]`."""
    key: list[Any] = []
    for v in values:
        kind = type(v)
        if kind is Sharded:
            key.append(v.at)
        elif kind is int or v is None:
            key.append(v)
        elif kind is Tensor or kind is nn.Parameter:
            key.append(v.shape)
        elif kind is tuple or kind is list or kind is torch.Size:
            key.append((kind, key_of(v)))
        elif kind is slice:
            key.append((kind, key_of((v.start, v.stop, v.step))))
        elif isinstance(v, (DTensor, Sharded)):
            raise NoKey
        else:
            key.append((kind, v.shape if isinstance(v, Tensor) else v))
    return tuple(key)


@dataclass(eq=False)
class GlueCall:
    """One operation of glue as a run comes to it: the `index`-th, `step` what the plan says of it; `shells` are the
    tensors among its arguments as glue holds them, None for those that are not sharded."""

    run: Run
    index: int
    func: Any
    what: Traits
    step: GlueStep | None
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    shells: list[Sharded | None]

    @property
    def asked(self) -> Sequence[Cut | None]:
        """How its tensors lie, or have to by the plan."""
        planned = None if self.step is None else self.step.cuts
        return list(map(cut_at, self.shells)) if planned is None else planned

    @property
    def push(self) -> list[Cut | None]:
        return self.step.push if self.step is not None else []

    @property
    def copies(self) -> bool | None:
        """Tell whether it makes memory of its own where it might return a view; None if no plan tells."""
        script = self.run.script
        if self.what.name not in DENSE or script is None or not self.run.planned(self.index):
            return None
        return self.index in script.fresh

    @property
    def views(self) -> bool:
        """Tell whether it is a view on one device, and may yet be a copy on a rank whose part lies otherwise."""
        return self.what.name in FOLDS and (self.what.name not in DENSE or self.copies is False)

    def frame(self, cuts: Sequence[Cut | None]) -> Frame:
        """The call with Operands for tensors, cut so."""
        stream = iter([Operand(tuple(t.shape), c) for t, c in zip(self.tensors, cuts)])
        axis = self.run.axis
        apart = self.step is not None and self.step.apart
        return Frame(self.what.name, *replaced(self.args, self.kwargs, stream), axis.size, axis.rank, self.func, apart)


def cut_at(t: Sharded | None) -> Cut | None:
    return None if t is None else t.at.cut


def derive(op: GlueCall) -> Recipe:
    """Derive how an operation runs, from the plan or else from the rule alone."""
    run, asked, changing = op.run, op.asked, op.what.in_place
    # another whole tensor needs no move: the rule narrows it to what the others need
    wanted = [c if s is not None else None for s, c in zip(op.shells, asked)]
    if not changing and not any(wanted):
        wanted = list(asked)  # all are whole, or to be: each rank begins with its part of those that are
    frame, outcome = op.frame(wanted), None
    if any(wanted):
        if op.kwargs.get("out") is not None:
            raise frame.refuse("out= has no rule for a sharded tensor")
        try:
            if changing and op.shells[0] is None:
                raise frame.refuse("it writes a sharded tensor into a whole one")
            outcome = frame.outcome()
        except GlueError as refusal:
            into_whole = changing and op.shells[0] is None  # what it writes there has to be whole, too
            if run.script is not None and not (run.script.recorded or run.strayed or into_whole):
                raise
            # nobody planned this: would another dim do, or else the whole tensors?
            found = None if into_whole else detour(op)
            if found is not None:
                wanted, frame, outcome = found
            elif changing and not into_whole:
                raise
            else:
                log.info("gathered: %s", refusal)
                wanted = [None] * len(wanted)
    # by the plan, not by what is seen here: all ranks share the same moves, and a local reshape may copy or not
    view = outcome is not None and outcome.view and run.script is not None and op.index not in run.script.copies
    view = view and not (op.what.name in DENSE and run.left(op.index))  # what a copy misses, no view sees
    via = op.step.via if op.step is not None else []
    random = draws(op.what.name, frame.args, frame.kwargs)
    whole = outcome is None and not (changing or any(via) or any(s is not None for s in op.shells))
    made = View(op.func, frame) if view else None
    recipe = Recipe(frame, wanted, via, outcome, op.push, made, random, whole)
    recipe.quick = quick(op, recipe)
    return recipe


def quick(op: GlueCall, recipe: Recipe) -> Quick | None:
    """The call, if it is one of local parts, this rank has something of each, and no view is taken of what moved."""
    frame, outcome, name = recipe.frame, recipe.outcome, op.what.name
    if outcome is None or outcome.cut is None or outcome.kwargs or recipe.draws:
        return None
    if outcome.rows or outcome.numbers is not None:
        return None
    if any(s is not None and 0 in s.at.local for s in op.shells) or not frame.own(outcome.cut, outcome.size):
        return None
    came = list(map(cut_at, op.shells))
    moves = came != list(recipe.wanted) or any(via for s, via in zip(op.shells, recipe.via) if s is not None)
    pushes = any(recipe.push)
    if moves or pushes:
        # a view, or what is written, of a copy: that takes care
        if name in ALIASES or outcome.view or op.what.in_place or outcome.args is not None:
            return None
        axis, there = op.run.axis, zip(op.shells, recipe.wanted)
        if any(s is not None and c is not None and 0 in axis.local_shape(s.at.shape, c) for s, c in there):
            return None
    cut = outcome.cut
    if name in DENSE and op.run.axis.local_shape((outcome.size,), cut._replace(dim=0))[0] <= len(cut.pieces(0)):
        return None
    operands = frame.operands()
    places = {id(o): i for i, o in enumerate(frame.args) if isinstance(o, Operand)}
    if any(id(operands[i]) not in places for i in outcome.narrow):
        return None
    parts = [(places[id(operands[i])], cut) for i, cut in outcome.narrow.items()]
    if parts and name in ALIASES:  # of which views would have to be marked
        return None
    rest, kept = None, list[int]()
    if outcome.args is not None:
        if outcome.args[0] is not frame.args[0]:
            return None
        kept = [i for i, (a, b) in enumerate(zip(outcome.args, frame.args)) if i and a is b and isinstance(a, Operand)]
        if any(has_operands(a) for i, a in enumerate(outcome.args) if i and i not in kept):
            return None
        rest = outcome.args[1:]
    elif outcome.kwargs is not None and frame.kwargs:
        return None
    alone = len(op.args) > 0 and isinstance(op.args[0], Sharded)
    if op.what.in_place and not alone:
        return None
    at = [i for i, a in enumerate(op.args) if isinstance(a, Sharded)]
    own = slice(at[0], at[-1] + 1) if at and len(at) == sum(s is not None for s in op.shells) and not moves else None
    if own is not None and own.stop - own.start > len(at):
        own = None
    aliases = alone and not op.what.in_place and (outcome.view or name in ALIASES)
    changes, copies, loose = op.what.in_place, bool(op.copies), name in DENSE and op.copies is None
    call = outcome.func or op.func
    return Quick(call, rest, kept, parts, own, changes, aliases, op.views, copies, loose, moves, pushes)


def has_operands(value: Any) -> bool:
    return isinstance(value, Operand) or (isinstance(value, (list, tuple)) and any(map(has_operands, value)))


def detour(op: GlueCall) -> tuple[list[Cut | None], Frame, Outcome] | None:
    """The first dim along which all sharded operands could be cut for this operation."""
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
