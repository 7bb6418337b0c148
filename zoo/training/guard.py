"""Which steps are taken: none whose loss or gradient is no number, none whose gradient is many times the usual one."""

import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from zoo.training import UserError
from zoo.training.checkpoint import found
from zoo.training.ranks import say
from zoo.training.sections import Train

USUAL, FEWEST = 100, 10  # gradient norms of steps taken that say what is usual, at most and at least


class Guard:
    """Judges a step by its loss and gradient norm, which every rank has alike; a resumed run goes on judging so."""

    def __init__(self, options: Train, state: Mapping[str, Any] | None = None):
        self.allowed, self.spike, state = options.skip, options.spike, state or {}
        self.norms: deque[float] = deque(state.get("norms", ()), maxlen=USUAL)
        self.skipped, self.in_row = int(state.get("skipped", 0)), int(state.get("in_row", 0))
        self.sound = int(state.get("sound", 0))  # the last step whose loss was finite: its weights are known to work

    def state(self) -> dict[str, Any]:
        """What `Guard` takes up again, as JSON."""
        return {"norms": list(self.norms), "skipped": self.skipped, "in_row": self.in_row, "sound": self.sound}

    def takes(self, step: int, loss: float, norm: float, run: Any) -> bool:
        """Whether `run` takes a step. What is skipped is said and recorded; a UserError if it were too many."""
        why = self.reason(step, loss, norm)
        if why:
            self.check(step, why, run.directory / "checkpoints", last=step == run.config.train.steps)
            say(f"step {step} is skipped: {why}")
            if run.tracker:
                run.tracker.log(step, skipped_because=why)
        return not why

    def reason(self, step: int, loss: float, norm: float) -> str:
        """Why a step is not to be taken; '' if it is."""
        if math.isfinite(loss):
            self.sound = step
        if not math.isfinite(loss + norm):
            why = f"loss {loss}, gradient norm {norm}"
        elif 0 < self.spike < self._times(norm):
            why = f"gradient norm {norm:.4g}, {self._times(norm):.1f} times the usual one"
        else:
            self.norms.append(norm)
            self.in_row = 0
            return ""
        self.skipped += 1
        self.in_row += 1
        return why

    def _times(self, norm: float) -> float:
        return norm / max(median(self.norms), 1e-30) if len(self.norms) >= FEWEST else 0.0

    def check(self, step: int, why: str, checkpoints: Path, last: bool) -> None:
        """A UserError if too many steps in a row were skipped, or the last ones of the run."""
        if self.in_row <= self.allowed and not last:
            return
        sound = [path for at, path in found(checkpoints) if at < self.sound]
        row = f"the last {self.in_row} steps were skipped (train.skip={self.allowed} may be)"
        where = f"; the last checkpoint known to be sound is {sound[-1]}" if sound else ""
        raise UserError(
            f"step {step}: {why}: training diverged, and {row if self.in_row > 1 else 'this step was not taken'}. The "
            f"weights before step {self.sound} still gave a finite loss; checkpoints are in {checkpoints}{where}. A "
            "lower optim.lr or a longer optim.warmup may help"
        )
