"""One run, one owner: `runs/<name>/owner.json` says which process writes into a run's directory, and holds its lock.

The lock is the kernel's own (flock), so that a dead owner holds nothing. Where another host's locks are not seen, as on
some shared storage, the time of the file decides: an owner touches the file every few seconds.
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
STALE = 60.0  # seconds after which an owner on another host counts as gone


class Owner:
    """The right to write into a run's directory: `take` it once; leaving the context gives it back.

    On ranks that never take it, it does nothing.
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
                if self._there(self.file):
                    self.path.unlink()
        self._forget()

    def take(self, directory: Path) -> str:
        """Own `directory`, which is made if need be. Returns a description of an owner that is gone, or "".

        Raises UserError, with nothing changed, if another owner is alive.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "owner.json"
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}: a run has to be able to write there") from None
        held, locks = False, True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = True
        except OSError:  # storage without locks
            locks = False
        there, host = _read(file), socket.gethostname()
        seen = locks and there.get("host") == host
        named = "process {pid} on {host} since {since}".format_map(there) if there else ""
        if held or (there and not seen and time.time() - os.fstat(file).st_mtime < STALE):
            os.close(file)
            more = "" if held else f", or wait {STALE:.0f} s if it is gone"
            raise UserError(
                f"{directory} is being written by {named or 'another process'}: stop that one first{more}, or give "
                "this run another name with name=..."
            )
        if not self._there(file):
            os.close(file)  # the last owner removed it between our opening and our lock
            return self.take(directory)
        self.file = file
        me = {"host": host, "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(me).encode(), 0)
        threading.Thread(target=self._touch, args=(file,), daemon=True, name="owner").start()
        os.register_at_fork(after_in_child=self._forget)  # the lock must not outlive the owner in a worker
        return named

    def _there(self, file: int) -> bool:
        """Tell whether the open file is still the one in the folder."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), self.path.stat())
        return False

    def _forget(self) -> None:
        if self.file is not None:
            os.close(self.file)
        self.file = None

    def _touch(self, file: int) -> None:
        with suppress(OSError):  # closed, or the disk is full or gone: the next write will say so
            while not self.done.wait(TOUCH):
                os.utime(file, (time.time(), time.time()))


def _read(file: int) -> dict[str, Any]:
    """The description of an owner; {} if there is none, as after a kill during its writing."""
    try:
        there = json.loads(os.pread(file, 4096, 0))
        return {key: there[key] for key in ("host", "pid", "since")}
    except (ValueError, TypeError, KeyError):
        return {}
