"""What a run measures of itself between two lines of the log: time, tokens, FLOPs, and how long it waited for data."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.profiler import record_function

from dsp.hardware import ACCELERATORS
from zoo.training import ranks
from zoo.training.model import compute_dtype
from zoo.training.profile import DATA
from zoo.training.tracking import amount, duration, size


class Meter:
    """Sums over steps, read and cleared by `read`. `elapsed`: seconds of the run before this start."""

    def __init__(self, config: Any, world: int, device: torch.device, elapsed: float = 0.0):
        self.device, self.before, self.began = device, elapsed, time.perf_counter()
        peak = peak_flops(config, device)
        self.peak = peak and peak * world
        self.steps, self.done = 0, 0
        self._clear()

    def _clear(self) -> None:
        self.done += self.steps
        self.steps, self.seconds, self.waited, self.tokens, self.flops = 0, 0.0, 0.0, 0, 0.0

    @property
    def elapsed(self) -> float:
        """Seconds of the run, with those before it was resumed; of what a crash undid, nothing."""
        return self.before + time.perf_counter() - self.began

    def waiting(self, batches: Any) -> Any:
        """The same batches; the time until each is there counts as waiting for data."""
        try:
            while True:
                clock = time.perf_counter()
                try:
                    with record_function(DATA):
                        batch = next(batches)
                except StopIteration:
                    return
                self.waited += time.perf_counter() - clock
                yield batch
        finally:
            batches.close()

    @contextmanager
    def step(self, tokens: int, flops: float) -> Iterator[None]:
        """Count a step of so many tokens and FLOPs of all ranks together."""
        clock = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - clock
        self.steps, self.tokens, self.flops = self.steps + 1, self.tokens + tokens, self.flops + flops

    def read(self, left: int) -> dict[str, float]:
        """What there is to record of the steps since the last time; `left`: steps to come. Collective."""
        wait = ranks.greatest(self.waited / self.seconds)  # of the rank that waited longest
        found = {
            "seconds_per_step": self.seconds / self.steps, "tokens_per_s": self.tokens / self.seconds,
            "data_wait": min(wait, 1.0), "memory_bytes": int(ranks.greatest(ranks.peak_memory(self.device))),
            "elapsed": self.elapsed,
        }  # fmt: skip
        if self.peak:
            found["mfu"] = self.flops / self.seconds / self.peak
        self._clear()
        return found | {"eta": (time.perf_counter() - self.began) / self.done * left}


def peak_flops(config: Any, device: torch.device) -> float | None:
    """FLOP/s of one rank's device by its data sheet: the configured one, or that with its name; None if not known."""
    name = config.hardware.device
    if name is None and device.type == "cuda":
        told = torch.cuda.get_device_name(device).lower()
        name = next((known for known in ACCELERATORS if known in told), None)
    if name not in ACCELERATORS:
        return None
    half, single, *_ = ACCELERATORS[name]
    return half if compute_dtype(config).itemsize == 2 else single


def log_line(step: int, steps: int, values: Mapping[str, float]) -> str:
    """One line for a reader, aligned with the lines before and after it."""
    share = f"{values['comm_share']:.0%}" if "comm_share" in values else ""
    mfu = f"mfu {values['mfu']:<5.1%} " if "mfu" in values else ""
    skipped = f"  skipped {values['skipped']:.0f}" if values.get("skipped") else ""
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {values['loss']:<8.4g} grad {values['grad_norm']:<7.3g} "
        f"lr {values['lr']:<8.2e} {values['seconds_per_step']:>6.3g} s/step "
        f"{amount(values['tokens_per_s']):>5} tokens/s  {mfu}data {values['data_wait']:>3.0%}  "
        f"comm {share:>3} {size(values['comm_bytes']):>8}  memory {size(values['memory_bytes']):>8}  "
        f"eta {duration(values['eta'])}{skipped}"
    )


def named(losses: Mapping[str, float]) -> dict[str, float]:
    """The terms of a loss as they are recorded; a loss of one term is recorded already."""
    return {f"loss_{name}": value for name, value in losses.items()} if len(losses) > 1 else {}
