"""Several tensors in one all-to-all against one each, by size: where the calls saved are worth the extra copies.

    python benchmarks/micro/fuse.py [--ranks 4] [--rounds 31] [--tensors 2]

One each either one after the other, or all under way at once. Medians over rounds in which the ways take turns, both
directions (at batch 1 each packs on the other side). `dsp.planner.FUSE` is the size up to which tensors share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import dsp.ops  # noqa: F401  registers torch.ops.dsp

T = S = 16


def run(rank: int, n: int, store: str, rounds: int, count: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n)
    group = init_device_mesh("cpu", (n,), mesh_dim_names=("sp",)).get_group().group_name
    ops = torch.ops.dsp
    ways: dict[str, Callable[[Tensor, int, int], Any]] = {
        "in turn": lambda x, *way: [ops.switch(x, *way, T, group) for _ in range(count)],
        "at once": lambda x, *way: ops.switch_each([x] * count, *[[d] * count for d in (*way, T)], group, [], []),
        "together": lambda x, *way: ops.switch_many([x] * count, *[[d] * count for d in (*way, T)], group),
    }
    for kib in (1, 16, 64, 256, 1024, 4096):
        c = kib * 1024 * n // (4 * T * S)
        shards = {(1, 2): torch.randn(1, T // n, S, c), (2, 1): torch.randn(1, T, S // n, c)}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for trial in range(-3, rounds):
            for (src, dst), x in shards.items():
                for name in times:
                    dist.barrier()
                    start = time.perf_counter()
                    ways[name](x, src, dst)
                    if trial >= 0:
                        times[name].append((time.perf_counter() - start) * 1e6)
        median = {name: statistics.median(v) for name, v in times.items()}
        if rank == 0:
            shown = "".join(f"{took:10.0f} µs {name}" for name, took in median.items())
            least = min(median["in turn"], median["at once"])
            print(f"{kib:6} KiB a rank, {count} times{shown}{median['together'] / least:8.2f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--tensors", type=int, default=2)
    options = parser.parse_args()
    print(f"{options.ranks} gloo ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        args = options.ranks, f"file://{folder}/store", options.rounds, options.tensors
        torch.multiprocessing.spawn(run, args, nprocs=options.ranks)


if __name__ == "__main__":
    main()
