"""A forward that reads its data, to find its way: it cannot be planned without them, but from a run it can."""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dsp.notation import NotationError, StagePattern
from dsp.plan.events import Trace
from dsp.plan.tracing import trace
from dsp.private import DataDependentOutputException, DynamicOutputShapeException
from dsp.rules import GlueError
from dsp.rules.functions import op_name
from dsp.stages import Stage
from dsp.tensors import tensors_in

READS = (DataDependentOutputException, DynamicOutputShapeException)
SAYING = ("FakeTensor", "tensor subclasses", "Can't pickle local object")  # of numpy(), of a number's format, of pickle
INSIDE = tuple(os.path.dirname(f) + os.sep for f in (torch.__file__, os.path.dirname(os.path.abspath(__file__))))


def traced(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n: int,
    **options: Any,
) -> Trace:
    """`dsp.plan.tracing.trace`, on fake tensors; where these will not do, on the inputs themselves, by one run.

    Raises ValueError for a forward that reads its data where there are none: on meta tensors.
    """
    try:
        return trace(model, stages, root, args, kwargs, n, **options)
    except (NotationError, GlueError):
        raise
    except Exception as error:
        reason = error
    where = place(reason) if isinstance(reason, READS) or any(x in str(reason) for x in SAYING) else ""
    if any(t.is_meta for t in itertools.chain(tensors_in((args, kwargs)), model.parameters(), model.buffers())):
        if not where:
            raise reason
        raise ValueError(
            f"{type(model).__name__} reads its data: {where}. Meta tensors have none: pass real inputs, small ones, to "
            "a model on a real device. One run with them is recorded, and the plan is for a forward that goes its way"
        ) from None
    found = trace(model, stages, root, args, kwargs, n, real=True, **options)
    found.reads = where or f"{type(reason).__name__} on tensors without data"
    return found


def place(error: Exception) -> str:
    """The operation that an error comes from, and the line of the model."""
    op, line = "an operation", ""
    found: TracebackType | None = error.__traceback__
    while found is not None:
        frame = found.tb_frame
        if not os.path.abspath(frame.f_code.co_filename).startswith(INSIDE):
            (own,) = traceback.extract_tb(found, 1)
            line = f" at {os.path.basename(own.filename)}:{own.lineno}" + (f", '{own.line}'" if own.line else "")
        elif frame.f_code.co_name == "__torch_function__" and "func" in frame.f_locals:
            op = op_name(frame.f_locals["func"])[0].strip("_") + "()"
        found = found.tb_next
    return op + line
