"""The step by method and option on networks that are drawn at random, and whether the cost model knows the best one.

    python benchmarks/methods/networks.py              # as root; 20 networks; benchmarks/results/networks.json
    python benchmarks/methods/networks.py --networks 5 --rounds 3 --ranks 4 --out FILE

A network has links with a rate, a delay and a loss of packets, between ranks in nodes (see links.py). On each network
all configurations take turns in the same processes, round by round, so a machine that is slow for a while is slow for
all of them. Of each configuration are told

    seconds      a training step, forward, backward and the average of gradients, by the slowest rank: the median
    waits        the part of it in which the rank's thread computed nothing; what overlap hides is missing there
    predicted    the thread's computing without a network, and its traffic on the links that `dsp.hardware` measured

Where ranks are more than cores, a rank also waits for a core.
"""

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

import dsp
from benchmarks.common import circumstances, line, options, table, write_down
from benchmarks.methods.cluster import take_turns
from benchmarks.methods.hosts import Ranks, serve, stoppable
from benchmarks.methods.links import Emulated, Network, Wire, why_not
from benchmarks.methods.rivals import Shape, Step, all_ranks

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "dsp": ("dsp", {}),
    "dsp, overlapped": ("dsp", {"overlap": 4}),
    "dsp, fp8 sent": ("dsp", {"wire": "fp8"}),
    "dsp, both": ("dsp", {"overlap": 4, "wire": "fp8"}),
    "ulysses": ("ulysses", {}),
}
STEPS: dict[str, Step] = {}  # of this rank, by configuration


def drawn(count: int, ranks: int, seed: int) -> list[Network]:
    """Networks, the same for the same seed: rates and delays are drawn evenly on a logarithmic scale."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        node = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        near = Wire(round(300 * 10 ** draw.random()), round(0.01 * 10 ** draw.random(), 3))
        far = Wire(round(30 * 30 ** draw.random()), round(0.05 * 40 ** draw.random(), 3), draw.choice([0, 0, 0, 5e-4]))
        found.append(Network(near, far, node))
    return found


# ------------------------------------------------------------------------------------------------------- on every rank


def build(name: str, shape: dict[str, int]) -> int:
    """Make the step of a configuration ready; the bytes of sequence parallelism that this rank sends in it."""
    method, how = CONFIGURATIONS[name]
    step = STEPS[name] = Step(method, Shape(**shape), **how)
    with dsp.count_comm() as comm:
        step.backward(step.forward())
    return comm.bytes


def timed(name: str) -> tuple[float, float]:
    """Seconds of one step on this rank, from when all were ready: those that its thread computed, and the rest."""
    step = STEPS[name]
    dist.barrier()
    began, worked = time.perf_counter(), time.thread_time()
    step.backward(step.forward())
    step.average()
    worked = time.thread_time() - worked
    return worked, time.perf_counter() - began - worked


def hardware(node: int) -> dict[str, Any]:
    """The hardware that `dsp.hardware` measures here."""
    found = dsp.hardware.measured(all_ranks(), node=node)
    return {"link": asdict(found.link), "network": found.network and asdict(found.network), "node": found.node}


# --------------------------------------------------------------------------------------------------------- the program


def foretold(name: str, shape: Shape, ranks: int, links: dict[str, Any], computing: float) -> float:
    """Seconds of a step by the cost model: what it computes, what it sends, and the average of gradients."""
    method, how = CONFIGURATIONS[name]
    near, far = (dsp.Link(**of) if (of := links[kind]) else None for kind in ("link", "network"))
    plan = shape.plan(method, ranks, **how)
    machine = dsp.Hardware(near, 1.0, plan.flops / computing, far, links["node"])  # type: ignore[arg-type]
    weights = 4 * sum(p.numel() for p in shape.bare("meta")[0].parameters())
    return plan.takes(machine, dsp.hardware.all_reduced(weights, ranks), overlap=False).step


def one(hosts: Emulated, ranks: Ranks, network: Network, o: Any, shape: Shape, computing: dict[str, float]) -> Any:
    """Every configuration on one network."""
    hosts.shape(network)
    links = ranks.ask("hardware", node=network.node)[0]
    rounds = take_turns(list(CONFIGURATIONS), o.rounds, lambda name: ranks.ask("timed", name=name))
    rows = {}
    for name, own in rounds.items():
        ratios = [sum(parts) / sum(base) for parts, base in zip(own, rounds["dsp"])]
        rows[name] = {
            "seconds": statistics.median(map(sum, own)),
            "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios),
            "waits": statistics.median(waited for _, waited in own),
            "predicted": foretold(name, shape, ranks.size, links, computing[name]),
        }  # fmt: skip
    best, chosen = (min(rows, key=lambda name, of=of: rows[name][of]) for of in ("seconds", "predicted"))
    return {"network": asdict(network), "links": links, "rows": rows, "best": best, "chosen": chosen}


def show(network: Network, found: Any) -> None:
    print(f"\n{network}\n" + "\n".join(table(["configuration", "s a step", "x dsp", "waits", "predicted"], [])))
    for name, r in found["rows"].items():
        spread = f"{r['ratio']:.2f} ({r['least']:.2f} to {r['most']:.2f})"
        print(line([name, f"{r['seconds']:.3f}", spread, f"{r['waits']:.3f}", f"{r['predicted']:.3f}"]))
    print(f"the shortest: {found['best']}; by the cost model: {found['chosen']}", flush=True)


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, networks=20, ranks=2, rounds=5, seed=0, hidden=64, depth=2, frames=32, side=16, out=None
    )
    if reason := why_not():
        print(f"skipped: networks cannot be emulated here: {reason}")
        return 0
    shape = Shape(o.hidden, max(8, o.ranks), o.depth, 1, o.frames, o.side)
    found = circumstances(arguments) | {"shape": asdict(shape), "ranks": o.ranks, "networks": []}
    with stoppable(), Emulated(o.ranks) as hosts, Ranks(__file__, o.ranks, hosts) as ranks:
        found["bytes"] = {name: max(ranks.ask("build", name=name, shape=vars(shape))) for name in CONFIGURATIONS}
        hosts.rate(None)
        free = take_turns(list(CONFIGURATIONS), o.rounds, lambda name: ranks.ask("timed", name=name))
        computing = {name: statistics.median(worked for worked, _ in own) for name, own in free.items()}
        found["computing"] = computing
        for network in drawn(o.networks, o.ranks, o.seed):
            found["networks"].append(each := one(hosts, ranks, network, o, shape, computing))
            show(network, each)
    agreed = sum(each["best"] == each["chosen"] for each in found["networks"])
    off = [abs(r["predicted"] / r["seconds"] - 1) for each in found["networks"] for r in each["rows"].values()]
    print(f"\nthe cost model chose the shortest on {agreed} of {o.networks}; it is off by {statistics.median(off):.0%}")
    write_down("networks", o.out, found)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"build": build, "timed": timed, "hardware": hardware})
    else:
        sys.exit(main(sys.argv[1:]))
