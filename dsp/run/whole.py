"""The operations of a model's own forward between stages, on whole tensors, while the model sees whole shapes.

Between the stages of a `Run` its mode sees every torch function. One that meets a `Sharded` tensor gets the whole of
it; where the plan wants a result sharded, each rank takes its part of it. `dsp.run.glue` runs on parts what has a rule.
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
from dsp.layout import Cut
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
from dsp.run.forward import Run, Unfit
from dsp.sharded import ACTIVE, READ, Sharded, carry, plain
from dsp.tensors import NO, map_tensors, plainly, tensors_in
from dsp.traits import Traits

Again = Callable[[], AbstractContextManager[Run]]  # operations between stages, in backward
PLAIN = frozenset({Tensor, nn.Parameter})  # functions of torch that are written in Python name these as well


class active:
    """Make `run` the one that hooks and mode of `runtime` serve, in the place of one that runs now."""

    def __init__(self, runtime: Any, run: Run) -> None:
        self.runtime, self.run = runtime, run

    def __enter__(self) -> None:
        current = ACTIVE.get()
        self.outer = None if current is None or current[1].mode.asleep else current[1].mode
        if self.outer is not None:  # what backward runs asked for what a checkpoint did not keep
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
            self.run.mode = None  # it knows the run: nobody would let go of either before garbage is collected
            if self.outer is not None:
                self.outer.resume()


@dataclass(eq=False)
class GlueCall:
    """One operation of glue as a run comes to it: `node` is what the plan has of it, `step` what it asks; `shells` are
    the tensors among its arguments as glue holds them, None for those that are not sharded."""

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
        """The copies to be made of each of its tensors first."""
        return self.step.via if self.step is not None else []

    @property
    def push(self) -> list[Cut | None]:
        return self.step.push if self.step is not None else []


class GlueOnWholes(Between):
    """The mode of a run: every operation between its stages that meets a sharded tensor is run on whole ones.

    cut: the forwards of stages that run piece by piece while it is on.
    """

    def __init__(self, run: Run, cut: Sequence[Any] = ()) -> None:
        super().__init__()
        self.run, self.cut = run, cut
        asks = run.script is None or run.script.compiled  # else nothing that is compiled was met between stages
        self.followed = CompileOff() if asks and compiler_loaded() else None
        self.asleep = self.popped = False

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

    def begin(self) -> None:
        """Called before a forward; the mode is entered anew for each operation that is written out."""

    def end(self) -> None:
        """Called after a forward, however it ended."""
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
        asks = run.writes.has_copies or name in run.on_wholes
        if not asks and PLAIN.issuperset(types) and not dtensors(args, kwargs):
            run.where = ("glue", -1, name)  # of what communicates by itself
            out = func(*args, **kwargs)
            if not (what.in_place or (type(out) is Tensor and not out.requires_grad)):
                out = plainly(out)  # asked here as well: a call less for most
        else:
            out = self.operate(func, what, args, kwargs)
        if run.recorder is not None:
            run.observe("operation", name, args, kwargs, out, what.in_place)
        return out

    def wait(self, what: Traits, args: Any, kwargs: Any) -> None:
        """Wait for the numbers of what a function reads, where they are under way."""
        self.run.arrive(tensor_args(args, kwargs))

    def operate(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        """One operation that meets a sharded tensor, or of which the plan asks something: on whole tensors."""
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
        """The tensors among the arguments, and as glue holds them."""
        if self.run.writes.stale and what.name == "setitem":
            self.run.writes.written_back(*args)
        tensors = tensor_args(args, kwargs)
        return tensors, list(map(self.run.open, tensors))

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if self.run.coming:
            self.wait(what, args, kwargs)
        if what.name == "backward":
            raise GlueError("backward inside a parallelized forward; return the loss and call backward outside")
        if what.name == "new_tensor" and sharded_in(args[1:], kwargs):
            raise GlueError("new_tensor() would copy this rank's part alone; write y.detach().clone()")
        if args and isinstance(args[0], Sharded):
            read = READ.get(func)
            if read is not None:
                return read(*args, **kwargs)
            with NO():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def on_wholes(op: GlueCall, tensors: list[Tensor], cuts: Sequence[Cut | None]) -> Any:
    """The call on whole tensors, and of its results this rank's part where the plan wants it."""
    args, kwargs = replaced(op.args, op.kwargs, iter(tensors))
    with writes(op, tensors, cuts) as views:
        out = views(op.func(*args, **kwargs))
    return parted(op.run, out, op.node, op.push)


def parted(run: Run, out: Any, node: PlannedNode | None, push: Sequence[Cut | None]) -> Any:
    """Whole results, of which this rank takes its part where the plan wants it."""
    if not any(push) or node is None:
        return out
    tensors = tensors_in(out)
    push = [*push, *[None] * (len(tensors) - len(push))]
    return map_tensors(out, run.share_out(tensors, push, chain(node.results, repeat(-1))))


def writes(op: GlueCall, parts: Sequence[Tensor], cuts: Sequence[Cut | None]) -> Any:
    """The context of `Writes.around` for an operation that runs on these parts."""
    return op.run.writes.around(op.what.name, op.what.in_place, op.tensors, op.shells, parts, cuts)


def dtensors(args: Any, kwargs: Any) -> bool:
    """Tell whether there is a DTensor among the arguments, or a sharded tensor that a function's types do not name."""
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
    """A context in which operations between stages run in backward as in this run, by `script`."""
    axis, sizes, first, turns, current = run.axis, run.root_sizes, run.first, dict(run.turns), ACTIVE.get()
    assert current is not None
    runtime = current[0]

    @contextmanager
    def again() -> Iterator[Run]:
        repeated = Run(axis, script, sizes, runtime.recipes, first, turns)
        repeated.again = True
        with active(runtime, repeated):
            yield repeated

    return again


def note_checkpoint(run: Run) -> None:
    """Inside a checkpointed region: let its recomputation in backward run under this run's script again."""
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

    lay = [(t.at, t.number) if isinstance(t, Sharded) else None for t in checkpoint_arguments(frame)]

    def given(args: Sequence[Any]) -> Sequence[Any]:
        first = len(args) - len(lay)
        found = zip(args[first:], lay)
        return *args[:first], *(carry(a, *at) if at is not None and type(a) is Tensor else a for a, at in found)

    Recompute(frame, note_checkpoint, around, plain, given)
