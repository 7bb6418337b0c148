"""The variables by which a launcher gives each process its place among the ranks: RANK, WORLD_SIZE, MASTER_ADDR, ...

All are read here. A UserError names the variable that is absent or is not a number.
"""

import os
from dataclasses import dataclass

from zoo.training import UserError

LAUNCH = "dsp-launch and torchrun set it for each rank"


def number(name: str, default: int, least: int = 0, most: int = 1 << 31) -> int:
    """The integer of a variable, `default` if it is absent."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) <= most):
        raise UserError(f"{name}={text[:40]!r}: expected a number from {least} to {most}; {LAUNCH}", alone=True)
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


def rank_on_host() -> int:
    return number("LOCAL_RANK", 0)


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
            raise UserError(f"WORLD_SIZE is {world}, but RANK is not set; {LAUNCH}. For one process, unset WORLD_SIZE")
        return None
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise UserError(f"RANK is set, but {name} is not; {LAUNCH}. For one process, unset RANK")
    rank = number("RANK", 0, most=world - 1)
    return Place(rank, world, os.environ["MASTER_ADDR"], number("MASTER_PORT", 0, least=1, most=65535))
