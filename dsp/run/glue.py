"""Glue: the operations between stages, run on local shards while the model sees global shapes.

Between the stages of a `Run` its `Glue` mode sees every torch function. For a function that gets a `Sharded` tensor, a
`Recipe` says what to call on local shards, and the layout of the result. A recipe is derived once, from the rules of
`dsp.rules` and the decisions of the plan, and kept for all operations with the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dsp.run.scripted  # noqa: F401 (what it lets modes see)
from dsp.calls import GlueError, replaced, tensor_args
from dsp.collectives import inexact
from dsp.core.skeleton import KEPT
from dsp.layout import At, Cut
from dsp.moves import Part
from dsp.pending import ahead
from dsp.plan.script import key_of_operation
from dsp.private import FakeTensor, saving_hooks
from dsp.rules.elementwise import ELEMENTWISE
from dsp.rules.functions import LOOKS, TELLING
from dsp.run.follow import follow, source
from dsp.run.forward import Run
from dsp.run.functions import FUNCTIONS
from dsp.run.gradient_hooks import GradientHook
from dsp.run.lookup import InTurn, NoKey
from dsp.run.recipes import PreparedCall, Recipe, RuledCall, derive, key_of
from dsp.run.whole import Again, GlueOnWholes, in_backward, parted, sharded_in, writes
from dsp.sharded import Sharded, carry, plain
from dsp.tensors import NO, map_tensors, memory, plainly, tensors_in
from dsp.traits import DTYPE_ARG, Traits

EACH = frozenset(ELEMENTWISE)


class Glue(GlueOnWholes):
    """The mode of a run whose operations between stages run on local shards, if they have a rule."""

    def begin(self) -> None:
        FUNCTIONS.begin()

    def end(self) -> None:
        FUNCTIONS.end()
        super().end()

    def wait(self, what: Traits, args: Any, kwargs: Any) -> None:
        if what.name in TELLING or not (what.metadata or what.name in LOOKS):
            super().wait(what, args, kwargs)

    def operate(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        """Run one operation between stages: by its recipe, or by a new one."""
        run, node = self.run, None
        try:
            key: Any = (func, key_of(args, run.first))
            if kwargs:
                key += (*kwargs, key_of(kwargs.values(), run.first))
            recipe = run.recipes.get(key)
        except (NoKey, TypeError):
            key = recipe = None
        if type(recipe) is InTurn:
            node = run.in_turn(recipe.alike)
            recipe = recipe.made.get(node.index)
        if type(recipe) is torch.dtype:  # not called on the shard, where it might copy, as .contiguous() does
            x = tensor_args(args, kwargs)[0]
            with NO():
                if x.dtype == recipe:
                    return x
            recipe = key = None
        if run.coming and what.name in LOOKS and not looks(func, what.name, recipe, args, kwargs):
            run.arrive(tensor_args(args, kwargs))
        if recipe is not None and not run.writes.stale:
            call = recipe.prepared
            if recipe.ready and not (call.writes and self.watched(args[0])):
                if call.moves or call.pushes:
                    args, kwargs = self.brought(recipe, what, args, kwargs)
                return self.quickly(recipe, call, args, kwargs)
            if recipe.whole and not run.writes.has_copies:
                return parted(run, func(*args, **kwargs), recipe.node, recipe.push, (args, kwargs))
        tensors, shells = self.opened(what, args, kwargs)
        if recipe is None:
            return self.first_time(RuledCall(run, node, func, what, args, kwargs, tensors, shells), key)
        return follow(RuledCall(run, recipe.node, func, what, args, kwargs, tensors, shells), recipe)

    def brought(self, recipe: Recipe, what: Traits, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with the tensors in the layouts that the operation needs."""
        run, call = self.run, recipe.prepared
        run.where = ("glue", recipe.index, what.name)
        if not call.moves:  # type: ignore[union-attr]
            return args, kwargs
        tensors = tensor_args(args, kwargs)
        shells = [t if type(t) is Sharded else None for t in tensors]
        return replaced(args, kwargs, iter(run.views.bring(tensors, shells, recipe.wanted, recipe.via)))

    def first_time(self, op: RuledCall, key: Any) -> Any:
        """Run an operation that has no recipe yet, and keep its recipe under `key`."""
        run, tensors, shells, name = op.run, op.tensors, op.shells, op.what.name
        run.refuse_graph()
        alike = None if op.node is None or key is None else run.recipes[key].alike
        if op.node is None:
            alike, op.node = run.find(key_of_operation(name, op.args, op.kwargs, run.reads(tensors, shells)))
        run.where = ("glue", op.index, name)
        if op.known and op.node.same and isinstance(tensors[0], Sharded):  # type: ignore[union-attr]
            if tensors[0].dtype == op.node.same:  # type: ignore[union-attr]
                run.keep_in_turn(key, alike, op.node, op.node.same)  # type: ignore[union-attr]
                return tensors[0]
            op.node = key = None  # y.float() of another type than before, as under autocast
        if any(type(t) is FakeTensor for t in tensors) and any(type(s) is Sharded for s in shells):
            raise GlueError(f"{name}() {KEPT}")
        if op.step is not None and op.step.cuts is not None and not fit(op.step.cuts, tensors):
            op.node = key = None  # the operands differ from the planned ones: x + 0 before, x + y now
        if (made := self.of_wholes(op)) is not NotImplemented:
            return made
        if sized_by_data(op):
            key = None
        recipe = self.derived(op, key is not None)
        run.keep_in_turn(key, alike, op.node, recipe)
        return follow(op, recipe)

    def of_wholes(self, op: RuledCall) -> Any:
        """The result of an operation on replicated tensors that needs no recipe; NotImplemented for any other."""
        if any(s is not None for s in op.shells):
            return NotImplemented
        if op.step is not None and op.step.source is not None:
            return source(op, op.step.source)
        if not op.what.in_place and (any(op.asked) or any(op.push)):
            return NotImplemented
        with writes(op, op.tensors, [None] * len(op.tensors)) as views:
            return views(op.func(*op.args, **op.kwargs))

    def derived(self, op: RuledCall, keeps: bool) -> Recipe:
        """The recipe of an operation. Operations without a decision in the plan share one per layout of operands."""
        node = op.node
        if not keeps or op.step is not None:
            return derive(op)
        facts = None if node is None else (node.exact, node.copied, node.fresh)
        key = (facts, op.func, key_of(op.args, None), *op.kwargs, key_of(op.kwargs.values(), None))
        found: Recipe | None = self.run.recipes.get(key)
        if found is None:
            found = derive(op)
            self.run.keep(key, found)
            return found
        return found.of(node)

    def watched(self, t: Sharded) -> bool:
        """Tell whether a write into `t` may concern other tensors than those that share its memory."""
        return bool(self.run.writes.copied) or "_dsp_copy_of" in t.__dict__ or torch.is_inference_mode_enabled()

    def quickly(self, recipe: Recipe, call: PreparedCall, args: Any, kwargs: Any) -> Any:
        """Run an operation by its prepared call, on tensors that have their layouts."""
        if call.narrowed:
            args = list(args)
            for i, cut in call.narrowed:
                args[i] = self.run.axis.narrow(args[i], cut)
        own = sharded_in(args, kwargs) if call.own is None else args[call.own]
        for t in own:  # as `bare` does
            t.__class__ = Tensor
        try:
            out = call.call(*args, **kwargs) if call.as_it_is else self.changed(call, args, kwargs, own[0])
            if out is not None and not torch.is_grad_enabled() and (type(out) is not Tensor or out.requires_grad):
                out = plainly(out)
            torn = call.views and out.data_ptr() != args[0].data_ptr()
        finally:
            for t in own:
                t.__class__ = Sharded
        if type(out) is Sharded or out is None:
            return out  # an argument, unchanged
        if call.pushes:
            return self.pushed(recipe, out)
        if type(out) is Tensor:
            out.__class__ = Sharded
            out.at, out.number = recipe.ats[0], self.run.first + recipe.numbers[0]  # type: ignore[attr-defined]
            made: Any = (out,)
        else:
            out, made = self.several(recipe, out)
        if call.aliases or call.views:
            self.related(recipe, args, made, torn)
        return out

    def changed(self, call: PreparedCall, args: Any, kwargs: Any, x: Tensor) -> Any:
        """The local call of an operation that writes in place, gets replaced arguments, or may return a view of x."""
        if call.writes and torch.is_grad_enabled():
            _ = args[0].grad_fn  # updates the grad_fn of a view whose base got one by a write through another view
        if call.rest is None:
            out = call.call(*args, **kwargs)
        else:
            rest = list(call.rest)
            for i in call.kept:
                rest[i - 1] = args[i]
            out = call.call(args[0], *rest)
        return out.clone() if call.copies and memory(out) == memory(x) else out

    def related(self, recipe: Recipe, args: Any, made: Sequence[Any], torn: bool) -> None:
        """Mark results as views of the first argument, or as copies if the first argument is a copy."""
        first = args[0]
        if recipe.view is not None:
            for t in made:
                t.viewed_from = first, recipe.view
        if torn:
            self.run.writes.reshape_copied(first, made[0])
        if (copied := first.__dict__.get("_dsp_copy_of")) is not None:
            for t in made:
                if recipe.view is not None or memory(t) == memory(first):
                    t._dsp_copy_of = copied

    def several(self, recipe: Recipe, out: Any) -> tuple[Any, Sequence[Any]]:
        """The results of an operation that returned several tensors: as the model sees them, and as a flat sequence."""
        if type(out) is tuple or type(out) is list:
            for t, at, number in zip(out, recipe.ats, recipe.numbers):
                t.__class__, t.at, t.number = Sharded, at, self.run.first + number
            return out, out
        made = list(map(carry, tensors_in(out), recipe.ats, self.numbers(recipe)))
        return map_tensors(out, made), made

    def pushed(self, recipe: Recipe, out: Any) -> Any:
        """The local result, switched into the plan's layout."""
        assert recipe.outcome is not None
        cut = recipe.outcome.cut
        assert cut is not None
        parts = [Part(t, cut, at.cut, at.shape) for t, at in zip(tensors_in(out), recipe.ats)]
        if self.goes_ahead(parts):
            moved: Any = [send_ahead(self.run, part) for part in parts]
        else:
            moved = self.run.push_all(parts)
        return map_tensors(out, map(claim, moved, recipe.ats, self.numbers(recipe)))

    def numbers(self, recipe: Recipe) -> list[int]:
        return [self.run.first + number for number in recipe.numbers]

    def goes_ahead(self, parts: Sequence[Part]) -> bool:
        """Tell whether all switches may run in the background while the forward goes on.

        Switches inside a checkpoint may not: its recomputation may end before they arrive.
        """
        script, size = self.run.script, self.run.axis.size
        if saving_hooks(False) is not None or script is None or script.compiled or self.run.by_graph:
            return False
        return all(p.simple and p.src != p.dst and not p.small(size) for p in parts)

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if func in (Tensor.register_hook, Tensor.retain_grad):
            return self.hooked(func, *args, **kwargs)
        return super().metadata(func, what, args, kwargs)

    def again(self) -> Again:
        return in_backward(self.run, None)

    def hooked(self, func: Any, t: Tensor, hook: Any = None) -> Any:
        """Register a hook on a tensor's gradient, or retain the gradient: either gets that of a single process."""
        run = self.run
        with NO():
            if isinstance(t, DTensor) or t.is_leaf or not t.requires_grad or (hook is None and isinstance(t, Sharded)):
                return func(t, hook) if func is Tensor.register_hook else func(t)
            made = t.register_hook(GradientHook(t, run.axis, self.again(), hook))
            return made if func is Tensor.register_hook else func(t)


def send_ahead(run: Run, part: Part) -> Tensor:
    """Start to switch a part, which must not be written meanwhile; its data may be read after `Run.arrive`."""
    made, arrived = ahead(*part.opened(run.axis), run.axis.switching, *(part.pieces or ()), wire=run.axis.wire)
    run.coming[memory(made)] = arrived
    return made


def claim(local: Tensor, at: At, number: int) -> Sharded:
    """Turn a local tensor to which nothing else refers into a `Sharded` with layout `at`, in place."""
    if type(local) is not Tensor:
        return carry(local, at, number)
    local.__class__, local.at, local.number = Sharded, at, number  # type: ignore[attr-defined]
    return local  # type: ignore[return-value]


def looks(func: Any, name: str, recipe: Recipe | None, args: Any, kwargs: Any) -> bool:
    """Tell whether an operation of LOOKS, run by this recipe, reads no data of its first argument."""
    call = recipe.prepared if recipe is not None and recipe.ready else None
    if call is None or call.moves or call.pushes:
        return False
    if name in DTYPE_ARG:  # the result is the argument itself, if it already has the dtype
        nothing = plain(args[0]).new_empty(0)
        return not kwargs and func(nothing, *args[1:]) is nothing
    return not call.views or plain(args[0]).is_contiguous()


def sized_by_data(op: RuledCall) -> bool:
    """Tell whether a size or a place may be a number in a replicated tensor, which the key of a recipe has not.

    That is one of a mask that picks, of the places of a split, or of a tensor of one integer given for a number.
    """
    name = op.what.name
    for t, s in zip(op.tensors[1:], op.shells[1:]):
        picks = name == "getitem" and t.dtype in (torch.bool, torch.uint8)
        number = not t.ndim and not inexact(t) and name not in EACH
        if s is None and (picks or number or name == "tensor_split"):
            return True
    return False


def fit(cuts: Sequence[Cut | None], tensors: Sequence[Tensor]) -> bool:
    """Tell whether a plan's cuts fit these tensors, in number and in shape."""
    return len(cuts) == len(tensors) and all(c is None or c.fits(t.shape) for c, t in zip(cuts, tensors))
