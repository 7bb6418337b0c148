"""The activations that a forward keeps for backward, computed on fake tensors, without allocating them."""

import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import dsp
from zoo.training.model import recomputed_modules
from zoo.training.task import Task

Call = tuple[nn.Module, int]  # a module, and the number of the call among all modules' calls


@dataclass(frozen=True)
class Saved:
    """One tensor that a forward keeps for backward."""

    stage: str  # the stage that keeps it; '' outside of stages
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int  # of its storage


@dataclass
class Activations:
    """The bytes that one forward keeps for backward, without parameters."""

    always: list[Saved]
    opened: list[Saved]  # tensors that the largest recomputed module makes again in backward

    @property
    def bytes(self) -> int:
        return total(self.always) + total(self.opened)

    def largest(self, count: int) -> list[tuple[int, str]]:
        """The kinds of tensors that take most, as (bytes, '28 x [1, 64, 1024, 1152] bfloat16 in blocks.*.spatial')."""
        kinds: dict[str, list[int]] = {}
        for saved in self.always + self.opened:
            place = f"in {re.sub(r'[.][0-9]+', '.*', saved.stage)}" if saved.stage else "outside of stages"
            kind = f"{list(saved.shape)} {str(saved.dtype).removeprefix('torch.')} {place}"
            kinds.setdefault(kind, []).append(saved.bytes)
        rows = [(sum(sizes), f"{len(sizes)} x {kind}" if len(sizes) > 1 else kind) for kind, sizes in kinds.items()]
        return sorted(rows, reverse=True)[:count]


def total(saved: Iterable[Saved]) -> int:
    return sum(one.bytes for one in saved)


class Keeping:
    """The tensors that autograd saves, by storage, under the calls of `modules` that saved them, outermost first."""

    def __init__(self, model: nn.Module, modules: Collection[nn.Module]):
        self.names = {module: name for name, module in model.named_modules() if module in modules}
        self.weights: set[int] = set()
        self.calls, self.path = itertools.count(), tuple[Call, ...]()
        self.tensors: dict[tuple[Call, ...], dict[Any, Saved]] = {(): {}}
        self.inputs: dict[tuple[Call, ...], dict[Any, Saved]] = {}
        self.alive: list[Any] = []
        model.register_forward_pre_hook(self.begin)
        for module in self.names:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
            module.register_forward_hook(self.leave)

    @property
    def place(self) -> str:
        return self.names[self.path[-1][0]] if self.path else ""

    def begin(self, model: nn.Module, _: Any) -> None:
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}

    def note(self, group: dict[Any, Saved], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.weights:
            group[storage._cdata] = Saved(self.place, tuple(tensor.shape), tensor.dtype, storage.nbytes())
            self.alive.append(storage)  # else its address would be used again

    def save(self, tensor: Tensor) -> Tensor:
        self.note(self.tensors[self.path], tensor)
        return tensor if tensor.grad_fn is None else tensor.detach()  # a node that saves its own result would never go

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.path += ((module, next(self.calls)),)
        self.tensors[self.path], self.inputs[self.path] = {}, {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and torch.is_grad_enabled():  # a pass without gradients keeps nothing
                self.note(self.inputs[self.path], value)

    def leave(self, *_: Any) -> None:
        self.path = self.path[:-1]

    # a stage like one that ran keeps the same tensors, with its own inputs and outputs in place of the other's

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[tuple[int | None, Saved]]:
        places = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(inputs + outputs)}
        return [(places.get(key), saved) for key, saved in self.tensors[self.path].items()]

    def repeated(self, log: list[tuple[int | None, Saved]], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        tensors = inputs + outputs
        for place, saved in log:
            storage = None if place is None else tensors[place].untyped_storage()
            self.alive.append(storage)
            key = object() if storage is None else storage._cdata
            self.tensors[self.path][key] = replace(saved, stage=self.place)

    def where_recomputed(self, modules: Collection[nn.Module]) -> Activations:
        """The activations if only these modules' inputs are kept, and backward recomputes one module at a time."""
        groups: dict[tuple[Call, ...], dict[Any, Saved]] = {}
        for path, saved in self.tensors.items():
            groups.setdefault(tuple(call for call in path if call[0] in modules), {}).update(saved)
        for path, saved in self.inputs.items():
            *outer, inner = (*(call for call in path[:-1] if call[0] in modules), path[-1])
            if inner[0] in modules:
                groups[tuple(outer)].update(saved)

        def opened(at: tuple[Call, ...]) -> dict[Any, Saved]:
            inside = [groups[path] | opened(path) for path in groups if path and path[:-1] == at]
            added = [{key: saved for key, saved in one.items() if key not in groups[at]} for one in inside]
            return max(added, key=lambda one: total(one.values()), default={})

        return Activations(list(groups[()].values()), list(opened(()).values()))


def saved_for_backward(task: Task, dtype: torch.dtype, *, twins: bool = True) -> dict[str, Activations]:
    """The activations of a whole forward for each value of train.checkpoint_activations; `twins`: equal stages run
    once."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # some initializers read the weights
            objective: Any = task.objective(task.model())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        inputs = task.example(objective)
    ways = recomputed_modules(objective.model)
    keeping, stages = Keeping(objective, frozenset(itertools.chain(*ways.values()))), ways["stages"] if twins else ()
    with saved_tensors_hooks(keeping.save, lambda tensor: tensor):
        dsp.without_data(objective, kwargs=inputs, stages=stages, ran=keeping.first, repeated=keeping.repeated)
    return {way: keeping.where_recomputed(frozenset(modules)) for way, modules in ways.items()}
