"""The assumptions of a recorded graph: what modules hold, numbers among the inputs, torch's state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.plan.skeleton import own_containers
from dsp.tensors import version

NO_OBJECTS = (nn.Module, Tensor, type, FunctionType, MethodType, partial)


class Guards:
    """Facts about the model, and about the call that was recorded."""

    def __init__(self, model: nn.Module, options: list[Any], device: str) -> None:
        self.options, self.device, self.outside = options, device, outside(device)
        self.modules = [(m, {k: own_containers(v) for k, v in attributes_of(m).items()}) for m in model.modules()]
        held = [v for m in model.modules() for v in m.__dict__.values()]
        self.others = attributes(held)
        self.versions = [(t, version(t)) for t in held if isinstance(t, Tensor)]
        self.weights = [*model.parameters(), *model.buffers()]
        self.kinds = [*map(kind_of, self.weights)]

    def hold(self, options: list[Any]) -> bool:
        """Tell whether all is as it was."""
        if self.outside != outside(self.device) or self.kinds != [*map(kind_of, self.weights)]:
            return False
        try:
            with Differ():  # what is the same object is never compared
                return self.options == options and all(
                    attributes_of(m) == held for m, held in chain(self.modules, self.others)
                )
        except Exception:  # other tensors, or arrays
            return False

    def written(self) -> bool:
        """Tell whether anybody wrote into a tensor that a module holds beside its weights."""
        return any(version(t) != before for t, before in self.versions)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object, but for the list of its weights that a recurrence makes anew when they change."""
    if isinstance(owner, nn.RNNBase):
        return {k: v for k, v in owner.__dict__.items() if k not in ("_flat_weights", "_flat_weight_refs")}
    return owner.__dict__


def kind_of(weight: Tensor) -> Any:
    return weight.requires_grad, weight.dtype, weight.device, weight.shape


def options_of(leaves: Iterable[Any]) -> list[Any]:
    return [v for v in leaves if not isinstance(v, Tensor)]


def outside(device: str) -> tuple[Any, ...]:
    autocast = torch.is_autocast_enabled(device)
    return (
        autocast, autocast and torch.get_autocast_dtype(device), torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
    )  # fmt: skip


def attributes(held: Iterable[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The contents of objects that are attributes of modules and no modules, such as attention processors."""
    own = {id(v): v for v in held if isinstance(getattr(v, "__dict__", None), dict) and not isinstance(v, NO_OBJECTS)}
    return [(v, {k: own_containers(x) for k, x in v.__dict__.items()}) for v in own.values()]


class Differ(TorchFunctionMode):
    """Within it no tensor is compared with another."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("a tensor is another one")
