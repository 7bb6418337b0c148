"""Bytes that each rank really sends in a training step, by method: counted by the kernel, against the paper's formulas.

    python benchmarks/methods/wire.py                  # 2, 4 and 8 ranks; benchmarks/results/wire.json and wire.svg
    python benchmarks/methods/wire.py --ranks 2 4 --out FILE

Every rank has a network device of its own (see hosts.py; as root), whose counter of sent bytes is read before and after
forward and backward; without root, ranks share the loopback, and its count is divided by their number. A layer is the
difference of two depths, so that the model's ends do not enter. Forward and backward are of a step that recomputes
nothing; what recomputation adds is the difference to a step that recomputes every stage. The kernel's count has the
headers of packets in it.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import dsp
from benchmarks.common import Panel, Series, figure, write_down
from benchmarks.methods.hosts import Hosts, Ranks, sent, serve, stoppable, why_not
from benchmarks.methods.rivals import COLOURS, METHODS, PAPER, RECOMPUTE, Shape, Step, circumstances, formula

DEPTHS = (1, 3)
COLLECTIVES = {"all_reduce": "2M", "all_gather": "M", "reduce_scatter": "M", "all_to_all": "M/N"}  # paper, table 8


def counted(step: Step) -> dict[str, int]:
    """{"forward", "backward"}: bytes by the kernel since everybody was ready until everybody is done."""
    found = {}
    dist.barrier()
    before = sent()
    dist.barrier()  # everybody has read before anybody sends
    loss = step.forward()
    dist.barrier()
    middle = sent()
    dist.barrier()
    step.backward(loss)
    dist.barrier()
    found["forward"], found["backward"] = middle - before, sent() - middle
    dist.barrier()
    return found


def measure(method: str, shape: dict[str, int], recompute: str, times: int) -> dict[str, Any]:
    """Bytes of a step of this rank: by the kernel, the least of several, and by count_comm()."""
    step = Step(method, Shape(**shape), recompute)
    with dsp.count_comm() as comm:
        step.backward(step.forward())  # connections are made
    every = [counted(step) for _ in range(times)]
    del step
    gc.collect()
    kernel = {phase: min(one[phase] for one in every) for phase in every[0]}
    return {"kernel": kernel, "count_comm": {p: sum(t.bytes.values()) for p, t in (
        ("forward", comm.forward), ("backward", comm.backward), ("recompute", comm.recompute))}}  # fmt: skip


def collective(name: str, size: int) -> int:
    """Bytes by the kernel of one operation on an activation of `size` bytes in all, as paper's table 8 counts them."""
    n, group = dist.get_world_size(), dist.group.WORLD.group_name  # type: ignore[union-attr]
    whole = torch.zeros(n, n, size // 4 // n**2)
    part, ops = whole[:1].contiguous(), torch.ops.dsp
    run = {
        "all_reduce": lambda: ops.all_reduce(whole, group),
        "all_gather": lambda: ops.gather(part, 0, n, group),
        "reduce_scatter": lambda: ops.reduce_scatter(whole, 0, group),
        "all_to_all": lambda: ops.switch(part, 0, 1, n, group),
    }[name]
    run()
    found = []
    for _ in range(3):
        dist.barrier()
        before = sent()
        dist.barrier()
        run()
        dist.barrier()
        found.append(sent() - before)
        dist.barrier()
    return min(found)


def of_collective(ranks: Ranks, name: str, shared: bool) -> dict[str, Any]:
    """One row: bytes of a collective on 16 MiB, measured and by formula."""
    size, n = 2**24, ranks.size
    found = max(ranks.ask("collective", name=name, size=size)) / (n if shared else 1)
    units = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1 / n}[name]
    return {"collective": name, "ranks": n, "measured": found / size, "formula": units * (n - 1) / n}


def a_layer(ranks: Ranks, method: str, shape: Shape, recompute: str, shared: bool) -> dict[str, float]:
    """The bytes of the rank that sends most, in a layer: kernel forward, backward; and count_comm, in all."""
    shallow, deep = (
        ranks.ask("measure", method=method, shape=vars(replace(shape, depth=depth)), recompute=recompute, times=times)
        for depth, times in zip(DEPTHS, (3 if shared else 1,) * 2)
    )
    layers, share = DEPTHS[1] - DEPTHS[0], ranks.size if shared else 1
    found = {}
    for phase in ("forward", "backward"):
        grew = [b["kernel"][phase] - a["kernel"][phase] for a, b in zip(shallow, deep)]
        found[phase] = max(grew) / layers / share
    told = [sum(b["count_comm"].values()) - sum(a["count_comm"].values()) for a, b in zip(shallow, deep)]
    return found | {"count_comm": max(told) / layers}


def of_method(ranks: Ranks, method: str, shape: Shape, shared: bool) -> dict[str, Any]:
    """One row: bytes of a layer by phase, measured and by formula."""
    row: dict[str, Any] = {"method": method, "ranks": ranks.size}
    kinds = [how for how in RECOMPUTE if method != "dsp" or how != "saved"]  # DSP has nothing to save
    found = {how: a_layer(ranks, method, shape, how, shared) for how in kinds}
    steps = {how: one["forward"] + one["backward"] for how, one in found.items()}
    measured = {phase: found["no"][phase] for phase in ("forward", "backward")}
    measured["recompute"] = steps["again"] - steps["no"]
    row["bytes"], row["formula"] = measured, {p: u * shape.activation for p, u in formula(method, ranks.size).items()}
    row["step"] = steps
    row["count_comm"] = {how: one["count_comm"] for how, one in found.items()}
    whole = sum(row["formula"].values())
    row["off"] = steps["again"] / whole - 1
    if "saved" in steps:
        row["saved_off"] = steps["saved"] / (whole - row["formula"]["recompute"]) - 1
    return row


def show(row: dict[str, Any], shape: Shape) -> str:
    m = shape.activation
    phases = " | ".join(
        f"{row['bytes'][p] / m:.3f} / {row['formula'][p] / m:.3f}" for p in ("forward", "backward", "recompute")
    )
    return f"| {METHODS[row['method']]} | {row['ranks']} | {phases} | {100 * row['off']:+.1f}% |"


def picture(found: dict[str, Any]) -> str:
    sizes = sorted({row["ranks"] for row in found["rows"]})
    m = Shape(**found["shape"]).activation
    panels = []
    for title, phases in (
        ("A layer, forward", ["forward"]),
        ("A layer of a training step, stages recomputed", ["forward", "backward", "recompute"]),
    ):
        series = []
        for method in METHODS:
            rows = sorted((r for r in found["rows"] if r["method"] == method), key=lambda row: row["ranks"])
            for key in ("formula", "bytes"):
                points = [(sizes.index(r["ranks"]), sum(r[key][p] for p in phases) / m) for r in rows]
                # a difference of two steps over a loopback that others use may be less than nothing
                points = [point for point in points if point[1] > 0]
                series.append(Series(METHODS[method], COLOURS[method], points, dashed=key == "formula"))
        panels.append(Panel(title, list(map(str, sizes)), series, "ranks", log=True, unit="in M"))
    return figure(
        "Bytes a rank sends, by the kernel", panels, "M: the bytes of an activation; dashes on the lines: the formulas"
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Bytes that each rank sends in a training step, by method.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--side", type=int, default=16, help="patches a side of a frame")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--loopback", action="store_true", help="as without root")
    parser.add_argument("--out", type=Path, help="for OUT.json and OUT.svg")
    options = parser.parse_args(arguments)
    shape = Shape(hidden=options.hidden, heads=max(options.ranks), frames=options.frames, side=options.side)
    reason = "--loopback" if options.loopback else why_not()
    if reason:
        print(f"the loopback is counted, for all ranks together: {reason}")
    found = circumstances(shape, arguments) | {
        "counter": "loopback" if reason else "a device a rank",
        "rows": [],
        "collectives": [],
    }
    print("| method | ranks | forward, measured / formula, in M | backward | recompute | step off by |")
    print("|---|---|---|---|---|---|")
    with stoppable(), nullcontext() if reason else Hosts(max(options.ranks)) as hosts:
        for n in options.ranks:
            with Ranks(__file__, n, hosts) as ranks:
                found["collectives"] += [of_collective(ranks, name, bool(reason)) for name in COLLECTIVES]
                for method in options.methods:
                    found["rows"].append(of_method(ranks, method, shape, bool(reason)))
                    print(show(found["rows"][-1], shape), flush=True)
    write_down("wire", options.out, found, picture(found))
    worst = max(abs(row["off"]) for row in found["rows"])
    print(
        f"a step is off its formula by {100 * worst:.1f}% at most; paper: "
        + ", ".join(f"{METHODS[k]} {v}" for k, v in PAPER.items())
    )
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"measure": measure, "collective": collective})
    else:
        sys.exit(main(sys.argv[1:]))
