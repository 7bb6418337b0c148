"""The switch between the two implementations of a parallel model: run and plan, and core and glue, which will replace
them. ``DSP_HOUSE=new`` in the environment chooses the latter; nothing of the former is imported then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import nn

from dsp import parallel
from dsp.layout import Axis
from dsp.methods import RankPart
from dsp.notation import StagePattern
from dsp.overlap.options import overlap_of
from dsp.routes import Route
from dsp.stages import Stage
from dsp.wire import SAME, permitted

NEW = os.environ.get("DSP_HOUSE") == "new"
if TYPE_CHECKING:
    FullRuntime: Any
    current_place: Any
if TYPE_CHECKING or NEW:
    from dsp.parallel import parallelize
    from dsp.report.plan import Goal, plan, plan_stages
else:
    from dsp.plan.make import plan, plan_stages
    from dsp.plan.solve import Goal
    from dsp.run.forward import current_place
    from dsp.run.parallel import FullRuntime, parallelize

__all__ = ["goal", "install", "parallelize", "plan", "plan_stages", "running_place"]


def install(
    model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather_output: bool, **options: Any
) -> None:
    """Make a model parallel in place, by its stages."""
    if not NEW:
        FullRuntime(model, axis, stages, root, gather_output, **options).install()
        return
    parallel.install(model, axis, stages, root, gather_output, **options)


def running_place() -> RankPart | None:
    """The place of the stage call that runs, where the run itself knows it."""
    return None if NEW else current_place()


def goal(
    size: int, *, recompute: bool = False, save_exchanges: bool = False, wire: Any = SAME, route: Any = None,
    overlap: Any = None, **options: Any,
) -> Goal:  # fmt: skip
    """The goal of a plan: recompute, save_exchanges: as for `dsp.embedded.plan`; options: see `Goal`."""
    hardware = options.get("hardware")
    options |= {"permits": permitted(wire), "ways": Route.of(route).over(size, hardware)}
    options |= {"overlap": overlap_of(overlap, hardware)}
    if not NEW:
        return Goal(size, **options, again_inside=recompute, kept_inside=save_exchanges)  # type: ignore[call-arg]
    return Goal(size, **options, recompute=recompute, save_exchanges=save_exchanges)
