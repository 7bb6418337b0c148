"""Two tensors in one all-to-all against one each, by size: where the call saved is worth the extra copies.

    python benchmarks/fuse.py [--ranks 4] [--rounds 31]

Medians over rounds in which the two ways take turns, both directions (at batch 1 each packs on the other side).
`dsp.planner.FUSE` is the size up to which tensors share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsp.ops  # noqa: F401  registers torch.ops.dsp

T = S = 16


def run(rank: int, n: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=n)
    group = init_device_mesh("cpu", (n,), mesh_dim_names=("sp",)).get_group().group_name
    switch, many = torch.ops.dsp.switch, torch.ops.dsp.switch_many
    for kib in (1, 16, 64, 256, 1024, 4096):
        c = kib * 1024 * n // (4 * T * S)
        shards = {(1, 2): torch.randn(1, T // n, S, c), (2, 1): torch.randn(1, T, S // n, c)}
        times: dict[str, list[float]] = {"apart": [], "together": []}
        for trial in range(-3, rounds):
            for (src, dst), x in shards.items():
                for name in times:
                    dist.barrier()
                    start = time.perf_counter()
                    if name == "apart":
                        switch(x, src, dst, T, group)
                        switch(x, src, dst, T, group)
                    else:
                        many([x, x], [src] * 2, [dst] * 2, [T] * 2, group)
                    if trial >= 0:
                        times[name].append((time.perf_counter() - start) * 1e6)
        apart, together = (statistics.median(v) for v in times.values())
        if rank == 0:
            print(f"{kib:6} KiB a rank, twice{apart:12.0f} µs apart{together:12.0f} µs together{together / apart:8.2f}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=31)
    options = parser.parse_args()
    print(f"{options.ranks} gloo ranks, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        args = options.ranks, f"file://{folder}/store", options.rounds
        torch.multiprocessing.spawn(run, args, nprocs=options.ranks)


if __name__ == "__main__":
    main()
