"""Switches of tensors that are sent ahead: the forward goes on, and waits for a tensor where it is first read."""

from __future__ import annotations

from torch import Tensor

from dsp.comm.layout import Axis
from dsp.comm.moves import Part, switch_all
from dsp.comm.pending import ahead
from dsp.core.record import Record
from dsp.support.private import _get_current_dispatch_mode, saving_hooks
from dsp.support.tensors import memory


def send_ahead(record: Record, parts: list[Part], axis: Axis) -> list[Tensor]:
    """Make switches of a forward, ahead if they may run while the forward goes on.

    Inside a checkpoint they may not: its recomputation may end before they arrive; nor where a mode looks at numbers.
    Small tensors share a call at once.
    """
    simple = all(p.simple and not p.small(axis.size) for p in parts)
    looked_at = saving_hooks(False) is not None or _get_current_dispatch_mode() is not None
    if record.compiled or looked_at or not simple:
        return switch_all(parts, axis)
    return [launch(record, part, axis) for part in parts]


def launch(record: Record, part: Part, axis: Axis) -> Tensor:
    """Start to switch a part, which must not be written meanwhile; its numbers may be read once they have arrived."""
    result, arrived = ahead(*part.opened(axis), axis.switching, *(part.pieces or ()), wire=axis.wire)
    record.in_flight[memory(result)] = arrived
    return result
