"""What a step holds in memory, computed without allocating it: fake tensors go through the model."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from zoo.training.tracking import amount, size


@dataclass(frozen=True)
class Saved:
    """One tensor that a forward keeps for backward."""

    stage: str  # where; '' outside of stages
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int  # of its storage


@dataclass
class Activations:
    """What one forward keeps for backward, parameters not counted."""

    always: list[Saved]
    opened: list[Saved]  # what the largest recomputed module makes again, when backward has come to it

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
        rows = [(sum(held), f"{len(held)} x {kind}" if len(held) > 1 else kind) for kind, held in kinds.items()]
        return sorted(rows, reverse=True)[:count]


def total(saved: Iterable[Saved]) -> int:
    return sum(one.bytes for one in saved)


@dataclass
class Region:
    """The model, or a module in it that is recomputed: by storage, what it is given and what it keeps in its turn."""

    module: nn.Module
    inputs: dict[Any, Saved] = field(default_factory=dict)
    kept: dict[Any, Saved] = field(default_factory=dict)
    inside: list["Region"] = field(default_factory=list)

    def of(self, modules: Collection[nn.Module]) -> "Region":
        """The same where none but `modules` are recomputed."""
        found = Region(self.module, self.inputs, dict(self.kept))
        for region in (one.of(modules) for one in self.inside):
            if region.module in modules:
                found.inside.append(region)
            else:
                found.kept |= region.kept
                found.inside += region.inside
        return found

    def always(self) -> dict[Any, Saved]:
        """What it keeps throughout its own backward: of a module that is recomputed its inputs alone."""
        return self.kept | {key: saved for region in self.inside for key, saved in region.inputs.items()}

    def opened(self) -> dict[Any, Saved]:
        """What the largest of those modules adds to that while it is recomputed."""
        always = self.always()
        found = [region.always() | region.opened() for region in self.inside]
        added = [{key: saved for key, saved in one.items() if key not in always} for one in found]
        return max(added, key=lambda one: total(one.values()), default={})


class Keeping:
    """Follows what autograd saves, module by module."""

    def __init__(self, model: nn.Module):
        self.names = {module: name for name, module in model.named_modules()}
        self.weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self.model = Region(model)
        self.regions, self.places = [self.model], [""]
        self.alive: list[Any] = []
        self.log: list[tuple[Any, Saved]] = []  # of the stage that runs

    def save(self, tensor: Tensor) -> Tensor:
        self.note(self.regions[-1].kept, tensor)
        return tensor

    def note(self, where: dict[Any, Saved], tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.weights:
            saved = Saved(self.places[-1], tuple(tensor.shape), tensor.dtype, storage.nbytes())
            where[storage._cdata] = saved
            self.log.append((storage._cdata, saved))
            self.alive.append(storage)  # or its address would be used again

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.places.append(self.names[module])

    def leave(self, *_: Any) -> None:
        self.places.pop()

    def open(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        region = Region(module)
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and torch.is_grad_enabled():  # a pass without keeps nothing
                self.note(region.inputs, value)
        self.regions[-1].inside.append(region)
        self.regions.append(region)

    def close(self, *_: Any) -> None:
        self.regions.pop()

    # a stage like one that ran keeps the same; what was given or returned then is now what is given or returned now

    def begin(self, *_: Any) -> None:
        self.log = []

    def first(self, inputs: list[Tensor], outputs: list[Tensor]) -> list[tuple[int | None, Saved]]:
        places = {tensor.untyped_storage()._cdata: i for i, tensor in enumerate(inputs + outputs)}
        return [(places.get(key), saved) for key, saved in dict(self.log).items()]

    def again(self, log: list[tuple[int | None, Saved]], inputs: list[Tensor], outputs: list[Tensor]) -> None:
        tensors = inputs + outputs
        for place, saved in log:
            storage = None if place is None else tensors[place].untyped_storage()
            key = object() if storage is None else storage._cdata
            self.alive.append(storage)
            self.regions[-1].kept[key] = replace(saved, stage=self.places[-1])


def saved_for_backward(
    build: Callable[[], nn.Module],
    example: Callable[[nn.Module], Mapping[str, Tensor]],
    stages: Callable[[nn.Module], Sequence[nn.Module]],
    recomputed: Callable[[nn.Module], Mapping[str, Sequence[nn.Module]]],
    *,
    dtype: torch.dtype,
    once: Callable[[Sequence[nn.Module], Any, Any], None] | None = None,
) -> dict[str, Activations]:
    """The activations of a whole forward of what `build` makes, for every way to recompute some of them.

    `recomputed`: for the name of each way the modules of which backward keeps the inputs alone, and the inside of one
    at a time; one may hold others. `once(stages, first, again)` lets stages alike run once (`dsp.twins.once`).
    """
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            objective = build()
        finally:
            torch.set_default_dtype(torch.float32)
        keeping = Keeping(objective)
        staged, ways = stages(objective), recomputed(objective)
        again = dict.fromkeys(module for modules in ways.values() for module in modules)
        if once:
            once(staged, keeping.first, keeping.again)
        for module in dict.fromkeys((*again, *staged)):
            module.register_forward_pre_hook(keeping.enter, with_kwargs=True)
            module.register_forward_hook(keeping.leave)
        for module in again:
            module.register_forward_pre_hook(keeping.open, with_kwargs=True)
            module.register_forward_hook(keeping.close)
        for module in staged:
            module.register_forward_pre_hook(keeping.begin)
        with saved_tensors_hooks(keeping.save, lambda tensor: tensor):
            outputs = objective(**example(objective))
            del outputs
        found = {name: keeping.model.of(frozenset(modules)) for name, modules in ways.items()}
        return {
            name: Activations(list(model.always().values()), list(model.opened().values()))
            for name, model in found.items()
        }


def memory_table(
    model: nn.Module,
    stages: Sequence[nn.Module],
    *,
    shards: int,
    ema: bool,
    accumulation: int,
    width: int,
    activations: int,
) -> list[tuple[str, int, str]]:
    """Bytes a rank as (what, bytes, why so many). `width` is bytes a number in the computation."""
    count = sum(p.numel() for p in model.parameters())
    sizes = sorted((sum(p.numel() for p in stage.parameters()) for stage in stages), reverse=True)
    gathered = sum(sizes[:2]) + count - sum(sizes)
    rows = [
        ("parameters", count * 4 // shards, f"{amount(count)} in fp32 over {shards} ranks"),
        ("gradients", count * 4 // shards, f"in fp32 over {shards} ranks"),
        ("AdamW moments", count * 8 // shards, f"two in fp32 over {shards} ranks"),
        ("gathered weights", gathered * width, "two stages and what is outside of stages"),
        ("activations", activations, "kept for backward, this rank's share"),
    ]
    if ema:
        rows.insert(3, ("averaged weights", count * 4 // shards, f"in fp32 over {shards} ranks"))
    if accumulation > 1:
        rows.insert(2, ("accumulated gradients", count * 4, "whole, until the last micro-batch"))
    return [*rows, ("total", sum(held for _, held, _ in rows), "")]


def fitting(needs: Mapping[str, Callable[[int], int]], way: str, memory: int, sp: int) -> str:
    """Which sp fits, where a rank holds `needs[way](sp)` bytes and a device has `memory`; and what else would help.

    The ways to recompute activations stand in the order of what they keep, most first.
    """
    most = 1024
    need = needs[way]
    fits = next((n for n in (2**i for i in range(11)) if need(n) <= memory), None)
    if fits is None:
        text = f"no sp up to {most} fits {size(memory)} a device: sp={most} needs {size(need(most))}"
    else:
        text = f"the smallest sp that fits {size(memory)} a device is {fits}: {size(need(fits))}"
        text += "" if fits == sp else f"; sp={sp} needs {size(need(sp))}"
    names = list(needs)
    less = [name for name in names[names.index(way) + 1 :] if needs[name](sp) < need(sp)]
    if less:
        # the first of them with which this sp is enough: it takes the least time
        name = next((name for name in less if needs[name](sp) <= memory), less[-1])
        text += f"; train.checkpoint_activations={name} needs {size(needs[name](sp))}"
    return text
