"""The option `overlap`: the number of pieces of a switch that travels while stages compute, or hardware to decide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dsp.comm.hardware import Hardware, measured

AUTO = "auto"
MOST = 4  # pieces; with more, latency grows and hardly more is hidden
Overlap = int | Hardware | None


def overlap_of(
    given: Any, hardware: Hardware | None = None, mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32
) -> Overlap:
    """The option `overlap` as a plan takes it: a number of pieces, hardware to decide by, or None.

    given: as for `dsp.parallelize`. "auto" stands for `hardware`, or for that of `mesh`, measured on all of its ranks:
    links, and matrix products in `dtype`. Raises ValueError for other values, and for "auto" with neither of the two.
    """
    refuse_overlap(given)
    if given != AUTO:
        return given
    if hardware is None and mesh is None:
        raise ValueError(
            "overlap='auto' weighs the time that overlap hides against the cost of more calls, by the hardware: "
            "pass hardware=dsp.Hardware(...) to dsp.plan, or give a number of pieces"
        )
    return hardware if mesh is None else measured(mesh, node=mesh.size(), dtype=dtype)


def kind_of(model: nn.Module) -> torch.dtype:
    """The dtype in which a model computes: that of its first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def refuse_overlap(choice: Any) -> None:
    """Raise ValueError for a value that is no overlap option."""
    pieces = isinstance(choice, int) and not isinstance(choice, bool) and 2 <= choice <= MOST
    if not (choice is None or choice == AUTO or pieces or isinstance(choice, Hardware)):
        raise ValueError(
            f"overlap: expected None, 'auto', a number of pieces from 2 to {MOST}, or a dsp.Hardware to decide by, "
            f"got {choice!r}"
        )
