"""The variables by which a launcher gives each process its place among the ranks: RANK, WORLD_SIZE, MASTER_ADDR, ...

All are read here. A ValueError names the variable that is absent or is not a number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

LAUNCH = "dsp-launch and torchrun set it for each rank"
MOST = 1 << 31


def number(name: str, default: int, least: int = 0, most: int = MOST, advice: str = LAUNCH) -> int:
    """The integer of a variable, `default` if it is absent."""
    text = os.environ.get(name)
    return default if text is None else as_number(name, text, least, most, advice)


def as_number(name: str, text: str, least: int = 0, most: int = MOST, advice: str = LAUNCH) -> int:
    """The integer that the text of a variable says."""
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most):
        raise ValueError(f"{name}={text[:40]!r}: expected a number from {least} to {most}; {advice}")
    return int(text)


def first_rank() -> bool:
    """Tell whether this is rank 0 or a process alone, also before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


def world_size() -> int:
    """The number of ranks; 1 for a process alone."""
    return number("WORLD_SIZE", 1, least=1)


def ranks_of_host() -> int:
    """The number of ranks on this host; 1 for a process alone."""
    return number("LOCAL_WORLD_SIZE", 1, least=1)


def device() -> torch.device:
    """The device of this rank: the GPU of its number on this host, which becomes the current one, or the CPU."""
    local, gpus = number("LOCAL_RANK", 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        return torch.device("cpu")
    if local >= gpus:
        raise ValueError(
            f"local rank {local} has no GPU: {gpus} are visible; start at most one rank for each "
            f"(dsp-launch --nproc-per-node {gpus})"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


@dataclass(frozen=True)
class Place:
    """A rank, how many there are, and where rank 0 listens."""

    rank: int
    world: int
    host: str
    port: int


def place() -> Place | None:
    """The place of this process among the ranks; None for a process alone."""
    world = world_size()
    if "RANK" not in os.environ:
        if world > 1:
            raise ValueError(f"WORLD_SIZE is {world}, but RANK is not set; {LAUNCH}. For one process, unset WORLD_SIZE")
        return None
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"RANK is set, but {name} is not; {LAUNCH}. For one process, unset RANK")
    rank = number("RANK", 0, most=world - 1)
    return Place(rank, world, os.environ["MASTER_ADDR"], number("MASTER_PORT", 0, least=1, most=65535))
