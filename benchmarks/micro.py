"""The cost of a switch, and of the host, each alone.

    python benchmarks/micro.py [--ranks 4] [--megabytes 32] [--repeat 11] [--batch 1 2]       # a switch
    python benchmarks/micro.py --host [--repeat 100]          # the host on two ranks; first calls; seconds to plan

A switch, beside a raw all-to-all of the same bytes and beside DTensor.redistribute: each rank holds a local part of
`megabytes` MiB of a float32 activation (b t s c) and changes its sharded dim. The operations take turns, each behind a
barrier, and a trial lasts as long as its slowest rank. A ratio is the median over rounds of the ratio within a round.
The raw collective has its buffers allocated, contiguous and warm; the others start from a tensor and end with one. "A
copy, then raw" is the least that a switch can cost: of its two sides only one is contiguous. The ranks' allocator keeps
its pages, as the CUDA one does: glibc otherwise gives blocks above 32 MiB back to the system, and every new tensor is
mapped, faulted in and zeroed page by page.

The host: tensors of a few bytes, so that nothing but its work is left. Times are CPU time of the thread that runs the
model, which waiting for the other rank and other programs do not enter; medians over rounds in which the bare model and
the parallelized one take turns. A cost per stage or operation is a slope: what 50 more of them add.
"""

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dsp
import zoo
from benchmarks.common import on_ranks, options
from benchmarks.hosts import Ranks, script
from benchmarks.methods import all_ranks

# ------------------------------------------------------------------------------------------------------------ a switch

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
    runs = operations(batch, megabytes)
    names, times = list(runs), {name: [] for name in runs}
    for trial in range(-2, repeat):  # two rounds to warm up
        for turn in range(len(names)):
            name = names[(turn + trial) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            runs[name]()
            if trial >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return times


def switches(o: Namespace) -> None:
    with Ranks(__file__, o.ranks) as ranks:
        for batch in o.batch:
            each = ranks.ask("race", batch=batch, megabytes=o.megabytes, repeat=o.repeat or 11)
            times = {name: [max(trial) for trial in zip(*(one[name] for one in each))] for name in each[0]}
            print(f"\nbatch {batch}, {o.megabytes:g} MiB a rank{'median ms':>15}{'/ raw':>8}{'/ redistribute':>16}")
            for name, taken in times.items():
                way = name[-5:] if "→" in name else "t → s"
                beside = times["raw all_to_all_single"], times[f"DTensor.redistribute {way}"]
                ratios = [statistics.median(a / b for a, b in zip(taken, other)) for other in beside]
                print(f"{name:28}{statistics.median(taken):12.1f}{ratios[0]:8.2f}{ratios[1]:16.2f}", flush=True)


# ------------------------------------------------------------------------------------------------------------ the host

FEW, MANY = 10, 60
SHAPE = (1, 4, 6, 8)  # b t s c
Call = Callable[[], object]
Op = Callable[[Tensor, Tensor], Tensor]


class Stages(nn.Module):
    """`depth` stages that do nothing; `switched`: every other one computes over the other dim."""

    def __init__(self, depth: int, switched: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(depth))
        over = ("b t [s c]", "b [t] s [c]") if switched else ("b t [s c]",)
        self.stages = {"": "x=b t s c"} | {f"blocks.{i}": over[i % len(over)] for i in range(depth)}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Glued(nn.Module):
    """One stage, then `depth` times the same operation of glue."""

    def __init__(self, depth: int, op: Op) -> None:
        super().__init__()
        self.first, self.weight = nn.Identity(), nn.Parameter(torch.ones(SHAPE[-1]))
        self.depth, self.op = depth, op
        self.stages = {"": "x=b t s c", "first": "b t [s c]"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.depth):
            x = self.op(x, self.weight)
        return x


GLUE: dict[str, Op] = {
    "x + x": lambda x, w: x + x,
    "x * parameter": lambda x, w: x * w,
    "F.silu(x)": lambda x, w: F.silu(x),
    "x.transpose(1, 2)": lambda x, w: x.transpose(1, 2),
}


def spend(calls: dict[str, Call], repeat: int) -> dict[str, float]:
    """Median microseconds of this thread's CPU time, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(-3, repeat):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            if trial >= 0:
                times[name].append((time.thread_time() - start) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def forward(model: nn.Module) -> Call:
    x = torch.randn(SHAPE)
    return torch.no_grad()(lambda: model(x))


def both_ways(model: nn.Module) -> Call:
    x = torch.randn(SHAPE)
    return lambda: dsp.mean(model(x.clone().requires_grad_() * 1)).backward()


CASES: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], Call], str]] = {
    "stage, no grad": (Stages, forward, ""),
    "stage, forward and backward": (Stages, both_ways, ""),
    "stage after a switch, no grad": (partial(Stages, switched=True), forward, ""),
    "stage after a switch, forward and backward": (partial(Stages, switched=True), both_ways, ""),
    **{f"glue {name}, no grad": (partial(Glued, op=op), forward, "") for name, op in GLUE.items()},
    **{f"glue {name} in a graph, no grad": (partial(Glued, op=GLUE[name]), forward, "eager") for name in
       ("x + x", "F.silu(x)", "x.transpose(1, 2)")},
}  # fmt: skip


def slopes(mesh: DeviceMesh, repeat: int) -> dict[str, list[float]]:
    """Microseconds of one more stage or operation: in the bare model, in the parallelized one, and the difference."""
    rows = {}
    for name, (make, call, compiler) in CASES.items():
        calls = {}
        for depth in (FEW, MANY):
            calls[f"bare {depth}"] = call(make(depth))
            parallel = dsp.parallelize(make(depth), mesh, gather_output=False, compile=compiler or False)
            calls[f"parallel {depth}"] = call(parallel)
        times = spend(calls, repeat)
        bare, parallel = ((times[f"{k} {MANY}"] - times[f"{k} {FEW}"]) / (MANY - FEW) for k in ("bare", "parallel"))
        rows[name] = [bare, parallel, parallel - bare]
    return rows


def alone(mesh: DeviceMesh, repeat: int) -> dict[str, list[float]]:
    """A model of one empty stage on two ranks; a step of a small transformer2d, bare and parallelized on one rank."""

    def step(model: Any) -> Call:
        inputs = model.example_inputs(frames=8, height=16, width=16)
        return lambda: dsp.mean(model(**inputs)).backward()

    small = [zoo.create("transformer2d", "test") for _ in range(2)]
    one, empty = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "sp"))["sp"], Stages(1)
    rows = {}
    parallel = forward(dsp.parallelize(empty, mesh, gather_output=False)), step(dsp.parallelize(small[1], one))
    bare = forward(Stages(1)), step(small[0])
    for name, *pair in zip(("call of a model of one empty stage", "step of transformer2d at size 1"), bare, parallel):
        times = spend(dict(zip(("bare", "parallel"), pair)), repeat)
        rows[name] = [*times.values(), times["parallel"] - times["bare"]]
    return rows


def first_calls(mesh: DeviceMesh) -> dict[str, float]:
    """Milliseconds of CPU time that one more stage, and one more operation, adds to a first call; medians of five."""
    rows, x = {}, torch.randn(SHAPE)
    for name, make in (
        ("stage after a switch", partial(Stages, switched=True)),
        *((f"glue {name}", partial(Glued, op=op)) for name, op in GLUE.items()),
    ):
        seconds: dict[int, list[float]] = {FEW: [], MANY: []}
        for _ in range(5):
            for depth, times in seconds.items():
                model = dsp.parallelize(make(depth), mesh, gather_output=False)
                start = time.process_time()
                with torch.no_grad():
                    model(x)
                times.append(time.process_time() - start)
        few, many = map(statistics.median, seconds.values())
        rows[f"first call, {name}"] = (many - few) / (MANY - FEW) * 1e3
    return rows


def planning() -> dict[str, float]:
    """Seconds of CPU time to plan deep models at great length, on meta tensors: the median of three."""
    seconds = {}
    for name, family, size, changes in (
        ("transformer2d 3b, 4M tokens, 32 ranks", "transformer2d", "3b", {}),
        ("the same in 100 layers (200 stages)", "transformer2d", "3b", {"depth": 100}),
        ("latte XL/2 in 200 blocks, 4M tokens", "latte", "XL/2", {"depth": 200}),
    ):
        with torch.device("meta"):
            model = zoo.create(family, size, **changes)
            inputs = model.example_inputs(frames=1024, height=128, width=128)
        rounds = []
        for _ in range(3):
            start = time.process_time()
            dsp.plan(model, kwargs=inputs, size=32, gather_output=False, dtype=torch.bfloat16)
            rounds.append(time.process_time() - start)
        seconds[name] = statistics.median(rounds)
    return seconds


def host(mesh: DeviceMesh, repeat: int) -> None:
    torch.manual_seed(0)  # all ranks hold the same inputs
    rows, first = alone(mesh, repeat) | slopes(mesh, repeat), first_calls(mesh)
    if dist.get_rank() == 0:
        print(f"{'host µs; a slope is of one more':44}{'bare':>12}{'parallel':>12}{'added':>12}")
        print("\n".join(f"{name:44}" + "".join(f"{v:12.1f}" for v in values) for name, values in rows.items()))
        print(f"\n{'ms of one more in a first call':44}")
        print("\n".join(f"{name:44}{ms:12.2f}" for name, ms in first.items()))
        print(f"\n{'seconds to plan':44}")
        print("\n".join(f"{name:44}{seconds:12.2f}" for name, seconds in planning().items()), flush=True)


def main(arguments: Sequence[str]) -> None:
    o = options(__doc__, arguments, ranks=4, megabytes=32.0, repeat=0, batch=[1, 2], host=False)
    on_ranks(2, host, o.repeat or 100) if o.host else switches(o)


if __name__ == "__main__":
    script(main, race=race)
