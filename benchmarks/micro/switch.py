"""The switch against a raw all-to-all of the same bytes and against DTensor.redistribute, in one run.

    python benchmarks/micro/switch.py [--ranks 4] [--megabytes 32] [--repeat 11] [--batch 1 2] [--fresh-pages]
    dsp-launch --nproc-per-node 8 benchmarks/micro/switch.py        # GPUs, over NCCL

Each rank holds a local part of `megabytes` MiB of a float32 activation (b t s c) and changes its sharded dim. The
operations take turns, each behind a barrier, and a trial lasts as long as its slowest rank: what else runs on the
machine falls on all of them alike. A ratio is the median over rounds of the ratio within a round; CPU time is the mean
over ranks. The bytes are those of the kernel's loopback counter, over all ranks: for Linux, gloo and one machine.

The raw collective has its buffers allocated, contiguous and warm; the others start from a tensor and end with one. "A
copy, then raw" is the least that a switch can cost: of its two sides only one is contiguous. The ranks' allocator is
told to keep its pages, as the CUDA one does: glibc otherwise gives blocks above 32 MiB back to the system, and every
new tensor is mapped, faulted in and zeroed page by page (`--fresh-pages` shows that).
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dsp
from dsp.gradients import connected_local, covered_exit
from dsp.layout import Axis, Cut
from dsp.planner import chunk_sizes

T_DIM, S_DIM = 1, 2
CHANNELS = 1024
KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}  # for glibc, at its start
Operation = Callable[[], object]


def lengths(batch: int, uneven: bool, size: int, megabytes: float) -> tuple[int, int]:
    """(t, s) of which one rank holds `megabytes` MiB; uneven ones are a little shorter."""
    t = 32 * size
    s = round(megabytes * 2**20 * size / (4 * CHANNELS * batch * t))
    return (t - 3, s - 5) if uneven else (t, s)


class Case:
    """One shape, and every operation on it."""

    def __init__(self, mesh: DeviceMesh, shape: tuple[int, ...]) -> None:
        self.mesh, self.axis, self.shape = mesh, Axis.of(mesh), shape
        self.stride = torch.empty(shape, device="meta").stride()
        self.group = mesh.get_group()
        self.parts = {d: torch.randn(self.axis.local_shape(shape, Cut(d)), device=mesh.device_type) for d in (1, 2)}

    def sharded(self, dim: int, local: Tensor | None = None) -> DTensor:
        local = self.parts[dim] if local is None else local
        return DTensor.from_local(
            local, self.mesh, [Shard(dim)], run_check=False, shape=torch.Size(self.shape), stride=self.stride
        )

    def raw(self) -> Operation:
        """The collective itself, with exactly the splits of the switch from t to s."""
        n, rank = self.axis.size, self.axis.rank
        send = self.parts[T_DIM].view(-1)
        received = torch.zeros_like(self.parts[S_DIM]).view(-1)
        t_parts, s_parts = chunk_sizes(self.shape[T_DIM], n), chunk_sizes(self.shape[S_DIM], n)
        rest = self.shape[0] * self.shape[3]
        out_splits = [t * s_parts[rank] * rest for t in t_parts]
        in_splits = [t_parts[rank] * s * rest for s in s_parts]
        if len({*out_splits, *in_splits}) == 1:
            return lambda: dist.all_to_all_single(received, send, group=self.group)
        return lambda: dist.all_to_all_single(received, send, out_splits, in_splits, group=self.group)

    def copy_and_raw(self) -> Operation:
        part, raw = self.parts[T_DIM], self.raw()
        buffer = torch.zeros_like(part)

        def both() -> None:
            buffer.copy_(part)
            raw()

        return both

    def switch(self, src: int, dst: int) -> Operation:
        x = self.sharded(src)

        @torch.no_grad()
        def forward() -> object:
            return dsp.switch(x, dst)

        return forward

    def both_ways(self, src: int, dst: int) -> Operation:
        leaf = self.parts[src].detach().requires_grad_()
        grad = self.parts[dst]

        def step() -> object:
            y = dsp.switch(self.sharded(src, leaf), dst)
            # the gradient is handed in, so that no loss is timed: covered_exit stands for dsp.mean or dsp.gather
            return torch.autograd.grad(covered_exit(connected_local(y)), leaf, grad)

        return step

    def redistribute(self, src: int, dst: int) -> Operation:
        x = self.sharded(src)

        @torch.no_grad()
        def forward() -> object:
            return x.redistribute(placements=[Shard(dst)])

        return forward

    def operations(self) -> dict[str, Operation]:
        return {
            "raw all_to_all_single": self.raw(),
            "a copy, then raw": self.copy_and_raw(),
            "dsp.switch  t → s": self.switch(T_DIM, S_DIM),
            "dsp.switch  s → t": self.switch(S_DIM, T_DIM),
            "dsp.switch  t → s and backward": self.both_ways(T_DIM, S_DIM),
            "dsp.switch  s → t and backward": self.both_ways(S_DIM, T_DIM),
            "DTensor.redistribute  t → s": self.redistribute(T_DIM, S_DIM),
            "DTensor.redistribute  s → t": self.redistribute(S_DIM, T_DIM),
        }

    def check(self) -> None:
        """The two agree before they race."""
        for src, dst in ((T_DIM, S_DIM), (S_DIM, T_DIM)):
            x = self.sharded(src)
            ours, theirs = dsp.switch(x, dst), x.redistribute(placements=[Shard(dst)])
            assert torch.equal(ours.to_local(), theirs.to_local())


def race(operations: dict[str, Operation], group: dist.ProcessGroup, device: str, repeat: int) -> dict[str, Tensor]:
    """(2, repeat) milliseconds of every trial of every operation: the slowest rank's, and the ranks' mean CPU time."""
    names = list(operations)
    wall, cpu = torch.zeros(2, len(names), repeat, dtype=torch.float64)
    for trial in range(-2, repeat):  # two rounds to warm up
        for turn in range(len(names)):
            i = (turn + trial) % len(names)
            dist.barrier(group)
            synchronize(device)
            start = time.perf_counter(), time.process_time()
            result = operations[names[i]]()
            synchronize(device)
            if trial >= 0:
                wall[i, trial] = (time.perf_counter() - start[0]) * 1e3
                cpu[i, trial] = (time.process_time() - start[1]) * 1e3
            del result
    wall, cpu = wall.to(device), cpu.to(device)
    dist.all_reduce(wall, dist.ReduceOp.MAX, group)
    dist.all_reduce(cpu, group=group)
    both = torch.stack([wall, cpu / dist.get_world_size(group)], 1).cpu()
    return dict(zip(names, both))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def loopback() -> int | None:
    """Bytes that this machine has received from itself."""
    try:
        lines = Path("/proc/net/dev").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith("lo:")), None)


def wire(operation: Operation, group: dist.ProcessGroup, bursts: int = 3) -> int | None:
    """Bytes over the loopback of one operation on all ranks; the least of several, for others use it too."""
    found = []
    for _ in range(bursts):
        dist.barrier(group)
        before = loopback()
        dist.barrier(group)  # everybody has read before anybody sends
        operation()
        dist.barrier(group)
        after = loopback()
        dist.barrier(group)
        if before is None or after is None:
            return None
        found.append(after - before)
    return min(found)


def report(case: Case, title: str, repeat: int) -> None:
    device, group = case.mesh.device_type, case.group
    case.check()
    operations = case.operations()
    times = race(operations, group, device, repeat)
    counted = {name: wire(op, group) for name, op in operations.items()} if device == "cpu" else {}
    sends = torch.zeros((), dtype=torch.int64)
    with dsp.count_comm() as comm:
        operations["dsp.switch  t → s"]()
    sends += comm.bytes
    sends = sends.to(device)
    dist.all_reduce(sends, group=group)
    if case.axis.rank:
        return

    def ratio(name: str, to: str) -> str:
        return "" if name == to else f"{statistics.median((times[name][0] / times[to][0]).tolist()):.2f}"

    n, total = case.axis.size, 4 * torch.Size(case.shape).numel()
    print(f"\n{title}: (b t s c) = {case.shape}, {total / n / 2**20:.1f} MiB a rank")
    print(f"{'':34}{'median ms':>10}{'min .. max':>17}{'/ raw':>8}{'/ redistribute':>16}{'CPU ms':>8}{'wire MiB':>10}")
    for name, (wall, cpu) in times.items():
        way = "s → t" if "s → t" in name else "t → s"
        against = "" if "backward" in name else ratio(name, f"DTensor.redistribute  {way}")
        moved = counted.get(name)
        print(
            f"{name:34}{statistics.median(wall.tolist()):10.1f}{wall.min():8.1f} .. {wall.max():5.1f}"
            f"{ratio(name, 'raw all_to_all_single'):>8}{against:>16}{statistics.median(cpu.tolist()):8.1f}"
            f"{'-' if moved is None else format(moved / 2**20, '.1f'):>10}"
        )
    formula = (n - 1) * total / n
    print(
        f"count_comm() over all ranks: {int(sends) / 2**20:.1f} MiB a switch; "
        f"N · (N-1)/N · M/N = {formula / 2**20:.1f} MiB",
        flush=True,
    )


def run(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    cuda = store == "env://" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size)
    mesh = init_device_mesh("cuda" if cuda else "cpu", (size,), mesh_dim_names=("sp",))
    if rank == 0:
        print(f"{size} {backend} ranks, {os.cpu_count()} cores, torch {torch.__version__}, {options.repeat} rounds")
    for batch in options.batch:
        for uneven in (False, True):
            t, s = lengths(batch, uneven, size, options.megabytes)
            title = f"batch {batch}, {'uneven' if uneven else 'even'} sizes"
            report(Case(mesh, (batch, t, s, CHANNELS)), title, options.repeat)
            gc.collect()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="processes to start (not under torchrun)")
    parser.add_argument("--megabytes", type=float, default=32, help="MiB that one rank holds")
    parser.add_argument("--repeat", type=int, default=11, help="rounds")
    parser.add_argument("--fresh-pages", action="store_true", help="leave the allocator as it is (not under torchrun)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://", options)
        return
    if not options.fresh_pages:
        os.environ |= {**KEEP_PAGES, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, f"file://{folder}/store", options)
        torch.multiprocessing.spawn(run, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
