"""The parts of a step's time, and the contents of a rank's memory.

    profile.steps=10:13        writes runs/<name>/profile/rank-0.json, for ui.perfetto.dev, and prints a summary
    profile.memory=true        writes memory-rank-0.pickle or .json of the same steps, too
    profile.every=100          takes one step in 100 apart, for the shares in the log

A share is a part of the step's time on rank 0: data, switches (what sequence parallelism sends), weights (what FSDP
gathers and reduces), compute, host (none of these). On a GPU the times are those of its kernels, on a CPU those of
operations.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from zoo.training import UserError
from zoo.training.ranks import log0
from zoo.training.sections import Profile
from zoo.training.tracking import human_bytes

DATA, STEP = "dsp: data", "dsp: step"  # names of ranges that the trainer itself marks
KINDS = ("data", "switches", "weights", "compute", "host")  # an instant counts as the first kind that it belongs to
Span = tuple[float, float]


class Profiler:
    """Profiles the steps that are configured. `shares`: those of the last step that was taken apart."""

    def __init__(self, options: Profile, directory: Path, device: torch.device):
        self.every, self.memory, self.device = options.every, options.memory, device
        self.directory = directory / "profile"
        self.first, self.last = wanted(options.steps) if options.steps else (0, -1)
        self.shares: dict[str, float] = {}
        self.running: Any = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the step of training inside, if that is configured."""
        inside = self.first <= step <= self.last
        once = not inside and self.every > 0 and step % self.every == 2 % self.every
        if once or (inside and self.running is None):
            self.running = self._begin(shapes=inside)
        with record_function(STEP):
            yield
        if self.running is not None and (once or step >= self.last):
            self._end(step, trace=not once)

    def _begin(self, shapes: bool) -> Any:
        if shapes and self.memory and self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch's library prints two lines each time
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        profiler = profile(activities=kinds, record_shapes=shapes, profile_memory=shapes and self.memory)
        profiler.start()
        return profiler

    def _end(self, step: int, trace: bool) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.running.stop()
        profiler, self.running = self.running, None
        # its table of its own methods keeps the events, megabytes, until Python next looks for cycles: after hours
        vars(profiler).pop("action_map", None)
        parts = shares(spans(profiler))
        self.shares = {f"{kind}_share": share for kind, share in parts.items()}
        self.shares["comm_share"] = parts["switches"] + parts["weights"]
        if trace:
            rank = dist.get_rank()
            self.directory.mkdir(parents=True, exist_ok=True)
            path = self.directory / f"rank-{rank}.json"
            profiler.export_chrome_trace(str(path))
            for line in summary(profiler, parts, max(step - self.first + 1, 1)):
                log0(line)
            log0(f"trace of steps {self.first} to {step}: {path}, a file a rank; open it in ui.perfetto.dev")
            if self.memory:
                log0(f"memory of the same steps: {self._write_memory(profiler, rank)}")

    def _write_memory(self, profiler: Any, rank: int) -> Path:
        """Write torch's record of memory: for a GPU a snapshot for pytorch.org/memory_viz, for a CPU by operation."""
        if self.device.type == "cuda":
            path = self.directory / f"memory-rank-{rank}.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
            return path
        path = self.directory / f"memory-rank-{rank}.json"
        rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_memory_usage)[:200]
        entries = [{"operation": r.key, "bytes": r.self_cpu_memory_usage, "calls": r.count} for r in rows]
        path.write_text(json.dumps(entries, indent=1))
        return path


def wanted(steps: str) -> tuple[int, int]:
    """The first and the last step of '10:13', or of '10'. UserError for any other text."""
    first, _, last = steps.partition(":")
    if not (first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first)):
        raise UserError(f"profile.steps={steps}: expected FIRST:LAST, such as 10:13, counted from 1")
    return int(first), int(last or first)


def kind_of(name: str) -> str:
    """The kind of an event, one of `KINDS`, by its name in the profile; '' for an event that does not count."""
    low = name.lower()
    if name == DATA:
        return "data"
    if name.startswith("dsp::") or any(word in low for word in ("alltoall", "all_to_all", "sendrecv", "wait_tensor")):
        return "switches"
    if low.startswith(("fsdp::all_gather", "fsdp::post_backward", "c10d::", "gloo:", "nccl")):
        return "weights"
    if name in (STEP, DATA) or low.startswith(("fsdp", "profilerstep", "cuda", "##")):
        return ""
    return "compute"


def spans(profiler: Any) -> dict[str, list[Span]]:
    """The spans of the events of each kind, in ns, with the steps themselves under 'step'.

    On a GPU the events are its kernels, on a CPU the operations of the thread that runs the steps.
    """
    events = profiler.profiler.kineto_results.events()
    on_device = any(event.device_type() != torch.autograd.DeviceType.CPU for event in events)
    threads = {event.start_thread_id() for event in events if event.name() == STEP}
    result: dict[str, list[Span]] = {}
    for event in events:
        cpu = event.device_type() == torch.autograd.DeviceType.CPU
        span = (event.start_ns(), event.start_ns() + event.duration_ns())
        if event.name() == STEP and cpu:
            result.setdefault("step", []).append(span)
            continue
        counted = (not cpu if on_device else event.start_thread_id() in threads) or event.name() == DATA
        if counted and (kind := kind_of(event.name())):
            result.setdefault(kind, []).append(span)
    return result


def shares(by_kind: dict[str, list[Span]]) -> dict[str, float]:
    """The share of the steps' time of each kind; an instant of two kinds counts as the first of `KINDS`."""
    whole = covered(by_kind.get("step", ()))
    counted: list[Span] = []
    before, result = 0.0, {}
    for kind in KINDS[:-1]:
        counted += by_kind.get(kind, ())
        so_far = min(covered(counted), whole)
        result[kind] = (so_far - before) / whole if whole else 0.0
        before = so_far
    return result | {"host": 1 - before / whole if whole else 0.0}


def covered(parts: Iterable[Span]) -> float:
    """The time during which at least one of the spans goes on."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(parts):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def summary(profiler: Any, parts: dict[str, float], steps: int) -> Iterator[str]:
    """The lines of a summary: the shares, and the operations that took longest."""
    yield "of a step: " + ", ".join(f"{kind} {share:.0%}" for kind, share in parts.items())
    device = torch.cuda.is_available()
    rows: Sequence[Any] = [row for row in profiler.key_averages() if row.key not in (STEP, DATA)]

    def spent(row: Any) -> float:
        return row.self_device_time_total if device else row.self_cpu_time_total

    rows = sorted(rows, key=spent, reverse=True)[:12]
    width = max((len(row.key[:48]) for row in rows), default=0)
    for row in rows:
        memory = f"  {human_bytes(row.self_cpu_memory_usage)}" if row.self_cpu_memory_usage > 0 else ""
        yield f"  {row.key[:48]:<{width}}  {spent(row) / 1e3 / steps:9.2f} ms  {row.count / steps:7.0f} times{memory}"
