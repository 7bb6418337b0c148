"""Contracts as typed protocols: that of a model of the zoo, and a comparison of any value with any contract.

    check(model).stages

A model is single-device code and inherits nothing from here. Patterns are paths of submodules in which `*` stands for
one component: "blocks.*.spatial".
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from inspect import getdoc
from types import FunctionType, UnionType
from typing import Annotated, Any, Protocol, cast, get_args, get_origin, get_type_hints

from torch import Tensor


class Model(Protocol):
    """The contract of a model. Its dicts may be empty."""

    config: Annotated[Any, "the dataclass that it was made from"]
    stages: Annotated[Mapping[str, str], "a dict of pattern to what the stage computes over"]
    cores: Annotated[
        Mapping[str, str], "a dict of pattern to what the attention computes over, for Ulysses and rings; {} for none"
    ]
    tensor_parallel: Annotated[
        Mapping[str, str], "a dict of a linear layer's pattern to 'columns' or 'rows', for Megatron; {} for none"
    ]

    def example_inputs(self, batch: int = 1, **lengths: int) -> dict[str, Tensor]:
        """A method (batch=1, **lengths) that returns the forward's keyword arguments, on the default device."""


def check(model: Any) -> Model:
    """Return the model, typed as one of the zoo. A TypeError names and describes every member that it lacks."""
    wanted, missing = members(Model), lacks(model, Model)
    if "config" not in missing and not is_dataclass(model.config):
        missing.append("config")
    if missing:
        lines = [
            f"{type(model).__name__} does not meet the contract of a model of the zoo; missing, or of another type:"
        ]
        raise TypeError("\n".join(lines + [f"  {name}: {wanted[name]}" for name in wanted if name in missing]))
    return cast(Model, model)


def members(contract: type) -> dict[str, str]:
    """The members of a protocol with their descriptions: an attribute's annotation, a method's docstring."""
    hints = get_type_hints(contract, include_extras=True)
    methods = {name: found for name, found in vars(contract).items() if isinstance(found, FunctionType)}
    own = {name: getdoc(method) or "" for name, method in methods.items() if name in ("__len__", name.lstrip("_"))}
    return {name: hint.__metadata__[0] for name, hint in hints.items()} | own


def lacks(value: Any, contract: type) -> list[str]:
    """The members of a protocol that a value lacks, or has with another type."""
    hints = get_type_hints(contract)

    def fits(name: str) -> bool:
        if name not in hints:
            return callable(getattr(value, name, None))
        kind = hints[name]
        kinds = tuple(get_origin(one) or one for one in (get_args(kind) if isinstance(kind, UnionType) else (kind,)))
        return hasattr(value, name) and (kind is Any or isinstance(getattr(value, name), kinds))

    return [name for name in members(contract) if not fits(name)]
