"""The number of ranks to use: the smallest that fits, the fastest, and whether sequence parallelism pays at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dsp.comm.hardware import Estimate, Hardware, clock
from dsp.comm.routes import Route
from dsp.comm.wire import SAME
from dsp.planner import Infeasible
from dsp.report.plan import Goal, plan_stages
from dsp.report.table import Plan
from dsp.stages.known import stages_of
from dsp.support.formatting import aligned, human


@dataclass(frozen=True)
class Sizing:
    """A plan for every number of ranks, whether it fits, and its time; ``print(sizing)`` is a table with a verdict.

    smallest: the fewest ranks whose peak fits in the memory, None if no peak does. fastest: the number of ranks with
    the shortest step, among those that fit.
    """

    hardware: Hardware
    plans: dict[int, Plan]
    smallest: int | None
    fastest: int | None

    def fits(self, size: int) -> bool:
        return self.plans[size].peak <= self.hardware.memory

    def estimate(self, size: int) -> Estimate:
        return self.plans[size].estimate

    def __str__(self) -> str:
        head = ["sp", "peak", "fits", "sends a step", "compute", "calls and bytes", "step", "speed-up"]
        ways = {size: plan.how for size, plan in self.plans.items()}
        rows = []
        for size, plan in self.plans.items():
            e = plan.estimate
            fits = "yes" if self.fits(size) else "no"
            sends = human(sum(plan.bytes.values()))
            times = clock(e.compute), clock(e.comm), clock(e.step)
            rows.append([str(size), human(plan.peak), fits, sends, *times, f"{e.speedup:.2f}"])
        if any(ways.values()):
            head.append("switches")
            rows = [[*row, way or "-"] for row, way in zip(rows, ways.values())]
        widths = [max(map(len, column)) for column in zip(head, *rows)]
        line = "  ".join("─" * w for w in widths)
        first, *lines = aligned([head, *rows])
        return "\n".join([first, line, *lines, line, *self.verdict()])

    def verdict(self) -> list[str]:
        """The verdict on the table, in sentences."""
        memory = human(self.hardware.memory)
        if self.smallest is None or self.fastest is None:
            size = min(self.plans, key=lambda n: self.plans[n].peak)
            need = human(self.plans[size].peak)
            return [f"nothing fits in {memory}: sp={size} needs the least, {need}; recompute activations?"]
        lines = [f"smallest sp that fits in {memory}: {self.smallest}"]
        e = self.plans[self.fastest].estimate
        if e.speedup > 1:
            times = f"{e.speedup:.3g} times as fast as one rank"
            way = self.plans[self.fastest].how
            lines.append(f"fastest: sp={self.fastest}{way and f', switches {way}'}, {clock(e.step)} a step, {times}")
        slow = [n for n in self.plans if n > 1 and self.plans[n].estimate.speedup <= 1]
        if slow:
            best = min(slow, key=lambda n: self.plans[n].estimate.step)
            plan = self.plans[best]
            calls = sum(plan.calls.values())
            delay = calls * self.hardware.axis(best).alpha
            lines.append(
                f"not worth it for speed: sp={', '.join(map(str, slow))}; at sp={best} a step takes "
                f"{clock(plan.estimate.step)} where one rank takes {clock(plan.estimate.alone)}, and the latency of "
                f"{calls} calls alone is {clock(delay)}"
            )
        return lines


def choose(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hardware: Hardware,
    sizes: Sequence[int] = (1, 2, 4, 8),
    stages: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    resident: Callable[[int], float] | None = None,
    recompute: bool = False,
    wire: str | Mapping[str, str] = SAME,
    route: str | Route | None = None,
    overlap: int | str | Hardware | None = None,
) -> Sizing:
    """Plan `model` for every number of ranks in `sizes`, and find the smallest that fits and the fastest.

    args, kwargs, stages, dtype: as for `dsp.plan`; nothing is allocated or run, and meta tensors will do. hardware:
    its memory is the limit. resident: the bytes of weights, gradients and optimizer states on a rank, as a function of
    sp; by default only those of the weights, replicated, as in inference. recompute: activation checkpointing of every
    stage, which keeps only its inputs for backward; under ``torch.no_grad()`` nothing is kept. wire, route, overlap:
    the formats and routes of switches, and which travel while stages compute, as for `dsp.parallelize`; "auto" takes
    the quickest combination by `hardware`. ``wire="auto"`` permits fewer bits, which are not exact. If no plan fits,
    the row shows the cheapest one's peak.
    """
    if not sizes or any(size < 1 for size in sizes):
        raise ValueError(f"sizes, the numbers of ranks, must be at least 1, got {tuple(sizes)}")
    matches, root = stages_of(model, stages)
    args = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    options: dict[str, Any] = {
        "gather_output": False, "dtype": dtype, "hardware": hardware, "recompute": recompute, "wire": wire,
        "route": route, "overlap": overlap,
    }  # fmt: skip
    plans: dict[int, Plan] = {}
    for size in sorted(set(sizes)):
        hardware.axis(size)

        def planned(**limit: Any) -> Plan:
            return plan_stages(model, matches, root, args, dict(kwargs or {}), Goal.of(size, **options, **limit))  # noqa: B023

        plan = planned()
        more = 0 if resident is None else int(resident(size)) - plan.resident
        if plan.peak + more > hardware.memory:
            with suppress(Infeasible):  # a plan that sends more may need less memory
                plan = planned(memory=int(hardware.memory) - more)
        plans[size] = holding(plan, more)
    fitting = [size for size, plan in plans.items() if plan.peak <= hardware.memory]
    fastest = min(fitting, key=lambda size: plans[size].estimate.step, default=None)
    return Sizing(hardware, plans, min(fitting, default=None), fastest)


def holding(plan: Plan, more: int) -> Plan:
    """The plan of a rank that always holds so many more bytes."""
    rows = [replace(row, peak=row.peak + more) for row in plan.stages]
    return replace(plan, stages=rows, peak=plan.peak + more, resident=plan.resident + more)
