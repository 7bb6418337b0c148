"""The cost of stages and operations of a forward, measured while a recorder observes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dsp.core.equal_modules import fingerprint
from dsp.core.meter import Meter, visible
from dsp.core.skeleton import checkpointed
from dsp.layout import cut_of
from dsp.methods import CommBytes, StageMethod
from dsp.plan.places import FlexCall, refuse_places, seen
from dsp.plan.record import Cost, Measured
from dsp.plan.tracing import Tracer
from dsp.private import storage_id
from dsp.rules.flex import captured_by, flex_attention, rehearsed, unreadable
from dsp.sharded import Sharded
from dsp.stages import Stage
from dsp.tensors import map_tensors, tensors_in, version
from dsp.text import Moving
from dsp.traits import Traits, traits

LEFT = (Sharded, DTensor)  # the types of tensors that earlier calls left sharded


class MeasuringTracer(Tracer):
    """Follows a forward on fake or real tensors, and measures memory, FLOPs and randomness of its stages."""

    def __init__(self, n: int, root_sizes: Mapping[str, int], recompute: bool = False, real: bool = False) -> None:
        super().__init__(n, root_sizes, real)
        self.record.measured, self.record.random = True, False
        self.recompute = recompute
        self.now: list[Measured] = []  # of the running stage, if its twin ran before
        self.watch: Meter = Meter()
        self.kept: dict[int, torch.UntypedStorage] = {}  # memory that glue saved for backward
        self.resident: set[int] = set()  # memory of parameters and buffers
        self.inside = [""]  # paths of the running modules
        self.clones: dict[str, nn.Module] = {}  # of stages, on fake parameters
        self.twins = False  # equal stages run once: then none may write to its attributes
        self.line = Moving("plan")
        self.attended: list[FlexCall] = []  # calls of flex_attention in the stage that runs
        self.left: dict[int, tuple[Tensor, Tensor]] = {}  # id -> a tensor that an earlier call left, and its stand-in

    def in_stage(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.scaled_dot_product_attention:
            return self.attention(*args, **kwargs)
        if traits(func).decomposition is not flex_attention:
            return func(*args, **kwargs)
        self.attended.append(seen(*args, **kwargs))
        return rehearsed(*args, **kwargs)

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        self.watch.part = visible(*args, **kwargs)
        try:
            return F.scaled_dot_product_attention(*args, **kwargs)
        finally:
            self.watch.part = 1.0

    def refuse_unrunnable(self, what: Traits, args: Any, kwargs: Any) -> None:
        super().refuse_unrunnable(what, *self.standing(args, kwargs))

    def transformed(self, func: Any, args: Any, kwargs: Any) -> Any:
        made = func(*args, **kwargs)
        self.record.random |= self.watch.random
        return made

    def operation(self, func: Any, what: Traits, args: Any, kwargs: Any, types: Any) -> Any:
        args, kwargs = self.standing(args, kwargs)
        if func is flex_attention:
            self.recorder.reads(captured_by(args[3:]), unreadable())
        self.line.say(f"{self.recorder.operations} operations")
        return super().operation(func, what, args, kwargs, types)

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        own: dict[Any, Any] = {flex_attention: rehearsed, F.scaled_dot_product_attention: self.attention}
        self.watch.restart()
        self.kept_by_call = list[Tensor]()
        with saving(self.kept_by_call, self.watch.hand_on):
            return super().called(own.get(func, func), args, kwargs)

    def cost(self) -> Cost:
        """The cost of the operation that ran last."""
        watch, apart, kept = self.watch, self.recorder.region() is None, self.kept_by_call
        self.record.random |= watch.random
        saved = self.keep(kept) if apart else 0  # a checkpoint drops what it saves
        return Cost(watch.flops, sum(watch.touched), watch.largest, watch.peak, saved, bool(kept))

    def standing(self, args: Any, kwargs: Any) -> Any:
        """The same arguments, with a fake tensor in place of each sharded one that an earlier call left in a cache."""
        tensors = () if self.record.data else tensors_in((args, kwargs))
        if not any(isinstance(t, LEFT) for t in tensors):
            return args, kwargs
        return map_tensors((args, kwargs), [self.stand_in(t) if isinstance(t, LEFT) else t for t in tensors])

    def stand_in(self, t: Sharded | DTensor) -> Tensor:
        if id(t) not in self.left:
            if (cut := t.at.cut if isinstance(t, Sharded) else cut_of(t.placements[0])) is None:
                return t
            made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            self.left[id(t)] = t, made.requires_grad_(t.requires_grad)
            self.recorder.left(made, cut)
        return self.left[id(t)][1]

    def keep(self, kept: list[Tensor]) -> int:
        """Bytes that are newly kept for backward; parameters exist anyway."""
        fresh = {k: s for k, s in storages(kept).items() if k not in self.kept and k not in self.resident}
        self.kept |= fresh
        return sum(storage.nbytes() for storage in fresh.values())

    def enter_module(self, path: str, args: Any, kwargs: Any) -> None:
        if not self.asleep:
            self.inside.append(path)
            self.recorder.module = path

    def leave_module(self) -> None:
        if not self.asleep:
            self.inside.pop()
            self.recorder.module = self.inside[-1]

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[Measured]:
        """Note that a stage ran; its measurements serve its twins."""
        self.now = []
        return self.now

    def again(self, measured: list[Measured], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.now = measured

    def before_stage(self, stage: Stage, args: Any, kwargs: Any) -> Any:
        if self.asleep:
            return super().before_stage(stage, args, kwargs)
        given = super().before_stage(stage, *self.standing(args, kwargs))
        self.now, self.attended, self.before = [], [], self.state_of(stage)
        self.sends: dict[str | None, CommBytes] = {}
        self.surplus: dict[str | None, float] = {}
        self.loads: list[tuple[dict[str | None, float], int]] = []
        self.watch.restart()
        self.saved: list[Tensor] = []
        self.saving = saving(self.saved, self.watch.hand_on)
        self.saving.__enter__()
        return given

    def state_of(self, stage: Stage) -> Any:
        """A state that shows, by comparison, whether a stage wrote to tensors or attributes of its modules."""
        clone = self.clones[stage.name]
        return [(id(b), version(b)) for b in clone.buffers()], None if self.twins else fingerprint(clone)

    def look_at_places(self) -> None:
        """Refuse flex_attention in the stage that ran if it reads positions that differ on a shard."""
        node, stage, *_ = self.recorder.pending
        options = node.options
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
            node = self.recorder.pending[0]
            for option in node.options:
                more = inside.sends(args, kwargs, option.name, node.sizes, self.n)
                self.sends[option.name] = self.sends.get(option.name, CommBytes()) + more
            loads = {o.name: inside.load(args, kwargs, o.name, node.sizes, self.n) for o in node.options}
            self.loads.append((loads, self.watch.flops))
            self.watch.inside += 1

    def leave_inside(self) -> None:
        if self.asleep:
            self.watch.inside -= 1
            loads, before = self.loads.pop()
            for name, load in loads.items():
                self.surplus[name] = self.surplus.get(name, 0.0) + (load - 1) * (self.watch.flops - before)

    def abandon(self) -> None:
        if self.asleep:
            self.saving.__exit__(None, None, None)
        super().abandon()

    def after_stage(self, output: Any) -> Any:
        if self.depth == 1:
            self.saving.__exit__(None, None, None)
        return super().after_stage(output)

    def leave(self, output: Any) -> None:
        region, stage = self.recorder.region(), self.recorder.pending[1]
        own = checkpointed(stage.module.__dict__.get("forward"))
        again = own or self.recompute or region is not None
        if not self.now:
            saved = sum(storage.nbytes() for storage in storages(self.saved).values())
            watch, (outside, inside) = self.watch, self.watch.touched
            found = watch.peak, saved, watch.flops, (outside, inside), watch.random, watch.largest
            writes = self.before != self.state_of(stage)
            self.now.append(Measured(*found, bool(self.saved), self.sends, self.surplus, writes, watch.operations))
        [measured] = self.now
        graded = torch.is_grad_enabled()
        saves = measured.keeps or (own and graded)
        if again:
            measured = replace(measured, saved=0)
        if self.attended and not stage.inside and stage.around is None:
            self.look_at_places()
        self.recorder.leave_stage(output, measured, own, again and graded, saves)


def storages(kept: list[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of kept tensors, without parameters."""
    return {storage_id(t.untyped_storage()): t.untyped_storage() for t in kept if not isinstance(t, nn.Parameter)}


@contextmanager
def saving(kept: list[Tensor], hand_on: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Collect the tensors that are saved for backward."""

    def pack(t: Tensor) -> Tensor:
        # a node that saves its own result, as tanh does, would hold itself for good, through this function too
        kept.append(t if t.grad_fn is None else t.detach())
        if kept[-1] is not t:
            hand_on(t, kept[-1])
        return kept[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield
