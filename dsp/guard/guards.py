"""The guards that a parallel model gets, as observers of its calls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from functools import partial

from dsp.core.observed import Events, Observe, Observed
from dsp.guard.advice import advise_on_plans
from dsp.guard.agreement import Agreement
from dsp.guard.notes import explain_errors
from dsp.guard.traffic import TrafficGuard


def compare_calls(parallel: Observed, events: Events) -> None:
    """Compare the inputs and the weights of ranks in each call, and plans in the first one for a kind of inputs; and
    what a call sends with its plan."""
    positional = list(inspect.signature(parallel.forward).parameters)
    agreement = Agreement(parallel.axis, positional, parallel.model)
    counted = not any(stage.around for stage in parallel.stages)  # the plan covers all traffic of a call
    events.ready.append(partial(agreement.compare, ahead=counted))
    if counted:
        # on CPU the answer has arrived by the end of the first stage, and a check there avoids a deadlock
        before = agreement.finish if agreement.device == "cpu" else lambda: None
        TrafficGuard(parallel.axis, before).attach(events)


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


GUARDS: Sequence[Observe] = (refuse_threads, compare_calls, advise_on_plans, explain_errors)
