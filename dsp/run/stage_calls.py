"""A stage call: before it, tensors move into the stage's layout; after it, results move into the plan's.

The moves depend on the tensors' layouts and not on their data, so they are derived once and kept as a `StageDecision`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.collectives import inexact
from dsp.gradients import waited
from dsp.layout import At, Axis, Cut
from dsp.methods import Peers, RankPart, Received
from dsp.moves import Part
from dsp.notation import NotationError, TensorPattern
from dsp.plan.script import PlannedNode, StageStep, Via, key_of_stage
from dsp.private import saving_hooks
from dsp.randomness import drew, fork, join, states
from dsp.run.forward import Given, InStage, Run
from dsp.run.lookup import NUMBERS, InTurn, NoKey
from dsp.run.whole import note_checkpoint
from dsp.sharded import ACTIVE, Sharded, carry, plain
from dsp.signature import Bound
from dsp.stages import Option, Stage
from dsp.tensors import constants_in, map_tensors, memory, tensors_in, version
from dsp.world import unpicklable

shape_of = attrgetter("shape")


@dataclass(eq=False)
class StageDecision:
    """How a stage runs on arguments in given layouts.

    node: the plan's node for this call; slots: where its tensors stand in args or kwargs; cuts: the layout that each
    must have (None: replicated); via: the copies to make of each first; still: all tensors have their layouts already;
    landings: the layouts of its results, by the results' local shapes; pieces: the decisions of the pieces of this
    rank's shard, if the stage runs in pieces; ahead: the tensors that are switched piece by piece.
    """

    node: PlannedNode | None
    step: StageStep | None
    option: Option
    sizes: dict[str, int]
    place: RankPart
    slots: list[int | str]
    patterns: list[TensorPattern | None]
    cuts: tuple[Cut | None, ...]
    via: Sequence[Sequence[Via]]
    still: bool
    landings: dict[Any, list[At]] = field(default_factory=dict)
    pieces: list[StageDecision] = field(default_factory=list)
    ahead: frozenset[int] = frozenset()

    @property
    def draws(self) -> bool:
        """Tell whether a sharded stage may draw random numbers: each rank then draws its own."""
        return self.option.name is not None and (self.step is None or self.step.random)


def lies(value: Any, first: int) -> Any:
    """The properties of a stage's argument on which the decision depends; `first`: see `Run.first`."""
    kind = type(value)
    if kind is Sharded:
        number = value.number - first
        if not -1 <= number < NUMBERS:
            raise NoKey  # a tensor that an earlier call left behind
        return value.at, number
    if kind is Tensor or kind is nn.Parameter:
        return value.shape
    if kind is tuple or kind is list:
        return kind, *[lies(v, first) for v in value]
    if isinstance(value, (Tensor, tuple, list, dict)):
        raise NoKey
    return kind


class StageCalls:
    """The hooks that `parallelize` puts on stages."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCalls:
        return StageCalls(self.axis)

    def __reduce__(self) -> Any:
        raise unpicklable()

    def install(self, stage: Stage) -> tuple[nn.Module, int, int]:
        """The module, and the keys of the hooks on it."""
        module = stage.module
        pre = module.register_forward_pre_hook(partial(self.enter, stage), with_kwargs=True, prepend=True)
        post = module.register_forward_hook(partial(self.leave, stage), with_kwargs=True, always_call=True)
        return module, pre.id, post.id

    # --- in ---

    def enter(self, stage: Stage, module: nn.Module, args: Any, kwargs: Any) -> Any:
        current = ACTIVE.get()
        if current is None:
            refuse_sharded(stage, args, kwargs)
            return None
        runtime, run = current
        if runtime.stage_calls is not self or run.in_stage is not None:
            return None
        if saving_hooks(False) is not None:
            note_checkpoint(run)
        if run.coming:  # nobody sees what a stage reads: all data must have arrived
            run.arrive()
        run.mode.suspend()
        if run.recorder is not None:
            run.observe("enter_stage", stage, args, kwargs)
        decision = self.decision(run, stage, args, kwargs)
        place = decision.place
        tensors = [args[slot] if type(slot) is int else kwargs[slot] for slot in decision.slots]
        shells, cuts = [run.open(t) for t in tensors], decision.cuts
        wanted = self.wanted(run, stage, decision, shells) if decision.pieces else cuts
        parts = list(map(plain, run.views.bring(tensors, shells, wanted, decision.via)))
        if stage.around is not None and decision.option.name is not None:
            place, parts, cuts = self.received(stage.around, decision, tensors, parts)
        locals_ = parts
        if place.own == 0:
            locals_ = list(map(with_dummy, parts, cuts))
        args, kwargs = list(args), dict(kwargs)
        for slot, local in zip(decision.slots, locals_):
            (args if type(slot) is int else kwargs)[slot] = local
        random = fork(self.axis) if decision.draws else states(self.axis) if run.watches else None
        run.in_stage = InStage(
            stage, decision, place, random,
            [Given(t, s, x, y, c, version(y)) for t, s, x, y, c in zip(tensors, shells, parts, locals_, cuts)],
        )  # fmt: skip
        if run.pieces is not None:
            run.pieces.start(shells, args, kwargs)
        return tuple(args), kwargs

    def wanted(
        self, run: Run, stage: Stage, decision: StageDecision, shells: Sequence[Sharded | None]
    ) -> Sequence[Cut | None]:
        """The cuts that the tensors of a call in pieces must have before its first piece."""
        raise NotImplementedError

    def received(
        self, around: Any, decision: StageDecision, tensors: list[Tensor], parts: list[Tensor]
    ) -> tuple[RankPart, list[Tensor], tuple[Cut | None, ...]]:
        """The place and the tensors of a stage, after the method that communicates around it."""
        given = [
            Received(x, c, p, tuple(t.shape)) for x, c, p, t in zip(parts, decision.cuts, decision.patterns, tensors)
        ]
        place, given = around.enter(decision.place, decision.sizes, given)
        return place, [x.local for x in given], tuple(x.cut for x in given)

    def decision(self, run: Run, stage: Stage, args: Any, kwargs: Any) -> StageDecision:
        """The plan's decision for this call, or else a greedy choice."""
        first, node = run.first, None
        try:
            # a plan is made for one signature, which fixes the sizes of the root pattern's dims
            mark = None if run.script is not None else run.sizes_key
            named = map(lies, kwargs.values(), repeat(first))
            key: Any = (stage, mark, *map(lies, args, repeat(first)), *kwargs, *named)
            found = run.recipes.get(key)
        except NoKey:
            key = found = None
        if type(found) is InTurn:
            node = run.in_turn(found.alike)
            found = found.made.get(node.index)
        if found is None:
            found = self.decided(run, stage, args, kwargs, key, node)
        run.where = ("stage", -1 if found.node is None else found.node.index, stage.name)
        return found

    def decided(
        self, run: Run, stage: Stage, args: Any, kwargs: Any, key: Any, node: PlannedNode | None
    ) -> StageDecision:
        """A new decision, kept for later calls with the same key."""
        run.refuse_graph()
        alike = None if node is None else run.recipes[key].alike
        if node is None:
            tensors = tensors_in((args, kwargs))
            alike, node = run.find(key_of_stage(stage.name, run.reads(tensors, [run.open(t) for t in tensors])))
        found = self.derived(run, stage, node, stage.signature.bind(args, kwargs)[1])
        run.keep_in_turn(key, alike, node, found)
        return found

    def derived(self, run: Run, stage: Stage, node: PlannedNode | None, bound: list[Bound]) -> StageDecision:
        """The decision of a plan's node; without a node, the greedy choice that moves the least."""
        step: StageStep | None = None if node is None else node.step
        sizes = stage.sizes(bound, run.root_sizes)
        options, shells = stage.options(bound, sizes, self.axis.size), [run.open(b.tensor) for b in bound]
        option = next((o for o in options if step and (o.name, o.onto) == (step.option, step.onto)), None)
        if option is None:
            lying = [None if s is None else s.at for s in shells]
            step, option = None, min(options, key=lambda o: (o.last_resort, bool(o.onto), o.moved(lying)))
        peers = Peers((self.axis.rank,), (1,))
        if option.name is not None:
            peers = Peers.all(option.size, self.axis.size)
        still = all(s is None or s.at.cut == cut for s, cut in zip(shells, option.cuts))
        via = step.via if step is not None and len(step.via) == len(bound) else []
        found = StageDecision(
            node, step, option, sizes, RankPart(self.axis, option.name, peers), [b.slot for b in bound],  # type: ignore[misc]
            [b.pattern for b in bound], option.cuts, via if any(via) else [], still,
        )  # fmt: skip
        return found

    # --- out ---

    def leave(self, stage: Stage, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        current = ACTIVE.get()
        if current is None or current[0].stage_calls is not self:
            return None
        run = current[1]
        inside = run.in_stage
        if inside is None or inside.stage is not stage:
            return None
        run.in_stage, pieces, run.pieces = None, run.pieces, None
        try:
            if inside.random is not None:
                self.drawn(run, inside)
            error = sys.exc_info()[1]
            if output is None and error is not None:  # the stage raised: only clean up
                if pieces is not None:
                    pieces.let_go()
                self.failed(run, inside, error)
                return None
            self.refuse_sizes(run, inside.stage, inside.decision, output)
            for x in inside.given:
                if version(x.local) != x.written:
                    run.writes.wrote(stage.where, x.tensor if x.shell is None else x.shell, x.missed())
            if not run.began:
                self.before_switching(run)
            tensors = [output] if type(output) is Tensor else [*map(waited, tensors_in(output))]
            results = self.results(run, inside, tensors) if pieces is None else pieces.carried(tensors)
            made = results[0] if type(output) is Tensor else map_tensors(output, results)
            if run.recorder is not None:
                made = run.recorder.apart([x.tensor for x in inside.given], made)
                run.observe("leave_stage", made)
            return made
        finally:
            run.mode.resume()

    def drawn(self, run: Run, inside: InStage) -> None:
        """End a rank's own random numbers; note a stage that draws some although it drew none when it was planned."""
        decision = inside.decision
        if decision.draws:
            join(inside.random)
        elif decision.step is not None and not decision.step.random and drew(self.axis, inside.random):
            script = run.script
            assert script is not None  # it has the step
            decision.step.random = script.random_stages = True  # from the next call on
            script.random_glue |= decision.option.name is None

    def before_switching(self, run: Run) -> None:
        """Called once in a forward, before the results of its first stage are switched."""
        run.began = True

    def failed(self, run: Run, inside: InStage, error: BaseException) -> None:
        """Note that `error` comes from inside a stage, where tensors are plain: it needs no note on sharded tensors."""
        run.failed = id(error)

    def refuse_sizes(self, run: Run, stage: Stage, decision: StageDecision, output: Any) -> None:
        """Raise NotationError if the constants that a stage returned differ from those at full size."""
        node, step, name = decision.node, decision.step, decision.option.name
        if step is None or not node.exact or run.script.recorded:  # type: ignore[union-attr]
            return
        if (found := constants_in(output)) != step.constants:
            raise NotationError(
                f"{stage.where} returned {found} on a shard along {name!r}: expected {step.constants}, as on the full "
                f"tensor. It returns a number that depends on the length of {name!r}. Put [{name}] in brackets, or "
                "make stages of its submodules instead"
            )

    def results(self, run: Run, inside: InStage, tensors: list[Tensor]) -> list[Tensor]:
        """The results of a stage, as the model sees them."""
        stage, decision, given = inside.stage, inside.decision, inside.given
        push = decision.step.push if decision.step is not None else [None] * len(tensors)
        numbers = chain(() if decision.node is None else decision.node.results, repeat(-1))
        if decision.option.name is None:
            stage.outputs(tensors)
            self.mark_copies(run, inside, tensors)
            return run.share_out(tensors, push, numbers)
        if stage.around is not None:
            tensors = stage.around.leave(inside.place, decision.sizes, stage.outputs(tensors), tensors)
        landings = self.landings(run, stage, decision, tensors)
        returned = [argument(t, at, given) for t, at in zip(tensors, landings)]
        tensors = self.of_part(decision, given, tensors, landings)
        self.mark_copies(run, inside, tensors)
        moving = [cut is not None and cut != at.cut for cut, at in zip(push, landings)]
        if any(moving):
            parts = [Part(t, at.cut, cut or at.cut, at.shape) for t, at, cut in zip(tensors, landings, push)]
            pushed = run.land(parts, numbers)
            run.writes.mark_moved(pushed, tensors, moving, [x.part for x in given])
        else:
            pushed = [carry(t, at, run.first + number) for t, at, number in zip(tensors, landings, numbers)]
        for t, own, moves in zip(pushed, tensors, moving):
            if not moves and (copied := own.__dict__.get("_dsp_copy_of")) is not None:
                t._dsp_copy_of = copied  # type: ignore[attr-defined]
        return [t if moves or itself is None else itself for t, itself, moves in zip(pushed, returned, moving)]

    def landings(self, run: Run, stage: Stage, decision: StageDecision, tensors: list[Tensor]) -> list[At]:
        """The layouts of the results of a stage."""
        shapes = tuple(map(shape_of, tensors))
        if (found := decision.landings.get(shapes)) is None:
            made = repeat(None) if decision.step is None else decision.step.made
            results = zip(tensors, stage.outputs(tensors), made)
            found = decision.landings[shapes] = [self.landing(run, stage, decision, *result) for result in results]
        return found

    def of_part(
        self, decision: StageDecision, given: list[Given], tensors: list[Tensor], landings: list[At]
    ) -> list[Tensor]:
        """The results of this rank's shard: partial sums are reduced over ranks, results of a dummy row dropped."""
        own = decision.place.own
        if decision.option.onto is not None:
            sums = [t if own else torch.where(t.new_zeros((), dtype=torch.bool), t, 0) for t in tensors]
            return [torch.ops.dsp.reduce_scatter(t, at.cut.dim, self.axis.group) for t, at in zip(sums, landings)]
        return tensors if own else [nothing(t, at.cut.dim, given) for t, at in zip(tensors, landings)]

    def mark_copies(self, run: Run, inside: InStage, tensors: list[Tensor]) -> None:
        """Mark the stage's results that view a copy."""
        shells = [x.shell for x in inside.given if x.shell is not None]
        if not inside.decision.still or run.writes.has_copies or any("_dsp_copy_of" in s.__dict__ for s in shells):
            run.writes.mark_copies(tensors, [(x.tensor, x.shell, x.part) for x in inside.given])

    def landing(
        self, run: Run, stage: Stage, decision: StageDecision, t: Tensor, pattern: TensorPattern,
        made: dict[str, int] | None,
    ) -> At:  # fmt: skip
        """The layout of a stage's result. Its size along the sharded dim is checked.

        made: the plan's sizes of dims that no input has; without a plan they follow from the local result.
        """
        name, size = decision.option.name, decision.option.size
        assert name is not None
        if decision.option.onto is not None:  # a partial sum of full shape, before the reduce-scatter
            return self.axis.at(t.shape, Cut(pattern.axis_of(decision.option.onto)))
        own = decision.place.own if stage.around is not None else max(decision.place.own, 1)
        axis = pattern.axis_of(name)
        names = pattern.axes[axis]
        at = names.index(name)
        sizes = decision.sizes if made is None else {**decision.sizes, **made}
        if any(other not in sizes for other in names):
            sizes = stage.result_sizes(t, pattern, {**sizes, name: own}, run.root_sizes)
        outer, inner = (math.prod(sizes[other] for other in others) for others in (names[:at], names[at + 1 :]))
        if t.shape[axis] != outer * own * inner:
            raise NotationError(
                f"{stage.where} got {own} of {size} along {name!r} and returned the shape {tuple(t.shape)}, where by "
                f"'{pattern}' axis {axis} has {outer * own * inner}: the stage is not independent along {name!r}. "
                f"Put {name!r} in brackets in its pattern, or make stages of its submodules"
            )
        shape = [*t.shape]
        shape[axis] = outer * size * inner
        return self.axis.at(shape, Cut(axis, outer))


def refuse_sharded(stage: Stage, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError if a stage got a sharded tensor outside a forward of its model."""
    if any(isinstance(t, (DTensor, Sharded)) for t in tensors_in((args, kwargs))):
        raise RuntimeError(
            f"{stage.where} got a sharded tensor outside its model's forward, or in another thread. If this is "
            "activation checkpointing, use use_reentrant=False; the reentrant kind cannot be followed"
        )


def argument(t: Tensor, at: At, given: Sequence[Given]) -> Sharded | None:
    """The sharded tensor that the stage was given, if the stage returned that argument unchanged."""
    for x in given:
        if x.local is t and x.shell is not None and x.shell.at is at:
            return x.shell
    return None


def with_dummy(local: Tensor, cut: Cut | None) -> Tensor:
    """An empty shard with a dummy row added; a replicated tensor as it is."""
    return local if cut is None else torch.cat([local, dummy(local, cut)], cut.dim)


def dummy(local: Tensor, cut: Cut) -> Tensor:
    """A dummy row for an empty rank, so that every rank runs every stage, its hooks, collectives and gradients."""
    shape = [*local.shape]
    shape[cut.dim] = cut.folds
    if local.dtype == torch.bool:
        return local.new_ones(shape)
    if not inexact(local):
        return local.new_zeros(shape)
    line = torch.linspace(0.5, 1.5, math.prod(shape), device=local.device, dtype=torch.float32)
    return line.to(local.dtype).view(shape)


def nothing(t: Tensor, dim: int, given: Sequence[Given]) -> Tensor:
    """An empty result for a dummy row's; if the result views the row, a view of the empty shard instead."""
    own = t.narrow(dim, 0, 0)
    of = next((x.part for x in given if x.local is not x.part and memory(x.local) == memory(t)), None)
    return own if of is None else of.view(own.shape)
