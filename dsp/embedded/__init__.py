"""Sequence parallelism inside a module: the methods with which DSP is compared, built to the same standards.

An embedded method keeps the sequence sharded along one dim throughout, and communicates inside the stages that compute
over that dim. Everything else is as in DSP: glue, entry, losses on shards, the gradient convention, the plan.
"""

from dsp.embedded.low_rank import low_rank_attention
from dsp.embedded.method import METHODS, parallelize, plan, save_exchanges
from dsp.embedded.ring import ring_attention
from dsp.embedded.tensor import rank_order
from dsp.embedded.timing import Steps, Timing
from dsp.embedded.ulysses import ulysses_attention

__all__ = [
    "METHODS", "Steps", "Timing", "low_rank_attention", "parallelize", "plan", "rank_order", "ring_attention",
    "save_exchanges", "ulysses_attention",
]  # fmt: skip
