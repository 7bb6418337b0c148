"""The console of a run, kept in its directory as `console.log`: lines from before a crash are still there after it."""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any, TextIO


class Console:
    """Copies what rank 0 prints, from the beginning, to the file that `keep` names."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self.early: list[str] = []

    def __enter__(self) -> "Console":
        self.screen = sys.stdout, sys.stderr
        if int(os.environ.get("RANK", 0)) == 0:
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
            self.file = path.open("a", buffering=1, encoding="utf-8")
            self.note("".join(self.early))

    def note(self, text: str) -> None:
        if self.file is None:
            self.early.append(text)
            return
        with contextlib.suppress(OSError):
            self.file.write(text)


class Both:
    """A stream that also gives its text to the console."""

    def __init__(self, stream: TextIO, console: Console):
        self.stream, self.console = stream, console

    def write(self, text: str) -> int:
        self.console.note(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
