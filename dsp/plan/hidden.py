"""The time that switches hide behind a stage which runs piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from dsp.hardware import Hardware, Link


@dataclass(frozen=True)
class Phase:
    """A stage call in one phase on the busiest rank: what it computes, and what its switches send."""

    flops: float
    touched: float
    bytes: float


@dataclass(frozen=True)
class Overlapped:
    """The switches behind a stage call, in so many pieces (1: left alone, for a `reason`)."""

    name: str
    switches: int
    phases: tuple[Phase, ...]  # forward, and backward if there is one
    pieces: int = 1
    reason: str = ""

    def alone(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step for the stage and then its switches, one after the other."""
        return sum(
            hardware.computing(p.flops, p.touched) + link.seconds(p.bytes, self.switches * self.pieces)
            for p in self.phases
        )

    def together(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step where each piece travels while the next one is computed."""
        found = 0.0
        for p in self.phases:
            compute = hardware.computing(p.flops, p.touched) / self.pieces
            travel = link.seconds(p.bytes / self.pieces, self.switches)
            found += compute + (self.pieces - 1) * max(compute, travel) + travel
        return found

    def hides(self, hardware: Hardware, size: int) -> float:
        """Seconds of a step in which switches travel while the stage computes."""
        link = hardware.axis(size)
        return self.alone(hardware, link) - self.together(hardware, link)
