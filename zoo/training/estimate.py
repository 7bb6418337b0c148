"""What a step holds in memory, computed without allocating it: fake tensors go through the model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from zoo.training.tracking import amount


def saved_for_backward(
    build: Callable[[], nn.Module],
    example: Callable[[nn.Module], Mapping[str, Tensor]],
    stages: Callable[[nn.Module], Sequence[nn.Module]],
    *,
    dtype: torch.dtype,
    checkpointed: bool,
) -> int:
    """Bytes of activations that one whole forward keeps for backward, parameters not counted.

    `checkpointed`: of every stage its inputs alone, and the inside of one stage, the largest, while it is recomputed.
    """
    with FakeTensorMode():
        torch.set_default_dtype(dtype)
        try:
            objective = build()
        finally:
            torch.set_default_dtype(torch.float32)
        weights = {p.untyped_storage()._cdata for p in objective.parameters()}
        kept: dict[int, dict[int, int]] = {}  # stage (0: none) -> storage -> bytes
        inputs: dict[int, int] = {}
        alive: list[Any] = []
        current = [0]

        def note(where: dict[int, int], tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                where[storage._cdata] = storage.nbytes()
                alive.append(storage)  # or its address would be used again

        def pack(tensor: Tensor) -> Tensor:
            note(kept.setdefault(current[-1], {}), tensor)
            return tensor

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            current.append(id(module))
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    note(inputs, value)

        for stage in stages(objective):
            stage.register_forward_pre_hook(enter, with_kwargs=True)
            stage.register_forward_hook(lambda *_: current.pop() and None)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = objective(**example(objective))
            del outputs
        if not checkpointed:
            return sum({k: v for stage in kept.values() for k, v in stage.items()}.values())
        inside = [sum(v for k, v in stage.items() if k not in inputs) for at, stage in kept.items() if at]
        return sum((inputs | kept.get(0, {}).copy()).values()) + max(inside, default=0)


def memory_table(
    model: nn.Module, stages: Sequence[nn.Module], *, shards: int, accumulation: int, width: int, activations: int
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
    if accumulation > 1:
        rows.insert(2, ("accumulated gradients", count * 4, "whole, until the last micro-batch"))
    return [*rows, ("total", sum(size for _, size, _ in rows), "")]
