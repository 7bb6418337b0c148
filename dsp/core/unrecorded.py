"""The reason why a forward cannot be recorded on tensors without data, in the user's terms."""

from __future__ import annotations

from dsp.core.torch_traits import op_name
from dsp.support.private import DataDependentOutputException, DynamicOutputShapeException
from dsp.support.source_lines import lines_of

UNKNOWN = (DataDependentOutputException, DynamicOutputShapeException)
SAYING = ("FakeTensor", "tensor subclasses", "Can't pickle local object")  # in errors of numpy(), format() and pickle


def reason_of(error: Exception) -> str:
    """The reason, as what the forward does or needs."""
    if place := place_of_read(error):
        return f"reads its data: {place}"
    lines = lines_of(error)
    return f"needs tensors with data: {type(error).__name__}" + (f" at {lines[-1]}" if lines else "")


def place_of_read(error: Exception) -> str:
    """The operation that asked for data, and the line of the model; "" for any other error."""
    return place_of(error) if isinstance(error, UNKNOWN) or any(x in str(error) for x in SAYING) else ""


def place_of(error: Exception) -> str:
    """The operation that raised an error, and the line of the model."""
    op, trace, lines = "an operation", error.__traceback__, lines_of(error)
    while trace is not None:
        if trace.tb_frame.f_code.co_name == "__torch_function__" and "func" in trace.tb_frame.f_locals:
            op = op_name(trace.tb_frame.f_locals["func"])[0].strip("_") + "()"
        trace = trace.tb_next
    return op + (f" at {lines[-1]}" if lines else "")
