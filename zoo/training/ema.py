"""A moving average of the weights, to sample and validate with (Polyak averaging)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class MovingAverage:
    """Follows every parameter of an FSDP2 model: average <- decay average + (1 - decay) weight, after each step.

    A rank keeps the average of its own shards alone, so there is nothing to communicate.
    """

    def __init__(self, model: Any, decay: float):
        self.model, self.decay = model, decay
        self.restart()

    def restart(self) -> None:
        """Begin with the weights as they are."""
        self.values = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        average = [_local(value) for value in self.values.values()]
        torch._foreach_lerp_(average, [_local(p) for p in self.model.parameters()], 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model with the averaged weights, for as long as this lasts."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for module in self.model.modules():
            if hasattr(module, "reshard"):
                module.reshard()  # FSDP keeps what it last gathered, which is about to be out of date
        for name, p in self.model.named_parameters():
            weight, average = _local(p), _local(self.values[name])
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
