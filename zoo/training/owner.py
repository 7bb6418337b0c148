"""One run, one owner: `runs/<name>/owner.json` says which process writes into a run's directory, and holds its lock.

The lock is the kernel's own (flock), so that a dead owner holds nothing. Where another machine's locks are not seen, as
on some shared storage, the time of the file decides: an owner touches the file every few seconds. That time and the
present are both the storage's, as the clocks of machines differ; so do machines of one name, which a number of the
kernel tells from each other.
"""

import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from zoo.files import parse_json, read_bytes
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
                if self._is_current(self.file):
                    self.path.unlink()
        self._forget()

    def take(self, directory: Path) -> str:
        """Own `directory`, which is made if need be. Returns a description of an owner that is gone, or "".

        Raises UserError, with nothing changed, if another owner is alive.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "owner.json"
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror}: a run has to be able to write there") from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UserError(f"{self.path} is not a regular file; move it away")
        is_locked, locks = False, True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_locked = True
        except OSError:  # storage without locks
            locks = False
        record, machine = _read(file), _machine()
        seen = locks and record.get("machine") == machine
        named = "process {pid} on {host} since {since}".format_map(record) if record else ""
        if is_locked or (record and not seen and abs(_now(directory) - os.fstat(file).st_mtime) < STALE):
            os.close(file)
            more = "" if is_locked else f", or wait {STALE:.0f} s if it is gone"
            raise UserError(
                f"{directory} is being written by {named or 'another process'}: stop that one first{more}, or give "
                "this run another name with name=..."
            )
        if not self._is_current(file):
            os.close(file)  # the last owner removed it between our opening and our lock
            return self.take(directory)
        self.file = file
        me = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        me["machine"] = machine
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(me).encode(), 0)
        threading.Thread(target=self._touch, args=(file,), daemon=True, name="owner").start()
        os.register_at_fork(after_in_child=self._forget)  # the lock must not outlive the owner in a worker
        return named

    def _is_current(self, file: int) -> bool:
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
                os.utime(file)


def _read(file: int) -> dict[str, Any]:
    """The description of an owner; {} if there is none, as after a kill during its writing."""
    try:
        record = parse_json(os.pread(file, 4096, 0))
        return {key: record[key] for key in ("host", "pid", "since")} | {"machine": record.get("machine")}
    except (ValueError, TypeError, KeyError):
        return {}


def _machine() -> str:
    """A name that no two machines share: within one, locks are seen."""
    with suppress(OSError):
        return read_bytes(Path("/proc/sys/kernel/random/boot_id"), 64).decode().strip()
    return f"{uuid.getnode():x}"


def _now(directory: Path) -> float:
    """The time by the clock of the storage, in seconds since 1970."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime
