"""Ranks that have no part of some stages."""

from __future__ import annotations

from collections.abc import Iterable

from dsp.support.formatting import generic


def idle_ranks(size: int, stages: Iterable[tuple[str, str | None, int]], least: float = 0) -> list[str]:
    """A sentence for each dim that is too short to give all of `size` ranks a part of some stages.

    stages: of each call the name, the sharded dim (None: replicated) and the number of idle ranks; least: the least
    share of idle ranks.
    """
    names: dict[tuple[int, str], dict[str, None]] = {}
    for name, along, idle in stages:
        if idle > 0 and idle >= least * size and along is not None:
            names.setdefault((idle, along), {})[generic(name)] = None
    return [
        f"{idle} of {size} ranks have nothing to do in {', '.join(of)}: {along!r} is too short for them"
        for (idle, along), of in names.items()
    ]
