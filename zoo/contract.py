"""What a model of the zoo has beside its forward: what the trainer, `dsp` and the tests read of any of them.

    check(model).stages

A model is single-device code and inherits nothing from here. Patterns are paths of submodules in which `*` stands for
one component: "blocks.*.spatial".
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Protocol, cast

from torch import Tensor


class Model(Protocol):
    """The contract. What a model has nothing of is an empty dict."""

    config: Any
    stages: Mapping[str, str]
    cores: Mapping[str, str]
    tensor_parallel: Mapping[str, str]

    def example_inputs(self, batch: int = 1, **lengths: int) -> dict[str, Tensor]:
        """Arguments of the forward, of a model's own lengths (frames, height, rows ...), on the default device."""


WHAT = {
    "config": "the dataclass that it was made from",
    "stages": "a dict of pattern to what the stage computes over",
    "cores": "a dict of pattern to what the attention computes over, for Ulysses and rings; {} for none",
    "tensor_parallel": "a dict of a linear layer's pattern to 'columns' or 'rows', for Megatron; {} for none",
    "example_inputs": "a method (batch=1, **lengths) that returns the forward's keyword arguments",
}


def check(model: Any) -> Model:
    """The model as one of the zoo. A TypeError names everything that it lacks, and what that would be."""
    found = {name: getattr(model, name, None) for name in WHAT}
    fits = {name: isinstance(value, Mapping) for name, value in found.items()}
    fits |= {"config": is_dataclass(found["config"]), "example_inputs": callable(found["example_inputs"])}
    if lacks := [f"  {name}: {WHAT[name]}" for name in WHAT if not fits[name]]:
        kind = type(model).__name__
        raise TypeError("\n".join([f"{kind} is no model of the zoo yet; it lacks, or has of another type:", *lacks]))
    return cast(Model, model)
