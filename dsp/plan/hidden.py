"""The time that switches hide behind a stage which runs piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from dsp.hardware import Hardware, Link

EXCHANGE = 40  # operations that last as long as to send and receive a piece that holds nothing: 0.5 ms of a CPU


@dataclass(frozen=True)
class Phase:
    """A stage call in one phase on the busiest rank: what it computes, in how many operations, and what its switches
    send. packed: the format that each of these packs, if it does."""

    flops: float
    touched: float
    bytes: float
    operations: int = 0
    packed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlapped:
    """The switches behind a stage call, in so many pieces (1: left alone, for a `reason`)."""

    name: str
    switches: int
    phases: tuple[Phase, ...]  # forward, and backward if there is one
    pieces: int = 1
    reason: str = ""

    def more(self, hardware: Hardware, phase: Phase) -> float:
        """Seconds that pieces cost beside one: each runs every operation, is sent, and packs, by itself."""
        operations = phase.operations + EXCHANGE * self.switches
        packing = sum(hardware.packs(form, 0) for form in phase.packed)
        return (self.pieces - 1) * (operations * hardware.launch + packing)

    def costs(self, hardware: Hardware) -> float:
        """Seconds of a step likewise."""
        return sum(self.more(hardware, p) for p in self.phases)

    def alone(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step for the stage and then its switches, one after the other."""
        return self.costs(hardware) + sum(
            hardware.computing(p.flops, p.touched) + link.seconds(p.bytes, self.switches * self.pieces)
            for p in self.phases
        )

    def together(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step where each piece travels while the next one is computed, as far as cores are left for
        both."""
        found = 0.0
        for p in self.phases:
            compute = (hardware.computing(p.flops, p.touched) + self.more(hardware, p)) / self.pieces
            travel = link.seconds(p.bytes / self.pieces, self.switches)
            found += compute + (self.pieces - 1) * max(compute + hardware.busy * travel, travel) + travel
        return found

    def hides(self, hardware: Hardware, size: int) -> float:
        """Seconds of a step in which switches travel while the stage computes."""
        link = hardware.axis(size)
        return self.alone(hardware, link) - self.together(hardware, link)
