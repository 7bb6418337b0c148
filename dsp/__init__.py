"""Dynamic Sequence Parallelism: shard a multi-dimensional model along the dims a stage does not compute over.

A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsp import embedded
    from dsp.cluster.choose import Sizing, choose
    from dsp.comm import hardware as hardware
    from dsp.comm.count import count_comm
    from dsp.comm.hardware import LINKS, Hardware, Link
    from dsp.comm.ops import gather, hand_over, mean, split, start_switch, switch
    from dsp.comm.routes import Route
    from dsp.core.torch_calls import GlueError
    from dsp.discovery.discover import discover
    from dsp.parallel import parallelize
    from dsp.report.plan import plan
    from dsp.report.table import Plan
    from dsp.report.without_data import without_data
    from dsp.stages.notation import NotationError
    from dsp.verify.check import check
    from dsp.verify.report import Report

__version__ = "0.2.0"

__all__ = [
    "LINKS",
    "GlueError",
    "Hardware",
    "Link",
    "NotationError",
    "Plan",
    "Report",
    "Route",
    "Sizing",
    "check",
    "choose",
    "count_comm",
    "discover",
    "embedded",
    "gather",
    "hand_over",
    "mean",
    "parallelize",
    "plan",
    "split",
    "start_switch",
    "switch",
    "without_data",
]

NAMES = {
    "cluster.choose": "Sizing choose",
    "comm.count": "count_comm",
    "comm.hardware": "LINKS Hardware Link",
    "comm.ops": "gather hand_over mean split start_switch switch",
    "comm.routes": "Route",
    "core.torch_calls": "GlueError",
    "discovery": "discover",
    "parallel": "parallelize",
    "report.plan": "plan",
    "report.table": "Plan",
    "report.without_data": "without_data",
    "stages.notation": "NotationError",
    "verify.check": "check",
    "verify.report": "Report",
}
MODULES = {"hardware": "dsp.comm.hardware"}  # a module by its public name
FOUND_IN = {name: module for module, names in NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """The public names and the modules, each loaded when it is used."""
    if name in FOUND_IN:
        value = globals()[name] = getattr(import_module(f"dsp.{FOUND_IN[name]}"), name)
        return value
    path = MODULES.get(name, f"dsp.{name}")
    if not name.startswith("_") and find_spec(path) is not None:
        return import_module(path)
    raise AttributeError(f"module 'dsp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
