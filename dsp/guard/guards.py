"""The guards that a parallel model gets, as observers of its calls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence

from dsp.core.observed import Events, Observe, Observed
from dsp.guard.agreement import Agreement


def agree_in_calls(parallel: Observed, events: Events) -> None:
    """Compare the inputs and the weights of ranks in each call, and plans in the first one for a kind of inputs."""
    positional = list(inspect.signature(parallel.forward).parameters)
    events.ready.append(Agreement(parallel.axis, positional, parallel.model).compare)


def refuse_threads(parallel: Observed, events: Events) -> None:
    """Raise RuntimeError for a call while another one runs."""
    idle, name = threading.Lock(), type(parallel.model).__name__

    def begin() -> None:
        if not idle.acquire(blocking=False):
            raise RuntimeError(
                f"two threads call one parallelized {name} at the same time, as nn.DataParallel would: its ranks could "
                "not tell whose data they exchange. Call it from one thread, or build a model for each, on a mesh of "
                "its own"
            )

    events.begin.append(begin)
    events.over.append(idle.release)


GUARDS: Sequence[Observe] = (refuse_threads, agree_in_calls)
