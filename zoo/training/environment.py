"""The place that a launcher gives this process among the ranks (`dsp.support.environment`), with UserErrors."""

from typing import TypeAlias

import torch

from dsp.support import environment
from zoo.training import user_error

Place: TypeAlias = environment.Place
first_rank = environment.first_rank


def world_size() -> int:
    """The number of ranks; 1 for a process alone."""
    return user_error(environment.world_size, alone=True)


def ranks_of_host() -> int:
    """The number of ranks on this host; 1 for a process alone."""
    return user_error(environment.ranks_of_host, alone=True)


def device() -> torch.device:
    """The device of this rank: its GPU, which becomes the current one, or the CPU."""
    return user_error(environment.device, alone=True)


def place() -> Place | None:
    """The place of this process among the ranks; None for a process alone."""
    return user_error(environment.place, alone=True)
