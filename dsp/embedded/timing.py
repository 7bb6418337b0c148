"""The choice of method and mesh: time and memory of a training step, by method, for every dp x sp of some ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from dsp.comm.hardware import Estimate, Hardware, all_reduced, clock, fully_sharded
from dsp.embedded.method import METHODS
from dsp.report.table import Plan
from dsp.support.formatting import aligned, human, number_of


@dataclass(frozen=True)
class Timing:
    """A training step by a method on dp x sp ranks. held: bytes of a rank's memory; tokens: of all ranks; plan: that of
    its sequence parallelism."""

    method: str
    dp: int
    sp: int
    seconds: Estimate
    held: int
    tokens: int
    plan: Plan

    @property
    def rate(self) -> float:
        """Tokens a second, of all ranks."""
        return self.tokens / self.seconds.step


@dataclass
class Steps:
    """The time of a step on some hardware, by method and mesh; computed from plans, on one process.

    plan: a function of (method, sp) that returns a plan, or raises ValueError if the method cannot run on sp ranks.
    held: bytes a rank, a function of (plan, number of groups over which the weights are sharded beside sp, sp).
    parameters: number of parameters; FSDP gathers them in `groups` calls, in `dtype`, and averages gradients in fp32.
    tokens: tokens in one batch of one group; a step accumulates `batches` of them.
    """

    plan: Callable[[str, int], Plan]
    held: Callable[[Plan, int, int], int]
    hardware: Hardware
    parameters: int
    groups: int
    dtype: torch.dtype
    tokens: int
    batches: int = 1

    def timing(self, method: str, dp: int, sp: int, replicate: int = 1) -> Timing:
        """The timing of dp groups of sp ranks; `replicate` sets of groups each hold all weights.

        Raise ValueError if the method cannot run on this mesh.
        """
        plan, shard = self.plan(method, sp), dp // replicate
        full_weights = self.parameters - plan.cut_weights
        weights = fully_sharded(
            full_weights * self.dtype.itemsize, full_weights * 4, shard * sp, replicate=replicate, calls=self.groups,
            batches=self.batches,
        ) + all_reduced(plan.cut_weights / sp * 4, dp, stride=sp)  # fmt: skip
        seconds = plan.takes(self.hardware, weights, batches=self.batches)
        return Timing(method, dp, sp, seconds, self.held(plan, shard, sp), self.tokens * self.batches * dp, plan)

    def supported(self, dp: int, sp: int, replicate: int = 1) -> list[Timing]:
        """The timings of all methods that can run on this mesh."""
        timings = []
        for method in METHODS if sp > 1 else ("dsp",):  # on one rank all methods are the same
            with suppress(ValueError):
                timings.append(self.timing(method, dp, sp, replicate))
        return timings

    def fits(self, timing: Timing) -> bool:
        return timing.held <= self.hardware.memory

    def best(self, ranks: int) -> Timing | None:
        """The timing with most tokens a second of all (dp, sp, method) that fit; weights are sharded over all ranks."""
        sizes = [sp for sp in range(1, ranks + 1) if ranks % sp == 0]
        every = [timing for sp in sizes for timing in self.supported(ranks // sp, sp)]
        return max(filter(self.fits, every), key=lambda timing: timing.rate, default=None)

    def table(self, dp: int, sp: int, replicate: int = 1) -> str:
        """A table of all methods on this mesh, with the time of a step, its parts and memory; and the best choice."""
        rows = [["method", "step", "computing", "communication", "weights", "tokens/s", "memory"]]
        for timing in self.supported(dp, sp, replicate):
            e = timing.seconds
            parts = [f"{100 * part / e.step:.1f}%" for part in (e.compute, e.comm, e.weights)]
            memory = human(timing.held) + ("" if self.fits(timing) else ", too much")
            rows.append([timing.method, clock(e.step), *parts, f"{timing.rate:,.0f}", memory])
        lines = ["  " + line for line in aligned(rows)]
        best = self.best(dp * sp)
        if best is None:
            return "\n".join([*lines, f"no dp x sp of {dp * sp} ranks fits {human(self.hardware.memory)}"])
        verdict = f"dp={best.dp} x sp={best.sp}{f' with {best.method}' if best.sp > 1 else ''}"
        verdict += f", {clock(best.seconds.step)} a step, {best.rate:,.0f} tokens/s"
        return "\n".join([*lines, f"the most tokens/s on {number_of(dp * sp, 'rank')}: {verdict}"])
