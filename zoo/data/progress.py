"""How far a long preparation is: a line every ten seconds, by the logger of who prepares."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

__all__ = ["counted"]

T = TypeVar("T")
EVERY = 10.0  # seconds between two lines; what is done sooner says nothing


def counted(items: Iterable[T], total: int, what: str, log: logging.Logger) -> Iterator[T]:
    """The same items, of which there are `total`; `what` is done with them, such as "reading videos"."""
    began = said = time.monotonic()
    for done, item in enumerate(items):
        if done and (now := time.monotonic()) - said > EVERY:
            said = now
            log.info("%s: %d of %d, %.0f s left", what, done, total, (now - began) / done * (total - done))
        yield item
