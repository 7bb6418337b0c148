"""The switch between the two implementations of a parallel model: run and plan, and core and glue, which will replace
them. ``DSP_HOUSE=new`` in the environment chooses the latter."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from dsp import parallel
from dsp.layout import Axis
from dsp.notation import StagePattern
from dsp.run.parallel import FullRuntime
from dsp.stages import Stage

NEW = os.environ.get("DSP_HOUSE") == "new"


def install(
    model: nn.Module, axis: Axis, stages: list[Stage], root: StagePattern | None, gather_output: bool, **options: Any
) -> None:
    """Make a model parallel in place, by its stages."""
    if not NEW:
        FullRuntime(model, axis, stages, root, gather_output, **options).install()
        return
    overlap = options.pop("overlap", None)
    asked = [name for name, value in options.items() if value]
    if asked:
        raise NotImplementedError(f"{asked[0]}= does not work with DSP_HOUSE=new yet")
    parallel.install(model, axis, stages, root, gather_output, overlap)
