"""A forward without data: which stages run, what glue joins them, what they cost; the problem the planner solves.

The model's forward runs once on fake tensors at full size. Every tensor that may be sharded is tracked as a value of
the planner, with every cut it could have; the rules that will run on shards (`dsp.rules`) tell how each cut passes
through glue. What comes out is a `Trace`: the planner's problem, and where each of its decisions applies in a run.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.inside import Inside, Sends
from dsp.layout import Cut
from dsp.notation import StagePattern
from dsp.plan.events import Event, Trace
from dsp.plan.recorder import Recorder
from dsp.plan.skeleton import checkpointed, foreign, skeleton
from dsp.plan.twins import alike, fingerprint, once
from dsp.plan.watch import Watch
from dsp.planner import Choice, Op
from dsp.private import FakeTensorMode, maybe_current_level, pytree
from dsp.rules.functions import ATTRIBUTE_OPS, BY_NUMBER, METADATA, UNRUNNABLE, in_place, op_name, refuse_unrunnable
from dsp.signature import Signature, sizes_of_root
from dsp.stages import Stage, clean
from dsp.tensors import memory, node, tensors_in


class Tracer(Recorder, TorchFunctionMode):
    """Records a forward on fake tensors, and measures memory, FLOPs and randomness of its stages on the way."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], recompute: bool = False, real: bool = False) -> None:
        super().__init__(n, root_sizes)
        self.recompute, self.real = recompute, real
        self.now: dict[str, Any] = {}  # measured of the stage that runs
        self.in_stage = False
        self.depth = 0
        self.watch = Watch()
        self.kept: dict[int, torch.UntypedStorage] = {}  # what glue saved for backward
        self.resident: set[int] = set()  # memory of parameters and buffers
        self.inside = [""]  # the modules that run now
        self.entered: dict[str, tuple[Any, Any]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.in_stage:
            return func(*args, **kwargs)
        name, attribute = op_name(func)
        metadata = (attribute and name not in ATTRIBUTE_OPS) or name in METADATA
        if name in UNRUNNABLE or maybe_current_level() is not None:
            refuse_unrunnable(name, metadata, args, kwargs, lambda t: hasattr(t, "_dsp_sym"))
        if metadata:
            return func(*args, **kwargs)
        if name in BY_NUMBER and not self.real:
            raise NotImplementedError(f"{name}_() on a tensor without data")  # where torch crashes
        index = len(self.names)
        self.watch.restart()
        region, kept = self.region(), list[Tensor]()
        with saving(kept):
            out = func(*args, **kwargs)
        watch, known = self.watch, len(self.ops)
        self.random_glue |= watch.random
        flops, touched, largest = watch.flops, sum(watch.touched), watch.largest
        self.record(index, name, args, kwargs, out, in_place(func))
        if region is not None and kept:  # an op that is no event comes after the one before
            self.saves[region] = known if len(self.events) > known else known - 0.5
        saved = self.keep(kept) if region is None else 0
        if len(self.ops) == known and (flops or touched):
            grad = any(t.requires_grad for t in tensors_in(out))
            event = Event("whole", index, name, grad=grad, memory=(watch.peak, saved), module=self.inside[-1])
            self.add_whole(event, tensors_in(out))
            self.events[-1].flops += flops
            self.events[-1].touched = (self.events[-1].touched[0] + touched, 0)
            self.events[-1].largest = max(self.events[-1].largest, largest)
        elif len(self.ops) > known:
            event, op = self.events[-1], self.ops[-1]
            event.flops, event.touched, event.largest, event.module = flops, (touched, 0), largest, self.inside[-1]
            if saved:
                parts = [replace(c, saved=int(saved * self.part(op, c))) for c in op.choices]
                self.ops[-1] = replace(op, choices=tuple(parts))
        return out

    def add_whole(self, event: Event, outputs: Sequence[Tensor]) -> None:
        """An operation on tensors that no plan shards: one op with those before it in the same module."""
        last = self.events[-1] if self.events else None
        if (
            last is None
            or any(getattr(last, what) != getattr(event, what) for what in ("kind", "module", "grad"))
            or last.region != self.region()
        ):
            self.add(Op(event.name, (), (), (Choice((), (), saved=event.memory[1]),)), event, outputs)
            return
        self.made[-1] += [{node(t)} for t in outputs]
        work, saved = max(last.memory[0], event.memory[0]), last.memory[1] + event.memory[1]
        if event.memory[0] > last.memory[0]:
            last.name = event.name
        last.memory = work, saved
        self.ops[-1] = replace(self.ops[-1], name=last.name, choices=(Choice((), (), saved=saved),))

    def part(self, op: Op, choice: Choice) -> float:
        """What one rank holds of what an op works on."""
        for v, key in zip(op.inputs + op.outputs, choice.needs + choice.gives):
            if key is not None:
                return self.values[v].local_bytes(key, self.n) / max(self.values[v].nbytes, 1)
        return 1.0

    def keep(self, kept: list[Tensor]) -> int:
        """Bytes that were not kept for backward before; parameters are there anyway."""
        fresh = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept if not isinstance(t, nn.Parameter)}
        fresh = {k: storage for k, storage in fresh.items() if k not in self.kept and k not in self.resident}
        self.kept |= fresh
        return sum(storage.nbytes() for storage in fresh.values())

    def enter_module(self, path: str, args: Any, kwargs: Any) -> None:
        if not self.in_stage:
            self.inside.append(path)
            if not self.real:
                self.entered.setdefault(path, (args, kwargs))

    def leave_module(self) -> None:
        if not self.in_stage:
            self.inside.pop()

    def is_view(self, out: Tensor, x: Tensor) -> bool:
        return self.real or memory(out) == memory(x)  # a run that is recorded cannot tell

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Any]:
        """A stage ran; what is measured of it will do for its twins."""
        self.now = {}
        return self.now

    def again(self, measured: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.now = measured

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> None:
        self.depth += 1
        if self.in_stage:
            return  # called by another stage: part of it
        self.enter_stage(stage, args, kwargs)
        self.in_stage = True
        self.now = {}
        self.keeps = False
        self.sends: dict[str | None, Sends] = {}
        self.watch.restart()
        self.saved: dict[int, torch.UntypedStorage] = {}  # alive, or another would get its address
        self.saved_hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x)
        self.saved_hooks.__enter__()

    def _save(self, t: Tensor) -> Tensor:
        self.keeps = True
        if not isinstance(t, nn.Parameter):
            storage = t.untyped_storage()
            self.saved[storage._cdata] = storage
        return t

    def enter_inside(self, inside: Inside, args: Any, kwargs: Any) -> None:
        if self.in_stage:
            _, _, sizes, options = self.pending
            for option in options:
                more = inside.sends(args, kwargs, option.name, sizes, self.n)
                self.sends[option.name] = self.sends.get(option.name, Sends()) + more
            self.watch.inside += 1

    def leave_inside(self) -> None:
        if self.in_stage:
            self.watch.inside -= 1

    def abandon(self) -> None:
        """Leave nothing behind if a stage raised."""
        if self.in_stage:
            self.saved_hooks.__exit__(None, None, None)
            self.in_stage = False

    def after_stage(self, output: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.saved_hooks.__exit__(None, None, None)
        self.in_stage = False
        region, stage = self.region(), self.pending[0]
        own = checkpointed(stage.module.__dict__.get("forward"))
        again = own or self.recompute or region is not None
        first = region is None or all(event.region != region for event in self.events)
        measured: dict[str, Any] = {
            "work": self.watch.peak,
            "largest": self.watch.largest,
            "saved": sum(storage.nbytes() for storage in self.saved.values()),
            "flops": self.watch.flops,
            "touched": tuple(self.watch.touched),
            "random": self.watch.random,
            "sends": self.sends,
            "keeps": self.keeps,
        }
        if not self.now:
            self.now.update(measured)
        measured = {**self.now}
        if (measured.pop("keeps") or (own and torch.is_grad_enabled())) and region is not None:
            self.saves[region] = len(self.events)
        if again:
            measured["saved"] = 0
        first |= own
        self.leave_stage(output, **measured, keeps_inputs=again and first and torch.is_grad_enabled())
        self.events[-1].own = own


@contextmanager
def saving(kept: list[Tensor]) -> Iterator[None]:
    """Collect what is saved for backward."""

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def trace(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n: int,
    *,
    gather_output: bool,
    dtype: torch.dtype | None = None,
    given: Mapping[str, Cut] | None = None,
    recompute: bool = False,
    twins: bool = True,
    real: bool = False,
) -> Trace:
    """Run `model` on fake copies of the inputs, shapes and dtypes only, and return what the planner has to decide.

    `given` maps parameters that arrive already sharded to their cut; with `recompute` every stage counts as one that
    keeps only its inputs for backward. With `twins` stages that are alike run once (`dsp.plan.twins`). With `real` the
    copies have their data.
    """
    fake_mode: Any = nullcontext() if real else FakeTensorMode(allow_non_fake_inputs=True)

    def fake(t: Tensor) -> Tensor:
        device = "cpu" if t.device.type == "meta" else t.device
        kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
        if real:
            new = t.detach().to(kind, copy=not isinstance(t, nn.Parameter))
        else:
            with fake_mode:
                new = torch.empty(tuple(t.shape), dtype=kind, device=device)
        if isinstance(t, nn.Parameter):
            return nn.Parameter(new, requires_grad=t.requires_grad)
        return new.requires_grad_() if t.requires_grad else new

    whole_args, whole_kwargs = args, kwargs
    fakes: dict[int, Tensor] = {}
    memo: dict[int, nn.Module] = {}
    # autocast keeps the weights it has cast, so that a call does less than one before it
    twins = twins and not real and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    groups = alike([stage.module for stage in stages], foreign) if twins else []
    first = {id(other): group[0] for group in groups for other in group[1:]}
    staged = {id(m) for stage in stages for m in stage.module.modules()}
    clone = skeleton(model, lambda t: fakes.setdefault(id(t), fake(t)), memo, first, staged)
    resident = 0
    for t in {id(t): t for t in itertools.chain(model.parameters(), model.buffers())}.values():
        kind = dtype if dtype is not None and t.is_floating_point() else t.dtype
        resident += t.numel() * kind.itemsize
    args, kwargs = pytree.tree_map_only(Tensor, fake, (args, dict(kwargs)))

    tracer = Tracer(n, sizes_of_root(model, root, args, kwargs), recompute, real)
    bound = Signature(model, root, "the model").bind(args, kwargs)[1] if root is not None else []
    tracer.root_inputs(bound, given or {})
    handles = []
    for stage in stages:
        module = memo.get(id(stage.module), stage.module)
        handles.append(module.register_forward_pre_hook(_enter(tracer, stage), with_kwargs=True))
        handles.append(module.register_forward_hook(lambda m, a, out: tracer.after_stage(out)))
        for inside in stage.inside:
            own = memo.get(id(inside.module))
            if own is not None:  # else its stage is the twin of another
                handles.append(own.register_forward_pre_hook(_inside(tracer, inside), with_kwargs=True))
                handles.append(own.register_forward_hook(lambda m, a, out: tracer.leave_inside()))
    tracer.resident = {t.untyped_storage()._cdata for t in fakes.values()}
    own_paths = {id(memo[k]): path for path, m in model.named_modules() if (k := id(m)) in memo and k not in staged}
    for module in [m for m in clone.modules() if own_paths.get(id(m))]:
        handles.append(
            module.register_forward_pre_hook(_module(tracer, clean(own_paths[id(module)])), with_kwargs=True)
        )
        handles.append(module.register_forward_hook(lambda m, a, out: tracer.leave_module()))
    before = [fingerprint(memo[id(group[0])], foreign) for group in groups]
    once([[memo[id(m)] for m in group] for group in groups], tracer.first, tracer.again)
    try:
        cuda = {t.device.index for t in fakes.values() if t.is_cuda} if real else ()
        drawn = torch.random.fork_rng(devices=cuda) if real else nullcontext()
        with drawn, fake_mode, tracer.watch, tracer, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the model has to say it says when it runs
            tracer.root_outputs(clone(*args, **kwargs), gather_output)
    finally:
        tracer.abandon()
        for handle in handles:
            handle.remove()
    if before != [fingerprint(memo[id(group[0])], foreign) for group in groups]:
        # a stage that writes to itself: what it does may depend on how often it ran
        return trace(
            model, stages, root, whole_args, whole_kwargs, n,
            gather_output=gather_output, dtype=dtype, given=given, recompute=recompute, twins=False,
        )  # fmt: skip
    found = tracer.trace(resident)
    found.recompute, found.entered = recompute, tracer.entered
    declared = {id(b.tensor) for b in bound if b.pattern is not None}
    for t in tensors_in((args, kwargs)):
        if node(t) in tracer.reached and id(t) not in declared:
            found.whole_grads.append(t.numel() * t.element_size())
    return found


def _module(tracer: Tracer, path: str) -> Any:
    return lambda module, args, kwargs: tracer.enter_module(path, args, kwargs)


def _inside(tracer: Tracer, inside: Inside) -> Any:
    return lambda module, args, kwargs: tracer.enter_inside(inside, args, kwargs)


def _enter(tracer: Tracer, stage: Stage) -> Any:
    return lambda module, args, kwargs: tracer.before_stage(stage, args, kwargs)
