"""Progress of long preparations: a line every ten seconds, by the caller's logger."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["counted"]

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines; shorter preparations log none


def counted(items: Iterable[T], total: int, activity: str, log: logging.Logger) -> Iterator[T]:
    """Iterate over `total` items and log the progress of `activity`, such as "reading videos"."""
    began = said = time.monotonic()
    for done, item in enumerate(items):
        if done and (now := time.monotonic()) - said > EVERY:
            said = now
            log.info("%s: %d of %d, %.0f s left", activity, done, total, (now - began) / done * (total - done))
        yield item
