"""discover: what each submodule of a model nobody annotated computes over, as a stages dict."""

from dsp.discovery.discover import Stages, discover

__all__ = ["Stages", "discover"]
