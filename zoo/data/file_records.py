"""Records of the files that a data set reads, so that ranks can compare them, and so that a later change is noticed."""

import hashlib
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zoo.data.progress import counted

__all__ = ["FileRecords", "fingerprint"]

BLOCK, BLOCKS = 1 << 16, 64  # of a file above BLOCK x BLOCKS = 4 MiB, so many bytes are read at so many places

log = logging.getLogger(__name__)


class FileRecords:
    """The files of a data set: `take` records them as they are, `check` compares one with its record.

    Every process takes its own records, of what it sees under these names.
    """

    def __init__(self, paths: Iterable[Path]):
        self.paths = sorted(set(paths))
        self.records: dict[Path, tuple[tuple[int, int, int], str]] = {}

    def take(self) -> dict[Path, str]:
        """Record every file; return their fingerprints."""
        with ThreadPoolExecutor(8) as pool:
            facts = pool.map(lambda path: (_status(path), fingerprint(path)), self.paths)
            self.records = dict(zip(self.paths, counted(facts, len(self.paths), "comparing files", log)))
        return {path: record for path, (_, record) in self.records.items()}

    def check(self, path: Path) -> None:
        """Raise ValueError if a file is another one than when it was recorded; before `take`, do nothing."""
        if path not in self.records:
            return
        (status, recorded), now = self.records[path], _status(path)
        if status != now:
            if (other := fingerprint(path)) != recorded:
                raise ValueError(
                    f"{path} has changed since the run began: it had {recorded}, it has {other}. Put the file back, or "
                    "start again: resume=true goes on from the last checkpoint"
                )
            self.records[path] = now, recorded


def fingerprint(path: Path) -> str:
    """The size of a file and a hash of its content, of a large file's content at 64 places; or why it has none."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            size = os.fstat(descriptor).st_size
            places = range(BLOCKS) if size > BLOCK * BLOCKS else range(-(-size // BLOCK))
            for i in places:
                file.seek(i * (size - BLOCK) // (BLOCKS - 1) if size > BLOCK * BLOCKS else i * BLOCK)
                digest.update(file.read(BLOCK))
    except OSError as error:
        return f"no readable content ({error.strerror})"
    return f"{size:,} bytes with hash {digest.hexdigest()}"


def _status(path: Path) -> tuple[int, int, int]:
    """The number, size and time of a file, which change with its content, as a rule; zeros if there is none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
