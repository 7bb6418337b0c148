"""The run: hooks on stages, glue between them, by the script of a plan."""

from dsp.run.parallel import parallelize

__all__ = ["parallelize"]
