"""Which method, on how many ranks: the seconds of a training step and what it holds, for every mesh that ranks make."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from dsp.embedded.method import METHODS
from dsp.hardware import Estimate, Hardware, all_reduced, clock, fully_sharded
from dsp.plan.table import Plan
from dsp.text import aligned, human, number_of


@dataclass(frozen=True)
class Timing:
    """A step by a method on dp x sp ranks: its seconds, what it holds of a rank's memory in bytes, its tokens, and the
    plan of its sequence parallelism."""

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
    """How long a step takes on some hardware, by method and mesh; from plans, on one process.

    plan: of a method on sp ranks, ValueError where it cannot run so. held: bytes a rank, given the plan, over how many
    groups the weights are sharded beside sp, and sp. parameters: numbers of the model, which FSDP gathers `groups` at
    a time, in `dtype`, and averages in fp32. tokens: of one batch of one group, of which a step accumulates `batches`.
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
        """The timing of dp groups of sp ranks, in `replicate` sets with all weights each. ValueError if impossible."""
        plan, shard = self.plan(method, sp), dp // replicate
        rest = self.parameters - plan.cut_weights
        weights = fully_sharded(
            rest * self.dtype.itemsize, rest * 4, shard * sp, replicate=replicate, calls=self.groups,
            batches=self.batches,
        ) + all_reduced(plan.cut_weights / sp * 4, dp, stride=sp)  # fmt: skip
        seconds = plan.takes(self.hardware, weights, batches=self.batches)
        return Timing(method, dp, sp, seconds, self.held(plan, shard, sp), self.tokens * self.batches * dp, plan)

    def supported(self, dp: int, sp: int, replicate: int = 1) -> list[Timing]:
        """The timings of all methods that can run so."""
        found = []
        for method in METHODS if sp > 1 else ("dsp",):  # one rank has no method
            with suppress(ValueError):
                found.append(self.timing(method, dp, sp, replicate))
        return found

    def fits(self, found: Timing) -> bool:
        return found.held <= self.hardware.memory

    def best(self, ranks: int) -> Timing | None:
        """Which (dp, sp, method) trains on most tokens a second, of those that fit, the weights over all ranks."""
        sizes = [sp for sp in range(1, ranks + 1) if ranks % sp == 0]
        every = [found for sp in sizes for found in self.supported(ranks // sp, sp)]
        return max(filter(self.fits, every), key=lambda found: found.rate, default=None)

    def table(self, dp: int, sp: int, replicate: int = 1) -> str:
        """Every method on that mesh: what a step takes and of what, and what it holds; and the best mesh and method."""
        rows = [["method", "step", "computing", "communication", "weights", "tokens/s", "memory"]]
        for found in self.supported(dp, sp, replicate):
            e = found.seconds
            parts = [f"{100 * part / e.step:.1f}%" for part in (e.compute, e.comm, e.weights)]
            held = human(found.held) + ("" if self.fits(found) else ", too much")
            rows.append([found.method, clock(e.step), *parts, f"{found.rate:,.0f}", held])
        lines = ["  " + line for line in aligned(rows)]
        best = self.best(dp * sp)
        if best is None:
            return "\n".join([*lines, f"no dp x sp of {dp * sp} ranks fits {human(self.hardware.memory)}"])
        verdict = f"dp={best.dp} x sp={best.sp}{f' with {best.method}' if best.sp > 1 else ''}"
        verdict += f", {clock(best.seconds.step)} a step, {best.rate:,.0f} tokens/s"
        return "\n".join([*lines, f"the most tokens/s on {number_of(dp * sp, 'rank')}: {verdict}"])
