"""Oracles that compute in float32 whatever their inputs are, made to compute in float64."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from unittest import mock

import torch
from torch import Tensor


def all_in_float64(dtype: torch.dtype) -> AbstractContextManager[None]:
    """With float64, ``x.float()`` and ``x.to(torch.float32)`` leave a float64 tensor as it is; else nothing changes."""
    return _unrounded() if dtype is torch.float64 else nullcontext()


@contextmanager
def _unrounded() -> Iterator[None]:
    plain = Tensor.to

    def to(x: Tensor, *args, **kwargs) -> Tensor:
        wanted = kwargs.get("dtype", args[0] if args else None)
        return x if x.dtype is torch.float64 and wanted is torch.float32 else plain(x, *args, **kwargs)

    with mock.patch.object(Tensor, "to", to), mock.patch.object(Tensor, "float", lambda x: to(x, torch.float32)):
        yield
