"""The parts of benchmarks/gpu.py: what they share, and their processes.

A part is a list of cases; a case gives a row of numbers, with ``ok`` where it is right or wrong, or ``aim`` and ``met``
where it is a measurement with an aim. `run` gives each part a process, a time limit and a place to leave its rows: what
fails, hangs or dies is in the report, and what was found before stays.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo.attention
from benchmarks.common import ROOT

TOGETHER = min(8, os.cpu_count() or 1)  # parts that do not measure time
FORK = multiprocessing.get_context("fork")  # torch is imported once; nobody here touches the GPU
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))  # of programs that parts start
Row = dict[str, Any]
Cases = dict[str, Callable[[], Row]]
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
REFUSED = "No available kernel", "No viable backend"  # what torch says where a kernel does not take a shape


@dataclass(frozen=True)
class Machine:
    """Where the parts run: a CUDA GPU, or in a dry run a CPU, which has the same code run at tiny sizes.

    peak: TFLOP/s in bf16 by the data sheet, stream: GB/s of its memory; None where the GPU is not known.
    """

    device: str
    name: str
    peak: float | None = None
    stream: float | None = None
    memory: int = 0

    @property
    def dry(self) -> bool:
        return self.device == "cpu"

    def of(self, full: Any, tiny: Any) -> Any:
        return tiny if self.dry else full

    @property
    def compiler(self) -> str:
        return self.of("inductor", "aot_eager")  # which traces the same graphs, and generates no code

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], times: int = 10, warm: int = 3) -> float:
        """Median seconds of a call, until the device is done."""
        samples = []
        for i in range(-warm, times):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            if i >= 0:
                samples.append(time.perf_counter() - began)
        return statistics.median(samples)

    def peak_memory(self, run: Callable[[], object]) -> int | None:
        """Bytes held at most, with what is held before."""
        if self.dry:
            run()
            return None
        torch.cuda.reset_peak_memory_stats()
        run()
        self.wait()
        return torch.cuda.max_memory_allocated()

    def clear(self) -> None:
        gc.collect()
        if not self.dry and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Part:
    """title: for the page; make: its cases, given the machine and what the parts before it found; limit: seconds;
    needs: modules; alone: nothing else may run meanwhile, for it measures time."""

    name: str
    title: str
    make: Callable[[Machine, dict[str, Any]], Cases]
    limit: int
    needs: tuple[str, ...] = ()
    alone: bool = False


def error(actual: Tensor, wanted: Tensor) -> float:
    """‖actual - wanted‖ / ‖wanted‖, in float64 on the CPU."""
    actual, wanted = actual.detach().double().cpu(), wanted.detach().double().cpu()
    return ((actual - wanted).norm() / wanted.norm().clamp(min=1e-300)).item()


def mesh_of(machine: Machine) -> DeviceMesh:
    """All ranks, over the group that there is: a mesh that makes its own takes NCCL for CUDA, whatever was wanted."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, machine.device, mesh_dim_names=("sp",))


@contextmanager
def attended_by(kernels: list[str]) -> Iterator[None]:
    """zoo.attention by the first of these kernels of SDPA that takes its shapes; given none, as the zoo has it."""
    if not kernels:
        yield
        return
    with patch.object(zoo.attention, "flash_attn_func", None):
        with sdpa_kernel([KERNELS[name] for name in kernels], set_priority=True):
            yield


@contextmanager
def pretended(machine: Machine, n: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of n ranks of which nobody else is there: what is exchanged holds no numbers, all else is as on a rank."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        yield mesh_of(machine)
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------ processes


def missing(parts: Sequence[Part]) -> dict[str, list[str]]:
    """The modules that are not here, and the parts that need them."""
    absent: dict[str, list[str]] = {}
    for part in parts:
        for module in part.needs:
            if importlib.util.find_spec(module) is None:
                absent.setdefault(module, []).append(part.name)
    return absent


def reason(problem: BaseException) -> str:
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
        pipe.send(("its preparation", {"ok": False, "error": reason(problem), "seconds": 0.0}))
        return
    for name, case in cases.items():
        began = time.perf_counter()
        try:
            row = case()
        except Exception as problem:
            traceback.print_exc()
            row = {"ok": False, "error": reason(problem)}
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
        facts: dict[str, Any] = {"title": self.part.title, "seconds": seconds, "cases": self.cases}
        if stopped:
            return facts | {"status": "stopped", "error": f"it ran past its limit of {self.ends - self.began:.0f} s"}
        if self.process.exitcode:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:] if self.log.exists() else []
            how = f"signal {-self.process.exitcode}" if self.process.exitcode < 0 else f"{self.process.exitcode}"
            return facts | {"status": "died", "error": clean(f"its process ended with {how}: {''.join(last)}")[:600]}
        return facts | {"status": "failed" if bad else "ok"}


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
