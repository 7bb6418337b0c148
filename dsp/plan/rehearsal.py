"""A forward without data, measured: the stages that run, the glue between them, and their cost.

The model's forward runs once on fake tensors at full size. Every tensor that may be sharded is tracked as a value of
the planner, with all its possible cuts. The rules that run on shards (`dsp.rules`) derive how each cut passes through
glue.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsp.core.equal_modules import alike, fingerprint, once
from dsp.core.precision import Casts, Precision
from dsp.layout import Cut
from dsp.notation import StagePattern
from dsp.plan.events import Trace
from dsp.plan.measuring import MeasuringTracer
from dsp.plan.operations import Operations
from dsp.plan.tracing import Rehearsal, Tracer, watch
from dsp.private import COMPILERS_OWN, compiler_loaded, storage_id, wraps_compiled
from dsp.signature import Bound
from dsp.stages import Stage, clean
from dsp.tensors import tensors_in
from dsp.world import World, reached


@dataclass(frozen=True)
class FullHow:
    """Options of a trace.

    gather_output: whether the outputs are gathered; dtype: the floating-point type to trace with, by default that of
    the model; given: parameters that arrive already sharded, and their cut; recompute: every stage counts as one that
    keeps only its inputs for backward; twins: equal stages run once (`dsp.core.equal_modules`); real: on copies with
    data; mixed: in the dtypes of `fully_shard`'s mixed precision.
    """

    gather_output: bool
    dtype: torch.dtype | None = None
    given: Mapping[str, Cut] = field(default_factory=dict)
    recompute: bool = False
    twins: bool = True
    real: bool = False
    mixed: bool = True

    def kind(self, t: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and t.is_floating_point() else t.dtype


def trace(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n: int,
    **how: Any,
) -> Trace:
    """Run `model` on fake copies of the inputs, which have shapes and dtypes only, and return the planner's problem.

    how: see `FullHow`.
    """
    found, real = None, how.get("real", False)
    own = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    for again in (True, False):
        loaded = compiler_loaded()
        try:
            with World(model, args, kwargs, data=real, own=own):
                with FullRehearsal(model, stages, FullHow(**how)) as rehearsal:
                    found = rehearsal.run(root, args, kwargs, n)
            break
        except Casts:
            return trace(model, stages, root, args, kwargs, n, **{**how, "mixed": False})
        except Exception as error:
            if loaded or type(error).__module__ != COMPILERS_OWN or not again:
                raise
            # the forward itself loaded the compiler, which is set aside from now on
    if found is None:  # a stage writes to itself: its result may depend on the number of calls
        return trace(model, stages, root, args, kwargs, n, **{**how, "twins": False})
    return found


class FullRehearsal(Rehearsal):
    """A copy of a model on fake or real parameters, for one forward that a `MeasuringTracer` follows."""

    choices = Operations
    how: FullHow

    def __init__(self, model: nn.Module, stages: list[Stage], how: FullHow) -> None:
        staged = {id(m) for stage in stages for m in stage.module.modules()}
        self.precision = Precision(model if how.mixed and how.dtype is None else nn.Module(), staged)
        # autocast caches the weights it has cast, so that a later call does less than an earlier one
        twins = how.twins and not how.real and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self.groups = alike([stage.module for stage in stages]) if twins else []
        super().__init__(model, stages, how, {id(other): group[0] for group in self.groups for other in group[1:]})
        if how.real:
            self.mode = nullcontext()

    def kind(self, t: Tensor) -> torch.dtype:
        return self.precision.parameters.get(id(t)) or self.how.kind(t)

    def fake(self, t: Tensor) -> Tensor:
        if not self.how.real:
            return super().fake(t)
        kind = self.kind(t)
        new = t.detach().to(kind, copy=not isinstance(t, nn.Parameter))
        if isinstance(t, nn.Parameter):
            return nn.Parameter(new, requires_grad=t.requires_grad)
        return new.requires_grad_() if t.requires_grad else new

    def resident(self) -> int:
        """Bytes of parameters and buffers."""
        held = {id(t): t for t in itertools.chain(self.model.parameters(), self.model.buffers())}
        return sum(t.numel() * self.kind(t).itemsize for t in held.values())

    def tracer(self, n: int, root_sizes: Mapping[str, int]) -> MeasuringTracer:
        tracer = MeasuringTracer(n, root_sizes, self.how.recompute, self.how.real)
        tracer.twins = bool(self.groups)
        return tracer

    def hooks(self, tracer: MeasuringTracer) -> list[Any]:
        """Install the hooks of stages, of modules that communicate inside of them, and of modules between."""
        tracer.resident = {storage_id(t.untyped_storage()) for t in self.fakes.values()}
        handles = super().hooks(tracer)
        for stage in self.stages:
            tracer.clones[stage.name] = self.memo.get(id(stage.module), stage.module)
            for inside in stage.inside:
                own = self.memo.get(id(inside.module))
                if own is not None:  # else its stage is another's twin
                    handles += watch(own, partial(tracer.enter_inside, inside), lambda out: tracer.leave_inside())
        copies = {id(self.memo[id(m)]): path for path, m in self.model.named_modules() if id(m) in self.memo}
        staged = {id(self.memo[k]) for k in self.staged if k in self.memo}
        for module in self.clone.modules():
            if id(module) not in staged and (path := copies.get(id(module))):
                handles += watch(module, partial(tracer.enter_module, clean(path)), lambda out: tracer.leave_module())
        handles += self.precision.hooks(self.memo)
        self.before = self.marks()
        once([[self.memo[id(m)] for m in group] for group in self.groups], tracer.first, tracer.again)
        return handles

    def marks(self) -> list[Any]:
        """A state that shows, by comparison, whether stages wrote to themselves."""
        return [fingerprint(self.memo[id(group[0])]) for group in self.groups]

    @contextmanager
    def followed(self, tracer: Tracer) -> Iterator[None]:
        """The same context, which also shows progress, and restores random states after a run on real tensors."""
        assert isinstance(tracer, MeasuringTracer)
        cuda = {t.device.index for t in self.fakes.values() if t.is_cuda} if self.how.real else ()
        drawn = torch.random.fork_rng(devices=cuda) if self.how.real else nullcontext()
        with drawn, tracer.line, super().followed(tracer):
            yield

    def problem(self, tracer: Tracer, bound: list[Bound], given: list[Tensor]) -> Trace | None:
        """The same; None if stages that counted as equal turned out to differ."""
        assert isinstance(tracer, MeasuringTracer)
        tracer.recorder.keep(partial(reached, self.clone, given))
        found = None if self.before != self.marks() else super().problem(tracer, bound, given)
        if found is not None:
            recorder, declared = tracer.recorder, {id(b.tensor) for b in bound if b.pattern is not None}
            found.recompute = self.how.recompute
            found.whole_grads = [t.nbytes for t in given if id(t) not in declared and recorder.asks(t)]
            found.unnamed = {b.param: b.tensor for b in bound if b.pattern is None}
            found.left = [t for t, _ in tracer.left.values()]
            between = [(path, m) for path, m in self.model.named_modules() if path and id(m) not in self.staged]
            found.compiled += [clean(path) for path, m in between if wraps_compiled(m)]
        return found
