"""Weak references to storages, by which tensors are known that share memory."""

from __future__ import annotations

import copy
import gc

import torch

from dsp.support.tensors import memory


def test_a_copy_of_a_memory_does_not_free_it() -> None:
    """A weak reference of torch, copied by its attributes, is freed twice, and the process dies much later."""
    for _ in range(100):
        x = torch.randn(3)
        assert copy.deepcopy({"own": memory(x)})["own"] == copy.copy(memory(x)) == memory(x)
    gc.collect()
    assert memory(x).expired() is False


def test_a_memory_is_compared_with_anything() -> None:
    x = torch.ones(3)
    assert memory(x) != None  # noqa: E711
    assert memory(x) != "memory"
    assert len({memory(x), memory(x[1:]), memory(x.clone())}) == 2
