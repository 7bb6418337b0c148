"""The steps to skip: those with a NaN or infinite loss or gradient, or a gradient of many times the usual norm.

The numbers of a step are copied to the host, where the run judges them, at once or one step later.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zoo.training.checkpoint import CheckpointData
from zoo.training.ranks import log0
from zoo.training.sections import Train

USUAL, FEWEST = 100, 10  # most and fewest gradient norms of taken steps that define the usual norm


class StepResult:
    """The losses of a step, averaged over all ranks, its gradient norm, and whether a rank was asked to stop.

    losses: this rank's, 0-d tensors on the device; norm: the same on every rank, 0-d; limit: a norm above it is a
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
        self.arrival = torch.cuda.Event() if self.sent.is_cuda else None
        if self.arrival is not None:
            self.arrival.record()

    @property
    def step_mask(self) -> Tensor:
        """One if the step is to be taken, zero if not; on the device."""
        *losses, _, norm = self.sent
        return (torch.isfinite(sum(losses, norm)) & (norm <= self.limit)).float()

    @cached_property
    def numbers(self) -> list[float]:
        """The numbers on the host, once the device has them."""
        if self.arrival is not None:
            self.arrival.synchronize()
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


class Diverged(Exception):
    """Too many steps in a row were skipped, or the last ones of the run; raised on every rank."""


class Snapshot(NamedTuple):
    """Weights that gave a finite loss, with the rest of their checkpoint."""

    step: int  # the last step that changed them
    data: CheckpointData
    extra: Mapping[str, Any]


def _usual(norms: Iterable[float]) -> float:
    return max(median(norms), 1e-30)


class Guard:
    """Judges a step by its loss and gradient norm, which are the same on every rank; a resumed run passes `state`."""

    def __init__(self, options: Train, state: Mapping[str, Any] | None = None):
        self.allowed, self.spike, self.every, state = options.skip, options.spike, options.sound, state or {}
        self.norms: deque[float] = deque(state.get("norms", ()), maxlen=USUAL + 1)
        self.skipped, self.in_row = int(state.get("skipped", 0)), int(state.get("in_row", 0))
        self.last_finite = int(state.get("sound", 0))  # the last step whose loss was finite: its weights work
        self.last_update = int(state.get("taken", 0))  # the last step that changed the weights
        self.snapshot: Snapshot | None = None  # a copy of weights that work

    def state(self) -> dict[str, Any]:
        """The state from which another `Guard` goes on, as JSON."""
        counts = {"skipped": self.skipped, "in_row": self.in_row, "sound": self.last_finite, "taken": self.last_update}
        return {"norms": list(self.norms), **counts}

    def limit(self, step: int, late: bool = False) -> float:
        """The gradient norm above which a step is a spike; `late`: without the norm of the step before.

        A run that takes steps before their numbers are on the host does not always know that norm.
        """
        norms = list(self.norms)[: -1 if late and self.last_update == step - 1 else None][-USUAL:]
        return self.spike * _usual(norms) if self.spike and len(norms) >= FEWEST else math.inf

    def wants_copy(self, step: int, loss: float) -> bool:
        """Tell whether to keep a copy of the weights, which gave this loss in `step`."""
        return bool(self.every) and step % self.every == 0 and self.last_update > 0 and math.isfinite(loss)

    def accept(self, result: StepResult, run: Any) -> bool:
        """Tell whether `run` takes a step. A skipped step is printed and recorded; Diverged if there were too many."""
        step = result.step
        why = self.reason(step, result.loss, result.norm, result.limit)
        if why:
            self.check(step, why, last=step == run.config.train.steps)
            log0(f"step {step} is skipped: {why}")
            if run.tracker:
                run.tracker.log(step, skipped_because=why)
        return not why

    def reason(self, step: int, loss: float, norm: float, limit: float) -> str:
        """The reason to skip a step; '' if it is taken."""
        if math.isfinite(loss):
            self.last_finite = step
        if not math.isfinite(loss + norm):
            why = f"loss {loss}, gradient norm {norm}"
        elif norm > limit:
            why = f"gradient norm {norm:.4g}, {norm * self.spike / limit:.1f} times the usual one"
        else:
            self.norms.append(norm)
            self.in_row, self.last_update = 0, step
            return ""
        self.skipped += 1
        self.in_row += 1
        return why

    def check(self, step: int, why: str, last: bool) -> None:
        """Raise Diverged if too many steps in a row were skipped, or the last ones of the run."""
        if self.in_row <= self.allowed and not last:
            return
        row = f"the last {self.in_row} steps were skipped (train.skip allows {self.allowed})"
        raise Diverged(
            f"step {step}: {why}: training diverged, and {row if self.in_row > 1 else 'this step was not taken'}. The "
            f"weights before step {self.last_finite} still gave a finite loss"
        )

    def forget(self) -> None:
        """Go back to the last step taken, and forget the steps skipped since."""
        self.skipped, self.in_row = self.skipped - self.in_row, 0
