"""The choice among plans by the seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence

from dsp.comm.wire import Wire

WORTH = 0.03  # the share of a step that fewer bits have to save


def shortest(steps: Sequence[tuple[Wire, float]]) -> int:
    """The index of the shortest step; exact ones come first, and fewer bits must save the share WORTH to win."""
    best = 0
    for at, (wire, seconds) in enumerate(steps):
        worth = WORTH if wire != steps[best][0] else 0.0
        if seconds < (1 - worth) * steps[best][1]:
            best = at
    return best
