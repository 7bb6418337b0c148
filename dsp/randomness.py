"""Random numbers of a rank's own: a stream forked from the default one, which moves on alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsp.layout import Axis


def seed(value: int) -> None:
    """As `torch.manual_seed`, which where no accelerator is takes a stack trace for each that may come: 0.5 ms."""
    if torch.accelerator.is_available():
        torch.manual_seed(value)
    else:
        torch.default_generator.manual_seed(value)


@contextmanager
def forked(axis: Axis) -> Iterator[None]:
    token = fork(axis)
    try:
        yield
    finally:
        join(token)


def fork(axis: Axis) -> Any:
    seed = int(torch.randint(2**62, (), device="cpu"))
    cuda = axis.mesh.device_type == "cuda"
    state = (torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None)
    own = (seed + 0x9E3779B97F4A7C15 * (axis.rank + 1)) % 2**63
    torch.default_generator.manual_seed(own)
    if cuda:
        torch.cuda.manual_seed(own)
    return state


def join(state: Any) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
