"""discover: find the dims that each submodule of a model computes over, as a stages dict."""

from dsp.discovery.discover import Stages, discover

__all__ = ["Stages", "discover"]
