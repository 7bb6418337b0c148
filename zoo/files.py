"""Reading of files from outside, which nobody vouches for: regular files alone, of limited size, depth and content.

Every reader of the zoo and of the trainer opens files here. Errors are ValueErrors that name the file, or OSErrors.
`whole_file` writes a file that is complete or absent.
"""

import codecs
import errno
import gzip
import io
import json
import os
import secrets
import stat
import types
import typing
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = [
    "MAX_BYTES",
    "fits",
    "open_file",
    "opened_to_append",
    "parse_json",
    "read_bytes",
    "read_json",
    "read_table",
    "read_text",
    "refuse_page",
    "regular",
    "whole_file",
]

MAX_BYTES = 100 << 20  # of a text, and of a table of settings
SHORT = 1 << 16  # bytes; a text up to this size may have any content


def open_file(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A regular file, opened for reading. A ValueError for any other: a FIFO or a device would block, or never end."""
    return os.fdopen(_regular(path, os.O_RDONLY), "rb")


def opened_to_append(path: str | os.PathLike[str]) -> io.BufferedWriter:
    """A regular file, opened to be appended to, made if need be. A ValueError for any other."""
    return os.fdopen(_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab")


def _regular(path: str | os.PathLike[str], flags: int) -> int:
    """The descriptor of a regular file. A ValueError for any other, also for a FIFO that nobody reads."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise ValueError(f"{path} is not a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return descriptor


def regular(path: Path) -> Path:
    """The path of a regular file, for a library that opens it by name; a ValueError for any other."""
    open_file(path).close()
    return path


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a file of at most `most` bytes; the size is checked before anything is read."""
    with open_file(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"{path} has {size:,} bytes, where at most {most:,} are expected")
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"{path} grows while it is read")
    return data


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, nulls: bool = False) -> str:
    """The text of a file, unpacked if its first bytes say gzip; a ValueError if it is damaged or too large.

    Byte order marks are obeyed. nulls: True if the text may contain null bytes.
    """
    with open_file(path) as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        try:
            data = (gzip.GzipFile(fileobj=raw) if packed else raw).read(max_bytes + 1)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: damaged: {error}") from error
    if len(data) > max_bytes:
        unpacked = " unpacked" if packed else ""
        raise ValueError(f"{path}: more than {max_bytes / (1 << 20):g} MiB{unpacked}, which is the limit for one file")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    if b"\0" in data and not nulls:
        raise ValueError(f"{path}: not a text file: it has null bytes")
    return data.decode("utf-8-sig", "replace")


def refuse_page(text: str) -> None:
    """Raise ValueError for a text without data: an empty one, or the HTML page that a server sent in its place."""
    begin = text.lstrip()[:200].lower()
    if not begin:
        raise ValueError("it is empty: was it downloaded to its end?")
    if begin.startswith(("<!doctype html", "<html", "<head", "<?xml")) and "html" in begin:
        raise ValueError("it is an HTML page, as a server sends for an error: download the file itself")


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


def read_table(path: Path) -> dict[str, Any]:
    """The settings in a JSON file, which is one object. A ValueError that names the file, or an OSError."""
    try:
        table = read_json(path, MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: damaged: a table of settings is expected, not a {type(table).__name__}")
    return table


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value has the annotated type; lists pass for tuples (JSON has no tuples), ints for floats."""
    args = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return any(fits(value, arg) for arg in args)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            return False
        if args[1:] == (...,):
            return all(fits(item, args[0]) for item in value)
        return len(value) == len(args) and all(map(fits, value, args))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


@contextmanager
def whole_file(path: str | os.PathLike[str], *, sync: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for writing, which gets its name when it is complete; make its folder.

    sync: the content is on disk before, so that the file is complete or absent even after a power failure.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with part.open("xb") as file:  # as readable as the process's umask lets it be
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
