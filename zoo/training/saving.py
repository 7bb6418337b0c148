"""Checkpoints written while training goes on: a step waits only for the copy, not for the disk.

    saver = Saver(directory, keep=2, asynchronous=True)
    saver.save(step, contents, extra)       # copies the tensors to memory of the host, and returns
    saver.wait()                            # the checkpoint is complete on disk, or an error says why not

checkpoint.py writes, hashes and renames the files, in a thread with a process group of its own.
`save` and `wait` are collective: an error while writing is raised by the next of them, on every rank.
"""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.training import checkpoint
from zoo.training.guard import Guard, Snapshot
from zoo.training.ranks import log0, on_first_rank
from zoo.training.watch import PATIENCE


class Saver:
    """Writes the checkpoints of a run, one at a time. `stalled`: seconds that training waited in `save`."""

    def __init__(self, directory: Path, keep: int, asynchronous: bool):
        self.directory, self.keep = directory, keep
        self.group = dist.new_group(backend="gloo") if asynchronous else None
        self.thread: threading.Thread | None = None
        self.step, self.stalled = -1, 0.0
        self.result: tuple[Any, float] = None, 0.0

    def save(self, step: int, contents: checkpoint.Contents, extra: Mapping[str, Any]) -> None:
        self.wait()
        clock = time.perf_counter()
        self.step = step
        if self.group is None:
            path = checkpoint.save(self.directory, step, contents, extra=extra, keep=self.keep)
            self.stalled = time.perf_counter() - clock
            log0(f"step {step}: checkpoint {path}")
            return
        data = checkpoint.hold(contents)
        self.thread = threading.Thread(target=self._write, args=(step, data, extra), daemon=True)
        self.thread.start()
        self.stalled = time.perf_counter() - clock

    def _write(self, step: int, data: Any, extra: Mapping[str, Any]) -> None:
        clock = time.perf_counter()
        try:
            path = checkpoint.write(self.directory, step, data, extra=extra, keep=self.keep, group=self.group)
            self.result = path, time.perf_counter() - clock
        except BaseException as error:  # `wait` raises it, on all ranks together
            self.result = error, 0.0

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        if self.thread is None:
            return
        self.thread.join()
        self.thread = None
        path, seconds = self.result
        if isinstance(path, BaseException):
            raise path
        log0(f"step {self.step}: checkpoint {path} (waited {self.stalled:.2f} s, written in {seconds:.2f} s)")

    def leave_sound(self, guard: Guard, snapshot: Callable[[], Snapshot]) -> str:
        """After a divergence, make weights that gave a finite loss the newest checkpoint; return a text that names it.

        snapshot: makes a copy of the current weights.
        """
        self.wait()
        saved = on_first_rank(lambda: checkpoint.finished(self.directory))
        sound = [(at, path) for at, path in saved if at < guard.last_finite]
        guard.forget()
        best = snapshot() if guard.last_finite > guard.last_update else guard.snapshot
        if best and best.step > max((at for at, _ in sound), default=0):
            path = checkpoint.write(self.directory, best.step, best.data, extra=best.extra, keep=self.keep)
            log0(f"step {best.step}: checkpoint {path}")
            sound.append((best.step, path))
        return f"the last checkpoint known to be sound is {sound[-1][1]}" if sound else "no checkpoint of them is left"

    def abandon(self) -> None:
        """After an error, wait only a moment for the checkpoint being written: ranks that it needs may be gone."""
        if self.thread is not None:
            self.thread.join(PATIENCE)
