"""The parts of benchmarks/gpu.py: what they share.

A part is a list of cases; a case gives a row of numbers, with ``ok`` where it is right or wrong, or ``aim`` and ``met``
where it is a measurement with an aim. `runner` gives each part a process, a time limit and a place to leave its rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import zoo.attention

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
        found = []
        for i in range(-warm, times):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            if i >= 0:
                found.append(time.perf_counter() - began)
        return statistics.median(found)

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


def error(found: Tensor, wanted: Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖, in float64 on the CPU."""
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    return ((found - wanted).norm() / wanted.norm().clamp(min=1e-300)).item()


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
