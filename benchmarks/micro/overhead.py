"""The host time of parallelize: microseconds a stage and an operation of glue, a step at size 1; seconds to plan.

    python benchmarks/micro/overhead.py [--repeat 100]

Two gloo ranks on tensors of a few bytes, so that nothing but host work is left. Times are CPU time of the thread that
runs the model, which waiting for the other rank and other programs do not enter; medians over rounds in which the bare
model and the parallelized one take turns. A cost per stage or operation is a slope: what 50 more of them add.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dsp
import zoo
from benchmarks.common import on_ranks, options

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
    found = {}
    for name, (make, call, compiler) in CASES.items():
        calls = {}
        for depth in (FEW, MANY):
            calls[f"bare {depth}"] = call(make(depth))
            parallel = dsp.parallelize(make(depth), mesh, gather_output=False, compile=compiler or False)
            calls[f"parallel {depth}"] = call(parallel)
        times = spend(calls, repeat)
        bare, parallel = ((times[f"{k} {MANY}"] - times[f"{k} {FEW}"]) / (MANY - FEW) for k in ("bare", "parallel"))
        found[name] = [bare, parallel, parallel - bare]
    return found


def alone(mesh: DeviceMesh, repeat: int) -> dict[str, list[float]]:
    """A model of one empty stage on two ranks; a step of a small transformer2d, bare and parallelized on one rank."""

    def step(model: Any) -> Call:
        inputs = model.example_inputs(frames=8, height=16, width=16)
        return lambda: dsp.mean(model(**inputs)).backward()

    small = [zoo.create("transformer2d", "test") for _ in range(2)]
    one, empty = init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "sp"))["sp"], Stages(1)
    found = {}
    parallel = forward(dsp.parallelize(empty, mesh, gather_output=False)), step(dsp.parallelize(small[1], one))
    bare = forward(Stages(1)), step(small[0])
    for name, *pair in zip(("call of a model of one empty stage", "step of transformer2d at size 1"), bare, parallel):
        times = spend(dict(zip(("bare", "parallel"), pair)), repeat)
        found[name] = [*times.values(), times["parallel"] - times["bare"]]
    return found


def planning() -> dict[str, float]:
    """Seconds of CPU time to plan deep models at great length, on meta tensors: the median of three."""
    found = {}
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
        found[name] = statistics.median(rounds)
    return found


def measure(mesh: DeviceMesh, repeat: int) -> None:
    torch.manual_seed(0)  # all ranks hold the same inputs
    rows = alone(mesh, repeat) | slopes(mesh, repeat)
    if dist.get_rank() == 0:
        print(f"{'host µs; a slope is of one more':44}{'bare':>12}{'parallel':>12}{'added':>12}")
        print("\n".join(f"{name:44}" + "".join(f"{v:12.1f}" for v in values) for name, values in rows.items()))
        print(f"\n{'seconds to plan':44}")
        print("\n".join(f"{name:44}{seconds:12.2f}" for name, seconds in planning().items()), flush=True)


if __name__ == "__main__":
    on_ranks(2, measure, options(__doc__, repeat=100).repeat)
