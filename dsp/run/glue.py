"""Glue: the operations of a model's own forward between stages, run on local parts while the model sees whole shapes.

Between the stages of a `Run` its `Glue` mode sees every torch function. One that meets a `Sharded` tensor is looked up:
the `Recipe` for it says what to call on local parts, and where the result lies. A recipe is derived once, from the
rules of `dsp.rules` and the decisions of the plan, and kept for all operations alike.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from dsp.collectives import summed_in
from dsp.layout import Cut
from dsp.moves import Part
from dsp.plan.script import GlueStep
from dsp.private import (
    FakeTensor,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
    checkpoint_frame,
    maybe_current_level,
    saving_hooks,
)
from dsp.randomness import forked
from dsp.rules import (
    RULES,
    Frame,
    GlueError,
    Operand,
    Outcome,
    localize_source,
    no_rule,
    tensor_args,
    with_operands,
    without_operands,
)
from dsp.rules.functions import ALIASES, DENSE, RANDOM, UNRUNNABLE, Function, known, refuse_unrunnable
from dsp.run.forward import Run
from dsp.run.homes import home_of
from dsp.run.recipes import RECIPES, Odd, Quick, Recipe, key_of
from dsp.sharded import ACTIVE, READ, Moved, Sharded, bare, carry, plain
from dsp.tensors import NO, map_tensors, memory, tensors_in, version

log = logging.getLogger("dsp")


@contextmanager
def active(runtime: Any, run: Run) -> Iterator[None]:
    """Make `run` the one that hooks and glue of `runtime` serve."""
    token, run.mode = ACTIVE.set((runtime, run)), Glue(run)
    try:
        with run.mode:
            yield
    finally:
        ACTIVE.reset(token)


KEPT = (
    "met a tensor without data: something that outlives a call, such as functools.lru_cache or a global dict, kept it "
    "when the forward was planned on fake tensors. Call the bare model once before dsp plans it, so that it keeps real "
    "ones"
)


class Glue(TorchFunctionMode):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.asleep = self.popped = False
        self.uncounted = False  # while hooks run that the trace did not: theirs is no operation of the plan

    def suspend(self) -> None:
        """Inside a stage tensors are local and plain: get out of the way, entirely if nobody stands above us."""
        if _get_current_function_mode() is self:
            _pop_mode()
            self.popped = True
        self.asleep = True

    def resume(self) -> None:
        if self.popped:
            _push_mode(self)
        self.asleep = self.popped = False

    def __exit__(self, *exc: Any) -> None:
        if not self.popped:  # an exception that no hook saw may have left a stage open
            super().__exit__(*exc)
        self.asleep = self.popped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.asleep:
            return func(*args, **kwargs)
        what, run = known(func), self.run
        if what.name in UNRUNNABLE or maybe_current_level() is not None:
            refuse_unrunnable(what.name, what.metadata, args, kwargs, lambda t: isinstance(t, Sharded))
        if what.metadata:
            return self.metadata(what.name, func, args, kwargs)
        if run.aside:
            return self.operate(-1, func, what, args, kwargs, types)
        if saving_hooks(False) is not None:
            note_checkpoint(run)
        if self.uncounted:
            return self.operate(-1, func, what, args, kwargs, types)
        index = run.glue_index
        run.glue_index += 1
        if run.script is not None and run.strayed is None:
            names = run.script.names
            if index >= len(names) or names[index] != what.name:
                run.strayed = ("glue", index, what.name), names[index] if index < len(names) else None
        if run.script is not None and index in run.script.same and not run.strayed and isinstance(args[0], Sharded):
            return args[0]  # of a part it might be a copy, as of one that is not contiguous
        out = self.operate(index, func, what, args, kwargs, types)
        if run.recorder is not None:
            run.observe("record", index, what.name, args, kwargs, out, what.changing)
        return out

    def operate(self, index: int, func: Any, what: Function, args: Any, kwargs: Any, types: Any) -> Any:
        """One operation of glue, on local parts: by its recipe, if there is one already."""
        run = self.run
        step = run.script.glue.get(index) if run.script else None
        if step is not None and step.name != what.name:
            step = None
        if (
            step is None
            and not types
            and not run.lends
            and not any(isinstance(t, DTensor) for t in tensor_args(args, kwargs))
        ):
            run.where = ("glue", index, what.name)
            return func(*args, **kwargs)
        mark = index if step is not None or (run.script is not None and index in run.script.copies) else None
        try:
            key: Any = (func, mark, *map(key_of, args), *map(key_of, kwargs.items()))
            recipe = run.recipes.get(key)
        except (Odd, TypeError):
            key = recipe = None
        if recipe is not None and recipe.ats and not run.stale:
            return self.quickly(recipe, recipe.quick, func, args, kwargs)
        run.where = ("glue", index, what.name)
        tensors = tensor_args(args, kwargs)
        shells = [run.open(t) for t in tensors]
        if recipe is None:
            if any(type(t) is FakeTensor for t in tensors) and any(type(s) is Sharded for s in shells):
                raise GlueError(f"{what.name}() {KEPT}")
            if step is not None and step.cuts is not None and len(step.cuts) != len(shells):
                run.strayed, step = (run.where, step.name), None  # x + 0 before, x + y now
            asked = step.cuts if step is not None and step.cuts is not None else [_cut(s) for s in shells]
            if not any(s is not None for s in shells):
                if step is not None and step.source is not None:
                    return self.source(step.source, what.name, args, kwargs, tensors)
                if what.changing or not (any(asked) or (step is not None and any(step.push))):
                    with self.writes(what, tensors, shells, tensors, shells) as views:
                        return views(func(*args, **kwargs))
            recipe = self.derive(func, what, index, step, asked, args, kwargs, tensors, shells)
            if key is not None:
                if len(run.recipes) >= RECIPES:
                    run.recipes.clear()
                run.recipes[key] = recipe
        return self.follow(recipe, func, what, args, kwargs, tensors, shells)

    def quickly(self, recipe: Recipe, quick: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation that moves nothing, as it ran before."""
        first = args[0] if args else None
        if quick.parts:
            args = list(args)
            for i, cut in quick.parts:
                args[i] = self.run.axis.narrow(args[i], cut)
        own = _sharded(args, kwargs)
        for t in own:  # as `bare` does
            t.__class__ = Tensor  # type: ignore[assignment]
        try:
            out = quick.call(*args, **kwargs) if quick.rest is None else quick.call(first, *quick.rest)
        finally:
            for t in own:
                t.__class__ = Sharded
        if type(out) is Sharded:
            return out  # an argument as it was
        if type(out) is Tensor:
            out.__class__ = Sharded
            out.at = recipe.ats[0]  # type: ignore[attr-defined]
            made: Any = (out,)
        elif type(out) is tuple or type(out) is list:
            made = out
            for t, at in zip(out, recipe.ats):
                t.__class__, t.at = Sharded, at
        else:
            made = [carry(t, at) for t, at in zip(tensors_in(out), recipe.ats)]
            out = map_tensors(out, made)
        if recipe.view:
            for t in made:
                t._dsp_view = first, func, recipe.frame
        if quick.aliases and (lent := first.__dict__.get("_dsp_lent")) is not None:
            for t in made:
                if recipe.view or memory(t) == memory(args[0]):
                    t._dsp_lent = lent
        return out

    def derive(
        self, func: Any, what: Function, index: int, step: GlueStep | None, asked: Sequence[Cut | None],
        args: Any, kwargs: Any, tensors: list[Tensor], shells: list[Sharded | None],
    ) -> Recipe:  # fmt: skip
        """What the plan, or else the rule alone, says of an operation."""
        run, changing = self.run, what.changing
        # another whole tensor needs no move: the rule narrows it to what the others need
        wanted = [c if s is not None else None for s, c in zip(shells, asked)]
        if not changing and not any(wanted):
            wanted = list(asked)  # all are whole, or to be: each rank begins with its part of those that are
        frame = self.frame(what.name, args, kwargs, tensors, wanted, func)
        outcome = None
        if any(wanted):
            rule = RULES.get(what.name, no_rule)
            if kwargs.get("out") is not None:
                raise frame.refuse("out= has no rule for a sharded tensor")
            try:
                if changing and shells[0] is None:
                    raise frame.refuse("it writes a sharded tensor into a whole one")
                outcome = rule(frame)
            except GlueError as refusal:
                if run.script is not None and not (run.script.recorded or run.strayed):
                    raise
                # nobody planned this: would another dim do, or else the whole tensors?
                found = self.detour(rule, func, what.name, args, kwargs, tensors, shells)
                if found is not None:
                    wanted, frame, outcome = found
                elif changing:
                    raise
                else:
                    log.info("gathered: %s", refusal)
                    wanted = [None] * len(wanted)
        push = step.push if step is not None else []
        # by the plan, not by what is seen here: all ranks share the same moves, and a local reshape may copy or not
        view = outcome is not None and outcome.view and run.script is not None and index not in run.script.copies
        via = step.via if step is not None else []
        quick = None
        stay = all(c == _cut(s) for s, c in zip(shells, wanted))
        if outcome is not None and stay and not (changing or any(push) or any(via)):
            quick = self.quick(outcome, frame, func, what, args, shells)
        return Recipe(frame, wanted, via, outcome, push, view, quick)

    def quick(
        self, outcome: Outcome, frame: Frame, func: Any, what: Function, args: Any, shells: list[Sharded | None]
    ) -> Quick | None:
        """The call, if it is one of local parts as they are, and on this rank there is something of each."""
        if (
            outcome.cut is None
            or outcome.rows
            or outcome.numbers is not None
            or what.name in RANDOM
            or outcome.kwargs
            or any(s is not None and 0 in s.at.local for s in shells)
        ):
            return None
        if (
            what.name in DENSE
            and self.run.axis.local_shape((outcome.size,), Cut(0, outcome.cut.outer))[0] <= outcome.cut.outer
        ):
            return None
        operands = frame.operands()
        places = {id(o): i for i, o in enumerate(frame.args) if isinstance(o, Operand)}
        if any(id(operands[i]) not in places for i in outcome.narrow):
            return None
        parts = [(places[id(operands[i])], cut) for i, cut in outcome.narrow.items()]
        if parts and what.name in ALIASES:  # of which views would have to be marked
            return None
        rest = None
        if outcome.args is not None:
            if outcome.args[0] is not frame.args[0] or any(_operands(a) for a in outcome.args[1:]):
                return None
            rest = outcome.args[1:]
        elif outcome.kwargs is not None and frame.kwargs:
            return None
        alone = len(args) > 0 and isinstance(args[0], Sharded)
        return Quick(outcome.func or func, rest, parts, alone and (outcome.view or what.name in ALIASES))

    def follow(
        self, recipe: Recipe, func: Any, what: Function, args: Any, kwargs: Any,
        tensors: list[Tensor], shells: list[Sharded | None],
    ) -> Any:  # fmt: skip
        """Run an operation by its recipe."""
        run, outcome, wanted, push = self.run, recipe.outcome, recipe.wanted, recipe.push
        if any(recipe.via):
            run.copy_first(shells, recipe.via)
        moved = iter(run.move_all([(s, c) for s, c in zip(shells, wanted) if s is not None and s.at.cut != c]))
        locals_: list[Tensor] = []
        for t, s, c in zip(tensors, shells, wanted):
            if s is None:
                locals_.append(t if c is None else run.axis.narrow(t, c))
            else:
                locals_.append(s if s.at.cut == c else next(moved))
        own = [t for t in locals_ if isinstance(t, Sharded)]
        if outcome is None:
            stream: Any = iter(locals_)
            call_args = tuple(with_operands(a, stream) for a in args)
            call_kwargs = {k: with_operands(v, stream) for k, v in kwargs.items()}
            with self.writes(what, tensors, shells, locals_, wanted) as views:
                out = views(func(*call_args, **call_kwargs))
            if not any(push):
                return out
            results = tensors_in(out)
            parted = [
                t if c is None else run.carry(run.axis.narrow(t, c), c, tuple(t.shape)) for t, c in zip(results, push)
            ]
            return map_tensors(out, parted)
        frame, call = recipe.frame, outcome.func or func
        locals_ = [run.axis.narrow(t, outcome.narrow[i]) if i in outcome.narrow else t for i, t in enumerate(locals_)]
        table: dict[int, Any] = {id(o): t for o, t in zip(frame.operands(), locals_)}
        if outcome.rows:
            read = run.read([(plain(locals_[i]), wanted[i], rows) for i, rows in outcome.rows.items()])
            table |= {id(frame.operands()[i]): own for i, own in zip(outcome.rows, read)}
        call_args = without_operands(frame.args if outcome.args is None else outcome.args, table)
        named = frame.kwargs if outcome.kwargs is None else outcome.kwargs
        call_kwargs = {k: without_operands(v, table) for k, v in named.items()}
        before = [version(t) for t in locals_]
        if what.changing:
            with NO():
                _ = locals_[0].grad_fn  # a view that got a gradient by a write into another one learns of it when asked
        with self.writes(what, tensors, shells, locals_, wanted) as views:
            with bare(own), quiet(locals_), forked(run.axis) if what.name in RANDOM else nullcontext():
                if outcome.numbers is not None:
                    mine = outcome.numbers.of(*call_args)[None]
                    call_args = (torch.ops.dsp.gather(mine, 0, run.axis.size, run.axis.group), *call_args)
                summed = outcome.reduce is not None and what.name == "mean"
                out = (torch.Tensor.sum if summed else call)(*call_args, **call_kwargs)
            if outcome.reduce is not None:
                total = torch.ops.dsp.all_reduce(out.to(summed_in(out.dtype)), run.axis.group)
                out = (total / outcome.reduce if outcome.reduce != 1.0 else total).to(out.dtype)
                if what.name in ("select", "getitem"):  # would be a view
                    run.mark(out, tensors[0].__dict__.get("_dsp_lent") or memory(tensors[0]))
                return out
            views(out)
        if outcome.cut is None:
            return out
        made, lent = [], []
        for k, t in enumerate(map(plain, tensors_in(out))):
            shape = list(t.shape)
            shape[outcome.cut.dim] = outcome.sizes[k] if outcome.sizes else outcome.size
            target = push[k] if k < len(push) else None
            if what.name in DENSE:
                t = self.copied(t, locals_[0], tensors[0], outcome.cut, out_shape=shape)
            made.append(Part(t, outcome.cut, target or outcome.cut, tuple(shape)))
            if outcome.rows and what.name in ALIASES:  # would be a view
                lent.append(_lent(tensors[0]) or memory(tensors[0]))
            else:
                lent.append(None if target not in (None, outcome.cut) else _lent(tensors_in(out)[k]))
        wrapped = [run.carry(p.local, p.dst, p.shape, x) for p, x in zip(run.push_all(made), lent)]
        if recipe.view and shells[0] is not None:
            for t in wrapped:
                t._dsp_view = shells[0], func, frame  # type: ignore[attr-defined]
        if recipe.quick is not None and before == [version(t) for t in locals_]:
            recipe.ats = tuple(t.at for t in wrapped)
        return map_tensors(out, wrapped)

    def copied(self, t: Tensor, local: Tensor, whole: Tensor, cut: Cut, out_shape: list[int]) -> Tensor:
        """A result that has its own memory if it would on one device; parts of size 1 are contiguous too often."""
        if t.shape[cut.dim] > cut.outer or memory(t) != memory(local):
            return t
        model = torch.empty_strided(whole.shape, whole.stride(), device="meta")
        dense = model.contiguous() if tuple(out_shape) == tuple(model.shape) else model.reshape(out_shape)
        return t if memory(dense) == memory(model) else t.clone()

    @contextmanager
    def writes(
        self, what: Function, tensors: list[Tensor], shells: Sequence[Any], locals_: list[Tensor], cuts: Sequence[Any]
    ) -> Iterator[Any]:
        """Around an operation: what it writes in place, all tensors that share the memory must see, or it is refused.

        Yields a function to mark those of its results that are views of a copy.
        """
        versions = [version(t) for t in locals_]

        def views(out: Any) -> Any:
            self.run.lend(tensors_in(out), zip(tensors, shells, locals_))
            return out

        yield views
        for i, (t, x, s, c, before) in enumerate(zip(tensors, locals_, shells, cuts, versions)):
            if version(x) == before and not (what.changing and i == 0 and x.is_inference()):
                continue
            if s is not None:
                home_of(s).forget()
            self.run.wrote(f"{what.name}() between stages", t if s is None else s, x)
            if s is not None and memory(x) != memory(s):
                if c is None:  # written whole, on every rank
                    x, c = self.run.axis.narrow(x, s.at.cut), s.at.cut
                if type(s) is Sharded:
                    s.__class__ = Moved
                s.now = self.run.carry(x, c, s.at.shape)

    def frame(
        self, name: str, args: Any, kwargs: Any, tensors: list[Tensor], cuts: Sequence[Cut | None], func: Any = None
    ) -> Frame:
        shapes = [tuple(t.shape) for t in tensors]
        stream = iter([Operand(s, c) for s, c in zip(shapes, cuts)])
        axis = self.run.axis
        converted = tuple(with_operands(a, stream) for a in args)
        named = {k: with_operands(v, stream) for k, v in kwargs.items()}
        return Frame(name, converted, named, axis.size, axis.rank, func)

    def detour(
        self, rule: Any, func: Any, name: str, args: Any, kwargs: Any,
        tensors: list[Tensor], shells: list[Sharded | None],
    ) -> tuple[list[Cut | None], Frame, Outcome] | None:  # fmt: skip
        """The first dim along which all sharded operands could be cut for this operation."""
        for dim in range(max(len(s.at.shape) for s in shells if s is not None)):
            cuts = [Cut(dim) if s is not None else None for s in shells]
            if any(s is not None and (dim >= len(s.at.shape) or s.at.shape[dim] < 2) for s in shells):
                continue
            frame = self.frame(name, args, kwargs, tensors, cuts, func)
            try:
                return cuts, frame, rule(frame)
            except GlueError:
                continue
        return None

    def source(self, cut: Cut, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        frame = self.frame(name, args, kwargs, tensors, [None] * len(tensors))
        stretch, call_args, size = localize_source(frame, cut)
        table = {id(o): t for o, t in zip(frame.operands(), tensors)}
        out = stretch(*without_operands(call_args, table))
        shape = list(out.shape)
        shape[cut.dim] = size
        return self.run.carry(out, cut, tuple(shape))

    def metadata(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "backward":
            raise GlueError("backward inside a parallelized forward; return the loss and call backward outside")
        if name == "new_tensor" and _sharded(args[1:], kwargs):
            raise GlueError("new_tensor() of a sharded tensor would be of its part; write y.detach().clone()")
        if args and isinstance(args[0], Sharded):
            read = READ.get(func)
            if read is not None:
                return read(*args, **kwargs)
            with NO():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _sharded(args: Any, kwargs: Any) -> list[Sharded]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if type(a) is Sharded:
            found.append(a)
        elif type(a) is tuple or type(a) is list:
            found += _sharded(a, {})
    return found


def _lent(t: Tensor) -> Any:
    return t.__dict__.get("_dsp_lent")


def _cut(t: Sharded | None) -> Cut | None:
    return None if t is None else t.at.cut


def _operands(value: Any) -> bool:
    return isinstance(value, Operand) or (isinstance(value, (list, tuple)) and any(map(_operands, value)))


def quiet(tensors: list[Tensor]) -> AbstractContextManager[Any]:
    """No warnings about statistics of nothing on a rank that holds nothing."""
    if all(t.numel() for t in tensors):
        return nullcontext()
    return _ignored()


@contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def note_checkpoint(run: Run) -> None:
    """Inside a checkpointed region: let its recomputation in backward run under this run again, from here."""
    frame = checkpoint_frame()
    if frame is None or getattr(frame, "_dsp_noted", False):
        return
    frame._dsp_noted = True
    original, script, sizes = frame.recompute_fn, run.script, run.root_sizes
    stage_index, glue_index, axis, recipes = run.stage_index, run.glue_index, run.axis, run.recipes
    runtime = ACTIVE.get()

    def recompute(*args: Any) -> Any:
        again = Run(axis, script, sizes, recipes)
        again.stage_index, again.glue_index = stage_index, glue_index
        assert runtime is not None
        with active(runtime[0], again):
            return original(*args)

    frame.recompute_fn = recompute
