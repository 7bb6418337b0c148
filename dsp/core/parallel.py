"""The call of a parallel model: a record for each signature of inputs, split inputs, and outputs brought out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.distributed.tensor import DTensor

import dsp.core.gradient_hooks  # noqa: F401 (hooks on carriers)
from dsp.comm.gradients import covered_exit, waited
from dsp.comm.layout import Axis
from dsp.comm.observers import RUNNING
from dsp.comm.randomness import after_forks, drew, share, states, unshare
from dsp.core.carrier import Carrier, arrive, carry, first_carrier, plain
from dsp.core.decide import Decision, decide
from dsp.core.growth import due, grown
from dsp.core.inputs import Inputs, add_inputs, adopt, arrivals, enter_sharded, layout_at, properties, signature_of
from dsp.core.module_calls import KEPT_BY_HOOK, UNCHANGED, StageCall, keep_compiled, order_hooks
from dsp.core.observed import Events, ModelCall, Observe
from dsp.core.offers import Rules, lay_out
from dsp.core.reads import reason_of
from dsp.core.record import Layout, Record
from dsp.core.recording import PLAIN, RecordOptions, record_forward
from dsp.core.run import Outside, Runner, Send, at_once
from dsp.core.torch_calls import GlueError
from dsp.core.watch import refuse_functions, watched
from dsp.stages.notation import NotationError, StagePattern
from dsp.stages.signature import sizes_of_root
from dsp.stages.stage import Stage
from dsp.support.private import (
    BELOW,
    AsyncCollectiveTensor,
    CompileOff,
    _DropoutNd,
    compiler_loaded,
    forward_level,
    maybe_current_level,
    pytree,
    uncompiled,
)
from dsp.support.python_state import Path, refuse_leaves, uncollected, unpicklable
from dsp.support.tensors import map_tensors, tensors_in

log = logging.getLogger("dsp")

LOOK = 256  # calls after which stages are looked at, whether they begin to draw random numbers
TRAINING, SHARE = attrgetter("training"), attrgetter("p")
DREW = (
    "{model} drew random numbers that its plan did not foresee. From the next call on all ranks draw the same between "
    "stages; in this one ranks with other seeds drew other numbers"
)
COMPILE = (
    "torch.compile of a parallelized model, or of several of its stages in one call, does not work. Give "
    "dsp.parallelize compile=True; or, after dsp.parallelize, compile the forward of each stage by itself, as in "
    "block.forward = torch.compile(block.forward)"
)
Pass = Callable[[Record, Decision], Any]  # over the nodes of a record, once each has its decision
RECORDS = 64  # signatures of inputs whose record is kept
GROWN = 50_000  # nodes that a record may grow to; then it begins anew
# the usual types of arguments: in others objects may hide, or a tensor still on its way
USUAL = frozenset({Tensor, nn.Parameter, DTensor, int, float, bool, str, type(None)})


class Parallel:
    """A parallel model: its forward, by the record for inputs like these.

    observers: of its calls (`dsp.core.observed`); passes: over the nodes of each planned record; options: of
    recordings; send: makes switches of results of operations; paths: of carriers that calls left and later ones read;
    leaving: keys of records that leave others, which nobody is known to read; running: the number of its forwards that
    run; led: the number of records made.
    """

    def __init__(
        self, model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather: bool, rules: Rules,
        observers: Sequence[Observe] = (), passes: Sequence[Pass] = (), options: RecordOptions = PLAIN,
        send: Send = at_once,
    ) -> None:  # fmt: skip
        if isinstance(getattr(model.forward, "__self__", None), Parallel):
            raise ValueError("this model is already parallelized; build it anew to parallelize it differently")
        self.model, self.axis, self.gather, self.rules = model, axis, gather, rules
        self.stages, self.root, self.observers = stages, root, observers
        self.passes, self.options, self.send = passes, options, send
        self.forward, self.signature = model.forward, signature_of(model, root)
        self.install()
        model.forward = self.call

    def install(self) -> None:
        """Take the place of the calls of stages."""
        self.records, self.paths, self.running = dict[Any, Record](), list[Path](), 0
        self.leaving, self.reason, self.led = set[Any](), "", 0
        self.cuda = self.axis.mesh.device_type == "cuda"
        self.stage_calls = [StageCall(stage, stage.module) for stage in self.stages]
        self.staged = [stage.module for stage in self.stages]
        self.events = Events()
        for observe in self.observers:
            observe(self, self.events)

    @cached_property
    def modules(self) -> list[nn.Module]:
        return [*self.model.modules()]

    @cached_property
    def dropouts(self) -> list[nn.Module]:
        return [m for m in self.modules if isinstance(m, _DropoutNd)]

    @cached_property
    def between(self) -> list[nn.Module]:
        """The modules between stages."""
        inside = {id(m) for stage in self.stages for m in stage.module.modules()}
        return [m for m in self.model.modules() if m is not self.model and id(m) not in inside]

    def __deepcopy__(self, memo: dict[int, Any]) -> Parallel:
        """The same for a copy of the model, on the same ranks and with its own records."""
        new = memo[id(self)] = object.__new__(Parallel)
        new.axis, new.gather, new.rules, new.observers = self.axis, self.gather, self.rules, self.observers
        new.passes, new.options, new.send = self.passes, self.options, self.send
        for name in ("model", "stages", "root", "forward", "signature"):  # the copied model is not complete yet
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        new.install()
        return new

    def __reduce__(self) -> Any:
        raise unpicklable()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            refuse_compiling()
        if first_carrier((*args, *kwargs.values())) is not None:  # inside another parallel model
            return self.forward(*args, **kwargs)
        for begin in self.events.begin:
            begin()
        token = RUNNING.set(None)
        try:
            return self.observed(args, kwargs)
        except BaseException as error:
            for fail in self.events.fail:
                fail(error)
            raise
        finally:
            RUNNING.reset(token)
            for over in self.events.over:
                over()

    def observed(self, args: Any, kwargs: Any) -> Any:
        """The output of a forward."""
        order_hooks(self.between, self.staged)
        if compiler_loaded() and keep_compiled(self.model, self.stage_calls, self.between):
            for record in self.records.values():  # what is ready calls what was there before
                record.driver.runner.prepared.by_key.clear()  # type: ignore[attr-defined]
        refuse_transformed(self.model)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not USUAL.issuperset(map(type, leaves)):
            refuse_leaves(leaves)
            if AsyncCollectiveTensor in map(type, leaves):
                leaves = [waited(t) if isinstance(t, Tensor) else t for t in leaves]
                args, kwargs = pytree.tree_unflatten(leaves, spec)
        key = spec, *map(properties, leaves), self.modes(), torch.is_grad_enabled()
        led = self.led
        record = self.record(key, args, kwargs)
        call = ModelCall(args, kwargs, leaves, spec, key, record)
        for observe in self.events.record if led != self.led else ():
            observe(call)
        for ready in self.events.ready:
            ready(call)
        outside: Any = record.driver
        if record.persistent:
            adopt(record, self.axis, self.model, args, kwargs)
        local_args, local_kwargs = outside.inputs.split(args, kwargs)
        token = self.agree_on_draws(record, outside.runner)
        record.driver, self.running = outside.runner, self.running + 1
        record.hook_parts = None
        try:
            if self.events.instead is not None:
                out = self.events.instead(call, local_args, local_kwargs)
                if out is not NotImplemented:
                    return out
            watch = watched(record) if record.sources or not record.planned else UNCHANGED
            with watch, CompileOff() if record.compiled else UNCHANGED:
                out = self.forward(*local_args, **local_kwargs)
            if record.in_flight:
                arrive(record)
            out = hand_out(self.axis, out, self.bring_out(outside.runner, out))
            for end in self.events.end:
                end(call, out)
            return out
        finally:
            record.driver, self.running = outside, self.running - 1
            if record.in_flight:  # the forward raised: torch keeps for good what nobody waits for
                arrive(record)
            self.end_draws(record, outside.runner, token)

    def modes(self) -> Any:
        """The modules in training, the shares that dropouts drop, and the dtype to which functions cast."""
        device = self.axis.mesh.device_type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return bytes(map(TRAINING, self.modules)), *map(SHARE, self.dropouts), cast

    def agree_on_draws(self, record: Record, runner: Runner) -> Any:
        """Begin a forward, in which all ranks draw the same random numbers between stages.

        They are those of rank 0. In a forward that is to draw none they are others: then nothing need be sent. One
        whose stages alone draw leaves the generators as they are.
        """
        runner.calls, runner.forks = runner.calls + 1, 0
        if record.draws or not record.planned:
            runner.looks = not runner.calls & (runner.calls - 1) or not runner.calls % LOOK
            return share(self.axis), states(self.axis)
        with BELOW():  # a mode of tensors without data would lose the states
            before = torch.get_rng_state(), torch.cuda.get_rng_state() if self.cuda else None
            if not record.stages_draw:
                torch.default_generator.manual_seed(runner.calls)
                if self.cuda:
                    torch.cuda.manual_seed(runner.calls)
            return before, (torch.get_rng_state(), torch.cuda.get_rng_state() if self.cuda else None)

    def end_draws(self, record: Record, runner: Runner, token: Any) -> None:
        """End what this began, and note random numbers that were not foreseen."""
        before, begun = token
        if record.draws or not record.planned:
            record.drew |= not record.planned and drew(self.axis, begun)
            unshare(before)
            return
        expected = begun if not runner.forks else after_forks(begun, runner.forks)
        with BELOW():
            record.drew = not torch.equal(expected[0], torch.get_rng_state()) or (
                self.cuda and not torch.equal(expected[1], torch.cuda.get_rng_state())
            )
            if not record.stages_draw:
                torch.set_rng_state(before[0])
                if record.drew:
                    torch.rand(())  # so that the next call draws others
                if self.cuda:
                    torch.cuda.set_rng_state(before[1])
        if record.stages_draw and record.drew and self.axis.rank == 0:
            log.warning(DREW.format(model=type(self.model).__name__))

    def record(self, key: Any, args: Any, kwargs: Any) -> Record:
        """The record for inputs like these, and for what earlier calls left, made in the first call.

        Where a forward leaves something, the next one may read it: then that has another record.
        """
        roots = self.model, args, kwargs
        full_key = (key, *(layout_at(path, *roots) for path in self.paths))
        record = self.records.get(full_key)
        if record is not None and full_key not in self.leaving:
            grew = record.driver.unplanned or record.drew  # type: ignore[attr-defined]
            return self.replan(full_key, record, args, kwargs) if grew else record
        self.leaving.discard(full_key)
        new, paths = self.plan(args, kwargs)
        if record is not None and not new.persistent:
            return record
        self.lead(new, args, kwargs)
        self.paths += [path for path in new.persistent if path not in self.paths]
        full_key = (key, *(layout_at(path, *roots) for path in self.paths))
        if not {*paths} <= {*self.paths}:
            self.leaving.add(full_key)
        if len(self.records) >= RECORDS:
            del self.records[next(iter(self.records))]
        self.records[full_key] = new
        return new

    def lead(self, record: Record, args: Any, kwargs: Any) -> None:
        """Give a record what drives it."""
        self.led += 1
        inputs = Inputs(record, self.axis, self.signature.bind(args, kwargs)[1])
        record.driver = Outside(Runner(record, self.rules, self.axis, self.send), inputs, lambda: self.running > 0)

    def replan(self, key: Any, record: Record, args: Any, kwargs: Any) -> Record:
        """The record with this key, planned again with the nodes that calls added to it, if that is due, or with the
        random numbers that a call drew. One that grew too long is made anew."""
        if len(record.nodes) > GROWN:
            del self.records[key]
            return self.record(key[0], args, kwargs)
        if not due(record):
            return record
        new = self.plan(args, kwargs)[0] if record.planned and not record.driver.unplanned else None  # type: ignore[attr-defined]
        if new is None or not (new.draws or new.stages_draw):
            new = grown(record)
            self.decide(new)
        self.lead(new, args, kwargs)
        self.records[key] = new
        return new

    @uncollected()
    def plan(self, args: Any, kwargs: Any) -> tuple[Record, list[Path]]:
        """A planned record, and the paths of what it leaves; of a forward that reads its data an empty one, which grows
        as it runs."""
        recorded = self.recorded(args, kwargs, reads=False) or self.recorded(args, kwargs, reads=True)
        if recorded is None:
            sizes = sizes_of_root(self.model, self.root, args, kwargs)
            record = Record(self.axis.size, sizes, self.rules, self.stages)
            record.memories, record.compiled = None, compiler_loaded()
            bound = self.signature.bind(args, kwargs)[1]
            add_inputs(record, bound, arrivals(bound))
            enter_sharded(record)
            return record, []
        record, paths = recorded
        record.priced = self.axis.wire.priced
        self.decide(record)
        return record, paths

    def recorded(self, args: Any, kwargs: Any, reads: bool) -> tuple[Record, list[Path]] | None:
        """The record of a forward, and the paths of what it leaves; None if the forward reads its data, or calls what
        cannot run without. reads: it gets the numbers of inputs and parameters."""
        options = self.options._replace(reads=reads)
        try:
            return record_forward(self.model, self.stages, self.root, args, kwargs, self.axis.size, self.rules, options)
        except (NotationError, GlueError):
            raise
        except Exception as error:
            self.reason = reason_of(error)
            return None

    def decide(self, record: Record) -> None:
        """Write decisions on the nodes of a record."""
        lay_out(record)
        decision = decide(record, self.gather)
        for one in self.passes:
            one(record, decision)

    def bring_out(self, runner: Runner, out: Any) -> list[Output]:
        """The tensors that a forward returns, gathered if the caller asks for that."""
        record = runner.record
        if not record.planned:
            refuse_functions(tensors_in(out))
            if self.root is not None:
                self.root.refuse_outputs([t.shape for t in tensors_in(out)])
        outputs: list[Output] = []
        for k, t in enumerate(tensors_in(out)):
            if record.hook_parts is not None and (place := record.hook_parts.get(t)) is not None:  # a hook kept it
                t = carry(record, t, *place)
            if not isinstance(t, Carrier):
                if record.hook_parts is not None and k in record.outputs:
                    raise GlueError(KEPT_BY_HOOK.format(what=f"output {k + 1} of the forward"))
                outputs.append(Output(t))
                continue
            nodes = record.by_key.get(("output", k, t.ref))
            node = nodes[0] if nodes else runner.added.output(k, t)
            if self.gather and t.cut is not None:
                [full] = runner.copies.bring(node, [t], [None])
                outputs.append(Output(full, gathered=True))
            else:
                outputs.append(Output(plain(t), t.cut, t.ref.shape))
        return outputs


class Output(NamedTuple):
    """A tensor that a forward returns: this rank's part in a cut, of a tensor of global `shape`, or all of it;
    gathered: from all ranks."""

    tensor: Tensor
    cut: Layout = None
    shape: Sequence[int] = ()
    gathered: bool = False


def hand_out(axis: Axis, out: Any, outputs: Sequence[Output]) -> Any:
    """The output of a forward, with these tensors in it; those that are sharded as DTensors."""
    tensors: list[Tensor] = []
    for t, cut, shape, gathered in outputs:
        if cut is not None:
            t = axis.wrap(t, cut, shape, guard=True)
        tensors.append(covered_exit(t) if gathered and t.requires_grad else t)
    return map_tensors(out, tensors)


@uncompiled
def refuse_compiling() -> None:
    """Raise RuntimeError in a call that torch.compile follows."""
    raise RuntimeError(COMPILE)


def refuse_transformed(model: nn.Module) -> None:
    """Raise RuntimeError where the model runs under a transform that leaves out the collectives of its ranks."""
    forward_mode = forward_level(torch.autograd.forward_ad) >= 0
    if maybe_current_level() is not None or forward_mode or torch.jit.is_tracing() or is_exporting():
        raise RuntimeError(
            f"a parallelized {type(model).__name__} cannot run under torch.vmap, torch.func, forward-mode AD, "
            "torch.jit.trace or torch.export: the collectives of its ranks would be missing. Call it as it is; for "
            "gradients use backward or torch.autograd.grad"
        )
