"""Bytes that each rank really sends in a training step, by method: counted by the kernel, against the paper's formulas.

    python benchmarks/wire.py                  # 2, 4 and 8 ranks; benchmarks/results/wire.json and wire.svg
    python benchmarks/wire.py --ranks 2 4 --out FILE

Every rank has a network device of its own (see hosts.py; as root), whose counter of sent bytes is read before and after
forward and backward; without root, or with --loopback, ranks share the loopback, and its count is divided by their
number. A layer is the difference of two depths, so that the model's ends do not enter. Forward and backward are of a
step that recomputes nothing; what recomputation adds is the difference to a step that recomputes every stage. The
kernel's count has the headers of packets in it.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import dsp
import dsp.comm.collectives  # its ops
from benchmarks.common import circumstances, line, options, table, write_down
from benchmarks.hosts import Hosts, Ranks, script, sent, stoppable, why_not
from benchmarks.methods import METHODS, RECOMPUTE, Shape, Step, formula

DEPTHS = (1, 3)
PHASES = ("forward", "backward", "recompute")
COLLECTIVES: dict[str, Callable[[int], float]] = {  # what a rank of n sends, in M, before (n-1)/n: paper, table 8
    "all_reduce": lambda n: 2, "all_gather": lambda n: 1, "reduce_scatter": lambda n: 1, "all_to_all": lambda n: 1 / n,
}  # fmt: skip


def counted(run: Callable[[], object]) -> int:
    """Bytes by the kernel since everybody was ready until everybody is done."""
    dist.barrier()
    before = sent()
    dist.barrier()  # everybody has read before anybody sends
    run()
    dist.barrier()
    return sent() - before


def measure(method: str, shape: dict[str, int], recompute: str, times: int) -> dict[str, Any]:
    """Bytes of a step of this rank: by the kernel, the least of several, and by count_comm()."""
    step, losses, kernel = Step(method, Shape(**shape), recompute), [], []
    with dsp.count_comm() as comm:
        step.backward(step.forward())  # connections are made
    for _ in range(times):
        forward = counted(lambda: losses.append(step.forward()))
        kernel.append((forward, counted(lambda: step.backward(losses.pop()))))
    total = sum(sum(phase.bytes.values()) for phase in (comm.forward, comm.backward, comm.recompute))
    return {"kernel": [min(each) for each in zip(*kernel)], "count_comm": total}


def collective(name: str, size: int) -> int:
    """Bytes by the kernel of one operation on an activation of `size` bytes in all, as paper's table 8 counts them."""
    n, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    whole = torch.zeros(n, n, size // 4 // n**2)
    part, ops = whole[:1].contiguous(), torch.ops.dsp
    run: Callable[[], object] = {
        "all_reduce": lambda: ops.all_reduce(whole, group),
        "all_gather": lambda: ops.gather(part, 0, n, group),
        "reduce_scatter": lambda: ops.reduce_scatter(whole, 0, group),
        "all_to_all": lambda: ops.switch(part, 0, 1, n, group),
    }[name]
    run()
    return min(counted(run) for _ in range(3))


def of_collective(ranks: Ranks, name: str, share: int) -> dict[str, Any]:
    """One row: bytes of a collective on 16 MiB, measured and by formula."""
    size, n = 2**24, ranks.size
    nbytes = max(ranks.ask("collective", name=name, size=size)) / share
    return {
        "collective": name, "ranks": n, "measured": nbytes / size, "formula": COLLECTIVES[name](n) * (n - 1) / n
    }  # fmt: skip


def a_layer(ranks: Ranks, method: str, shape: Shape, recompute: str, share: int) -> dict[str, float]:
    """The bytes of the rank that sends most, in a layer: kernel forward, backward; and count_comm, in all."""
    shallow, deep = (
        ranks.ask("measure", method=method, shape=vars(replace(shape, depth=depth)), recompute=recompute, times=times)
        for depth, times in zip(DEPTHS, (3 if share > 1 else 1,) * 2)
    )
    layers, pairs = DEPTHS[1] - DEPTHS[0], list(zip(shallow, deep))
    kernel = [max(b["kernel"][i] - a["kernel"][i] for a, b in pairs) / layers / share for i in (0, 1)]
    total = max(b["count_comm"] - a["count_comm"] for a, b in pairs) / layers
    return dict(zip(PHASES, kernel)) | {"count_comm": total}


def of_method(ranks: Ranks, method: str, shape: Shape, share: int) -> dict[str, Any]:
    """One row: bytes of a layer by phase, measured and by formula."""
    kinds = [how for how in RECOMPUTE if method != "dsp" or how != "saved"]  # DSP has nothing to save
    layers = {how: a_layer(ranks, method, shape, how, share) for how in kinds}
    steps = {how: one["forward"] + one["backward"] for how, one in layers.items()}
    measured = {phase: layers["no"][phase] for phase in ("forward", "backward")}
    measured["recompute"] = steps["again"] - steps["no"]
    by_formula = {p: u * shape.activation for p, u in formula(method, ranks.size).items()}
    return {
        "method": method, "ranks": ranks.size, "bytes": measured, "formula": by_formula, "step": steps,
        "count_comm": {how: one["count_comm"] for how, one in layers.items()},
        "off": steps["again"] / sum(by_formula.values()) - 1,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, {"methods": METHODS}, ranks=[2, 4, 8], hidden=64, frames=32, side=16,
        methods=list(METHODS), loopback=False, out=None,
    )  # fmt: skip
    shape = Shape(hidden=o.hidden, heads=max(o.ranks), frames=o.frames, side=o.side)
    m, reason = shape.activation, "--loopback" if o.loopback else why_not()
    if reason:
        print(f"the loopback is counted, for all ranks together: {reason}")
    rows: list[dict[str, Any]] = []
    collectives: list[dict[str, Any]] = []
    print("\n".join(table(["method", "ranks", *(f"{p}, measured / formula, in M" for p in PHASES), "off by"])))
    with stoppable(), nullcontext() if reason else Hosts(max(o.ranks)) as hosts:
        for n in o.ranks:
            with Ranks(__file__, n, hosts) as ranks:
                share = n if reason else 1
                collectives += [of_collective(ranks, name, share) for name in COLLECTIVES]
                for method in o.methods:
                    rows.append(row := of_method(ranks, method, shape, share))
                    phases = [f"{row['bytes'][p] / m:.3f} / {row['formula'][p] / m:.3f}" for p in PHASES]
                    print(line([METHODS[method], n, *phases, f"{row['off']:+.1%}"]), flush=True)
    report = circumstances(arguments) | {"shape": asdict(shape), "counter": "loopback" if reason else "a device a rank"}
    report |= {"rows": rows, "collectives": collectives}
    write_down("wire", o.out, report)
    return 0


if __name__ == "__main__":
    script(main, measure=measure, collective=collective)
