"""The call of a stage's module, outside of all hooks on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn

from dsp.core.carrier import first_carrier
from dsp.core.record import Record
from dsp.core.watch import unwatched, watching
from dsp.stages.stage import Stage
from dsp.support.private import compiled_call, set_compiled_call

UNCHANGED = nullcontext()


class StageCall:
    """Takes the place of a module's call; the record that its first carrier, or else a watch, belongs to leads it."""

    def __init__(self, stage: Stage, module: nn.Module) -> None:
        self.stage, self.call = stage, compiled_call(module) or module._call_impl
        set_compiled_call(module, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first: Any = first_carrier((*args, *kwargs.values()))
        if first is None:
            first = watching(self.stage)
        if first is not None:
            record = first.record
            if self.stage not in record.stages:  # a stage of a parallel model inside the one that runs
                return self.call(*args, **kwargs)
            with inside(record) if record.sources or record.compiled or not record.planned else UNCHANGED:
                return record.driver.stage(self.stage, self.call, args, kwargs, first)
        with unwatched():
            return self.call(*args, **kwargs)  # not in a forward of ours, or inside another stage


@contextmanager
def inside(record: Record) -> Iterator[None]:
    """A stage: no watch is on, and torch.compile is."""
    with unwatched(), torch.compiler.set_stance("default") if record.compiled else UNCHANGED:
        yield


def keep_compiled(model: nn.Module, calls: Iterable[StageCall], between: Iterable[nn.Module]) -> bool:
    """Take in what a stage's compile() compiled since the last forward, and tell whether there is any.

    Raises RuntimeError if it compiled a module between stages.
    """
    new = False
    for call in calls:
        module = call.stage.module
        if (compiled := compiled_call(module)) is not call and not isinstance(compiled, StageCall):
            call.call, new = compiled, True
            set_compiled_call(module, call)
    for module in (model, *between):
        if isinstance(compiled_call(module), FunctionType):
            raise RuntimeError(compiled_between(model, module, [call.stage for call in calls]))
    return new


def compiled_between(model: nn.Module, module: nn.Module, stages: list[Stage]) -> str:
    path = next(name for name, other in model.named_modules() if other is module)
    inside = [stage.name for stage in stages if any(stage.module is other for other in module.modules())]
    way = f"compile its stages instead ({', '.join(inside[:3])}{' and more' * (len(inside) > 3)})"
    if not inside:
        way = f"name it in stages, if it is independent along some dim ({path!r})"
    return (
        f"{path!r} was compiled by its compile(). It runs operations between stages, which dsp has to see one by one: "
        f"{way}, or give dsp.parallelize compile=True, for the whole forward as one graph"
    )
