"""Glue: the operations of a model's own forward between stages, run on local parts while the model sees whole shapes.

Between the stages of a `Run` its `Glue` mode sees every torch function. One that meets a `Sharded` tensor is looked up:
the `Recipe` for it says what to call on local parts, and where the result lies. A recipe is derived once, from the
rules of `dsp.rules` and the decisions of the plan, and kept for all operations alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.compile_off import CompileOff
from dsp.layout import Cut
from dsp.moves import Part
from dsp.observers import observing
from dsp.plan.script import Script
from dsp.plan.tracing import KEPT
from dsp.private import (
    FakeTensor,
    Recompute,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
    checkpoint_frame,
    compiler_loaded,
    saving_hooks,
)
from dsp.rules import GlueError, replaced, tensor_args
from dsp.rules.between import Between
from dsp.rules.functions import DENSE, DTYPE_ARG, LOOKS, TELLING, Traits
from dsp.run.follow import follow, parted, source, writes
from dsp.run.forward import Run, Unfit
from dsp.run.recipes import GlueCall, NoKey, PreparedCall, Recipe, derive, key_of
from dsp.sharded import ACTIVE, READ, Sharded, carry, claim, plain
from dsp.tensors import NO, map_tensors, memory, plainly, tensors_in


@contextmanager
def active(runtime: Any, run: Run) -> Iterator[None]:
    """Make `run` the one that hooks and glue of `runtime` serve."""
    token, run.mode = ACTIVE.set((runtime, run)), Glue(run)
    try:
        with run.mode:
            yield
    finally:
        ACTIVE.reset(token)
        run.mode = None  # it knows the run: nobody would let go of either before the next collection of garbage


PLAIN = frozenset({Tensor, nn.Parameter})  # functions of torch that are written in Python name these as well


class Glue(Between):
    """The mode of a run: every operation between its stages is run on local parts."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        asks = run.script is None or run.script.compiled  # else nothing that is compiled was met between stages
        self.followed = CompileOff() if asks and compiler_loaded() else None
        self.asleep = self.popped = False
        self.uncounted = False  # while hooks run that the trace did not: theirs is no operation of the plan

    def suspend(self) -> None:
        """Inside a stage tensors are local and plain: get out of the way, entirely if nobody stands above us."""
        if _get_current_function_mode() is self:
            _pop_mode()
            self.popped = True
        self.asleep = True
        if self.followed is not None:
            self.followed.__exit__()

    def resume(self) -> None:
        if self.followed is not None:
            self.followed.__enter__()
        if self.popped:
            _push_mode(self)
        self.asleep = self.popped = False

    def __enter__(self) -> Any:
        if self.followed is not None:
            self.followed.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        if self.followed is not None:
            self.followed.__exit__()
        if not self.popped:  # an exception that no hook saw may have left a stage open
            super().__exit__(*exc)
        self.asleep = self.popped = False

    def sharded(self, t: Tensor) -> bool:
        return isinstance(t, Sharded)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        run = self.run
        if run.coming and what.name not in LOOKS:
            run.arrive(tensor_args(args, kwargs))
        if run.aside:
            return self.operate(-1, func, what, args, kwargs, types)
        if saving_hooks(False) is not None:
            note_checkpoint(run)
        if self.uncounted:
            return self.operate(-1, func, what, args, kwargs, types)
        index, script = run.glue_index, run.script
        if script is not None and run.strayed is None:
            other = index >= len(script.names) or script.names[index] != what.name
            if other or run.loose or (index in script.spare and dtensors(args, kwargs)):
                index = self.aligned(script, index, what.name, args, kwargs)
        if index >= 0:
            run.glue_index = index + 1
        if script is not None and run.strayed is None and index in script.same:
            first = tensor_args(args, kwargs)[0]
            if isinstance(first, Sharded):
                return first  # of a part it might be a copy, as of one that is not contiguous
        out = self.operate(index, func, what, args, kwargs, types)
        if run.recorder is not None:
            run.observe("operation", what.name, args, kwargs, out, what.in_place)
        return out

    def aligned(self, script: Script, index: int, name: str, args: Any, kwargs: Any) -> int:
        """The place in its script of an operation that is not the next one there; -1 for one that has none.

        What is done to whole tensors that no plan shards may be done in one call and not in another, as a table is made
        in the first alone. Where one that has no place is followed by one that may be what the plan cuts, or not, the
        run has left its script.
        """
        run, whole, names = self.run, not dtensors(args, kwargs), script.names
        same = False
        for at in range(index, len(names)):
            same = names[at] == name
            if same and whole == (at in script.spare):
                run.loose &= whole
                return at
            if at not in script.spare:
                break
        if whole and not same:
            run.loose = True
            return -1
        if whole and not run.loose:
            return at  # of what the plan has whole here
        if whole or index >= len(names) or names[index] != name:
            run.strayed = ("glue", index, name), names[index] if index < len(names) else None
        return index  # or else it asks a sharded one for its shape alone, as new_zeros

    def operate(self, index: int, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        """One operation of glue, on local parts: by its recipe, if there is one already."""
        run = self.run
        script, step = run.script, run.script.glue.get(index) if run.script else None
        if step is not None and (step.name != what.name or (run.strayed is not None and not dtensors(args, kwargs))):
            step = None  # a run that has left its script has no place for what is whole
        idle = (step is None or step.idle) and not run.has_copies
        if idle and PLAIN.issuperset(types) and not dtensors(args, kwargs):
            run.where = ("glue", index, what.name)
            out = func(*args, **kwargs)
            # asked here as well: a call less for most
            return out if what.in_place or (type(out) is Tensor and not out.requires_grad) else plainly(out)
        own = script is not None and (index in script.copies or index in script.fresh)
        mark = index if step is not None or own else None
        left = what.name in DENSE and run.left(index)  # what is a view by a plan or record is none then
        try:
            key: Any = (func, mark, left, key_of(args))
            if kwargs:
                key += (*kwargs, key_of(kwargs.values()))
            recipe = run.recipes.get(key)
        except (NoKey, TypeError):
            key = recipe = None
        if run.coming and what.name in LOOKS and not looks(func, what.name, recipe, args, kwargs):
            run.arrive(tensor_args(args, kwargs))
        if recipe is not None and not run.stale:
            call = recipe.prepared
            if recipe.ready and not (call.writes and self.watched(args[0])):
                if not (call.moves or call.pushes):
                    return self.quickly(recipe, call, args, kwargs)
                run.where = ("glue", index, what.name)
                if call.moves:
                    tensors = tensor_args(args, kwargs)
                    shells = [t if type(t) is Sharded else None for t in tensors]
                    args, kwargs = replaced(args, kwargs, iter(run.bring(tensors, shells, recipe.wanted, recipe.via)))
                return self.quickly(recipe, call, args, kwargs)
            if recipe.whole and not run.has_copies:
                return parted(run, func(*args, **kwargs), recipe.push)
        run.where = ("glue", index, what.name)
        tensors = tensor_args(args, kwargs)
        if run.stale and what.name == "setitem":
            run.written_back(*args)
        shells = [run.open(t) for t in tensors]
        op = GlueCall(run, index, func, what, step, args, kwargs, tensors, shells)
        return follow(op, recipe) if recipe is not None else self.first_time(op, key)

    def first_time(self, op: GlueCall, key: Any) -> Any:
        """An operation without a recipe, which is kept for those that have its key."""
        run, step, tensors, shells = op.run, op.step, op.tensors, op.shells
        if any(type(t) is FakeTensor for t in tensors) and any(type(s) is Sharded for s in shells):
            raise GlueError(f"{op.what.name}() {KEPT}")
        if step is not None and step.cuts is not None and not fit(step.cuts, tensors):
            run.strayed, op.step = (run.where, step.name), None  # x + 0 before, x + y now
        if not any(s is not None for s in shells):
            if op.step is not None and op.step.source is not None:
                return source(op, op.step.source)
            if op.what.in_place or not (any(op.asked) or any(op.push)):
                with writes(op, tensors, [None] * len(tensors)) as views:
                    return views(op.func(*op.args, **op.kwargs))
        recipe = derive(op)
        if key is not None:
            run.keep(key, recipe)
        return follow(op, recipe)

    def watched(self, t: Sharded) -> bool:
        """Tell whether others may have to see a write into it, beside those that share its memory."""
        return bool(self.run.copied) or "_dsp_copy_of" in t.__dict__ or torch.is_inference_mode_enabled()

    def quickly(self, recipe: Recipe, call: PreparedCall, args: Any, kwargs: Any) -> Any:
        """Run an operation as it ran before, on tensors that lie as it needs them."""
        first, graded = args[0] if args else None, torch.is_grad_enabled()
        if call.narrowed:
            args = list(args)
            for i, cut in call.narrowed:
                args[i] = self.run.axis.narrow(args[i], cut)
        own = _sharded(args, kwargs) if call.own is None else args[call.own]
        for t in own:  # as `bare` does
            t.__class__ = Tensor
        try:
            if call.writes and graded:
                _ = args[0].grad_fn  # a view that got a gradient by a write into another one learns of it when asked
            if call.rest is None:
                out = call.call(*args, **kwargs)
            else:
                rest = list(call.rest)
                for i in call.kept:
                    rest[i - 1] = args[i]
                out = call.call(first, *rest)
            if not graded and out is not None and (type(out) is not Tensor or out.requires_grad):
                out = plainly(out)
            if call.copies and not self.run.strayed and memory(out) == memory(own[0]):
                out = out.clone()
            torn = call.views and out.data_ptr() != args[0].data_ptr()
        finally:
            for t in own:
                t.__class__ = Sharded
        if type(out) is Sharded and call.anew:
            out = plain(out)
        if type(out) is Sharded or out is None:
            return out  # an argument as it was
        if call.pushes:
            return self.pushed(recipe, out)
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
        if recipe.view is not None:
            for t in made:
                t._dsp_view = first, recipe.view
        if torn:
            self.run.reshape_copied(args[0], out)
        if call.aliases and (copied := first.__dict__.get("_dsp_copy_of")) is not None:
            for t in made:
                if recipe.view is not None or memory(t) == memory(args[0]):
                    t._dsp_copy_of = copied
        return out

    def pushed(self, recipe: Recipe, out: Any) -> Any:
        """The result of local parts, switched to where the plan wants it."""
        assert recipe.outcome is not None
        cut = recipe.outcome.cut
        assert cut is not None
        parts = [Part(t, cut, at.cut, at.shape) for t, at in zip(tensors_in(out), recipe.ats)]
        if self.goes_ahead(parts):
            return map_tensors(out, map(claim, map(self.run.send_ahead, parts), recipe.ats))
        return map_tensors(out, map(claim, self.run.push_all(parts), recipe.ats))

    def goes_ahead(self, parts: Sequence[Part]) -> bool:
        """Tell whether all may be under way while the forward goes on. Not what a checkpoint computes again, whose
        forward may end before it comes."""
        script, size = self.run.script, self.run.axis.size
        if saving_hooks(False) is not None or script is None or script.compiled or self.run.by_graph:
            return False
        return all(p.simple and p.src != p.dst and not p.small(size) for p in parts)

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if self.run.coming and what.name in TELLING:
            self.run.arrive(tensor_args(args, kwargs))
        if what.name == "backward":
            raise GlueError("backward inside a parallelized forward; return the loss and call backward outside")
        if what.name == "new_tensor" and _sharded(args[1:], kwargs):
            raise GlueError("new_tensor() would copy this rank's part alone; write y.detach().clone()")
        if args and isinstance(args[0], Sharded):
            read = READ.get(func)
            if read is not None:
                return read(*args, **kwargs)
            with NO():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def looks(func: Any, name: str, recipe: Recipe | None, args: Any, kwargs: Any) -> bool:
    """Tell whether one of LOOKS by this recipe reads no number of its first argument indeed."""
    call = recipe.prepared if recipe is not None and recipe.ready else None
    if call is None or call.moves or call.pushes:
        return False
    if name in DTYPE_ARG:  # it is the argument itself, if that is of this type
        nothing = plain(args[0]).new_empty(0)
        return not kwargs and func(nothing, *args[1:]) is nothing
    return not call.views or plain(args[0]).is_contiguous()


def fit(cuts: Sequence[Cut | None], tensors: Sequence[Tensor]) -> bool:
    """Tell whether these are as many tensors as a plan has cuts for, and can be cut so."""
    return len(cuts) == len(tensors) and all(c is None or c.fits(t.shape) for c, t in zip(cuts, tensors))


def dtensors(args: Any, kwargs: Any) -> bool:
    """Tell whether there is a DTensor among the arguments, or a sharded tensor that a function's types do not name."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, (DTensor, Sharded)) or (type(a) in (list, tuple) and dtensors(a, None)):
            return True
    return False


def _sharded(args: Any, kwargs: Any) -> list[Sharded]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if type(a) is Sharded:
            found.append(a)
        elif type(a) is tuple or type(a) is list:
            found += _sharded(a, {})
    return found


def note_checkpoint(run: Run) -> None:
    """Inside a checkpointed region: let its recomputation in backward run under this run again, from here."""
    frame = checkpoint_frame()
    if frame is None or Recompute.known(frame, note_checkpoint):
        return
    if run.by_graph:
        raise Unfit("it has an activation checkpoint")
    script, sizes = run.script, run.root_sizes
    stage_index, glue_index, axis, recipes = run.stage_index, run.glue_index, run.axis, run.recipes
    traffic_check, runtime = run.traffic_check, ACTIVE.get()

    @contextmanager
    def around() -> Iterator[None]:
        again = Run(axis, script, sizes, recipes)
        again.stage_index, again.glue_index, again.traffic_check = stage_index, glue_index, traffic_check
        assert runtime is not None
        with active(runtime[0], again), observing(traffic_check.again(again) if traffic_check is not None else None):
            yield

    Recompute(frame, note_checkpoint, around)
