"""The cost of the nodes of a forward, noted while it is recorded."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from dsp.core.carrier import LOCAL, Carrier
from dsp.core.meter import Meter, facts, unpack, visible
from dsp.core.record import BoundStage, Cost, Node, Record
from dsp.core.skeleton import checkpointed
from dsp.stages.methods import NO_METHODS, MethodCost, StageMethod
from dsp.stages.stage import clean
from dsp.support.private import FLEX, checkpoint_frame, compiled_callers, saving_hooks, storage_id
from dsp.support.source_lines import line_now
from dsp.support.tensors import tensors_in


class Plain(NamedTuple):
    """Functions of plain tensors that ran between two nodes, and whether one of them kept something for backward.

    parameters: they read parameters and what was made of these alone.
    """

    name: str
    module: str
    cost: Cost
    saves: bool
    parameters: bool


class Measure(Meter):
    """Notes what each node costs. Functions of plain tensors, between two nodes and in one module, become a node, too.

    methods: by path, the modules of stages that communicate themselves; recompute: each stage counts as one that keeps
    only its inputs for backward.
    """

    def __init__(
        self, record: Record, model: nn.Module, exist: Iterable[Tensor],
        methods: Sequence[tuple[str, StageMethod]] = (), recompute: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.record, self.recompute = record, recompute
        self.stage: Node | None = None  # that runs
        self.methods: dict[str | None, MethodCost] = {}
        self.loads: list[tuple[dict[str | None, float], int]] = []  # of the modules that run
        followed = set[int]()  # equal stages share modules
        for path, method in methods:
            if id(module := model.get_submodule(path)) not in followed:
                followed.add(id(module))
                module.register_forward_pre_hook(partial(self.enter, method), with_kwargs=True)
                module.register_forward_hook(self.leave)
        self.paths = {id(m): clean(path) for path, m in model.named_modules()}
        self.resident = {storage_id(t.untyped_storage()) for t in exist}
        self.weights = storages(model.parameters())  # their memory, and that of what was made of them alone
        self.between = True  # whether no node runs
        self.alone = True  # whether all that has run since the last node read these alone
        # memory kept for backward; a reference, so that ids stay valid
        self.backward_storages: dict[int, torch.UntypedStorage] = {}
        self.saved: list[Tensor] = []  # since the last restart
        self.plain: list[Plain] = []  # since the last node
        self.region: Any = None  # the activation checkpoint of the last node
        self.compiled: dict[str, None] = {}  # functions given to torch.compile that ran uncompiled
        self.reads = ""  # what reads data, and its line, if the forward does so
        self.saving = saved_tensors_hooks(self.pack, unpack)
        self.within: saved_tensors_hooks | None = None  # of a stage in an activation checkpoint
        self.attention = VisiblePairs(self)

    def __enter__(self) -> Measure:
        self.saving.__enter__()
        self.attention.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self.within is not None:  # the stage raised an error
            self.within.__exit__()
        self.attention.__exit__(*error)
        self.saving.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.between and facts(func).makes:
            operands = storages(tensors_in((args, kwargs or {})))
            self.alone &= bool(operands) and operands.keys() <= self.weights.keys()
            self.weights |= storages(tensors_in(out)) if self.alone else {}
        return out

    def pack(self, t: Tensor) -> Any:
        with LOCAL():  # a node that saves its own result, as tanh does, would hold itself for good
            alias = t if t.grad_fn is None and not isinstance(t, Carrier) else t.detach()
        if alias is not t:
            self.hand_on(t, alias)
        self.saved.append(alias)
        return alias

    def holding(self, pack: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The hook of an activation checkpoint, which lets a stage drop what it saves: a recomputation has it all."""

        @wraps(pack)  # by which the checkpoint is known
        def hold(t: Tensor) -> Any:
            self.pack(t)
            return pack(t)

        return hold

    def start(self, node: Node | None = None) -> None:
        if self.flops or any(self.touched):
            path, saved, keeps = place(self.paths), self.keep(), bool(self.saved)
            cost = Cost(self.flops, sum(self.touched), self.largest, self.peak, saved)
            self.plain.append(Plain(self.heaviest, path, cost, keeps, self.alone))
        super().start(node)
        self.saved, self.stage, self.methods, self.between = [], node, {}, False
        if node is not None and checkpoint_frame() is not None:
            pack, restore = saving_hooks(False)
            self.within = saved_tensors_hooks(self.holding(pack), restore)
            self.within.__enter__()

    def finish(self, node: Node) -> None:
        if self.within is not None:
            self.within.__exit__()
            self.within = None
        super().finish(node)
        self.saved, self.stage, self.between, self.alone = [], None, True, True

    def enter(self, method: StageMethod, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note what a module of the running stage sends, for each dim that the stage may be sharded along."""
        if self.stage is None or not isinstance(self.stage.call, BoundStage):
            return
        _, sizes, options = self.stage.call
        n = self.record.n
        for name in (option.name for option in options):
            before = self.methods.get(name, NO_METHODS)
            self.methods[name] = before._replace(sends=before.sends + method.sends(args, kwargs, name, sizes, n))
        self.loads.append(({o.name: method.load(args, kwargs, o.name, sizes, n) for o in options}, self.flops))
        self.in_methods += 1

    def leave(self, *_: Any) -> None:
        if self.stage is None:
            return
        self.in_methods -= 1
        loads, flops = self.loads.pop()
        for name, load in loads.items():
            cost = self.methods[name]
            self.methods[name] = cost._replace(surplus=cost.surplus + (load - 1) * (self.flops - flops))

    def value(self, node: Node) -> tuple[Any, Cost, dict[str | None, MethodCost]]:
        saved_bytes = self.keep()
        if node.kind == "stage":  # as if no other node had kept it: equal calls share the cost
            saved_bytes = sum(
                storage.nbytes()
                for storage in storages(t for t in self.saved if not isinstance(t, nn.Parameter)).values()
            )
        outside, in_methods = self.touched
        cost = Cost(
            self.flops, outside + in_methods, self.largest, self.peak, saved_bytes, in_methods, self.operations,
            numel=self.numel,
        )  # fmt: skip
        return super().value(node), cost, self.methods

    def write(self, node: Node, value: tuple[Any, Cost, dict[str | None, MethodCost]]) -> None:
        self.add_plain()
        super().write(node, value[0])
        frame, cost, node.methods = checkpoint_frame(), *value[1:]
        itself = isinstance(node.call, BoundStage) and checkpointed(node.call.stage.module.__dict__.get("forward"))
        itself_or_asked = itself or (node.kind == "stage" and self.recompute and torch.is_grad_enabled())
        repeats = itself_or_asked or frame is not None
        first = repeats and (itself or frame is None or frame is not self.region)
        cost = cost._replace(recomputed=repeats, restarts=first and node.kind == "stage", itself=itself_or_asked)
        node.cost = cost._replace(saved=0) if repeats else cost  # a checkpoint drops what it saves
        node.line, node.module, self.region = line_now(), "" if node.kind == "stage" else place(self.paths), frame
        self.compiled |= dict.fromkeys(compiled())

    def keep(self) -> int:
        """Bytes that are newly kept for backward; parameters exist anyway."""
        known = self.backward_storages.keys() | self.resident
        new = {k: s for k, s in storages(self.saved).items() if k not in known}
        self.backward_storages |= new
        return sum(storage.nbytes() for storage in new.values())

    def add_plain(self) -> None:
        """Add a node for the functions of plain tensors that ran in one module before this node."""
        for (module, saves), group in itertools.groupby(self.plain, lambda p: (p.module, p.saves)):
            several = [*group]
            heaviest = max(several, key=lambda p: p.cost.work)
            costs = [p.cost for p in several]
            node = Node("plain", heaviest.name, [], module=module, result_grads=(saves,))
            node.cost = Cost(
                sum(c.flops for c in costs), sum(c.touched for c in costs), max(c.largest for c in costs),
                heaviest.cost.work, sum(c.saved for c in costs), parameters=all(p.parameters for p in several),
            )  # fmt: skip
            self.record.nodes.append(node)
        self.plain = []


class VisiblePairs(TorchFunctionMode):
    """Lets a meter count the pairs of query and key that attention computes: under a causal mask, the visible ones."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.meter.part = visible(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self.meter.part = 1.0


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """The memory of tensors that have one block of it."""
    return {storage_id(t.untyped_storage()): t.untyped_storage() for t in tensors if t.layout == torch.strided}


def place(paths: dict[int, str]) -> str:
    """The path of the innermost module whose forward runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and (path := paths.get(id(frame.f_locals.get("self")))) is not None:
            return path
        frame = frame.f_back
    return ""


def compiled() -> list[str]:
    """The functions that torch.compile was given and that run uncompiled, by name; a rule compiles flex_attention."""
    named = [f for f in compiled_callers() if getattr(f, "__module__", "") != FLEX]
    return [getattr(f, "__qualname__", type(f).__name__) for f in named]
