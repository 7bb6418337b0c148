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
        self.path: Path | None = None
        self.file: int | None = None
        self.done = threading.Event()

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        if self.path is not None and self.file is not None:
            try:
                if _same_file(self.file, self.path):
                    self.path.unlink()
            except OSError:  # a disk that has become read-only: the lock goes with the file's descriptor
                pass
            os.close(self.file)
        self.path = self.file = None

    def take(self, directory: Path) -> str:
        """Own `directory`, which is made if need be. Returns who held it and is gone, or "".

        A UserError, with nothing changed, if its owner lives.
        """
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "owner.json"
        while True:
            try:
                file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}: a run has to be able to write there") from None
            try:
                before = _claim(file, path)
            except BaseException:
                os.close(file)
                raise
            if before is not None:
                break
            os.close(file)  # the last owner removed it between our opening and our lock
        self.path, self.file = path, file
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(me).encode(), 0)
        threading.Thread(target=self._touch, args=(file,), daemon=True, name="owner").start()
        os.register_at_fork(after_in_child=self._forget)
        return _words(before) if before else ""

    def _forget(self) -> None:
        """In a process forked from this one: the lock is not its own, and must not outlive the owner."""
        if self.file is not None:
            os.close(self.file)
        self.path = self.file = None

    def _touch(self, file: int) -> None:
        while not self.done.wait(TOUCH):
            try:
                os.utime(file)
            except OSError:  # closed, or a disk that is full or away: what is written next will say so
                return


def _claim(file: int, path: Path) -> dict[str, Any] | None:
    """Lock the file; what the owner before wrote into it, {} for none. None: this is no longer the file at `path`."""
    there = _read(file)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unseen = False
    except BlockingIOError:
        raise _taken(path, there) from None
    except OSError:  # storage without locks
        unseen = True
    if not _same_file(file, path):
        return None
    there = _read(file)
    if there and (unseen or there.get("host") != socket.gethostname()) and _age(file, path) < STALE:
        raise _taken(path, there, f", or wait {STALE:.0f} s if it is gone")
    return there


def _age(file: int, path: Path) -> float:
    """Seconds since the owner's last sign of life, by the clock of the storage."""
    probe = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - os.fstat(file).st_mtime
    finally:
        probe.unlink(missing_ok=True)


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


def _words(there: dict[str, Any]) -> str:
    named = {key: ascii(str(there.get(key, "?")))[1:-1][:80] for key in ("host", "pid", "since")}
    return f"process {named['pid']} on {named['host']} since {named['since']}"


def _same_file(file: int, path: Path) -> bool:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    mine = os.fstat(file)
    return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)
