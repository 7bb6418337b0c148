"""parallelize: hooks on the stages, and a runtime in the place of the model's forward. Stages see local tensors."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dsp.calls import GlueError
from dsp.compiled.graphs import Graph
from dsp.compiled.reasons import Unfit
from dsp.core.skeleton import KEPT
from dsp.gradients import waited
from dsp.guard.agreement import DIFFER, Agreement, agree, number, same, same_weights
from dsp.guard.notes import COMPILE, add_note
from dsp.hardware import Hardware
from dsp.known import stages_of
from dsp.layout import Axis, Cut
from dsp.notation import NotationError, StagePattern
from dsp.observers import observing
from dsp.overlap.options import Overlap, kind_of, overlap_of, refuse_overlap
from dsp.pipelines import Method, SharedBatch, axes_of, parts_of
from dsp.plan.advice import remedy
from dsp.plan.events import Trace
from dsp.plan.make import make_plan
from dsp.plan.operations import Operations
from dsp.plan.recorder import Recorder
from dsp.plan.rehearsal import trace
from dsp.plan.solve import Goal
from dsp.private import (
    COMPILERS_OWN,
    AsyncCollectiveTensor,
    _DropoutNd,
    backward_hooks_of,
    compiled_call,
    compiler_loaded,
    forward_level,
    hooks_of,
    maybe_current_level,
    uncompiled,
)
from dsp.report.table import Plan
from dsp.routes import Route
from dsp.run.forward import Run
from dsp.run.glue import Glue
from dsp.run.graph import RunGraphs
from dsp.run.hooks import Compiled, keep_compiled, settle
from dsp.run.inputs import (
    describe,
    given_cuts,
    taken_apart,
    without_data,
)
from dsp.run.lookup import NUMBERS
from dsp.run.piecewise import PieceCalls, in_pieces
from dsp.run.runtime import CallEntry, Runtime, counting_writes
from dsp.run.traffic_check import PlannedCounts, TrafficCheck
from dsp.sharded import ACTIVE, Sharded
from dsp.signature import Signature
from dsp.stages import Stage
from dsp.tensors import map_tensors, tensors_in
from dsp.wire import SAME, Wire
from dsp.world import Path, reached, refuse_leaves, search, value_at

log = logging.getLogger("dsp")


UNPLANNED = (
    "{model} runs without a plan, because none could be made of its forward: {why}. Results are right, but "
    "each stage picks its own sharding, and operations on tensors that no stage has sharded run in full on every rank"
)


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    stages: Mapping[str, str] | None = None,
    gather_output: bool = True,
    compile: bool | str = False,
    wire: str | Mapping[str, str] = SAME,
    route: str | Route | Hardware | None = None,
    overlap: int | str | Hardware | None = None,
) -> nn.Module:
    """Run `model` on sequences N times longer over the N ranks of `mesh`; in place, and returned.

    model: a module, or a pipeline of diffusers. A pipeline's parts of known classes are parallelized: transformers,
    U-Nets and the methods of autoencoders. mesh: a 1-D DeviceMesh, such as ``mesh["sp"]`` of a larger one. A pipeline's
    mesh may have two axes: the first divides the batch of each call, such as guidance's two predictions. stages:
    submodule pattern to stage string, by default ``model.stages``, or the stages that `dsp.known` has for its class;
    the key ``""`` names the model's own inputs and outputs. The parallel model takes the inputs of the bare model:
    full tensors, the same on every rank, or DTensors sharded over `mesh`. It returns full tensors; with
    ``gather_output=False`` it returns DTensors, whose loss is taken with `dsp.mean`. Average parameter gradients over
    the ranks of `mesh` (DDP, `fully_shard`) to get the single-process gradient.

    compile: True, or the name of a backend of torch.compile, compiles the forward with its collectives as one graph,
    from the second call with inputs of one signature on (docs/compile.md). If one graph cannot replace a forward, it
    runs uncompiled, with a warning that says why.

    wire: the format in which a switch sends real numbers: ``"same"``, unchanged; or ``"bf16"``, ``"fp8"`` or
    ``"int8"``, in fewer bits, which is not exact (docs/wire.md). ``{"forward": ..., "backward": ...}`` sets the format
    of gradients apart. All other traffic is exact.

    route: how a switch goes over ranks of several nodes: ``"direct"``, the default, in one all-to-all;
    ``"hierarchical"``, within nodes first and then between them, in fewer and larger messages; ``"rounds"``, to one
    rank after the other; or ``"auto"``, the quickest of these for each switch's size, by links measured now, or
    those of a `dsp.Hardware`. A node has LOCAL_WORLD_SIZE ranks, unless a `dsp.Route` says otherwise. With a route,
    `mesh` may have two axes, nodes and ranks within a node; they are used as one axis, the mesh of DTensor outputs
    (``output.device_mesh``).

    overlap: the number of pieces, 2 to 4, in which to run a stage whose result is switched: each piece travels while
    the next one is computed, in backward as well (docs/overlap.md). "auto" measures the links and cuts where that saves
    time; a `dsp.Hardware` decides the same without measuring. Switched numbers are the same; gradients of weights are
    added up piece by piece, which rounds differently.

    At size 1 the model is returned untouched. Compile inner forwards and apply `fully_shard` after this. Call it on
    every rank of `mesh`: the ranks compare models, stages and versions, and raise RuntimeError if these differ.
    """
    refuse_overlap(overlap)
    if compile and overlap is not None:
        raise ValueError(
            f"overlap={overlap!r} with compile={compile!r}: in one graph the compiler decides when something is "
            "sent. Give one of the two; or compile the forwards of stages, block.forward = "
            "torch.compile(block.forward), which overlap= can cut into pieces"
        )
    batches, mesh = axes_of(model, mesh)
    mesh, route = Route.along(mesh, route)
    axis = Axis.of(mesh, Wire.of(wire), route)
    if (parts := parts_of(model, stages, axis.rank)) is not None:
        for part in parts:
            if axis.size > 1:
                parallelize(part.module, mesh, part.stages, gather_output, compile, wire, route, overlap)
                part.place()
            if batches is not None and batches.size() > 1 and not isinstance(part.module, Method):
                SharedBatch(part.module, part.stages, Axis.of(batches)).attach()
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module or a pipeline of diffusers, not {type(model).__name__}")
    if axis.size > 1:
        stated = stages if stages is not None else getattr(model, "stages", None)
        options = {"gather_output": gather_output, "compile": compile, "overlap": repr(overlap)}
        agree(axis, model, {"stages": stated, "wire": axis.wire, "route": axis.ways, **options})
    found, root = stages_of(model, stages)
    if root is not None:
        Signature(model, root, "the model")
    if axis.size > 1:
        cut = overlap_of(overlap, mesh=mesh, dtype=kind_of(model))
        FullRuntime(model, axis, found, root, gather_output, compile, cut).install()
    return model


def lying(path: Path, *roots: Any) -> Any:
    """The layout of the tensor at the end of a path; None if there is no tensor, or it is not sharded."""
    it = value_at(path, *roots)
    if isinstance(it, DTensor):
        return it.shape, it.placements, it.requires_grad
    return (it.at.shape, it.at.cut, it.requires_grad) if isinstance(it, Sharded) else None


@dataclass(eq=False, kw_only=True)
class FullEntry(CallEntry):
    """The state shared by calls with one signature of inputs; `number`: a hash of the signature.

    told, whole: the messages logged about traffic that differs from the plan, and about a forward without a plan.
    graphs: the graphs of ``compile``. astray: the key of a plan that a run left, until the next call makes a new plan;
    anew: such a new plan has been made.
    """

    number: int
    told: str = ""
    whole: str = ""
    astray: str = ""
    anew: bool = False
    graphs: list[Graph] | None = field(default_factory=list)  # None: none can be made


class FullRuntime(Runtime):
    """The runtime that `dsp.parallelize` adds to a model.

    It runs operations between stages on shards, if they have a rule; checks that ranks agree; compares traffic with the
    plan; records forwards that read their data; and runs forwards as one graph, if asked to.
    """

    OWN = f"{Runtime.OWN} between followed_in backward agreement graphs modules dropouts"

    def __init__(
        self, model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather_output: bool,
        compile: bool | str = False, overlap: Overlap = None,
    ) -> None:  # fmt: skip
        super().__init__(model, axis, stages, root, gather_output)
        self.overlap = overlap
        self.graphs = RunGraphs(model, axis, compile) if compile else None
        self.kept: list[Path] = []  # paths to sharded tensors that earlier calls left and later forwards read
        self.advice = ""  # the message logged about operations that run replicated
        self.agreement = Agreement(axis, list(inspect.signature(model.forward).parameters), model)
        self.stage_calls = PieceCalls(axis, self.agreement)
        self.counts = not any(stage.around for stage in stages)  # whether the plan covers all traffic of a run
        self.idle = threading.Lock()  # held while a forward runs

    def __deepcopy__(self, memo: dict[int, Any]) -> FullRuntime:
        new = super().__deepcopy__(memo)
        assert isinstance(new, FullRuntime)
        new.kept, new.idle = [], threading.Lock()
        return new

    def install(self) -> None:
        super().install()
        inside = {id(m) for stage in self.stages for m in stage.module.modules()}
        between = [m for m in self.model.modules() if m is not self.model and id(m) not in inside]
        self.between = [hooks for m in between for hooks in hooks_of(m)]
        self.followed_in = [*(stage.module for stage in self.stages), *between]
        self.backward = [hooks for m in (self.model, *self.followed_in) for hooks in backward_hooks_of(m)]
        self.modules = [*self.model.modules()]
        self.dropouts = [m for m in self.modules if isinstance(m, _DropoutNd)]

    def modes(self) -> Any:
        """The modules in training, and what dropouts drop: by these a plan knows what draws random numbers."""
        return bytes(map(attrgetter("training"), self.modules)), *map(attrgetter("p"), self.dropouts)

    def between_stages(self, run: Run) -> Glue:
        cut = in_pieces(self.stages, run.script) if run.script is not None and run.script.in_pieces else ()
        return Glue(run, cut)

    # --- the model ---

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            refuse_compiling()
        if ACTIVE.get() is not None:
            return self.forward(*args, **kwargs)
        forward_mode = forward_level(torch.autograd.forward_ad) >= 0
        if maybe_current_level() is not None or forward_mode or torch.jit.is_tracing() or is_exporting():
            raise RuntimeError(
                f"a parallelized {type(self.model).__name__} cannot run under torch.vmap, torch.func, forward-mode AD, "
                "torch.jit.trace or torch.export: the collectives of its ranks would be missing. Call it as it is; for "
                "gradients use backward or torch.autograd.grad"
            )
        if not self.idle.acquire(blocking=False):
            raise RuntimeError(
                f"two threads call one parallelized {type(self.model).__name__} at the same time, as nn.DataParallel "
                "would: its ranks could not tell whose data they exchange. Call it from one thread, or build a model "
                "for each, on a mesh of its own"
            )
        try:
            if torch.is_inference_mode_enabled():
                with counting_writes():
                    return self.once(args, kwargs)
            return self.once(args, kwargs)
        finally:
            self.idle.release()

    def once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        settle(self.hooks, self.between, self.backward)
        if compiler_loaded():
            self.look_for_compiled()
        leaves, spec = taken_apart(args, kwargs)
        if AsyncCollectiveTensor in map(type, leaves):
            args, kwargs = map_tensors((args, kwargs), [*map(waited, tensors_in((args, kwargs)))])
            leaves, spec = taken_apart(args, kwargs)
        if not isinstance(spec, tuple):  # a pytree's spec: objects may be among the inputs
            refuse_leaves(leaves)
        key = (describe(leaves, spec), self.modes(), torch.is_grad_enabled())
        if self.kept:
            key = (*key, *(lying(path, self.model, args, kwargs) for path in self.kept))
        entry: FullEntry | None = self.entries.get(key)
        fresh = entry is None or bool(entry.astray)
        if entry is None:
            entry = self.new_entry(key, leaves, args, kwargs)
        else:
            self.entries.move_to_end(key)
            if entry.astray:
                self.plan_again(entry, args, kwargs)
        graph = None if self.graphs is None or fresh else self.graphs.graph_for(entry, leaves)
        plan = entry.plan
        way = entry.number + (plan is None) + (0 if graph is None else 2 + graph)  # compared between ranks, too
        self.agreement.start(leaves, spec, way, wait=fresh or plan is None)
        if fresh:
            self.agree_on(plan)
        self.first += NUMBERS
        run = Run(self.axis, plan.script if plan else None, entry.sizes, self.recipes, self.first)
        run.graph, run.watches = graph, self.agreement.due
        if plan is not None and self.counts and graph is None:
            check = run.traffic_check = self.traffic_check(plan, entry, run)
            run.witness = check.witness if check.planned.returns else None
        with observing(run.traffic_check.forward if run.traffic_check is not None else None):
            return self.followed(run, entry, args, kwargs)

    def agree_on(self, plan: Plan | None) -> None:
        """Raise RuntimeError on every rank if weights or plans differ between ranks."""
        same_weights(self.axis, self.model)
        if not same(self.axis, plan.script.key() if plan is not None else ""):
            raise RuntimeError(DIFFER)

    def look_for_compiled(self) -> None:
        for m in self.followed_in:
            if compiled_call(m) is not None and type(compiled_call(m)) is not Compiled:
                self.compiled(m)

    def compiled(self, m: nn.Module) -> None:
        """Keep a stage that its own compile() compiled. Raise RuntimeError if such a module is between stages."""
        if any(m is stage.module for stage in self.stages):
            keep_compiled(self.hooks)
            return
        path = next(name for name, other in self.model.named_modules() if other is m)
        inside = [stage.name for stage in self.stages if any(stage.module is own for own in m.modules())]
        way = f"compile its stages instead ({', '.join(inside[:3])}{' and more' * (len(inside) > 3)})"
        if not inside:
            way = f"name it in stages, if it is independent along some dim ({path!r})"
        raise RuntimeError(
            f"{path!r} was compiled by its compile(). It runs operations between stages, which dsp has to see one by "
            f"one: {way}, or give dsp.parallelize compile=True, for the whole forward as one graph"
        )

    def followed(self, run: Run, entry: FullEntry, args: Any, kwargs: Any) -> Any:
        """The output of a forward that follows its plan, or without a plan chooses greedily and is recorded."""
        args, kwargs = self.taken(run, entry, args, kwargs)
        if run.script is None:
            run.recorder = Recorder(self.axis.size, run.root_sizes)
            if self.signature is not None:
                bound = self.signature.bind(args, kwargs)[1]
                run.observe("root_inputs", bound)
        if run.graph is not None and self.graphs is not None:
            self.agreement.before_switching()
            try:
                return self.graphs.run(self, entry, run.graph, args, kwargs)
            except Unfit as reason:
                self.graphs.give_up(entry, str(reason))
        try:
            return self.driven(run, entry, args, kwargs)
        except Exception as error:
            self.explain(run, error)
            raise

    def finished(self, run: Run, entry: FullEntry, output: Any, given: Any) -> Any:
        if without_data(output) and not without_data(given):
            raise GlueError(f"{type(self.model).__name__} {KEPT}")
        if run.coming:
            run.arrive()
        run.observe("root_outputs", output)
        plan, check = entry.plan, run.traffic_check
        if plan is None and run.within is None:  # a checkpoint will call the model again: same choices, so no new plan
            args, kwargs = given
            run.observe("keep", partial(reached, self.model, given))
            entry.plan, entry.places = self.recorded(run, given_cuts(self.signature, args, kwargs)), None
            if entry.plan is None and not entry.whole:
                entry.whole = UNPLANNED.format(model=type(self.model).__name__, why=run.why or DIFFER)
                (log.warning if self.axis.rank == 0 else log.info)(entry.whole)
        output = super().finished(run, entry, output, given)
        if check is not None:
            check.end()
        if plan is not None and run.unknown and not plan.script.recorded and run.within is None:
            # a filled cache, another branch: the next call makes a new plan; if that fails again, it is recorded
            if entry.anew:
                entry.plan = None
            else:
                entry.astray = plan.script.key()
        return output

    def explain(self, run: Run, error: Exception) -> None:
        """Raise an error that names the cause in the user's terms, if it is known; otherwise add a note to `error`."""
        with suppress(Exception):  # nobody will read it, but what nobody waited for is kept for good
            run.arrive()
        if run.misread is not None and run.misread[0] is error:
            raise NotationError(run.misread[1]) from error
        if type(error).__module__ == COMPILERS_OWN:
            raise RuntimeError(f"{COMPILE}. torch.compile says: {error}") from error
        if run.failed != id(error):
            add_note(self.model, error)

    def recorded(self, run: Run, given: Mapping[str, Cut]) -> Plan | None:
        """The plan of a recorded run, for later calls; None if it cannot be made or differs between ranks."""
        plan = None
        found: Trace | None = None
        if run.recorder is not None:
            run.recorder.record.random = True
            with run.unplanned():
                found = Operations.of(run.recorder.record, given, self.gather_output).trace()
        if found is not None:
            plan = self.solve(found)
            plan.script.recorded = True
            if plan.advice and self.axis.rank == 0 and len(self.entries) == 1:
                log.warning(plan.advice)
        return plan if same(self.axis, plan.script.key() if plan is not None else "") else None

    def traffic_check(self, plan: Plan, entry: FullEntry, run: Run) -> TrafficCheck:
        """The traffic check of a run; it logs once per entry if the traffic differs from the plan."""
        if plan.script.planned_counts is None:
            plan.script.planned_counts = PlannedCounts(plan, self.axis.rank)

        def say(text: str) -> None:
            if not entry.told:
                entry.told = text
                (log.warning if self.axis.rank == 0 else log.info)(text)

        return TrafficCheck(plan.script.planned_counts, run, say)

    def plan_again(self, entry: FullEntry, args: Any, kwargs: Any) -> None:
        """Make a new plan for calls whose forwards left theirs; keep none if the new plan is the same."""
        plan, left = self.make_plan(args, kwargs), entry.astray
        entry.plan, entry.astray, entry.anew, entry.graphs = None, "", True, []
        if plan is not None and plan.script.key() != left:
            entry.plan, entry.places = plan, None

    def entry(
        self, key: Any, plan: Any, sizes: dict[str, int], asks: bool, args: Any, kwargs: Any
    ) -> tuple[Any, FullEntry]:
        key = (*key, *(lying(path, self.model, args, kwargs) for path in self.kept[len(key) - 3 :]))
        return key, FullEntry(number=number(key), plan=plan, sizes=sizes, asks=asks)

    def traced(self, root: StagePattern | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        given = given_cuts(self.signature, args, kwargs)
        return trace(
            self.model, self.stages, root, args, kwargs, self.axis.size, gather_output=self.gather_output, given=given
        )

    def make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        try:
            t = self.traced(self.root, args, kwargs)
        except (NotationError, GlueError):
            raise
        except Exception as error:
            # the forward branches on real data: this call chooses greedily, later calls follow a plan of its record
            log.info("no plan ahead of the run, stages choose greedily: %s: %s", type(error).__name__, error)
            return None
        left = {id(x) for x in t.left}
        more = [path for path, _ in search(lambda it: id(it) in left, self.model, args, kwargs)] if left else []
        self.kept += [path for path in more if path not in self.kept]
        plan = self.solve(t)
        if (idle := plan.idle(1 / 3)) and self.axis.rank == 0 and not self.entries:
            log.warning(". ".join(idle))
        if plan.advice and self.axis.rank == 0 and not self.entries:
            better = remedy(self.root, t, plan, lambda named: self.solve(self.traced(named, args, kwargs)))
            self.advice = replace(plan, remedy=better).advice
            log.warning(self.advice)
        return plan

    def solve(self, t: Trace) -> Plan:
        return make_plan(
            t,
            {s.name: s for s in self.stages},
            Goal(self.axis.size, permits=(self.axis.wire,), ways=self.axis.ways, overlap=self.overlap),
        )


@uncompiled
def refuse_compiling() -> None:
    raise RuntimeError(COMPILE)
