"""The numbers of a step, on their way to the host: the run judges them there, at once or one step later."""

from collections.abc import Mapping
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor


class Outcome:
    """The losses of a step, averaged over all ranks, its gradient norm, and whether a rank was asked to stop.

    losses: of this rank, 0-d tensors on the device; norm: the same on every rank, 0-d; limit: a norm above it is a
    spike. Nothing here waits for the device until `numbers` is read. Collective.
    """

    def __init__(
        self, step: int, lr: float, losses: Mapping[str, Tensor], norm: Tensor, limit: float, stop: bool
    ) -> None:
        self.step, self.lr, self.limit, self.names = step, lr, limit, list(losses)
        first = next(iter(losses.values()))
        sums = torch.stack([*(v.double() / dist.get_world_size() for v in losses.values()), first.new_full((), stop)])
        dist.all_reduce(sums)
        self.sent = torch.cat([sums, norm.to(sums)[None]])
        self.host = self.sent.to("cpu", non_blocking=True)
        self.there = torch.cuda.Event() if self.sent.is_cuda else None
        if self.there is not None:
            self.there.record()

    @property
    def taken(self) -> Tensor:
        """One if the step is to be taken, zero if not: on the device, where the numbers are."""
        *losses, _, norm = self.sent
        return (torch.isfinite(sum(losses, norm)) & (norm <= self.limit)).float()

    @cached_property
    def numbers(self) -> list[float]:
        """The numbers on the host, once the device has them."""
        if self.there is not None:
            self.there.synchronize()
        return self.host.tolist()

    @property
    def losses(self) -> dict[str, float]:
        return dict(zip(self.names, self.numbers))

    @property
    def loss(self) -> float:
        return sum(self.losses.values())

    @property
    def norm(self) -> float:
        return self.numbers[-1]

    @property
    def stopping(self) -> bool:
        return bool(self.numbers[-2])
