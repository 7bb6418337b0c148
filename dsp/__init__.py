"""Dynamic Sequence Parallelism: shard a multi-dimensional model along the dims a stage does not compute over.

A name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsp import embedded
    from dsp.calls import GlueError
    from dsp.check.check import check
    from dsp.check.report import Report
    from dsp.cluster.choose import Sizing, choose
    from dsp.count import count_comm
    from dsp.discovery.discover import discover
    from dsp.hardware import LINKS, Hardware, Link
    from dsp.notation import NotationError
    from dsp.ops import gather, hand_over, mean, split, start_switch, switch
    from dsp.parallel import parallelize
    from dsp.report.plan import plan
    from dsp.report.table import Plan
    from dsp.report.without_data import without_data
    from dsp.routes import Route

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
    "calls": "GlueError",
    "check.check": "check",
    "check.report": "Report",
    "cluster.choose": "Sizing choose",
    "count": "count_comm",
    "discovery": "discover",
    "hardware": "LINKS Hardware Link",
    "notation": "NotationError",
    "ops": "gather hand_over mean split start_switch switch",
    "parallel": "parallelize",
    "report.plan": "plan",
    "report.table": "Plan",
    "report.without_data": "without_data",
    "routes": "Route",
}
FOUND_IN = {name: module for module, names in NAMES.items() for name in names.split()}
import_module("dsp.check")  # named like its function: imported later, the package would replace it
del globals()["check"]


def __getattr__(name: str) -> Any:
    """The public names and the modules, each loaded when it is used."""
    if name in FOUND_IN:
        found = globals()[name] = getattr(import_module(f"dsp.{FOUND_IN[name]}"), name)
        return found
    if not name.startswith("_") and find_spec(f"dsp.{name}") is not None:
        return import_module(f"dsp.{name}")
    raise AttributeError(f"module 'dsp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
