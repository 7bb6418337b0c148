"""What a step holds in memory, computed without allocating it: fake tensors go through the model."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    opened: list[Saved]  # the inside of the largest stage, while it is recomputed

    @property
    def bytes(self) -> int:
        return sum(saved.bytes for saved in self.always + self.opened)

    def largest(self, count: int) -> list[tuple[int, str]]:
        """The kinds of tensors that take most, as (bytes, '28 x [1, 64, 1024, 1152] bfloat16 in blocks.*.spatial')."""
        kinds: dict[str, list[int]] = {}
        for saved in self.always + self.opened:
            place = f"in {re.sub(r'[.][0-9]+', '.*', saved.stage)}" if saved.stage else "outside of stages"
            kind = f"{list(saved.shape)} {str(saved.dtype).removeprefix('torch.')} {place}"
            kinds.setdefault(kind, []).append(saved.bytes)
        rows = [(sum(held), f"{len(held)} x {kind}" if len(held) > 1 else kind) for kind, held in kinds.items()]
        return sorted(rows, reverse=True)[:count]


def saved_for_backward(
    build: Callable[[], nn.Module],
    example: Callable[[nn.Module], Mapping[str, Tensor]],
    stages: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    dtype: torch.dtype,
    checkpointed: bool,
) -> Activations:
    """The activations of a whole forward. `checkpointed`: of every stage its inputs alone, and the inside of one."""
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            objective = build()
        finally:
            torch.set_default_dtype(torch.float32)
        names = {module: name for name, module in objective.named_modules()}
        weights = {p.untyped_storage()._cdata for p in objective.parameters()}
        kept: dict[str, dict[int, Saved]] = {"": {}}  # stage -> storage -> what it holds
        inputs: dict[int, Saved] = {}
        alive: list[Any] = []
        current = [""]

        def note(where: dict[int, Saved], tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                where[storage._cdata] = Saved(current[-1], tuple(tensor.shape), tensor.dtype, storage.nbytes())
                alive.append(storage)  # or its address would be used again

        def pack(tensor: Tensor) -> Tensor:
            note(kept.setdefault(current[-1], {}), tensor)
            return tensor

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            current.append(names[module])
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor) and torch.is_grad_enabled():  # a pass without keeps nothing
                    note(inputs, value)

        for stage in stages(objective):
            stage.register_forward_pre_hook(enter, with_kwargs=True)
            stage.register_forward_hook(lambda *_: current.pop() and None)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = objective(**example(objective))
            del outputs
        if not checkpointed:
            return Activations(list({k: v for stage in kept.values() for k, v in stage.items()}.values()), [])
        outside = kept.pop("")
        inside = [[v for k, v in stage.items() if k not in inputs] for stage in kept.values()]
        largest = max(inside, key=lambda stage: sum(saved.bytes for saved in stage), default=[])
        return Activations(list((inputs | outside).values()), largest)


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


def advice(total: Callable[[int], int], memory: int, sp: int, checkpointed: bool) -> str:
    """Which sp fits, where a rank holds `total(sp)` bytes and a device has `memory`."""
    most = 1024
    fits = next((n for n in (2**i for i in range(11)) if total(n) <= memory), None)
    if fits is None:
        text = f"no sp up to {most} fits {size(memory)} a device: sp={most} needs {size(total(most))}"
    else:
        text = f"the smallest sp that fits {size(memory)} a device is {fits}: {size(total(fits))}"
        text += "" if fits == sp else f"; sp={sp} needs {size(total(sp))}"
    return text if checkpointed else text + "; train.checkpoint_activations=true keeps less"
