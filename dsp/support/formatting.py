"""Numbers and tables as people read them."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from dsp.support.environment import first_rank


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def number_of(count: int, noun: str) -> str:
    """
    >>> number_of(1, "rank"), number_of(8, "rank"), number_of(2, "switch")
    ('1 rank', '8 ranks', '2 switches')
    """
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines of text, with right-aligned cells."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]


def generic(name: str) -> str:
    """The name of a module with `*` for each number, so that equal modules share one name."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")


EVERY = 0.1  # seconds between two updates of a progress line


class Moving:
    """A progress line on stderr for a long job. Rank 0 prints it if stderr is a terminal, or if `shown` asks for it.

    A job inside another job prints nothing: the outer job has the line.
    """

    within: ContextVar[bool] = ContextVar("dsp_moving", default=False)

    def __init__(self, job: str, shown: bool | None = None) -> None:
        first = first_rank() and not self.within.get()
        self.job, self.shown = job, first and sys.stderr.isatty() if shown is None else shown
        self.began = self.last = time.monotonic()
        self.width = 0

    def __enter__(self) -> Moving:
        self.token = self.within.set(True)
        return self

    def say(self, text: str) -> None:
        now = time.monotonic()
        if self.shown and now - self.last >= EVERY:
            self.last = now
            line = f"{self.job}: {text}, {now - self.began:.0f} s"
            print(f"\r{line:<{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(line)

    def __exit__(self, *error: Any) -> None:
        self.within.reset(self.token)
        if self.width:
            print(f"\r{'':<{self.width}}\r", end="", file=sys.stderr, flush=True)
