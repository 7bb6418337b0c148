"""A forward without data, recorded: the model runs once on fake tensors, shapes and types only.

What comes out is a `Trace`: the planner's problem, and where each of its decisions applies in a run.
`dsp.plan.rehearsal` measures on the way what stages and operations cost, and leaves nothing of it behind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsp.between import Between, suspects, unrunnable
from dsp.calls import GlueError
from dsp.compile_off import CompileOff
from dsp.layout import Cut
from dsp.notation import StagePattern
from dsp.plan.choices import Choices
from dsp.plan.events import Trace
from dsp.plan.record import Cost
from dsp.plan.recorder import Recorder
from dsp.plan.skeleton import Skeleton
from dsp.private import FakeTensorMode, any_device, fake_tensor, schema_of
from dsp.sharded import Sharded, laid_out
from dsp.signature import Bound, Signature, sizes_of_root
from dsp.stages import Stage
from dsp.tensors import remade, tensors_in
from dsp.traits import BY_NUMBER, Traits

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


class Tracer(Between):
    """Follows a forward on fake tensors, and tells a recorder of its stages and operations."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], real: bool = False) -> None:
        super().__init__()
        self.recorder = Recorder(n, root_sizes, real)
        self.record = self.recorder.record
        self.record.random = True  # for all that is known
        self.n, self.depth = n, 0
        self.watch: AbstractContextManager[Any] = nullcontext()  # of what runs below

    def refuse_unrunnable(self, what: Traits, args: Any, kwargs: Any) -> None:
        self.recorder.reads(suspects(what, args, kwargs), unrunnable(what))

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if what.name in ("stride", "is_contiguous") and args and self.recorder.made_of_sharded(args[0]):
            return laid_out(args[0].shape, what.name, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        if what.name in BY_NUMBER and not self.record.data:
            raise NotImplementedError(f"{what.name}_() on a tensor without data")  # where torch crashes
        out = self.called(func, args, kwargs)
        self.recorder.operation(what.name, args, kwargs, out, what.in_place, self.cost())
        return out

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of one operation."""
        return func(*args, **kwargs)

    def cost(self) -> Cost | None:
        """The cost of the operation that ran last, if it was measured."""
        return None

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.asleep:
            return None  # called by another stage: part of it
        self.recorder.enter_stage(stage, args, kwargs)
        self.asleep, self.given = True, (args, kwargs)
        return args, kwargs

    def after_stage(self, output: Any) -> Any:
        self.depth -= 1
        if self.depth:
            return None
        output = self.recorder.apart(tensors_in(self.given), output)
        self.asleep = False
        self.leave(output)
        del self.given
        return output

    def leave(self, output: Any) -> None:
        """A stage returned this."""
        self.recorder.leave_stage(output)

    def abandon(self) -> None:
        """Leave nothing behind if a stage raised."""
        self.asleep = False


class How(NamedTuple):
    """How a forward is traced: whether its outputs are gathered, and the cuts of inputs that arrive sharded."""

    gather_output: bool
    given: Mapping[str, Cut]


class Rehearsal:
    """A copy of a model on fake parameters, for one forward that a `Tracer` is told of.

    first: by the id of a module an earlier one like it, whose insides will do for both.
    """

    choices: type[Choices] = Choices

    def __init__(self, model: nn.Module, stages: list[Stage], how: Any, first: Mapping[int, nn.Module]) -> None:
        self.model, self.stages, self.how = model, stages, how
        self.mode: Any = Fakes(allow_non_fake_inputs=True)
        self.fakes: dict[int, Tensor] = {}
        self.staged = {id(m) for stage in stages for m in stage.module.modules()}
        skeleton = Skeleton(lambda t: self.fakes.setdefault(id(t), self.fake(t)), first, self.staged)
        self.clone, self.memo = skeleton.of(model), skeleton.memo

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exc: object) -> None:
        if isinstance(self.mode, Fakes):
            self.mode.over = True

    def fake(self, t: Tensor) -> Tensor:
        return fake_tensor(self.mode, t, self.kind(t))

    def kind(self, t: Tensor) -> torch.dtype:
        return t.dtype

    def resident(self) -> int:
        """Bytes that each rank holds anyway, as far as they count."""
        return 0

    def tracer(self, n: int, root_sizes: Mapping[str, int]) -> Tracer:
        return Tracer(n, root_sizes)

    def hooks(self, tracer: Any) -> list[Any]:
        """Install the hooks that tell the tracer of stages."""
        handles: list[Any] = []
        for stage in self.stages:
            module = self.memo.get(id(stage.module), stage.module)
            handles += watch(module, partial(tracer.before_stage, stage), tracer.after_stage)
        return handles

    @contextmanager
    def followed(self, tracer: Tracer) -> Iterator[None]:
        """Around the forward: the tracer sees its operations, and nobody its warnings."""
        # what an activation checkpoint around the model keeps is of the run alone
        with saved_tensors_hooks(lambda t: t, lambda t: t), CompileOff(), any_device(), self.mode, tracer.watch, tracer:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what the model has to say it says when it runs
                yield

    def run(self, root: StagePattern | None, args: Any, kwargs: Any, n: int) -> Trace | None:
        """The problem of a call with such inputs."""
        # what an earlier call left in a cache lies as it left it
        args, kwargs = remade((args, dict(kwargs)), lambda t: t if isinstance(t, Sharded) else self.fake(t))
        tracer = self.tracer(n, sizes_of_root(self.model, root, args, kwargs))
        bound = Signature(self.model, root, "the model").bind(args, kwargs)[1] if root is not None else []
        tracer.recorder.root_inputs(bound)
        handles = self.hooks(tracer)
        try:
            with self.followed(tracer):
                output = self.clone(*args, **kwargs)
            tracer.recorder.root_outputs(output)
        except Exception:
            self.choices.refuse(tracer.record, self.how.given)  # what stumbled may have come of what is refused
            raise
        finally:
            tracer.abandon()
            for handle in handles:
                handle.remove()
        return self.problem(tracer, bound, tensors_in((args, kwargs)))

    def problem(self, tracer: Tracer, bound: list[Bound], given: list[Tensor]) -> Trace | None:
        """The planner's problem of what the tracer was told; `bound` of the inputs `given` are the model's own."""
        return self.choices.of(tracer.record, self.how.given, self.how.gather_output).trace(self.resident())


def watch(module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any], Any]) -> list[Any]:
    """Have functions called before and after a module's forward."""
    return [
        module.register_forward_pre_hook(lambda m, a, k: before(a, k), with_kwargs=True),
        module.register_forward_hook(lambda m, a, out: after(out)),
    ]


def trace(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, n: int, how: How
) -> Trace:
    """Run `model` on fake copies of the inputs, shapes and types only, and return what the planner has to decide."""
    with Rehearsal(model, stages, how, {}) as rehearsal:
        found = rehearsal.run(root, args, kwargs, n)
    assert found is not None
    return found
