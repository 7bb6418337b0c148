"""Multi-dimensional models as plain single-device PyTorch, each with a ``stages`` dict that says what it computes over.

import zoo

model = zoo.create("transformer2d", "720m", block="stdit")
model(**model.example_inputs(frames=16, height=32, width=32))

run = zoo.load("runs/demo")  # a trained one, on one process or on all ranks of a torchrun
clips = run.sample(label=[3, 7], frames=16)
"""

from typing import Any

from zoo.registry import create, from_reference, list_models, sizes


def load(path: Any, *, averaged: bool = True) -> Any:
    """The trained model of a run's directory, or of one of its checkpoints: a `zoo.training.use.Run`.

    averaged: with the moving average of its weights, if the run kept one. It is restored on every rank; a process that
    torchrun did not start is the only one. ValueError: no run, no sound checkpoint, or one of another model.
    """
    from zoo.training.use import Run  # it needs what models do not: dsp, configurations, checkpoints

    return Run(path, averaged=averaged)


__all__ = ["create", "from_reference", "list_models", "load", "sizes"]
