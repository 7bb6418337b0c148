"""The console of a run, kept in its directory as `console.log`: lines from before a crash are still there after it.

All that is printed passes here: characters that move a terminal's cursor, as a file's name may have them, are escaped.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from zoo.training import UserError, printable
from zoo.training.environment import first_rank


class Console:
    """Escapes what this process prints; on rank 0, copies it from the beginning to the file that `keep` names."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self.early: list[str] | None = [] if first_rank() else None

    def __enter__(self) -> "Console":
        self.screen = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (Both(stream, self) for stream in self.screen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.stdout, sys.stderr = self.screen
        if self.file:
            with contextlib.suppress(OSError):
                self.file.close()

    def keep(self, path: Path) -> None:
        """Append to this file what was printed, and what will be. A full disk does not end the run here."""
        with contextlib.suppress(OSError):
            self.file = opened(path)
            self.note("".join(self.early or ()))
        self.early = None

    def note(self, text: str) -> None:
        if self.early is not None:
            self.early.append(text)
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.write(text)


class Both:
    """A stream that also gives its text to the console."""

    def __init__(self, stream: TextIO, console: Console):
        self.stream, self.console = stream, console

    def write(self, text: str) -> int:
        begin = "\r" if text.startswith("\r") else ""  # of a line on progress
        text = begin + printable(text.removeprefix(begin))
        self.console.note(text)
        self._do(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._do(self.stream.flush)

    def _do(self, action: Callable[..., Any], *args: Any) -> None:
        """Write to the stream. Its reader may go away, as a terminal, ssh or `| head` does: the run goes on."""
        try:
            action(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                return  # a full disk: there may be space later
            with contextlib.suppress(OSError, ValueError):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self.stream.fileno())  # also for what Python flushes at its end
                os.close(null)
            self.console.note("(nobody reads what is printed any more: this log goes on)\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def opened(path: Path) -> TextIO:
    """A log, to be appended to. OSError: it cannot be written, or it is a FIFO that nobody reads, which would block."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o644)
    return os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")


def command(work: Callable[[], Iterable[Any]], line: str = "wrote {}") -> int:
    """Do a command's work, print a line for each result, and return the exit status: 2 after an error, in one line."""
    with Console():
        try:
            for result in work():
                print(line.format(result))
        except (UserError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return 0
