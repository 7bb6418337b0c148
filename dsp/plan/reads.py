"""A forward that branches on its data: it is planned from a run on real tensors, not on fake ones."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import nn

from dsp.calls import GlueError
from dsp.lines import lines_of
from dsp.notation import NotationError, StagePattern
from dsp.plan.events import Trace
from dsp.plan.rehearsal import trace
from dsp.private import DataDependentOutputException, DynamicOutputShapeException
from dsp.stages import Stage
from dsp.tensors import tensors_in
from dsp.traits import op_name

READS = (DataDependentOutputException, DynamicOutputShapeException)
SAYING = ("FakeTensor", "tensor subclasses", "Can't pickle local object")  # in errors of numpy(), format() and pickle


def traced(
    model: nn.Module,
    stages: list[Stage],
    root: StagePattern | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n: int,
    **options: Any,
) -> Trace:
    """`dsp.plan.rehearsal.trace` on fake tensors; if the forward fails on these, on the inputs themselves, by one run.

    Raises ValueError for a forward that reads its data when its tensors are meta tensors.
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
            if hasattr(reason, "add_note"):  # since Python 3.11
                reason.add_note(
                    f"dsp: {type(model).__name__} was planned on tensors without data (of a subclass of torch.Tensor), "
                    "since meta tensors have none. If its code asks for the exact type, or for data, pass real inputs"
                )
            raise reason
        raise ValueError(
            f"the forward of {type(model).__name__} depends on the values of tensors: {where}. Meta tensors have "
            "none: pass real inputs, small ones, to a model on a real device. dsp then records one forward, and "
            "plans for forwards that take the same branches"
        ) from None
    found = trace(model, stages, root, args, kwargs, n, real=True, **options)
    found.reads = f"reads its data: {where}" if where else f"needs tensors with data: {failed(reason)}"
    return found


def failed(error: Exception) -> str:
    """The type of an error, and the line of the model that raised it."""
    lines = lines_of(error)
    return type(error).__name__ + (f" at {lines[-1]}" if lines else "")


def place(error: Exception) -> str:
    """The operation that raised an error, and the line of the model."""
    op, found = "an operation", error.__traceback__
    while found is not None:
        if found.tb_frame.f_code.co_name == "__torch_function__" and "func" in found.tb_frame.f_locals:
            op = op_name(found.tb_frame.f_locals["func"])[0].strip("_") + "()"
        found = found.tb_next
    lines = lines_of(error)
    return op + (f" at {lines[-1]}" if lines else "")
