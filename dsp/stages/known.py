"""Models with known stages. `known.json` has the line of each class of diffusers, and of each type of transformers."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from dsp.stages.notation import StagePattern
from dsp.stages.stage import Stage, declared

log = logging.getLogger("dsp")


@cache
def table() -> dict[str, Any]:
    """The package and version that the lines were tried with; models and autoencoders by class name."""
    lines: dict[str, Any] = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
    return lines


def classes(model: Any) -> list[str]:
    """The names of an object's classes that belong to the package, the most derived first."""
    package = table()["package"]
    return [kind.__name__ for kind in type(model).__mro__ if kind.__module__.partition(".")[0] == package]


def stages_for(model: nn.Module) -> dict[str, str] | None:
    """The stages of a model of diffusers whose class is known; None for others.

    It warns, once a class, if the forward takes other arguments than in the version that was tried.
    """
    entry = next(filter(None, (table()["models"].get(name) for name in classes(model))), None)
    if entry is None:
        return None
    changed(type(model), tuple(entry["takes"]))  # type: ignore[arg-type]
    return {"": entry["line"]}


def of_type(model: nn.Module) -> dict[str, str] | None:
    """The stages of a model of transformers whose type is known, with any head; None for others."""
    if all(kind.__module__.partition(".")[0] != "transformers" for kind in type(model).__mro__):
        return None
    line = table()["transformers"]["lines"].get(getattr(getattr(model, "config", None), "model_type", None), "")
    takes = inspect.signature(model.forward).parameters
    patterns = [pattern for pattern in line.split(", ") if pattern.partition("=")[0] in takes]
    return {"": ", ".join(patterns)} if patterns else None


def stages_of(model: nn.Module, stages: Mapping[str, str] | None) -> tuple[list[Stage], StagePattern | None]:
    """The stages of a model, and the pattern of its inputs and outputs; by default those that the model names, or those
    known for its class."""
    if stages is None:
        stages = getattr(model, "stages", None) or stages_for(model) or of_type(model)
    return declared(model, stages)


def methods_for(model: Any) -> dict[str, str] | None:
    """The dims of the tensor that each method of an autoencoder takes, by method; None for other classes."""
    return next(filter(None, (table()["autoencoders"].get(name) for name in classes(model))), None)


@cache
def changed(kind: Any, takes: tuple[str, ...]) -> None:
    now = [name for name in inspect.signature(kind.forward).parameters if name != "self"]
    if set(now) == set(takes):
        return
    new, absent = [x for x in now if x not in takes], [x for x in takes if x not in now]
    said = [f"it also takes {', '.join(new)}"] * bool(new) + [f"it takes no {', '.join(absent)}"] * bool(absent)
    log.warning(
        "%s: the forward differs from that of %s %s, for which dsp knows the dims: %s. Compare with one process "
        "(dsp.check), or give stages",
        kind.__name__, table()["package"], table()["version"], " and ".join(said),
    )  # fmt: skip
