"""The operations between stages on full tensors, while the model sees global shapes.

Between the stages of a `Run` its mode sees every torch function. A function that gets a `Sharded` tensor runs on the
gathered tensor; each rank keeps its shard of a result that is planned sharded. `dsp.run.glue` runs rules on shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.between import Between
from dsp.calls import GlueError, replaced, tensor_args
from dsp.compile_off import CompileOff
from dsp.compiled.reasons import Unfit
from dsp.layout import At, Cut
from dsp.observers import observing
from dsp.plan.choices import WRITES
from dsp.plan.script import GlueStep, PlannedNode, Script, Via, key_of_operation
from dsp.private import (
    Recompute,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
    checkpoint_arguments,
    checkpoint_frame,
    compiler_loaded,
    saving_hooks,
)
from dsp.run.forward import Run
from dsp.sharded import ACTIVE, READ, Sharded, carry, plain
from dsp.tensors import NO, map_tensors, memory, plainly, tensors_in
from dsp.traits import DRAWN, Traits, written

Again = Callable[[], AbstractContextManager[Run]]  # a context in which backward runs operations between stages
PLAIN = frozenset({Tensor, nn.Parameter})  # torch functions written in Python list these among their types, too


class active:
    """Make `run` the active run of `runtime`, for its hooks and mode; a run that is active already is suspended."""

    def __init__(self, runtime: Any, run: Run) -> None:
        self.runtime, self.run = runtime, run

    def __enter__(self) -> None:
        current = ACTIVE.get()
        self.outer = None if current is None or current[1].mode.asleep else current[1].mode
        if self.outer is not None:  # code that runs in backward needs the recomputation of a checkpoint
            self.outer.suspend()
        self.token, self.run.mode = ACTIVE.set((self.runtime, self.run)), self.runtime.between_stages(self.run)
        self.run.mode.begin()
        self.run.mode.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self.run.mode.__exit__(*error)
        finally:
            self.run.mode.end()
            ACTIVE.reset(self.token)
            self.run.mode = None  # breaks the reference cycle of run and mode
            if self.outer is not None:
                self.outer.resume()


@dataclass(eq=False)
class GlueCall:
    """One operation between stages, as it runs. node: its node in the plan; step: the plan's decision on it;
    tensors: the tensors among its arguments; shells: the same as glue holds them, None for those not sharded."""

    run: Run
    node: PlannedNode | None
    func: Any
    what: Traits
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    shells: list[Sharded | None]

    @property
    def step(self) -> GlueStep | None:
        return None if self.node is None else self.node.step

    @property
    def index(self) -> int:
        return -1 if self.node is None else self.node.index

    @property
    def via(self) -> Sequence[Sequence[Via]]:
        """The copies to make of each tensor first."""
        return self.step.via if self.step is not None else []

    @property
    def push(self) -> list[Cut | None]:
        return self.step.push if self.step is not None else []


class GlueOnWholes(Between):
    """The mode of a run: every operation between stages that gets a sharded tensor runs on full tensors.

    cut: the forwards of stages that run piece by piece while the mode is on.
    """

    def __init__(self, run: Run, cut: Sequence[Any] = ()) -> None:
        super().__init__()
        self.run, self.cut = run, cut
        asks = run.script is None or run.script.compiled  # otherwise the plan met no compiled code between stages
        self.followed = CompileOff() if asks and compiler_loaded() else None
        self.asleep = self.popped = False

    def suspend(self) -> None:
        """Sleep inside a stage, where tensors are local and plain; leave the stack if this mode is its top."""
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

    def begin(self) -> None:
        """Prepare a forward. Unlike `__enter__`, it is not called again for operations that are written out."""

    def end(self) -> None:
        """Clean up after a forward, whether it returned or raised."""
        for forward in self.cut:
            forward.let_go()

    def sharded(self, t: Tensor) -> bool:
        return isinstance(t, Sharded)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        run, name = self.run, what.name
        if run.coming:
            self.wait(what, args, kwargs)
        if saving_hooks(False) is not None:
            note_checkpoint(run)
        if run.alike is None and name in DRAWN and DRAWN[name](args, kwargs):
            run.draw_alike()  # its plan did not foresee that
        asks = run.writes.has_copies or name in run.on_wholes
        if not asks and PLAIN.issuperset(types) and not dtensors(args, kwargs):
            run.where = ("glue", -1, name)  # for operations that communicate by themselves
            out = func(*args, **kwargs)
            if not (what.in_place or (type(out) is Tensor and not out.requires_grad)):
                out = plainly(out)  # the condition above saves most operations this call
        else:
            out = self.operate(func, what, args, kwargs)
        if run.recorder is not None:
            run.observe("operation", name, args, kwargs, out, what.in_place)
        return out

    def wait(self, what: Traits, args: Any, kwargs: Any) -> None:
        """Wait for the data of a function's arguments, if still in transfer."""
        self.run.arrive(tensor_args(args, kwargs))

    def operate(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        """Run on full tensors an operation that gets a sharded tensor, or on which the plan has a decision."""
        run, (tensors, shells) = self.run, self.opened(what, args, kwargs)
        if (what.in_place and isinstance(shells[0], Sharded)) or isinstance(kwargs.get("out"), Sharded):
            raise GlueError(WRITES.format(name=what.name))
        _, node = run.find(key_of_operation(what.name, args, kwargs, run.reads(tensors, shells)))
        if node is not None and node.same and node.exact and isinstance(shells[0], Sharded):
            if node.same == shells[0].dtype:
                return shells[0]
            node = None  # y.float() of another type than before, as under autocast
        op = GlueCall(run, node, func, what, args, kwargs, tensors, shells)
        run.where = ("glue", op.index, what.name)
        whole: list[Cut | None] = [None] * len(tensors)
        return on_wholes(op, run.views.bring(tensors, shells, whole, op.via), whole)

    def opened(self, what: Traits, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Sharded | None]]:
        """The tensors among the arguments, and the `Sharded` that glue holds for each (None: not sharded)."""
        if self.run.writes.stale and what.name == "setitem":
            self.run.writes.written_back(*args)
        tensors = tensor_args(args, kwargs)
        return tensors, list(map(self.run.open, tensors))

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if self.run.coming:
            self.wait(what, args, kwargs)
        if what.name == "backward":
            raise GlueError("backward() inside a parallelized forward does not work; call it on the loss outside")
        if what.name == "new_tensor" and sharded_in(args[1:], kwargs):
            raise GlueError("new_tensor() would copy only this rank's part; write y.detach().clone()")
        if args and isinstance(args[0], Sharded):
            read = READ.get(func)
            if read is not None:
                return read(*args, **kwargs)
            with NO():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def on_wholes(op: GlueCall, tensors: list[Tensor], cuts: Sequence[Cut | None]) -> Any:
    """Call the operation on full tensors, and shard the results that the plan wants sharded."""
    args, kwargs = replaced(op.args, op.kwargs, iter(tensors))
    with writes(op, tensors, cuts) as views:
        out = views(op.func(*args, **kwargs))
    return parted(op.run, out, op.node, op.push, tensors)


def parted(run: Run, out: Any, node: PlannedNode | None, push: Sequence[Cut | None], given: Any) -> Any:
    """The replicated results of a call on `given`; this rank keeps its shard of each that the plan wants sharded."""
    if not any(push) or node is None:
        return out
    tensors = tensors_in(out)
    push = [*push, *[None] * (len(tensors) - len(push))]
    memories = list(map(memory, tensors))
    kept = len(set(memories)) < len(tensors) or not set(map(memory, tensors_in(given))).isdisjoint(memories)
    return map_tensors(out, run.share_out(tensors, push, chain(node.results, repeat(-1)), kept))


def writes(op: GlueCall, parts: Sequence[Tensor], cuts: Sequence[Cut | None]) -> Any:
    """The context of `Writes.around` for an operation that runs on these local tensors."""
    into = written(op.func, op.args, op.kwargs)
    return op.run.writes.around(op.what.name, into, op.tensors, op.shells, parts, cuts)


def dtensors(args: Any, kwargs: Any) -> bool:
    """Tell whether a DTensor is among the arguments, or a sharded tensor that a function's types do not list."""
    for a in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(a, (DTensor, Sharded)) or (type(a) in (list, tuple) and dtensors(a, None)):
            return True
    return False


def sharded_in(args: Any, kwargs: Any) -> list[Sharded]:
    found = []
    for a in (*args, *kwargs.values()) if kwargs else args:
        if type(a) is Sharded:
            found.append(a)
        elif type(a) is tuple or type(a) is list:
            found += sharded_in(a, {})
    return found


def in_backward(run: Run, script: Script | None) -> Again:
    """A context in which backward runs operations between stages as this run does, by `script`."""
    axis, sizes, first, turns, current = run.axis, run.root_sizes, run.first, dict(run.turns), ACTIVE.get()
    declared, alike = run.declared, None if run.alike is None else True
    assert current is not None
    runtime = current[0]

    @contextmanager
    def again() -> Iterator[Run]:
        repeated = Run(axis, script, sizes, runtime.recipes, first, turns)
        repeated.again, repeated.declared, repeated.alike = True, dict(declared), alike
        try:
            with active(runtime, repeated):
                yield repeated
        finally:
            if repeated.alike is not None:
                repeated.draw_as_before()

    return again


def note_checkpoint(run: Run) -> None:
    """Inside a checkpointed region: let the recomputation in backward follow this run's script."""
    frame = checkpoint_frame()
    if frame is None or frame is run.within or Recompute.known(frame, note_checkpoint):
        return
    if run.by_graph:
        raise Unfit("it has an activation checkpoint")
    traffic_check, again = run.traffic_check, in_backward(run, run.script)

    @contextmanager
    def around() -> Iterator[None]:
        with again() as repeated, observing(traffic_check.again(repeated) if traffic_check is not None else None):
            yield

    def known(t: Any) -> Any:
        """The layout and number of a sharded argument, or the number of a declared input that came as a DTensor."""
        return (t.at, t.number) if isinstance(t, Sharded) else run.declared.get(id(t))

    lay = list(map(known, checkpoint_arguments(frame)))

    def saved(a: Any, it: Any) -> Any:
        """An argument as the checkpoint saved it, with what is known of the original."""
        if it is None or not isinstance(a, Tensor):
            return a
        if isinstance(it[0], At):
            return carry(a, *it) if type(a) is Tensor else a
        if isinstance(a, DTensor) and (current := ACTIVE.get()) is not None:
            current[1].declared[id(a)] = a, it[1]
        return a

    def given(args: Sequence[Any]) -> Sequence[Any]:
        first = len(args) - len(lay)
        return *args[:first], *map(saved, args[first:], lay)

    Recompute(frame, note_checkpoint, around, plain, given)
