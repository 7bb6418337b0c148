"""Reading files that somebody else made: regular files alone, of a size and a depth that they may have."""

import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "read_bytes", "read_json"]

SHORT = 1 << 16  # bytes of a text that may hold what it will


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most`. A ValueError says what else it is; an OSError is as it comes.

    A FIFO or a device would block, or never end; the size is that of the file before anything is read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        if status.st_size > most:
            raise ValueError(f"{path} has {status.st_size:,} bytes, where at most {most:,} are expected")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} grows while it is read")
    return data


def parse_json(text: str | bytes, each: int = 8) -> Any:
    """The value of a JSON text. A ValueError if it is not JSON, or nested too deeply.

    So it is if a long one has, on average, less than `each` bytes for a name, a list or an object: every one of them
    takes a hundred bytes of memory or more.
    """
    marks = "{[:" if isinstance(text, str) else (b"{", b"[", b":")
    if len(text) > SHORT and sum(map(text.count, marks)) > len(text) / each:  # type: ignore[arg-type]
        raise ValueError("little but brackets and names")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, most: int, each: int = 8) -> Any:
    """The value of a JSON file of at most `most` bytes. A ValueError or an OSError."""
    return parse_json(read_bytes(path, most), each)
