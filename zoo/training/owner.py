"""One run, one owner: `runs/<name>/owner.json` says which process writes into a run's directory, and holds its lock.

The lock is the kernel's own (flock), so that a dead owner holds nothing. Where another host's locks are not seen, which
shared storage may do, the time of the file decides: an owner touches it every few seconds.
"""

import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo.training import UserError

TOUCH = 10.0  # seconds between two signs of life
STALE = 60.0  # after which an owner on another host counts as gone


class Owner:
    """The right to write into a run's directory: `take` it once; leaving the context gives it back.

    On ranks that never take it, nothing.
    """

    def __init__(self) -> None:
        self.path = Path()
        self.file: int | None = None
        self.done = threading.Event()

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        if self.file is not None:
            with suppress(OSError):  # a disk that has become read-only: the lock goes with the file's descriptor
                if _same_file(self.file, self.path):
                    os.ftruncate(self.file, 0)
                    self.path.unlink()
        self._forget()

    def take(self, directory: Path) -> str:
        """Own `directory`, which is made if need be. Returns who held it and is gone, or "".

        A UserError, with nothing changed, if its owner lives.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = path = directory / "owner.json"
        try:
            self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}: a run has to be able to write there") from None
        try:
            before = _claim(self.file, path)
        except UserError:
            self._forget()
            raise
        if not _same_file(self.file, path):  # the last owner removed it between our opening and our lock
            self._forget()
            return self.take(directory)
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, json.dumps(me).encode(), 0)
        threading.Thread(target=self._touch, args=(self.file,), daemon=True, name="owner").start()
        os.register_at_fork(after_in_child=self._forget)  # the lock must not outlive the owner in a worker
        return _words(before) if before else ""

    def _forget(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = None

    def _touch(self, file: int) -> None:
        with suppress(OSError):  # closed, or a disk that is full or away: what is written next will say so
            while not self.done.wait(TOUCH):
                os.utime(file, (time.time(), time.time()))


def _claim(file: int, path: Path) -> dict[str, Any]:
    """Lock the file; returns what the owner before wrote into it, {} for none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = _read(file)
        seen = there.get("host") == socket.gethostname()
    except BlockingIOError:
        raise _taken(path, _read(file)) from None
    except OSError:  # storage without locks
        there, seen = _read(file), False
    if there and not seen and time.time() - os.fstat(file).st_mtime < STALE:
        raise _taken(path, there, f", or wait {STALE:.0f} s if it is gone")
    return there


def _taken(path: Path, there: dict[str, Any], more: str = "") -> UserError:
    return UserError(
        f"{path.parent} is being written by {_words(there)}: stop that one first{more}, "
        "or give this run another name with name=..."
    )


def _read(file: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:  # empty, or its owner was killed while it wrote
        return {}
    return found if isinstance(found, dict) else {}


def _same_file(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    return False


def _words(there: dict[str, Any]) -> str:
    named = {key: ascii(str(there.get(key, "?")))[1:-1][:80] for key in ("host", "pid", "since")}
    return f"process {named['pid']} on {named['host']} since {named['since']}"
