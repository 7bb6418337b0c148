"""The switch against a raw all-to-all of the same bytes and against DTensor.redistribute, in one run.

    python benchmarks/micro/switch.py [--ranks 4] [--megabytes 32] [--repeat 11] [--batch 1 2]

Each rank holds a local part of `megabytes` MiB of a float32 activation (b t s c) and changes its sharded dim. The
operations take turns, each behind a barrier, and a trial lasts as long as its slowest rank. A ratio is the median over
rounds of the ratio within a round. The raw collective has its buffers allocated, contiguous and warm; the others start
from a tensor and end with one. "A copy, then raw" is the least that a switch can cost: of its two sides only one is
contiguous. The ranks' allocator keeps its pages, as the CUDA one does: glibc otherwise gives blocks above 32 MiB back
to the system, and every new tensor is mapped, faulted in and zeroed page by page.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import dsp
from benchmarks.common import options
from benchmarks.methods.hosts import Ranks, serve
from benchmarks.methods.rivals import all_ranks

T_DIM, S_DIM = 1, 2
CHANNELS = 1024


def operations(batch: int, megabytes: float) -> dict[str, Callable[[], object]]:
    """All on one shape, whose even sizes divide over the ranks."""
    mesh, n = all_ranks(), dist.get_world_size()
    t = 32 * n
    whole = (batch, t, round(megabytes * 2**20 * n / (4 * CHANNELS * batch * t)) // n * n, CHANNELS)

    def part(dim: int) -> torch.Tensor:
        return torch.randn([size // n if i == dim else size for i, size in enumerate(whole)])

    x = {dim: DTensor.from_local(part(dim), mesh, [Shard(dim)], run_check=False) for dim in (T_DIM, S_DIM)}
    send, received = x[T_DIM].to_local(), torch.zeros_like(x[S_DIM].to_local())
    buffer = torch.zeros_like(send)
    ways = {"t → s": (T_DIM, S_DIM), "s → t": (S_DIM, T_DIM)}
    for src, dst in ways.values():  # the two agree before they race
        assert torch.equal(dsp.switch(x[src], dst).to_local(), x[src].redistribute(placements=[Shard(dst)]).to_local())
    return {
        "raw all_to_all_single": lambda: dist.all_to_all_single(received.view(-1), send.view(-1)),
        "a copy, then raw": lambda: (
            buffer.copy_(send), dist.all_to_all_single(received.view(-1), buffer.view(-1))
        ),
        **{f"dsp.switch {w}": lambda s=s, d=d: dsp.switch(x[s], d) for w, (s, d) in ways.items()},
        **{f"DTensor.redistribute {w}": lambda s=s, d=d: x[s].redistribute(placements=[Shard(d)])
           for w, (s, d) in ways.items()},
    }  # fmt: skip


@torch.no_grad()
def race(batch: int, megabytes: float, repeat: int) -> dict[str, list[float]]:
    """Milliseconds of every trial of every operation on this rank."""
    made = operations(batch, megabytes)
    names, times = list(made), {name: [] for name in made}
    for trial in range(-2, repeat):  # two rounds to warm up
        for turn in range(len(names)):
            name = names[(turn + trial) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            made[name]()
            if trial >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def main() -> None:
    o = options(__doc__, ranks=4, megabytes=32.0, repeat=11, batch=[1, 2])
    with Ranks(__file__, o.ranks) as ranks:
        for batch in o.batch:
            each = ranks.ask("race", batch=batch, megabytes=o.megabytes, repeat=o.repeat)
            times = {name: [max(trial) for trial in zip(*(one[name] for one in each))] for name in each[0]}
            print(f"\nbatch {batch}, {o.megabytes:g} MiB a rank{'median ms':>15}{'/ raw':>8}{'/ redistribute':>16}")
            for name, taken in times.items():
                way = name[-5:] if "→" in name else "t → s"
                beside = times["raw all_to_all_single"], times[f"DTensor.redistribute {way}"]
                ratios = [statistics.median(a / b for a, b in zip(taken, other)) for other in beside]
                print(f"{name:28}{statistics.median(taken):12.1f}{ratios[0]:8.2f}{ratios[1]:16.2f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"race": race})
    else:
        main()
