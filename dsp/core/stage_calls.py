"""The call of a stage's module, outside of all hooks on it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn

from dsp.core.carrier import first_carrier
from dsp.core.watch import unwatched
from dsp.private import set_compiled_call
from dsp.stages import Stage

UNCHANGED = nullcontext()


class StageCall:
    """Takes the place of a module's call; the record that its first carrier belongs to leads it."""

    def __init__(self, stage: Stage, module: nn.Module) -> None:
        self.stage, self.call = stage, module._call_impl
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        t = first_carrier((*args, *kwargs.values()))
        if t is not None:
            record = t.record
            with unwatched() if record.sources or not record.planned else UNCHANGED:
                return record.driver.stage(self.stage, self.call, args, kwargs)
        with unwatched():
            return self.call(*args, **kwargs)  # not in a forward of ours, or inside another stage
