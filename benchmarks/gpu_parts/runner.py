"""Parts in processes of their own: what fails, hangs or dies is in the report, and what was found before stays."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.gpu_parts import Machine, Part

TOGETHER = min(8, os.cpu_count() or 1)  # parts that do not measure time
FORK = multiprocessing.get_context("fork")  # torch is imported once; nobody here touches the GPU
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of programs that parts start


def missing(parts: Sequence[Part]) -> dict[str, list[str]]:
    """The modules that are not here, and the parts that need them."""
    absent: dict[str, list[str]] = {}
    for part in parts:
        for module in part.needs:
            if importlib.util.find_spec(module) is None:
                absent.setdefault(module, []).append(part.name)
    return absent


def told(problem: BaseException) -> str:
    """An error in a line, with the place of ours that it came from, without paths of this machine."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if f.filename.startswith(str(ROOT))]
    where = f" ({Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno})" if frames else ""
    return clean(f"{type(problem).__name__}: {problem}")[:600] + where


def clean(text: str) -> str:
    return " ".join(text.replace(f"{ROOT}/", "").replace(sys.prefix, "").split())


def work(part: Part, machine: Machine, earlier: dict[str, Any], log: str, pipe: Connection) -> None:
    """In the process of a part: send each row as it is there."""
    os.setsid()  # so that all it starts can be ended with it
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (1 if part.alone else TOGETHER)))
    try:
        cases = part.make(machine, earlier)
    except Exception as problem:
        pipe.send(("its preparation", {"ok": False, "error": told(problem), "seconds": 0.0}))
        return
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            row = case()
        except Exception as problem:
            traceback.print_exc()
            row = {"ok": False, "error": told(problem)}
        pipe.send((name, row | {"seconds": time.perf_counter() - began}))
        machine.clear()


@dataclass
class Running:
    """A part that runs, and what it has found so far."""

    part: Part
    process: Any
    pipe: Connection
    log: Path
    ends: float
    began: float = field(default_factory=time.monotonic)
    cases: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls, part: Part, machine: Machine, earlier: dict[str, Any], folder: Path, ends: float,
        target: Callable[..., None] = work,
    ) -> Running:  # fmt: skip
        here, there = FORK.Pipe(duplex=False)
        log = folder / f"{part.name}.log"
        process = FORK.Process(target=target, args=(part, machine, earlier, str(log), there))
        process.start()
        there.close()
        return cls(part, process, here, log, ends)

    def collect(self) -> bool:
        """Take what has come; True while there may be more."""
        alive = self.process.is_alive()
        try:
            while self.pipe.poll(0.05):
                name, row = self.pipe.recv()
                self.cases[name] = row
        except EOFError:
            self.process.join(5)
            return False
        return alive  # what it has started may have the other end of the pipe, too

    def stop(self) -> None:
        """End it and all that it started."""
        for act in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            with suppress(ProcessLookupError, PermissionError):
                act()
        self.process.join(10)  # one that the driver holds cannot be ended

    def report(self, stopped: bool) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        bad = [name for name, row in self.cases.items() if row.get("ok") is False]
        found: dict[str, Any] = {"title": self.part.title, "seconds": seconds, "cases": self.cases}
        if stopped:
            return found | {"status": "stopped", "error": f"it ran past its limit of {self.ends - self.began:.0f} s"}
        if self.process.exitcode:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:] if self.log.exists() else []
            how = f"signal {-self.process.exitcode}" if self.process.exitcode < 0 else f"{self.process.exitcode}"
            return found | {"status": "died", "error": clean(f"its process ended with {how}: {''.join(last)}")[:600]}
        return found | {"status": "failed" if bad else "ok"}


def run(
    parts: Sequence[Part], machine: Machine, folder: Path, deadline: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All parts: several together, and those that measure time alone, last. `keep` is given the report so far after
    each; `deadline` by time.monotonic(): parts for which no time is left are left out."""
    report: dict[str, Any] = {}

    def leave_out(part: Part, why: str) -> None:
        report[part.name] = {"title": part.title, "status": "left out", "error": why, "cases": {}, "seconds": 0.0}

    absent = missing(parts)
    for part in parts:
        lacks = [module for module in absent if part.name in absent[module]]
        if lacks:
            leave_out(part, f"it needs {', '.join(lacks)}, which is not installed")
    for batch in batches([part for part in parts if part.name not in report]):
        started: list[Running] = []
        for part in batch:
            left = deadline - time.monotonic()
            if left < 5:
                leave_out(part, "no time was left for it")
                continue
            ends = time.monotonic() + min(machine.of(1, 4) * part.limit, left)  # few cores take longer
            started.append(Running.start(part, machine, report, folder, ends))
        try:
            while started:
                for one in list(started):
                    more, late = one.collect(), time.monotonic() > one.ends
                    if late or not more:
                        one.stop()
                        started.remove(one)
                        report[one.part.name] = one.report(stopped=more)
                        keep(report)
        finally:
            for one in started:
                one.stop()
    return report


def batches(parts: Sequence[Part]) -> Iterator[list[Part]]:
    sociable = [part for part in parts if not part.alone]
    for i in range(0, len(sociable), TOGETHER):
        yield sociable[i : i + TOGETHER]
    for part in parts:
        if part.alone:
            yield [part]


def write(path: Path, text: str) -> None:
    """At once: a reader sees the whole of one report or of another."""
    aside = path.with_suffix(".part")
    aside.write_text(text)
    aside.replace(path)
