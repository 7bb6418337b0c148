"""The rules: how each operation between stages ("glue") treats a sharded dim.

A rule reads an operation's arguments, tensors replaced by `Operand`s (global shape and cut), and says how the same
operation runs on local parts: which whole operands to narrow, which size arguments to localize, and where the result is
cut. It touches no data, so the planner and the run share one table. An operation without a rule runs on whole tensors,
which the plan gathers for it: on shards it may be exact, but nobody has shown it.
"""

from __future__ import annotations

from dsp.calls import GlueError, Operand, replaced, tensor_args, without_operands
from dsp.rules import along, attention, elementwise, flex, joins, products, sequences, shape, sources, windows
from dsp.rules import written_out as others
from dsp.rules.call import RULES, DealtRows, Frame, Outcome, Rule
from dsp.rules.sources import localize_source, source_cuts
from dsp.traits import SOURCES

# each puts its own into RULES, or into the tables of `dsp.traits`
MODULES = along, attention, elementwise, flex, joins, products, sequences, shape, sources, windows, others

__all__ = [
    "RULES", "SOURCES", "DealtRows", "Frame", "GlueError", "Operand", "Outcome", "Rule", "localize_source", "replaced",
    "source_cuts", "tensor_args", "without_operands",
]  # fmt: skip
