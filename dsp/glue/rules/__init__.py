"""The rules: how each operation between stages ("glue") treats a sharded dim.

A rule reads an operation's arguments, with `Operand`s (global shape and cut) in place of tensors, and describes how the
operation runs on shards: which replicated operands to narrow, which size arguments to localize, and the cut of the
result. A rule reads no data, so planner and run share one table. An operation without a rule runs on full tensors,
which the plan gathers: on shards it might be exact, but nobody has shown it.
"""

from __future__ import annotations

from dsp.core.torch_calls import GlueError, Operand, replaced, tensor_args, without_operands
from dsp.core.torch_traits import SOURCES
from dsp.glue.rules import along, attention, elementwise, flex, joins, products, sequences, shape, sources, windows
from dsp.glue.rules import written_out as decompositions
from dsp.glue.rules.call import RULES, DealtRows, Frame, Outcome, Rule
from dsp.glue.rules.sources import localize_source, source_cuts

# each registers its rules in RULES, or in the tables of `dsp.core.torch_traits`
MODULES = along, attention, elementwise, flex, joins, products, sequences, shape, sources, windows, decompositions

__all__ = [
    "RULES", "SOURCES", "DealtRows", "Frame", "GlueError", "Operand", "Outcome", "Rule", "localize_source", "replaced",
    "source_cuts", "tensor_args", "without_operands",
]  # fmt: skip
