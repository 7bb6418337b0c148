"""Random numbers for each rank: streams forked from the default generator, which advances alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsp.comm.layout import Axis
from dsp.support.private import BELOW


def seed(value: int) -> None:
    """`torch.manual_seed`, without the 0.5 ms that it takes to note stack traces where there is no accelerator."""
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
    """Begin random numbers of this rank's own, until `join` gets the returned state."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    return _begin(axis, (seed + 0x9E3779B97F4A7C15 * (axis.rank + 1)) % 2**63)


@contextmanager
def forked_if_drawn(axis: Axis) -> Iterator[list[bool]]:
    """The same for code that may draw none; then the default generator stays as it was. Yields a list that says in the
    end whether it drew some."""
    before, answer = states(axis), list[bool]()
    token = fork(axis)
    begun = states(axis)
    try:
        yield answer
    finally:
        answer.append(drew(axis, begun))
        join(token if answer[0] else before)


def share(axis: Axis) -> Any:
    """Let all ranks draw the numbers that rank 0 would draw alone, until `unshare` gets the token."""
    before = states(axis)
    packed = torch.cat(before).to(axis.mesh.device_type)
    dist.broadcast(packed, group=axis.mesh.get_group(), group_src=0)
    agreed = packed.cpu().split([len(state) for state in before])
    same = all(map(torch.equal, before, agreed))
    if not same:
        join(agreed)
    return before, same


def unshare(token: Any) -> None:
    """End what `share` began: a generator that was as rank 0's goes on behind what was drawn, another as it was."""
    before, same = token
    if not same:
        join(before)


def _begin(axis: Axis, value: int) -> tuple[Tensor, ...]:
    before = states(axis)
    torch.default_generator.manual_seed(value)
    if len(before) > 1:
        torch.cuda.manual_seed(value)
    return before


def states(axis: Axis) -> tuple[Tensor, ...]:
    """The states of the default generators: of the CPU and, if the ranks have GPUs, of the GPU."""
    with BELOW():  # a mode of tensors without data would lose the states
        cpu = torch.get_rng_state()
        return (cpu, torch.cuda.get_rng_state()) if axis.mesh.device_type == "cuda" else (cpu,)


def drew(axis: Axis, before: tuple[Tensor, ...]) -> bool:
    """Tell whether random numbers were drawn since the default generators had these states."""
    with BELOW():
        return not all(map(torch.equal, states(axis), before))


def after_forks(before: tuple[Tensor, ...], forks: int) -> tuple[Tensor, ...]:
    """The states after so many `fork`s from `before`."""
    if not forks:
        return before
    with BELOW():
        generator = torch.Generator().set_state(before[0])
        for _ in range(forks):
            torch.randint(2**62, (), generator=generator)
        return generator.get_state(), *before[1:]


def join(before: Sequence[Tensor]) -> None:
    with BELOW():
        torch.set_rng_state(before[0])
        for state in before[1:]:
            torch.cuda.set_rng_state(state)
