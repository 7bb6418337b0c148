"""Dynamic Sequence Parallelism: shard a multi-dimensional model along the dims a stage does not compute over."""

from dsp.count import count_comm
from dsp.notation import NotationError
from dsp.ops import gather, mean, split, start_switch, switch

__all__ = ["NotationError", "count_comm", "gather", "mean", "split", "start_switch", "switch"]
