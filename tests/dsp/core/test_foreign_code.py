"""Code of other libraries between stages: what it asks of a tensor's class."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tests.support.beside import exact
from tests.support.toys import C, SpaceTime


def by_library(m: Any, x: Tensor) -> Tensor:
    """Chooses by the module of a tensor's class, as opt_einsum does."""
    library = type(m.space(x)).__module__.partition(".")[0]
    return {"torch": torch.sin}[library](m.time(x))


def test_a_tensor_between_stages_is_of_torch(mesh: DeviceMesh) -> None:
    exact(SpaceTime(by_library).double(), mesh, (torch.randn(2, 7, 5, C, dtype=torch.float64),), rounds=2)
