"""The assumptions of a recorded graph: attributes of modules, Python values among the inputs, torch's state."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsp.core.skeleton import copy_containers
from dsp.support.tensors import version

NO_OBJECTS = (nn.Module, Tensor, type, FunctionType, MethodType, partial)


class Guards:
    """Facts about the model and about the recorded call."""

    def __init__(self, model: nn.Module, options: list[Any], device: str) -> None:
        self.options, self.device, self.outside = options, device, outside(device)
        self.modules = [(m, {k: copy_containers(v) for k, v in attributes_of(m).items()}) for m in model.modules()]
        values = [v for m in model.modules() for v in m.__dict__.values()]
        self.objects = attributes(values)
        self.versions = [(t, version(t)) for t in values if isinstance(t, Tensor)]
        self.weights = [*model.parameters(), *model.buffers()]
        self.kinds = [*map(kind_of, self.weights)]

    def hold(self, options: list[Any]) -> bool:
        """Tell whether all facts still hold."""
        if self.outside != outside(self.device) or self.kinds != [*map(kind_of, self.weights)]:
            return False
        try:
            with Differ():  # Python compares identical objects without calling ==
                return self.options == options and all(
                    attributes_of(m) == before for m, before in chain(self.modules, self.objects)
                )
        except Exception:  # tensors or arrays that are not the same objects
            return False

    def written(self) -> bool:
        """Tell whether a tensor that is a module's plain attribute was written."""
        return any(version(t) != before for t, before in self.versions)


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes of an object, without the lists of weights that an RNN rebuilds when its weights change."""
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


def attributes(values: Iterable[Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The attributes of objects, other than modules, that modules hold, such as attention processors."""
    objects = [v for v in values if isinstance(getattr(v, "__dict__", None), dict) and not isinstance(v, NO_OBJECTS)]
    unique = {id(v): v for v in objects}.values()
    return [(v, {k: copy_containers(x) for k, x in v.__dict__.items()}) for v in unique]


class Differ(TorchFunctionMode):
    """A mode in which comparing two tensors raises."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("a tensor is another one")
