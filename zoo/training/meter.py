"""Measurements of a run between two lines of the log: time, tokens, FLOPs, and how long it waited for data."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

import dsp
from zoo.training import ranks
from zoo.training.model import compute_dtype
from zoo.training.profile import DATA
from zoo.training.tracking import duration, human_bytes, human_count


@dataclass
class Sums:
    """Steps, their seconds, seconds of waiting for data, and tokens and FLOPs of all ranks together."""

    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    tokens: int = 0
    flops: float = 0.0


class Meter:
    """Sums over steps, read and cleared by `read`. `elapsed`: seconds of the run before this start.

    The first step of a start also plans, allocates and compiles: it is read by itself, and left out of later means.
    """

    def __init__(self, config: Any, world: int, device: torch.device, elapsed: float = 0.0):
        self.device, self.before, self.began = device, elapsed, time.perf_counter()
        peak = peak_flops(config, device)
        self.peak = peak and peak * world
        self.first: Sums | None = None
        self.sums = Sums()
        self.done, self.settled = 0, 0.0  # steps read after the first; when the first ended

    @property
    def elapsed(self) -> float:
        """Seconds of the run, over its resumes; time that a crash undid does not count."""
        return self.before + time.perf_counter() - self.began

    def waiting(self, batches: Any) -> Any:
        """Yield the batches; the time until each is ready counts as waiting for data."""
        try:
            while True:
                clock = time.perf_counter()
                try:
                    with record_function(DATA):
                        batch = next(batches)
                except StopIteration:
                    return
                self.sums.waited += time.perf_counter() - clock
                yield batch
        finally:
            batches.close()

    @contextmanager
    def step(self, tokens: int, flops: float) -> Iterator[None]:
        """Count a step of so many tokens and FLOPs of all ranks together."""
        clock = time.perf_counter()
        yield
        sums, now = self.sums, time.perf_counter()
        sums.steps, sums.seconds = sums.steps + 1, sums.seconds + now - clock
        sums.tokens, sums.flops = sums.tokens + tokens, sums.flops + flops
        if self.first is None:
            self.first, self.sums, self.settled = sums, Sums(), now

    def read(self, steps: int) -> dict[str, float]:
        """The record of the steps since the last read; `steps`: those to come. Collective."""
        sums = self.sums if self.sums.steps or self.first is None else self.first
        wait = ranks.all_max(sums.waited / sums.seconds)  # of the rank that waited longest
        averages = {
            "seconds_per_step": sums.seconds / sums.steps, "tokens_per_s": sums.tokens / sums.seconds,
            "data_wait": min(wait, 1.0), "memory_bytes": int(ranks.all_max(ranks.peak_memory(self.device))),
            "elapsed": self.elapsed,
        }  # fmt: skip
        if self.peak:
            averages["mfu"] = sums.flops / sums.seconds / self.peak
        self.done, self.sums = self.done + self.sums.steps, Sums()
        if self.done:
            averages["eta"] = (time.perf_counter() - self.settled) / self.done * steps
        return averages


def peak_flops(config: Any, device: torch.device) -> float | None:
    """FLOP/s of one rank's device by its data sheet: the configured one, or by the GPU's name; None if not known."""
    name = config.hardware.device
    if name is None and device.type == "cuda":
        gpu = torch.cuda.get_device_name(device).lower()
        name = next((known for known in dsp.hardware.ACCELERATORS if known in gpu), None)
    if name not in dsp.hardware.ACCELERATORS:
        return None
    return dsp.hardware.accelerator(name, dtype=compute_dtype(config), products=1.0).flops


def log_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """One line for a reader, aligned with the lines before and after it."""
    share = f"{values['comm_share']:.0%}" if "comm_share" in values else ""
    mfu = f"mfu {values['mfu']:<5.1%} " if "mfu" in values else ""
    eta = duration(values["eta"]) if "eta" in values else "-"
    skipped = f"  skipped {values['skipped']:.0f}" if values.get("skipped") else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:<8.4g} grad {values['grad_norm']:<7.3g} "
        f"lr {values['lr']:<8.2e} {values['seconds_per_step']:>6.3g} s/step "
        f"{human_count(values['tokens_per_s']):>5} tokens/s  {mfu}data {values['data_wait']:>3.0%}  "
        f"comm {share:>3} {human_bytes(values['comm_bytes']):>8}  memory {human_bytes(values['memory_bytes']):>8}  "
        f"eta {eta}{skipped}"
    )


def loss_records(losses: Mapping[str, float]) -> dict[str, float]:
    """The terms of a loss under their keys in the records; {} for a loss of one term, which is `loss` itself."""
    return {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
