"""A forward without data: which stages run, what glue joins them, what they cost; the problem the planner solves.

The model's forward runs once on fake tensors at full size. Every tensor that may be sharded is tracked as a value of
the planner, with every cut it could have; the rules that will run on shards (`dsp.rules`) tell how each cut passes
through glue. What comes out is a `Trace`: the planner's problem, and where each of its decisions applies in a run.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsp.compile_off import CompileOff
from dsp.layout import Cut
from dsp.notation import StagePattern
from dsp.plan.choices import refuse, trace_of
from dsp.plan.events import Trace
from dsp.plan.precision import Casts, Precision
from dsp.plan.skeleton import Skeleton
from dsp.plan.stage_cache import alike, fingerprint, once
from dsp.plan.tracer import Tracer
from dsp.private import COMPILERS_OWN, FakeTensorMode, any_device, compiler_loaded, fake_tensor, schema_of, storage_id
from dsp.rules import GlueError
from dsp.sharded import Sharded
from dsp.signature import Bound, Signature, sizes_of_root
from dsp.stages import Stage, clean
from dsp.tensors import remade, tensors_in
from dsp.world import World

KEPT = (
    "met a tensor without data. The forward was planned on fake tensors, and one of them was kept where dsp cannot "
    "restore it: no attribute, closure, global name or functools cache of the model's own code leads there. Call the "
    "bare model once before dsp plans it, so that it keeps real ones"
)


class Fakes(FakeTensorMode):
    """The tensors without data of one forward; when that is over, no operation takes them any more."""

    over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.over:
            raise GlueError(f"{schema_of(func).name.partition('::')[2].strip('_')}() {KEPT}")
        return super().__torch_dispatch__(func, types, args, kwargs or {})


@dataclass(frozen=True)
class How:
    """How a forward is traced.

    gather_output: whether its outputs are gathered; dtype: the floating-point type to trace with, by default that of
    the model; given: parameters that arrive already sharded, and their cut; recompute: every stage counts as one that
    keeps only its inputs for backward; twins: stages that are alike run once (`dsp.plan.stage_cache`); real: on copies
    that have their data; mixed: in the types of `fully_shard`'s mixed precision.
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
    """Run `model` on fake copies of the inputs, shapes and dtypes only, and return what the planner has to decide.

    how: see `How`.
    """
    found, real = None, how.get("real", False)
    own = [*model.parameters(), *model.buffers(), *tensors_in((args, kwargs))]
    for again in (True, False):
        loaded = compiler_loaded()
        try:
            # what an activation checkpoint around the model keeps is of the run alone
            with World(model, args, kwargs, data=real, own=own), saved_tensors_hooks(lambda t: t, lambda t: t):
                with Rehearsal(model, stages, How(**how)) as rehearsal:
                    found = rehearsal.run(root, args, kwargs, n)
            break
        except Casts:
            return trace(model, stages, root, args, kwargs, n, **{**how, "mixed": False})
        except Exception as error:
            if loaded or type(error).__module__ != COMPILERS_OWN or not again:
                raise
            # the forward itself loaded the compiler, which is put aside from now on
    if found is None:  # a stage that writes to itself: what it does may depend on how often it ran
        return trace(model, stages, root, args, kwargs, n, **{**how, "twins": False})
    return found


class Rehearsal:
    """A copy of a model on fake parameters, for one forward that a `Tracer` is told of."""

    def __init__(self, model: nn.Module, stages: list[Stage], how: How) -> None:
        self.model, self.stages, self.how = model, stages, how
        self.mode: Any = nullcontext() if how.real else Fakes(allow_non_fake_inputs=True)
        self.fakes: dict[int, Tensor] = {}
        # autocast keeps the weights it has cast, so that a call does less than one before it
        twins = how.twins and not how.real and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        self.groups = alike([stage.module for stage in stages]) if twins else []
        first = {id(other): group[0] for group in self.groups for other in group[1:]}
        self.staged = {id(m) for stage in stages for m in stage.module.modules()}
        self.precision = Precision(model if how.mixed and how.dtype is None else nn.Module(), self.staged)
        skeleton = Skeleton(lambda t: self.fakes.setdefault(id(t), self.fake(t)), first, self.staged)
        self.clone, self.memo = skeleton.of(model), skeleton.memo

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.mode, Fakes):
            self.mode.over = True

    def kind(self, t: Tensor) -> torch.dtype:
        return self.precision.parameters.get(id(t)) or self.how.kind(t)

    def fake(self, t: Tensor) -> Tensor:
        kind = self.kind(t)
        if not self.how.real:
            return fake_tensor(self.mode, t, kind)
        new = t.detach().to(kind, copy=not isinstance(t, nn.Parameter))
        if isinstance(t, nn.Parameter):
            return nn.Parameter(new, requires_grad=t.requires_grad)
        return new.requires_grad_() if t.requires_grad else new

    def resident(self) -> int:
        """Bytes of parameters and buffers."""
        held = {id(t): t for t in itertools.chain(self.model.parameters(), self.model.buffers())}
        return sum(t.numel() * self.kind(t).itemsize for t in held.values())

    def hooks(self, tracer: Tracer) -> list[Any]:
        """Install the hooks that tell the tracer of stages, of what communicates inside, and of modules between."""
        handles: list[Any] = []

        def watch(module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any], Any]) -> None:
            handles.append(module.register_forward_pre_hook(lambda m, a, k: before(a, k), with_kwargs=True))
            handles.append(module.register_forward_hook(lambda m, a, out: after(out)))

        for stage in self.stages:
            module = tracer.clones[stage.name] = self.memo.get(id(stage.module), stage.module)
            watch(module, partial(tracer.before_stage, stage), tracer.after_stage)
            for inside in stage.inside:
                own = self.memo.get(id(inside.module))
                if own is not None:  # else its stage is the twin of another
                    watch(own, partial(tracer.enter_inside, inside), lambda out: tracer.leave_inside())
        copies = {id(self.memo[id(m)]): path for path, m in self.model.named_modules() if id(m) in self.memo}
        staged = {id(self.memo[k]) for k in self.staged if k in self.memo}
        for module in self.clone.modules():
            if id(module) not in staged and (path := copies.get(id(module))):
                watch(module, partial(tracer.enter_module, clean(path)), lambda out: tracer.leave_module())
        return handles + self.precision.hooks(self.memo)

    def marks(self) -> list[Any]:
        """The state that shows whether stages wrote to themselves."""
        return [fingerprint(self.memo[id(group[0])]) for group in self.groups]

    @contextmanager
    def followed(self, tracer: Tracer) -> Iterator[None]:
        """Around the forward: the tracer sees its operations, and nobody its warnings or random numbers."""
        cuda = {t.device.index for t in self.fakes.values() if t.is_cuda} if self.how.real else ()
        drawn = torch.random.fork_rng(devices=cuda) if self.how.real else nullcontext()
        with drawn, tracer.line, CompileOff(), any_device(), self.mode, tracer.watch, tracer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the model has to say it says when it runs
            yield

    def run(self, root: StagePattern | None, args: Any, kwargs: Any, n: int) -> Trace | None:
        """The record of a call with such inputs; None if stages that count as alike turned out not to be."""
        how = self.how
        # what an earlier call left in a cache lies as it left it: the tracer has a stand-in for it
        args, kwargs = remade((args, dict(kwargs)), lambda t: t if isinstance(t, Sharded) else self.fake(t))
        tracer = Tracer(n, sizes_of_root(self.model, root, args, kwargs), how.recompute, how.real)
        bound = Signature(self.model, root, "the model").bind(args, kwargs)[1] if root is not None else []
        tracer.twins = bool(self.groups)
        tracer.recorder.root_inputs(bound)
        tracer.resident = {storage_id(t.untyped_storage()) for t in self.fakes.values()}
        handles, before = self.hooks(tracer), self.marks()
        once([[self.memo[id(m)] for m in group] for group in self.groups], tracer.first, tracer.again)
        try:
            with self.followed(tracer):
                output = self.clone(*args, **kwargs)
            tracer.recorder.root_outputs(output)
        except Exception:
            refuse(tracer.record, how.given)  # what stumbled may have come of what is refused
            raise
        finally:
            tracer.abandon()
            for handle in handles:
                handle.remove()
        if before != self.marks():
            return None
        found = trace_of(tracer.record, how.given, how.gather_output, self.resident())
        self.complete(found, tracer, bound, tensors_in((args, kwargs)))
        return found

    def complete(self, found: Trace, tracer: Tracer, bound: list[Bound], given: list[Tensor]) -> None:
        """Add to a trace what its record does not say: the inputs, and what earlier calls left."""
        recorder, declared = tracer.recorder, {id(b.tensor) for b in bound if b.pattern is not None}
        found.recompute = self.how.recompute
        found.whole_grads = [t.nbytes for t in given if id(t) not in declared and recorder.asks(t)]
        found.unnamed = {b.param: b.tensor for b in bound if b.pattern is None}
        found.left = [t for t, _ in tracer.left.values()]
