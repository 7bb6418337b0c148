"""Dynamic Sequence Parallelism: shard a multi-dimensional model along the dims a stage does not compute over."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dsp.check import Report, check
from dsp.count import count_comm
from dsp.hardware import LINKS, Hardware, Link
from dsp.notation import NotationError
from dsp.ops import gather, hand_over, mean, split, start_switch, switch
from dsp.plan import Plan, Sizing, choose, plan, without_data
from dsp.routes import Route
from dsp.rules import GlueError
from dsp.run import parallelize

if TYPE_CHECKING:
    from dsp import embedded
    from dsp.discovery import discover

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


def __getattr__(name: str) -> Any:
    """`discover` and `embedded`, which are loaded when they are used."""
    if name == "discover":
        return import_module("dsp.discovery").discover
    if name == "embedded":
        return import_module("dsp.embedded")
    raise AttributeError(f"module 'dsp' has no attribute {name!r}")
