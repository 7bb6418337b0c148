"""Switches that travel while something is computed: of tensors, and piece by piece of what a stage takes and gives."""

from dsp.overlap.options import overlap_of

__all__ = ["overlap_of"]
