"""Follows a forward on fake tensors: records its stages and glue, and measures what they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.layout import cut_of
from dsp.methods import CommBytes, StageMethod
from dsp.plan.events import Event
from dsp.plan.meter import Meter
from dsp.plan.places import FlexCall, refuse_places, seen
from dsp.plan.recorder import Measured, Recorder, Saver
from dsp.plan.skeleton import checkpointed
from dsp.planner import Choice, Op
from dsp.private import storage_id
from dsp.rules import tensor_args
from dsp.rules.between import Between
from dsp.rules.flex import flex_attention, refuse_reading, rehearsed
from dsp.rules.functions import BY_NUMBER, Traits, traits
from dsp.rules.sources import FILLED
from dsp.sharded import Sharded, laid_out
from dsp.stages import Stage
from dsp.tensors import edge, map_tensors, tensors_in
from dsp.text import Moving

LEFT = (Sharded, DTensor)  # by earlier calls
SHORT = 8  # times that a rank's share of the longest tensor is longer than what may run whole from the start


class Longer(BaseException):
    """A tensor is so long that others before it are short: they may run whole. No model may catch this."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


class Tracer(Recorder, Between):
    """Records a forward on fake tensors, and measures memory, FLOPs and randomness of its stages on the way."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], recompute: bool = False, real: bool = False) -> None:
        super().__init__(n, root_sizes)
        self.recompute, self.real = recompute, real
        self.savers: list[Saver] = []
        self.restarts = False
        self.now: list[Measured] = []  # of the stage that runs, if its twin ran before
        self.depth = 0
        self.watch = Meter()
        self.kept: dict[int, torch.UntypedStorage] = {}  # what glue saved for backward
        self.resident: set[int] = set()  # memory of parameters and buffers
        self.inside = [""]  # the modules that run now
        self.entered: dict[str, tuple[Any, Any]] = {}
        self.clones: dict[str, nn.Module] = {}  # of stages, on fake parameters
        self.line = Moving("plan")
        self.attended: list[FlexCall] = []  # calls of flex_attention in the stage that runs
        self.left: dict[int, tuple[Tensor, Tensor]] = {}  # by id: what earlier calls left, and what stands for it

    def in_stage(self, func: Any, args: Any, kwargs: Any) -> Any:
        if traits(func).decomposition is not flex_attention:
            return func(*args, **kwargs)
        self.attended.append(seen(*args, **kwargs))
        return rehearsed(*args, **kwargs)

    def refuse_unrunnable(self, what: Traits, args: Any, kwargs: Any) -> None:
        if not self.real and any(isinstance(t, LEFT) for t in tensor_args(args, kwargs)):
            args, kwargs = self.standing((args, kwargs))
        super().refuse_unrunnable(what, args, kwargs)

    def transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self.random_glue |= self.watch.random
        return made

    def metadata(self, func: Any, what: Traits, args: Any, kwargs: Any) -> Any:
        if what.name in ("stride", "is_contiguous") and args and hasattr(args[0], "_dsp_sym"):
            return laid_out(args[0].shape, what.name, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        name = what.name
        if not self.real and any(isinstance(t, LEFT) for t in tensor_args(args, kwargs)):
            args, kwargs = self.standing((args, kwargs))
        if name in BY_NUMBER and not self.real:
            raise NotImplementedError(f"{name}_() on a tensor without data")  # where torch crashes
        call: Any = func
        if func is flex_attention:
            call = rehearsed
            refuse_reading(args[3:], self.sharded)
        index = len(self.names)
        self.line.say(f"{index} operations")
        self.watch.restart()
        region, kept = self.region(), list[Tensor]()
        with saving(kept):
            out = call(*args, **kwargs)
        watch, before = self.watch, len(self.ops)
        self.random_glue |= watch.random
        flops, touched, largest = watch.flops, sum(watch.touched), watch.largest
        self.record(index, name, args, kwargs, out, what.in_place)
        if region is not None and kept:  # an op that is no event comes after the one before
            own = len(self.events) > before
            ends = None if own or what.in_place else {edge(t) for t in tensors_in(out)}
            self.savers.append(Saver(region, before, own, ends))
        saved = self.keep(kept) if region is None else 0
        if len(self.ops) == before and (flops or touched):
            grad = any(t.requires_grad for t in tensors_in(out))
            event = Event("whole", index, name, grad=grad, memory=(watch.peak, saved), module=self.inside[-1])
            event.flops, event.touched, event.largest = flops, (touched, 0), largest
            if name in FILLED:  # perhaps, if nothing sharded is written into them
                out._dsp_fresh.alone = partial(self.add_whole, event, [out])
            else:
                self.add_whole(event, tensors_in(out))
        elif len(self.ops) > before:
            event, op = self.events[-1], self.ops[-1]
            event.flops, event.touched, event.module = flops, (touched, 0), self.inside[-1]
            event.largest = max(event.largest, largest)
            if saved:
                parts = [replace(c, saved=int(saved * op.share(c, self.values, self.n))) for c in op.choices]
                self.ops[-1] = replace(op, choices=tuple(parts))
        return out

    def standing(self, value: Any) -> Any:
        """The same arguments with a tensor without data for each sharded one that an earlier call left, in a cache."""
        return map_tensors(value, [self.stand_in(t) if isinstance(t, LEFT) else t for t in tensors_in(value)])

    def stand_in(self, t: Sharded | DTensor) -> Tensor:
        if id(t) not in self.left:
            if (cut := t.at.cut if isinstance(t, Sharded) else cut_of(t.placements[0])) is None:
                return t
            made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            self.left[id(t)] = t, made.requires_grad_(t.requires_grad)
            self.kept_value(made, cut)
        return self.left[id(t)][1]

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
        self.made[-1] += [{edge(t)} for t in outputs]
        last.flops, last.largest = last.flops + event.flops, max(last.largest, event.largest)
        last.touched = (last.touched[0] + event.touched[0], 0)
        work, saved = max(last.memory[0], event.memory[0]), last.memory[1] + event.memory[1]
        if event.memory[0] > last.memory[0]:
            last.name = event.name
        last.memory = work, saved
        self.ops[-1] = replace(self.ops[-1], name=last.name, choices=(Choice((), (), saved=saved),))

    def grow(self, nbytes: int) -> None:
        super().grow(nbytes)
        if self.restarts and SHORT * self.n * self.held <= self.longest:
            raise Longer(self.longest)

    def keep(self, kept: list[Tensor]) -> int:
        """Bytes that were not kept for backward before; parameters are there anyway."""
        fresh = {k: s for k, s in storages(kept).items() if k not in self.kept and k not in self.resident}
        self.kept |= fresh
        return sum(storage.nbytes() for storage in fresh.values())

    def enter_module(self, path: str, args: Any, kwargs: Any) -> None:
        if not self.asleep:
            self.inside.append(path)
            if not self.real:
                self.entered.setdefault(path, (args, kwargs))

    def leave_module(self) -> None:
        if not self.asleep:
            self.inside.pop()

    def is_view(self, out: Tensor, x: Tensor, viewed: bool) -> bool:
        return super().is_view(out, x, viewed and self.real)  # a run that is recorded cannot tell

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[Measured]:
        """A stage ran; what is measured of it will do for its twins."""
        self.now = []
        return self.now

    def again(self, measured: list[Measured], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.now = measured

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> Any:
        self.depth += 1
        if self.asleep:
            return None  # called by another stage: part of it
        if any(isinstance(t, LEFT) for t in tensors_in((args, kwargs))):
            args, kwargs = self.standing((args, kwargs))
        self.enter_stage(stage, args, kwargs)
        self.asleep, self.given = True, (args, kwargs)
        self.now, self.attended = [], []
        self.sends: dict[str | None, CommBytes] = {}
        self.watch.restart()
        self.saved: list[Tensor] = []
        self.saving = saving(self.saved)
        self.saving.__enter__()
        return args, kwargs

    def look_at_places(self) -> None:
        """Refuse flex_attention in the stage that ran if it reads places that are others on a part."""
        stage, _, _, options = self.pending
        now, whole = self.now, self.attended

        def run(args: Any, kwargs: Any) -> list[FlexCall]:
            self.attended = []
            with torch.no_grad():
                self.clones[stage.name].forward(*args, **kwargs)
            return self.attended

        self.asleep, self.depth = True, 1
        try:
            refuse_places(stage, *self.given, options, whole, run)
        finally:
            self.asleep, self.depth, self.now = False, 0, now

    def enter_inside(self, inside: StageMethod, args: Any, kwargs: Any) -> None:
        if self.asleep:
            _, _, sizes, options = self.pending
            for option in options:
                more = inside.sends(args, kwargs, option.name, sizes, self.n)
                self.sends[option.name] = self.sends.get(option.name, CommBytes()) + more
            self.watch.inside += 1

    def leave_inside(self) -> None:
        if self.asleep:
            self.watch.inside -= 1

    def abandon(self) -> None:
        """Leave nothing behind if a stage raised."""
        if self.asleep:
            self.saving.__exit__(None, None, None)
            self.asleep = False

    def after_stage(self, output: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.saving.__exit__(None, None, None)
        self.asleep = False
        region, stage = self.region(), self.pending[0]
        own = checkpointed(stage.module.__dict__.get("forward"))
        again = own or self.recompute or region is not None
        first = region is None or all(event.region != region for event in self.events)
        if not self.now:
            saved = sum(storage.nbytes() for storage in storages(self.saved).values())
            watch, (outside, inside) = self.watch, self.watch.touched
            found = watch.peak, saved, watch.flops, (outside, inside), watch.random, watch.largest
            self.now.append(Measured(*found, bool(self.saved), self.sends))
        [measured] = self.now
        if (measured.keeps or (own and torch.is_grad_enabled())) and region is not None:
            self.savers.append(Saver(region, len(self.events), True))
        if again:
            measured = replace(measured, saved=0)
        if self.attended and not stage.inside and stage.around is None:
            self.look_at_places()
        del self.given
        self.leave_stage(output, measured, keeps_inputs=again and (first or own) and torch.is_grad_enabled())
        self.events[-1].own = own


def storages(kept: list[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of what is kept, but for parameters."""
    return {storage_id(t.untyped_storage()): t.untyped_storage() for t in kept if not isinstance(t, nn.Parameter)}


@contextmanager
def saving(kept: list[Tensor]) -> Iterator[None]:
    """Collect what is saved for backward."""

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield
