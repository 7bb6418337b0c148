"""Plans: a forward without data is traced, the planner solves what comes out, and a run follows the script of it."""

from dsp.plan.choose import Sizing, choose
from dsp.plan.make import make_plan, plan, plan_stages, stages_of
from dsp.plan.table import Plan, StageRow
from dsp.plan.tracing import trace
from dsp.plan.without_data import without_data

__all__ = [
    "Plan",
    "Sizing",
    "StageRow",
    "choose",
    "make_plan",
    "plan",
    "plan_stages",
    "stages_of",
    "trace",
    "without_data",
]
