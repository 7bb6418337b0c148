"""A rank's share of one process: the elements of the tensors that a step makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dsp
from dsp.support.tensors import tensors_in


class Sizes(TorchDispatchMode):
    """Elements of every tensor an op makes, above a floor that parameters and conditioning stay below."""

    def __init__(self, floor: int) -> None:
        super().__init__()
        self.floor, self.total, self.largest = floor, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return out  # a view of what was counted
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and type(t) is Tensor and t.numel() > self.floor:
                self.total += t.numel()
                self.largest = max(self.largest, t.numel())
        return out


def shares(
    build: Callable[[], nn.Module],
    inputs: dict[str, Tensor],
    parallelize: Callable[[nn.Module], Any],
    floor: int = 0,
    backward: bool = True,
) -> tuple[float, float]:
    """The largest tensor of a step, and the elements of all, as shares of one process's."""
    found = []
    for parallel in (False, True):
        model = build()
        if parallel:
            parallelize(model)
            model(**inputs)  # planned
        with Sizes(max(floor, *(p.numel() for p in model.parameters()))) as sizes:
            loss = sum(dsp.mean(y) for y in tensors_in(model(**inputs)) if y.requires_grad)
            if backward:
                loss.backward()
        found.append(sizes)
    single, sharded = found
    return sharded.largest / single.largest, sharded.total / single.total
