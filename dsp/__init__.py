"""Dynamic Sequence Parallelism: shard a multi-dimensional model along the dims a stage does not compute over."""

from dsp.check import Report, check
from dsp.count import count_comm
from dsp.discover import discover
from dsp.notation import NotationError
from dsp.ops import gather, mean, split, start_switch, switch
from dsp.parallel import parallelize
from dsp.plan import Plan, plan
from dsp.rules import GlueError

__all__ = [
    "GlueError",
    "NotationError",
    "Plan",
    "Report",
    "check",
    "count_comm",
    "discover",
    "gather",
    "mean",
    "parallelize",
    "plan",
    "split",
    "start_switch",
    "switch",
]
