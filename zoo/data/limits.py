"""Reading of untrusted files: only regular files, of limited size and depth."""

import json
import os
import stat
from pathlib import Path
from typing import Any

__all__ = ["parse_json", "read_bytes", "read_json", "read_table"]

SHORT = 1 << 16  # bytes; a text up to this size may have any content


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file of at most `most` bytes. A ValueError for any other file; an OSError passes through.

    A FIFO or a device would block, or never end. The size is checked before anything is read.
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

    A long text with fewer than `each` bytes on average for each name, list or object is a ValueError too: each of these
    takes a hundred bytes of memory or more.
    """
    marks = "{[:" if isinstance(text, str) else (b"{", b"[", b":")
    if len(text) > SHORT and sum(map(text.count, marks)) > len(text) / each:  # type: ignore[arg-type]
        raise ValueError("too many names, lists and objects for a text of its length")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path, most: int, each: int = 8) -> Any:
    """The value of a JSON file of at most `most` bytes. A ValueError or an OSError."""
    return parse_json(read_bytes(path, most), each)


def read_table(path: Path, most: int, each: int = 8) -> dict[str, Any]:
    """The value of a JSON file that is an object. A ValueError, which names the file, or an OSError."""
    try:
        value = read_json(path, most, each)
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: damaged: a table of settings is expected, not a {type(value).__name__}")
    return value
