"""A forward without data, recorded: the model runs once on fake tensors, which have shapes and dtypes only.

The result is a `Trace`: the planner's problem, and the place in a run where each of its decisions applies.
`dsp.plan.rehearsal` measures the cost of stages and operations on the way, and restores all state that they change.
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
from dsp.calls import GlueError, tensor_args
from dsp.compile_off import CompileOff
from dsp.core.skeleton import Fakes, Skeleton
from dsp.layout import Cut
from dsp.notation import StagePattern
from dsp.plan.choices import Choices
from dsp.plan.events import Trace
from dsp.plan.record import Cost
from dsp.plan.recorder import Recorder
from dsp.private import any_device, fake_tensor
from dsp.sharded import Sharded, laid_out
from dsp.signature import Bound, Signature, sizes_of_root
from dsp.stages import Stage
from dsp.tensors import remade, tensors_in
from dsp.traits import BY_NUMBER, Traits


class Tracer(Between):
    """Follows a forward on fake tensors, and reports its stages and operations to a recorder."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], real: bool = False) -> None:
        super().__init__()
        self.recorder = Recorder(n, root_sizes, real)
        self.record = self.recorder.record
        self.record.random = True  # assumed, where nothing measures it
        self.n, self.depth = n, 0
        self.running = False  # an operation
        self.watch: AbstractContextManager[Any] = nullcontext()  # entered around the forward

    def refuse_unrunnable(self, what: Traits, args: Any, kwargs: Any) -> None:
        if not what.name.endswith("_in_place"):  # that has no rule: the planner refuses it where it has to
            self.recorder.reads(suspects(what, args, kwargs), unrunnable(what))

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if what.name in ("stride", "is_contiguous") and args and self.recorder.made_of_sharded(args[0]):
            return laid_out(args[0].shape, what.name, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        if what.name in BY_NUMBER and not self.record.data:
            raise NotImplementedError(f"{what.name}_() while dsp plans, without data")  # torch itself would crash
        self.running = True
        try:
            out = self.called(func, args, kwargs)
        finally:
            self.running = False
        self.recorder.operation(what.name, args, kwargs, out, what.in_place, self.cost())
        return out

    def collective(self, name: str, args: Any) -> None:
        """Record a collective that no torch function called: a run would not see it, nor gather its tensors."""
        if not (self.asleep or self.running):
            error = GlueError(
                f"ProcessGroup.{name}() between stages would run on this rank's shard as if it were the full tensor; "
                "call the function of torch.distributed"
            )
            self.recorder.reads(tensor_args(args, {}), error)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of one operation."""
        return func(*args, **kwargs)

    def cost(self) -> Cost | None:
        """The cost of the last operation, if it was measured."""
        return None

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.asleep:
            return None  # called inside another stage, and part of it
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
        """Record that a stage returned."""
        self.recorder.leave_stage(output)

    def abandon(self) -> None:
        """Reset the state after a stage that raised."""
        self.asleep = False


class How(NamedTuple):
    """Options of a trace: whether the outputs are gathered, and the cuts of inputs that arrive sharded."""

    gather_output: bool
    given: Mapping[str, Cut]


class Rehearsal:
    """A copy of a model on fake parameters, for one forward that a `Tracer` follows.

    first: the id of a module -> an earlier, equal one, whose submodules serve both.
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
            self.mode.end()

    def fake(self, t: Tensor) -> Tensor:
        return fake_tensor(self.mode, t, self.kind(t))

    def kind(self, t: Tensor) -> torch.dtype:
        return t.dtype

    def resident(self) -> int:
        """Bytes that each rank holds in any case, as far as the planner counts them."""
        return 0

    def tracer(self, n: int, root_sizes: Mapping[str, int]) -> Tracer:
        return Tracer(n, root_sizes)

    def hooks(self, tracer: Any) -> list[Any]:
        """Install the hooks that report stages to the tracer."""
        handles: list[Any] = []
        for stage in self.stages:
            module = self.memo.get(id(stage.module), stage.module)
            handles += watch(module, partial(tracer.before_stage, stage), tracer.after_stage)
        return handles

    @contextmanager
    def followed(self, tracer: Tracer) -> Iterator[None]:
        """A context for the forward: the tracer sees its operations, and warnings are ignored."""
        # the identity hooks hide the tensors from the hooks of an activation checkpoint around the model
        with saved_tensors_hooks(lambda t: t, lambda t: t), CompileOff(), any_device(), self.mode, tracer.watch, tracer:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the real run warns
                yield

    def run(self, root: StagePattern | None, args: Any, kwargs: Any, n: int) -> Trace | None:
        """The planner's problem of a call with these inputs."""
        # a sharded tensor, kept in a cache by an earlier call, keeps its layout
        args, kwargs = remade((args, dict(kwargs)), lambda t: t if isinstance(t, Sharded) else self.fake(t))
        tracer = self.tracer(n, sizes_of_root(self.model, root, args, kwargs))
        bound = Signature(self.model, root, "the model").bind(args, kwargs)[1] if root is not None else []
        tracer.recorder.root_inputs(bound)
        handles = self.hooks(tracer)
        self.mode.collective = tracer.collective
        try:
            with self.followed(tracer):
                output = self.clone(*args, **kwargs)
            tracer.recorder.root_outputs(output)
        except Exception:
            self.choices.refuse(tracer.record, self.how.given)  # the refusal that caused the error, if one did
            raise
        finally:
            tracer.abandon()
            self.mode.collective = None
            for handle in handles:
                handle.remove()
        return self.problem(tracer, bound, tensors_in((args, kwargs)))

    def problem(self, tracer: Tracer, bound: list[Bound], given: list[Tensor]) -> Trace | None:
        """The planner's problem of the recorded forward; `bound`: the inputs `given` that have a parameter."""
        return self.choices.of(tracer.record, self.how.given, self.how.gather_output).trace(self.resident())


def watch(module: nn.Module, before: Callable[[Any, Any], Any], after: Callable[[Any], Any]) -> list[Any]:
    """Register functions to be called before and after a module's forward."""
    return [
        module.register_forward_pre_hook(lambda m, a, k: before(a, k), with_kwargs=True),
        module.register_forward_hook(lambda m, a, out: after(out)),
    ]


def trace(
    model: nn.Module, stages: list[Stage], root: StagePattern | None, args: Any, kwargs: Any, n: int, how: How
) -> Trace:
    """Run `model` on fake copies of the inputs, which have shapes and dtypes only, and return the planner's problem."""
    with Rehearsal(model, stages, how, {}) as rehearsal:
        found = rehearsal.run(root, args, kwargs, n)
    assert found is not None
    return found
