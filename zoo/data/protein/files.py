"""Text from untrusted files, plain or gzipped, up to a limit of size."""

import codecs
import gzip
import os
import zlib
from pathlib import Path

__all__ = ["MAX_BYTES", "read_text"]

MAX_BYTES = 100 << 20


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, nulls: bool = False) -> str:
    """The text of a file, unpacked if its first bytes say gzip; a ValueError if it is damaged or too large.

    Byte order marks are obeyed. nulls: True if the text may contain null bytes.
    """
    with Path(path).open("rb") as raw:
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
