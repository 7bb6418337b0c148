"""The host time of parallelize: microseconds a stage, an operation of glue, a step; the time to plan a large model.

    python benchmarks/micro/overhead.py [--repeat 100] [--profile stage|switch|glue|step]

Two gloo ranks on tensors of a few bytes, so that nothing but host work is left. Times are CPU time of the thread that
runs the model, which waiting for the other rank and other programs do not enter; medians over rounds in which the bare
model and the parallelized one take turns. A cost per stage or operation is a slope: what 50 more of them add.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dsp
import zoo
from dsp.plan.make import make_plan, stages_of
from dsp.plan.solve import Goal
from dsp.plan.tracing import trace
from dsp.run.agreement import EVERY, ROW
from dsp.run.inputs import describe, taken_apart

FEW, MANY = 10, 60
SHAPE = (1, 4, 6, 8)  # b t s c
WEIGHTS = 4_000_000
ROOT = {"": "x=b t s c"}
Call = Callable[[], object]


class Stages(nn.Module):
    """`depth` stages that do nothing, or as good as nothing."""

    def __init__(self, depth: int, stage: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(stage() for _ in range(depth))
        self.stages = {**ROOT, "blocks.*": "b t [s c]"}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Switched(Stages):
    """The same, but every other stage computes over the other dim."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.stages = {**ROOT} | {f"blocks.{i}": ("b t [s c]", "b [t] s [c]")[i % 2] for i in range(depth)}


class Glued(nn.Module):
    """One stage, then `depth` times the same operation of glue."""

    def __init__(self, depth: int, op: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Identity()
        self.weight = nn.Parameter(torch.ones(SHAPE[-1]))
        self.depth, self.op = depth, op
        self.stages = {**ROOT, "first": "b t [s c]"}

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(self.depth):
            x = self.op(x, self.weight)
        return x


GLUE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x + 1": lambda x, w: x + 1,
    "x + x": lambda x, w: x + x,
    "x * parameter": lambda x, w: x * w,
    "F.silu(x)": lambda x, w: F.silu(x),
    "F.layer_norm(x)": lambda x, w: F.layer_norm(x, SHAPE[-1:]),
    "x.reshape(b, t, s, c)": lambda x, w: x.reshape(x.shape),
    "x.transpose(1, 2)": lambda x, w: x.transpose(1, 2),
    "x.chunk(2, -1)[0], torch.cat": lambda x, w: torch.cat(x.chunk(2, -1), -1),
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

    def step() -> None:
        dsp.mean(model(x.clone().requires_grad_() * 1)).backward()

    return step


def slope(
    make: Callable[[int], nn.Module], call: Callable[[nn.Module], Call], mesh: DeviceMesh, repeat: int,
    compile: bool | str = False,
) -> list[float]:  # fmt: skip
    """Microseconds of one more stage or operation: in the bare model, in the parallelized one, and the difference."""
    calls = {}
    for depth in (FEW, MANY):
        calls[f"bare {depth}"] = call(make(depth))
        calls[f"parallel {depth}"] = call(dsp.parallelize(make(depth), mesh, gather_output=False, compile=compile))
    times = spend(calls, repeat)
    kinds = "bare", "parallel"
    bare, parallel = ((times[f"{kind} {MANY}"] - times[f"{kind} {FEW}"]) / (MANY - FEW) for kind in kinds)
    return [bare, parallel, parallel - bare]


def line(name: str, values: list[float]) -> str:
    return f"{name:44}" + "".join(f"{v:12.1f}" for v in values)


def stages_and_glue(mesh: DeviceMesh, repeat: int) -> list[str]:
    lines = ["", f"{'host µs, one more':44}{'bare':>12}{'parallel':>12}{'added':>12}"]
    for name, make in (
        ("stage", Stages),
        ("stage that draws random numbers", partial(Stages, stage=nn.Dropout)),
        ("stage after a switch", Switched),
    ):
        lines.append(line(f"{name}, no grad", slope(make, forward, mesh, repeat)))
        lines.append(line(f"{name}, forward and backward", slope(make, both_ways, mesh, repeat)))
    for name, op in GLUE.items():
        lines.append(line(f"glue {name}, no grad", slope(partial(Glued, op=op), forward, mesh, repeat)))
    for name in ("x + x", "F.silu(x)", "x.transpose(1, 2)"):
        costs = slope(partial(Glued, op=GLUE[name]), forward, mesh, repeat, compile="eager")
        lines.append(line(f"glue {name} in a graph, no grad", costs))
    for name in ("x + x", "x.transpose(1, 2)"):
        costs = slope(partial(Glued, op=GLUE[name]), both_ways, mesh, repeat)
        lines.append(line(f"glue {name}, forward and backward", costs))
    return lines


def a_step(mesh: DeviceMesh, repeat: int) -> list[str]:
    """The host time of a call of the model beside its stages and glue."""
    one = Stages(1)
    dsp.parallelize(one, mesh, gather_output=False)
    runtime = one.forward.__self__
    small, large = torch.randn(SHAPE), torch.randn(1, 64, 256, 64)

    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    group, row = mesh.get_group(), torch.zeros(ROW, dtype=torch.int64)
    everyone = row.new_empty(ROW * mesh.size())

    def agree(x: Tensor) -> Call:
        def check() -> None:
            runtime.agreement.start(*taken_apart((x,), {}), 7, wait=False)
            runtime.agreement.finish()

        return check

    def lookup() -> None:
        leaves, spec = taken_apart((small,), {})
        runtime.entry_for((describe(leaves, spec), True, torch.is_grad_enabled()), leaves, (small,), {})

    one.weight = nn.Parameter(torch.randn(WEIGHTS))
    check_small = agree(small)

    def weigh() -> None:
        runtime.agreement.calls = 0
        check_small()
        runtime.agreement.calls = EVERY  # the next ones compare none

    def gathered() -> None:
        all_gather(everyone, row, group=group, async_op=True).wait()

    times = spend(
        {
            "call of a model of one empty stage, no grad": forward(one),
            "    the same, bare": forward(Stages(1)),
            "    plan found in the cache": lookup,
            "    do all ranks hold the same inputs?": agree(small),
            "        a bare all-gather of as many bytes": gathered,
            f"    and the same weights? ({WEIGHTS * 4 / 1e6:.1f} MB, in calls 1, 2, 4 ... and every {EVERY}th)": weigh,
            f"    the same for {large.numel() * 4 / 1e6:.1f} MB of input": agree(large),
        },
        repeat,
    )
    return ["", f"{'host µs a step':44}{'':12}{'':12}", *(line(name, [t]) for name, t in times.items())]


def real_model(mesh: DeviceMesh, alone: DeviceMesh, repeat: int) -> list[str]:
    """A small transformer2d: bare, parallelized on one rank, parallelized on two."""

    def make(depth: int = 2) -> nn.Module:
        torch.manual_seed(0)
        return zoo.create("transformer2d", "test", depth=depth)

    def step(model: nn.Module, **lengths: int) -> Call:
        inputs = model.example_inputs(**lengths)
        return lambda: dsp.mean(model(**inputs)).backward()

    lengths = {"frames": 8, "height": 16, "width": 16}
    calls = {
        "bare": step(make(), **lengths),
        "sp=1": step(dsp.parallelize(make(), alone), **lengths),
        "bare again": step(make(), **lengths),
    }
    ratios: dict[str, list[float]] = {"sp=1": [], "bare again": []}
    for trial in range(-3, repeat):
        times = {}
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name] = time.thread_time() - start
        if trial >= 0:
            for name, values in ratios.items():
                values.append(times[name] / times["bare"])
    lines = ["", "step of transformer2d (hidden 48, 2 layers, 8 frames of 16x16), CPU time against the bare model"]
    lines += [f"{name:44}{statistics.median(values):12.3f}" for name, values in ratios.items()]

    calls = {}
    for depth in (2, 6):
        calls[f"bare {depth}"] = step(make(depth))
        calls[f"parallel {depth}"] = step(dsp.parallelize(make(depth), mesh, gather_output=False))
    t = spend(calls, repeat // 2)
    bare, parallel = ((t[f"{kind} 6"] - t[f"{kind} 2"]) / 4 for kind in ("bare", "parallel"))
    lines += [
        "",
        f"{'host µs, forward and backward, one more':44}{'bare':>12}{'parallel':>12}{'added':>12}",
        line("layer of transformer2d: 2 stages, 2 switches", [bare, parallel, parallel - bare]),
    ]
    return lines


def profiled(what: str, mesh: DeviceMesh) -> str:
    if what == "glue":
        call = forward(dsp.parallelize(Glued(MANY, GLUE["x * parameter"]), mesh, gather_output=False))
    elif what == "switch":
        call = forward(dsp.parallelize(Switched(MANY), mesh, gather_output=False))
    else:
        depth = 1 if what == "step" else MANY
        call = forward(dsp.parallelize(Stages(depth), mesh, gather_output=False))
    for _ in range(3):
        call()
    profile = cProfile.Profile(time.thread_time)
    with profile:
        for _ in range(50):
            call()
    with tempfile.TemporaryFile("w+") as out:
        pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(30)
        out.seek(0)
        return out.read()


def run(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks hold the same inputs
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    grid = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "sp"))
    alone = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "sp"))["sp"]
    if options.profile:
        lines = [profiled(options.profile, grid["sp"])]
    else:
        lines = real_model(grid["sp"], alone, options.repeat)
        lines += stages_and_glue(grid["sp"], options.repeat)
        lines += a_step(grid["sp"], options.repeat)
    if rank == 0:
        print(*lines, sep="\n", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def planning() -> None:
    """Deep models at great length, on meta tensors: the forward on fake tensors, and the search over layouts."""
    print(f"{'seconds to plan':44}{'all':>12}{'trace':>12}{'search':>12}{'cold':>12}")
    cases = {
        "transformer2d 3b, 4M tokens, 32 ranks": ("transformer2d", "3b", {}, 32),
        "the same in 100 layers (200 stages)": ("transformer2d", "3b", {"depth": 100}, 32),
        "latte XL/2 in 200 blocks, 4M tokens": ("latte", "XL/2", {"depth": 200}, 32),
    }
    for name, (family, size, changes, ranks) in cases.items():
        with torch.device("meta"):
            model = zoo.create(family, size, **changes)
            inputs = model.example_inputs(frames=1024, height=128, width=128)
        rounds = []
        for _ in range(6):
            start = time.process_time()
            found, root = stages_of(model, None)
            t = trace(model, found, root, (), inputs, ranks, gather_output=False, dtype=torch.bfloat16)
            traced = time.process_time()
            make_plan(t, {s.name: s for s in found}, Goal(ranks))
            rounds.append((time.process_time() - start, traced - start, time.process_time() - traced))
        medians = [statistics.median(r[i] for r in rounds[1:]) for i in range(3)]
        print(f"{name:44}" + "".join(f"{s:12.2f}" for s in [*medians, rounds[0][0]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=100, help="rounds")
    parser.add_argument("--profile", choices=["stage", "switch", "glue", "step"], help="profile one of them instead")
    options = parser.parse_args()
    print(f"2 gloo ranks, {os.cpu_count()} cores, torch {torch.__version__}, {options.repeat} rounds")
    if not options.profile:
        planning()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (2, f"file://{folder}/store", options), nprocs=2)


if __name__ == "__main__":
    main()
