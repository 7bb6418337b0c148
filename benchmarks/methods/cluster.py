"""The step by method on emulated hosts, whose links are held to a rate: DSP against the methods it is compared with.

    python benchmarks/methods/cluster.py               # as root; benchmarks/results/cluster.json and cluster.svg
    python benchmarks/methods/cluster.py --rates 100 1000 0 --rounds 3 --out FILE      # Mbit/s; 0 is no limit

One rank is one host: a network namespace whose link to a switch has the rate in each direction (see hosts.py). All
methods are built in the same processes and take turns, round by round, so a machine that is slow for a while is slow
for all of them; a ratio is taken within a round, and shown as the median, the least and the most. A step is forward,
backward and the average of gradients over ranks, which Megatron takes of little but its norms; its parts are recorded
one by one. Ranks share this machine's cores: the seconds of computing are those of N ranks on so few cores.

    sweep     training and inference at every rate, on the most ranks
    scaling   at one rate on 1, 2, 4 ranks: weak (a sample more a rank, table 7) and strong (table 6), figures 6 to 8
    share     of a step: what its bytes take at the rate of the link; and what it takes longer than without a limit
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

import dsp
from benchmarks.common import Panel, Series, figure, write_down
from benchmarks.methods.hosts import Hosts, Ranks, serve, stoppable, why_not
from benchmarks.methods.rivals import COLOURS, METHODS, RECOMPUTE, Shape, Step, circumstances

MODES = ("train", "infer")
PARTS = ("forward", "backward", "average")
STEPS: dict[str, Step] = {}  # of this rank, by the name that it was built under


# ------------------------------------------------------------------------------------------------------- on every rank


def build(name: str, method: str, shape: dict[str, int], recompute: str) -> dict[str, Any]:
    """Make a step ready. What it sends: bytes of forward, of all of it, and of the average of gradients."""
    step = STEPS[name] = Step(method, Shape(**shape), recompute)
    with dsp.count_comm() as comm:
        step.backward(step.forward())
    averaged = 2 * (step.size - 1) * step.weights[1] // step.size
    return {"infer": sum(comm.forward.bytes.values()), "train": comm.bytes + averaged}


def timed(name: str, mode: str) -> list[float]:
    """Seconds of the parts of one step, or of a forward alone, on this rank, from when all were ready."""
    step, marks = STEPS[name], []

    def mark() -> None:
        marks.append(time.perf_counter())

    dist.barrier()
    mark()
    if mode == "infer":
        with torch.no_grad():
            step.forward()
        mark()
    else:
        loss = step.forward()
        mark()
        step.backward(loss)
        mark()
        step.average()
        mark()
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


def in_turn(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """(round, name), every name once a round and first in another one each time; round -1 is to warm up."""
    for i in range(-1, rounds):
        for j in range(len(names)):
            yield i, names[(i + j) % len(names)]


def slowest(answers: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of the parts of a step that is done when all ranks are."""
    last = max(answers, key=sum)
    return [round(seconds, 6) for seconds in last]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def rows_of(times: dict[str, list[list[float]]], against: str = "dsp") -> dict[str, Any]:
    """{method: seconds, parts and ratios} of the rounds of one mode."""
    found = {}
    for method, rounds in times.items():
        whole = [sum(parts) for parts in rounds]
        base = [sum(parts) for parts in times[against]]
        found[method] = {
            "seconds": spread(whole),
            "parts": dict(zip(PARTS, (statistics.median(part) for part in zip(*rounds)))),
            "ratio": spread([a / b for a, b in zip(whole, base)]),
        }
    return found


def sweep(hosts: Hosts, options: argparse.Namespace, shape: Shape) -> dict[str, Any]:
    """Every method in both modes at every rate: {"bytes": ..., "rates": [...]}."""
    n = max(options.ranks)
    found: dict[str, Any] = {"ranks": n, "recompute": options.recompute, "rates": []}
    with Ranks(__file__, n, hosts) as ranks:
        sends = {
            method: ranks.ask("build", name=method, method=method, shape=vars(shape), recompute=options.recompute)
            for method in options.methods
        }
        found["bytes"] = {m: {mode: max(one[mode] for one in each) for mode in MODES} for m, each in sends.items()}
        for rate in options.rates:
            hosts.rate(rate or None)
            measured = ranks.ask("link", size=options.probe, times=3)[0]
            one: dict[str, Any] = {"rate": rate, "measured": measured, "modes": {}}
            for mode in MODES:
                times: dict[str, list[list[float]]] = {method: [] for method in options.methods}
                for i, method in in_turn(options.methods, options.rounds):
                    taken = slowest(ranks.ask("timed", name=method, mode=mode))
                    if i >= 0:
                        times[method].append(taken)
                one["modes"][mode] = rows_of(times)
            found["rates"].append(one)
            show_rate(one)
    shares(found)
    return found


def shares(found: dict[str, Any]) -> None:
    """Add the share of communication in a step, twice: by bytes and the rate, and against the run without a limit."""
    free = next((one for one in found["rates"] if not one["rate"]), None)
    for one in found["rates"]:
        for mode, rows in one["modes"].items():
            for method, row in rows.items():
                seconds = row["seconds"]["median"]
                if one["rate"]:
                    row["share_of_link"] = found["bytes"][method][mode] * 8e-6 / one["rate"] / seconds
                    if free:
                        row["share_measured"] = 1 - free["modes"][mode][method]["seconds"]["median"] / seconds


def scaling(hosts: Hosts, options: argparse.Namespace, shape: Shape) -> list[dict[str, Any]]:
    """Weak and strong, in both modes, by method and number of ranks; all numbers of ranks take turns too."""
    rows = []
    hosts.rate(options.scaling_rate or None)
    with ExitStack() as stack:
        pools = {n: stack.enter_context(Ranks(__file__, n, hosts)) for n in options.ranks}
        for kind in ("weak", "strong"):
            shapes = {n: replace(shape, batch=shape.batch * (n if kind == "weak" else 1)) for n in pools}
            cases = {}
            for n, ranks in pools.items():
                for method in options.methods if n > 1 else ["dsp"]:  # one rank alone has no method
                    name = f"{kind} {n} {method}"
                    ranks.ask("build", name=name, method=method, shape=vars(shapes[n]), recompute=options.recompute)
                    cases[name] = n, method
            for mode in MODES:
                times: dict[str, list[list[float]]] = {name: [] for name in cases}
                for i, name in in_turn(list(cases), options.rounds):
                    taken = slowest(pools[cases[name][0]].ask("timed", name=name, mode=mode))
                    if i >= 0:
                        times[name].append(taken)
                for name, (n, method) in cases.items():
                    row = rows_of(times, against=f"{kind} {n} dsp")[name]
                    tokens = shapes[n].tokens / row["seconds"]["median"]
                    rows.append(
                        {"kind": kind, "mode": mode, "ranks": n, "method": method, "tokens_per_s": tokens} | row
                    )
                    print(
                        f"{kind:<7}{mode:<6}{n} ranks  {METHODS[method]:<15}{row['seconds']['median']:8.3f} s"
                        f"{tokens:10.0f} tokens/s{row['ratio']['median']:8.2f} x DSP",
                        flush=True,
                    )
    return rows


def show_rate(one: dict[str, Any]) -> None:
    rate = f"{one['rate']:g} Mbit/s" if one["rate"] else "no limit"
    got = ", ".join(f"{kind.replace('_', '-')} {each:.0f}" for kind, each in one["measured"].items())
    print(f"\n{rate}; measured Mbit/s: {got}")
    for mode, rows in one["modes"].items():
        for method, row in rows.items():
            seconds, ratio = row["seconds"], row["ratio"]
            print(
                f"{mode:<6}{METHODS[method]:<15}{seconds['median']:8.3f} s ({seconds['least']:.3f} to "
                f"{seconds['most']:.3f}){ratio['median']:8.2f} x DSP ({ratio['least']:.2f} to {ratio['most']:.2f})",
                flush=True,
            )


def picture(found: dict[str, Any]) -> str:
    rates = found["sweep"]["rates"]
    labels = [rate_name(one["rate"]) for one in rates]
    panels = []
    for mode, title in (("train", "A training step"), ("infer", "A forward")):
        series = []
        for method in found["methods"]:
            ratios = [one["modes"][mode][method]["ratio"] for one in rates]
            points = [(i, r["median"], r["least"], r["most"]) for i, r in enumerate(ratios)]
            series.append(Series(METHODS[method], COLOURS[method], points))
        panels.append(Panel(title, labels, series, "rate of a link, bit/s", log=True, unit="time / DSP's"))
    for kind in ("weak", "strong"):
        rows = [r for r in found["scaling"] if r["kind"] == kind and r["mode"] == "train"]
        sizes = sorted({r["ranks"] for r in rows})
        series = []
        for method in found["methods"]:
            mine = sorted((r for r in rows if r["method"] == method or r["ranks"] == 1), key=lambda r: r["ranks"])
            points = [(sizes.index(r["ranks"]), r["tokens_per_s"]) for r in mine]
            series.append(Series(METHODS[method], COLOURS[method], points))
        rate = rate_name(found["scaling_rate"])
        panels.append(Panel(f"{kind.title()} scaling, {rate}", list(map(str, sizes)), series, "ranks", unit="tokens/s"))
    note = f"{found['sweep']['ranks']} emulated hosts on {found['cores']} cores; median, least and most of the rounds"
    return figure("Time by method and link", panels, note)


def rate_name(megabits: float) -> str:
    if not megabits:
        return "no limit"
    return f"{megabits / 1000:g} G" if megabits >= 1000 else f"{megabits:g} M"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The step by method on emulated hosts, as root.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the sweep is on the most of them")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 300, 1000, 3000, 10000, 0], help="Mbit/s")
    parser.add_argument("--scaling-rate", type=float, default=1000, help="Mbit/s")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="dsp among them")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="no", help="stages, in backward")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--side", type=int, default=16, help="patches a side of a frame")
    parser.add_argument("--probe", type=int, default=8 * 2**20, help="bytes by which a link is measured")
    parser.add_argument("--out", type=Path, help="for OUT.json and OUT.svg")
    options = parser.parse_args(arguments)
    if "dsp" not in options.methods:
        parser.error("--methods: the others are compared with dsp, so it has to be among them")
    if reason := why_not():
        print(f"skipped: hosts cannot be emulated here: {reason}")
        return 0
    # as many heads as the most ranks, or Ulysses and Megatron have nothing to give to a rank
    shape = Shape(options.hidden, max(8, *options.ranks), options.depth, 1, options.frames, options.side)
    found = circumstances(shape, arguments) | {"methods": options.methods, "scaling_rate": options.scaling_rate}
    with stoppable(), Hosts(max(options.ranks)) as hosts:
        found["sweep"] = sweep(hosts, options, shape)
        found["scaling"] = scaling(hosts, options, shape)
    print("wrote", write_down("cluster", options.out, found, picture(found)))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"build": build, "timed": timed, "link": link})
    else:
        sys.exit(main(sys.argv[1:]))
