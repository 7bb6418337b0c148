"""Multi-dimensional models as plain single-device PyTorch, each with a ``stages`` dict that says what it computes over.

import zoo

model = zoo.create("transformer2d", "720m", block="stdit")
model(**model.example_inputs(frames=16, height=32, width=32))
"""

from zoo.registry import create, from_reference, list_models, sizes

__all__ = ["create", "from_reference", "list_models", "sizes"]
