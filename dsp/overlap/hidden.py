"""The time of switches that is hidden behind a stage that runs piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

from dsp.comm.hardware import Hardware, Link

EXCHANGE = 40  # operations that take as long as an exchange of an empty piece: 0.5 ms of a CPU


@dataclass(frozen=True)
class Phase:
    """A stage call in one phase on the busiest rank: what it computes, its number of operations, and what its switches
    send. packed: the format of each switch that is packed."""

    flops: float
    touched: float
    bytes: float
    operations: int = 0
    packed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Overlapped:
    """The switches behind a stage call, and the number of pieces (1: not cut, for a `reason`)."""

    name: str
    switches: int
    phases: tuple[Phase, ...]  # forward, and backward if there is one
    pieces: int = 1
    reason: str = ""

    def more(self, hardware: Hardware, phase: Phase) -> float:
        """Seconds that pieces cost more than one: each runs every operation, is sent, and is packed on its own."""
        operations = phase.operations + EXCHANGE * self.switches
        packing = sum(hardware.packs(form, 0) for form in phase.packed)
        return (self.pieces - 1) * (operations * hardware.launch + packing)

    def costs(self, hardware: Hardware) -> float:
        """The same seconds for a step."""
        return sum(self.more(hardware, p) for p in self.phases)

    def alone(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step in which the switches run after the stage."""
        return self.costs(hardware) + sum(
            hardware.computing(p.flops, p.touched) + link.seconds(p.bytes, self.switches * self.pieces)
            for p in self.phases
        )

    def together(self, hardware: Hardware, link: Link) -> float:
        """Seconds of a step in which each piece travels while the next is computed, as far as cores are free for
        both."""
        total = 0.0
        for p in self.phases:
            compute = (hardware.computing(p.flops, p.touched) + self.more(hardware, p)) / self.pieces
            travel = link.seconds(p.bytes / self.pieces, self.switches)
            beside = hardware.busy * link.seconds(p.bytes / self.pieces, 0)  # latency takes nothing from a core
            total += compute + (self.pieces - 1) * max(compute + beside, travel) + travel
        return total

    def hides(self, hardware: Hardware, size: int) -> float:
        """Seconds of a step that are saved because switches travel while the stage computes."""
        link = hardware.axis(size)
        return self.alone(hardware, link) - self.together(hardware, link)
