"""The step by method on emulated hosts, whose links are held to a rate: DSP against the methods it is compared with.

    python benchmarks/cluster.py               # as root; benchmarks/results/cluster.json and cluster.svg
    python benchmarks/cluster.py --rates 100 1000 0 --rounds 3 --out FILE      # Mbit/s; 0 is no limit
    python benchmarks/cluster.py --overlap     # what `overlap=` hides behind computing; benchmarks/results/overlap.json

One rank is one host: a network namespace whose link to a switch has the rate in each direction (see hosts.py). All
methods are built in the same processes and take turns, round by round, so a machine that is slow for a while is slow
for all of them; a ratio is taken within a round, and shown as the median, the least and the most. A step is forward,
backward and the average of gradients over ranks, which Megatron takes of little but its norms; its parts are recorded
one by one. Ranks share this machine's cores: the seconds of computing are those of N ranks on so few cores.

    sweep     training and inference at every rate, on the most ranks
    scaling   at one rate on 1, 2, 4 ranks: weak (a sample more a rank, table 7) and strong (table 6), figures 6 to 8
    share     of a step: what its bytes take at the rate of the link; and what it takes longer than without a limit
    overlap   DSP's step alone on two hosts, its switches in one piece, in 2 and in 4, whose bytes are the same; then
              its switches in bf16, in fp8, and either in 4 pieces. The rate of the link is such that the bytes of the
              first take a share of a step, by the seconds of one without a limit. Left is what a step takes longer
              than the first without a limit, over what the first takes longer with it; what is not left is hidden
"""

import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import dsp
from benchmarks.common import circumstances, options, rate_name, spread, write_down
from benchmarks.hosts import Hosts, Ranks, script, stoppable, why_not
from benchmarks.methods import METHODS, RECOMPUTE, Shape, Step

MODES = ("train", "infer")
PARTS = ("forward", "backward", "average")
SENT: tuple[dict[str, dict[str, Any]], ...] = (  # ways to send, compared with the first of each kind
    {"one piece": {}, "2 pieces": {"overlap": 2}, "4 pieces": {"overlap": 4}},
    {
        "bf16": {"wire": "bf16"},
        "bf16, 4 pieces": {"wire": "bf16", "overlap": 4},
        "fp8": {"wire": "fp8"},
        "fp8, 4 pieces": {"wire": "fp8", "overlap": 4},
    },
)
STEPS: dict[str, Any] = {}  # of this rank, by the name that it was built under


# ------------------------------------------------------------------------------------------------------- on every rank


def build(name: str, method: str, shape: dict[str, int], recompute: str = "no", **how: Any) -> dict[str, Any]:
    """Make a step ready. What it sends: bytes of forward, of all of it, and of the average of gradients."""
    step = STEPS[name] = Step(method, Shape(**shape), recompute, **how)
    with dsp.count_comm() as comm:
        step.backward(step.forward())
    averaged = 2 * (step.size - 1) * step.weights[1] // step.size
    return {"infer": sum(comm.forward.bytes.values()), "train": comm.bytes + averaged, "average": averaged}


def timed(name: str, mode: str) -> list[float]:
    """Seconds of the parts of one step, of it without the average ("own"), or of a forward, once all are ready."""
    step, losses = STEPS[name], []
    parts: list[Callable[[], object]] = [lambda: losses.append(step.forward())]
    if mode != "infer":
        parts += [lambda: step.backward(losses[0])]
    if mode == "train":
        parts += [step.average]
    dist.barrier()
    marks = [time.perf_counter()]
    with torch.set_grad_enabled(mode != "infer"):
        for part in parts:
            part()
            marks.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(marks)]


def link(size: int, times: int) -> dict[str, float]:
    """Mbit/s that are left of a link's rate when each of N ranks sends so many bytes to the next, or (N-1)/N of them
    in an all-to-all."""
    n, rank = dist.get_world_size(), dist.get_rank()
    send = torch.zeros(size // 4 // n * n)
    received = torch.empty_like(send)

    def ring() -> None:
        there = dist.isend(send, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        there.wait()

    kinds = {"ring": (ring, 1.0), "all_to_all": (lambda: dist.all_to_all_single(received, send), (n - 1) / n)}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(times):
        for name, (run, part) in kinds.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            rates[name].append(8e-6 * 4 * send.numel() * part / (time.perf_counter() - began))
    return {name: statistics.median(each) for name, each in rates.items()}


# --------------------------------------------------------------------------------------------------------- the program


def take_turns(names: Sequence[str], rounds: int, ask: Callable[[str], list[Any]]) -> dict[str, list[list[float]]]:
    """Seconds of the parts of each step, by the slowest rank: every name once a round, and first in turn."""
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for i in range(-1, rounds):  # -1 is to warm up
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            taken = [round(seconds, 6) for seconds in max(ask(name), key=sum)]
            times[name] += [taken] if i >= 0 else []
    return times


def row_of(rounds: list[list[float]], against: list[list[float]]) -> dict[str, Any]:
    """Seconds, parts and ratios of the rounds of one method."""
    whole, base = ([sum(parts) for parts in each] for each in (rounds, against))
    return {
        "seconds": spread(whole),
        "parts": dict(zip(PARTS, (statistics.median(part) for part in zip(*rounds)))),
        "ratio": spread([a / b for a, b in zip(whole, base)]),
    }


def show(name: str, row: dict[str, Any], beside: str = "DSP") -> None:
    seconds, ratio = (
        f"{r['median']:.3f} ({r['least']:.3f} to {r['most']:.3f})" for r in (row["seconds"], row["ratio"])
    )
    print(f"{name:<40}{seconds} s, {ratio} x {beside}", flush=True)


def sweep(hosts: Hosts, o: Namespace, shape: Shape) -> dict[str, Any]:
    """Every method in both modes at every rate: {"bytes": ..., "rates": [...]}."""
    n = max(o.ranks)
    report: dict[str, Any] = {"ranks": n, "recompute": o.recompute, "rates": [], "bytes": {}}
    with Ranks(__file__, n, hosts) as ranks:
        for method in o.methods:
            each = ranks.ask("build", name=method, method=method, shape=vars(shape), recompute=o.recompute)
            report["bytes"][method] = {mode: max(one[mode] for one in each) for mode in MODES}
        for rate in o.rates:
            hosts.rate(rate or None)
            one: dict[str, Any] = {"rate": rate, "measured": ranks.ask("link", size=o.probe, times=3)[0], "modes": {}}
            print(f"\n{rate_name(rate)}; measured Mbit/s: {one['measured']}")
            for mode in MODES:
                times = take_turns(
                    o.methods, o.rounds, lambda name, mode=mode: ranks.ask("timed", name=name, mode=mode)
                )
                one["modes"][mode] = {method: row_of(rounds, times["dsp"]) for method, rounds in times.items()}
                for method, row in one["modes"][mode].items():
                    show(f"{mode:<6}{METHODS[method]}", row)
            report["rates"].append(one)
    shares(report)
    return report


def shares(report: dict[str, Any]) -> None:
    """Add the share of communication in a step, twice: by bytes and the rate, and against the run without a limit."""
    free = next((one for one in report["rates"] if not one["rate"]), None)
    for one in (one for one in report["rates"] if one["rate"]):
        for mode, rows in one["modes"].items():
            for method, row in rows.items():
                seconds = row["seconds"]["median"]
                row["share_of_link"] = report["bytes"][method][mode] * 8e-6 / one["rate"] / seconds
                if free:
                    row["share_measured"] = 1 - free["modes"][mode][method]["seconds"]["median"] / seconds


def scaling(hosts: Hosts, o: Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Weak and strong, in both modes, by method and number of ranks; all numbers of ranks take turns too."""
    rows = []
    hosts.rate(o.scaling_rate or None)
    with ExitStack() as stack:
        pools = {n: stack.enter_context(Ranks(__file__, n, hosts)) for n in o.ranks}
        for kind in ("weak", "strong"):
            shapes = {n: replace(shape, batch=shape.batch * (n if kind == "weak" else 1)) for n in pools}
            cases = {  # one rank alone has no method
                f"{kind} {n} {method}": (n, method) for n in pools for method in (o.methods if n > 1 else ["dsp"])
            }  # fmt: skip
            for name, (n, method) in cases.items():
                pools[n].ask("build", name=name, method=method, shape=vars(shapes[n]), recompute=o.recompute)
            for mode in MODES:
                times = take_turns(
                    list(cases), o.rounds,
                    lambda name, of=cases, mode=mode: pools[of[name][0]].ask("timed", name=name, mode=mode),
                )  # fmt: skip
                for name, (n, method) in cases.items():
                    row = row_of(times[name], times[f"{kind} {n} dsp"])
                    show(f"{mode:<6}{name}", row)
                    tokens = shapes[n].tokens / row["seconds"]["median"]
                    rows.append(
                        {"kind": kind, "mode": mode, "ranks": n, "method": method, "tokens_per_s": tokens} | row
                    )
    return rows


def overlap(hosts: Hosts, o: Namespace) -> dict[str, Any]:
    """The step by each way to send, for each share of it that bytes take: {"shape": ..., "sent": ..., "shares": {...}}.

    The rounds of a way, their spread, and what is left of the first way's waiting, are under its name.
    """
    shape = Shape(hidden=256, heads=4, depth=2, frames=16, side=16)
    report: dict[str, Any] = {"shape": asdict(shape), "sent": {}, "shares": {str(share): {} for share in o.shares}}
    with Ranks(__file__, 2, hosts) as ranks:

        def ask(name: str) -> list[Any]:
            hosts.rate(None if name == "free" else rate)
            return ranks.ask("timed", name=first if name == "free" else name, mode="own")

        for ways in SENT:
            for name, how in ways.items():
                each = ranks.ask("build", name=name, method="dsp", shape=vars(shape), **how)[0]
                report["sent"][name] = each["train"] - each["average"]
            first = next(iter(ways))
            for share in o.shares:
                free = take_turns(["free"], o.rounds, ask)["free"]
                rate = report["sent"][first] * 8e-6 / (statistics.median(map(sum, free)) * share / (1 - share))
                times = {name: [*map(sum, pairs)] for name, pairs in take_turns([*ways, "free"], o.rounds, ask).items()}
                waited = statistics.median(a - b for a, b in zip(times[first], times["free"]))
                one = report["shares"][str(share)][first] = {"rate": rate, "free": times["free"]}
                for name in ways:
                    left = statistics.median(a - b for a, b in zip(times[name], times["free"])) / max(waited, 1e-9)
                    ratio = spread([a / b for a, b in zip(times[name], times[first])])
                    one[name] = {"rounds": times[name], "seconds": spread(times[name]), "ratio": ratio, "left": left}
                    show(f"{share:.0%} at {rate:.0f} Mbit/s, {name}: {left:.0%} left", one[name], first)
    return report


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, {"methods": METHODS, "recompute": RECOMPUTE}, ranks=[1, 2, 4], scaling_rate=1000.0,
        rates=[100.0, 300.0, 1000.0, 3000.0, 10000.0, 0.0], rounds=7, methods=list(METHODS), recompute="no", hidden=64,
        depth=2, frames=64, side=16, probe=8 * 2**20, overlap=False, shares=[0.3, 0.4, 0.5], out=None,
    )  # fmt: skip
    if "dsp" not in o.methods:
        raise SystemExit("--methods: the others are compared with dsp, so it has to be among them")
    if reason := why_not():
        print(f"skipped: hosts cannot be emulated here: {reason}")
        return 0
    if o.overlap:
        with stoppable(), Hosts(2) as hosts:
            write_down("overlap", o.out, circumstances(arguments) | overlap(hosts, o))
        return 0
    # as many heads as the most ranks, or Ulysses and Megatron have nothing to give to a rank
    shape = Shape(o.hidden, max(8, *o.ranks), o.depth, 1, o.frames, o.side)
    report = circumstances(arguments) | {"shape": asdict(shape), "methods": o.methods, "scaling_rate": o.scaling_rate}
    with stoppable(), Hosts(max(o.ranks)) as hosts:
        report["sweep"] = sweep(hosts, o, shape)
        report["scaling"] = scaling(hosts, o, shape)
    write_down("cluster", o.out, report)
    return 0


if __name__ == "__main__":
    script(main, build=build, timed=timed, link=link)
