"""The runtime of a parallel model: hooks on its stages, a plan for each signature of inputs, a forward by the plan."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.layout import Axis
from dsp.notation import StagePattern
from dsp.plan.events import Trace
from dsp.plan.program import Program
from dsp.plan.script import Script
from dsp.plan.solve import Goal, solved
from dsp.plan.tracing import How, trace
from dsp.run.forward import Run
from dsp.run.inputs import DeclaredInput, describe, given_cuts, places, split, taken_apart, with_true_gradients
from dsp.run.lookup import NUMBERS
from dsp.run.outputs import bring_out, hand_out
from dsp.run.stage_calls import StageCalls
from dsp.run.whole import GlueOnWholes, active
from dsp.sharded import ACTIVE
from dsp.signature import Signature, sizes_of_root
from dsp.stages import Stage, declared
from dsp.world import unpicklable

PLANS = 64  # input signatures whose plan is kept


@contextmanager
def counting_writes() -> Iterator[None]:
    """A context for a call under inference_mode: that of no_grad, in which torch counts writes in place."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    except RuntimeError as error:
        if "inference tensor" in str(error):
            error.add_note("dsp: a forward runs under no_grad, never inference_mode: write to clones of such tensors")
        raise


class Decided(NamedTuple):
    """A plan with no more than a run needs; `dsp.report.table.Plan` adds the figures and the table."""

    script: Script


@dataclass(eq=False, kw_only=True)
class CallEntry:
    """The state shared by calls with one signature of inputs.

    sizes: the sizes of the root pattern's dims; asks: an input requires a gradient; places: the inputs that the plan
    splits; given: some inputs are passed sharded.
    """

    plan: Any  # has a script, as `Decided`; None: stages choose greedily as they are called
    sizes: dict[str, int]
    asks: bool
    places: list[DeclaredInput] | None = None
    given: bool = False

    @property
    def script(self) -> Script | None:
        return None if self.plan is None else self.plan.script


class Runtime:
    """The runtime whose `call` replaces the model's forward; `dsp.parallelize` uses the subclass
    `dsp.run.parallel.FullRuntime`."""

    OWN: ClassVar[str] = "model forward stages signature hooks stage_calls"  # deep-copied with the model

    def __init__(
        self, model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather_output: bool
    ) -> None:
        self.model, self.axis, self.stages, self.root = model, axis, stages, root
        self.gather_output = gather_output
        self.entries: OrderedDict[Any, Any] = OrderedDict()  # call entries by the signature of inputs
        self.stage_calls = StageCalls(axis)
        self.signature = Signature(model, root, "the model") if root is not None else None
        self.recipes: dict[Any, Any] = {}  # recipes of runs without a plan
        self.first = 0  # see `Run.first`

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """The runtime of a copy of the model, on the same ranks and with its own plans."""
        new = memo[id(self)] = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.entries, new.recipes = OrderedDict(), {}
        for name in self.OWN.split():  # through memo, because the copied model is not complete yet
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new

    def __reduce__(self) -> Any:
        raise unpicklable()

    def install(self) -> None:
        if isinstance(getattr(self.model.__dict__.get("forward"), "__self__", None), Runtime):
            raise ValueError("this model is already parallelized; build it anew to parallelize it differently")
        self.forward = self.model.forward
        self.hooks = [self.stage_calls.install(stage) for stage in self.stages]
        self.model.forward = self.call

    def between_stages(self, run: Run) -> GlueOnWholes:
        """The mode that sees the operations between the stages of a run."""
        return GlueOnWholes(run)

    # --- a call ---

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if ACTIVE.get() is not None:  # inside another parallelized model: its plan governs
            return self.forward(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            with counting_writes():
                return self.once(args, kwargs)
        return self.once(args, kwargs)

    def once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = taken_apart(args, kwargs)
        key = (describe(leaves, spec), self.model.training, torch.is_grad_enabled())
        entry = self.entries.get(key)
        if entry is None:
            entry = self.new_entry(key, leaves, args, kwargs)
        else:
            self.entries.move_to_end(key)
        self.first += NUMBERS
        return self.followed(Run(self.axis, entry.script, entry.sizes, self.recipes, self.first), entry, args, kwargs)

    def new_entry(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        """The entry for inputs of a new signature."""
        plan = self.make_plan(args, kwargs)
        asks = torch.is_grad_enabled() and any(isinstance(v, Tensor) and v.requires_grad for v in leaves)
        sizes = sizes_of_root(self.model, self.root, args, kwargs)
        key, entry = self.entry(key, plan, sizes, asks, args, kwargs)
        self.entries[key] = entry
        if len(self.entries) > PLANS:
            self.entries.popitem(last=False)
        return entry

    def entry(
        self, key: Any, plan: Any, sizes: dict[str, int], asks: bool, args: Any, kwargs: Any
    ) -> tuple[Any, CallEntry]:
        """The entry for a new plan, and the entry's key."""
        return key, CallEntry(plan=plan, sizes=sizes, asks=asks)

    def followed(self, run: Run, entry: Any, args: Any, kwargs: Any) -> Any:
        """The output of a forward that follows its plan."""
        args, kwargs = self.taken(run, entry, args, kwargs)
        return self.driven(run, entry, args, kwargs)

    def driven(self, run: Run, entry: Any, args: Any, kwargs: Any) -> Any:
        """The output of a forward, for arguments that `taken` has prepared."""
        if run.script is None or run.script.random_glue:
            run.draw_alike()
        try:
            with active(self, run):
                output = self.forward(*args, **kwargs)
            return self.finished(run, entry, output, (args, kwargs))
        finally:
            if run.alike is not None:
                run.draw_as_before()

    def taken(self, run: Run, entry: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for the forward: declared inputs are split and have the plan's numbers."""
        script = run.script
        if self.signature is not None:
            if entry.places is None:
                inputs, numbers = (script.inputs, script.numbers) if script is not None else ({}, {})
                entry.places = places(self.axis, self.signature, inputs, numbers, args, kwargs)
                entry.given = bool(given_cuts(self.signature, args, kwargs))
            args, kwargs = split(entry.places, run.first, args, kwargs)
        if entry.asks:
            args, kwargs = with_true_gradients(self.axis, args, kwargs)
        if script is not None and self.signature is not None and entry.given:
            run.declare(self.signature.bind(args, kwargs)[1])
        return args, kwargs

    def finished(self, run: Run, entry: Any, output: Any, given: Any) -> Any:
        """The output as the caller gets it; `given`: the forward's arguments."""
        return hand_out(self.axis, output, bring_out(run, output, self.root, self.gather_output), run.witness)

    # --- plans ---

    def make_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.solve(self.traced(self.root, args, kwargs))

    def traced(self, root: StagePattern | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
        """The planner's problem for a call with these inputs."""
        how = How(self.gather_output, given_cuts(self.signature, args, kwargs))
        return trace(self.model, self.stages, root, args, kwargs, self.axis.size, how)

    def solve(self, t: Trace) -> Any:
        return Decided(Program(solved(t, {s.name: s for s in self.stages}, Goal(self.axis.size))).script())


def parallelize(model: nn.Module, mesh: DeviceMesh, stages: Mapping[str, str] | None = None) -> nn.Module:
    """`dsp.parallelize` reduced to what stages need: every operation between stages runs on full tensors."""
    found, root = declared(model, getattr(model, "stages", None) if stages is None else stages)
    Runtime(model, Axis.of(mesh), found, root, gather_output=True).install()
    return model
