"""The step by method and option on networks that are drawn at random, and whether a plan's estimate finds the best one.

    python benchmarks/networks.py              # as root; 20 networks; benchmarks/results/networks.json
    python benchmarks/networks.py --networks 5 --rounds 3 --ranks 4 --out FILE

A network has links with a rate, a delay and a loss of packets, between ranks in nodes (see hosts.py). On each network
all configurations take turns in the same processes, round by round, so a machine that is slow for a while is slow for
all of them. Of each configuration are shown

    seconds      a training step, forward, backward and the average of gradients, by the slowest rank: the median
    x the best   its share of the geometric mean of its round, the median of that, over the least of all configurations
    waits        the part of it in which the rank's thread computed nothing; what overlap hides is missing there
    predicted    by what `dsp.hardware.measured` finds on this network, and by one step of plain DSP without a limit,
                 which says how much slower this model computes than a product and a copy

The choice is that of `dsp.choose`, among these configurations: the shortest that is predicted, where fewer bits have to
save 3%. It counts as the best where it takes no more than 1.03 of the best one's time, which is what a repetition
differs by. Where ranks are more than cores, a rank also waits for a core.
"""

import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

import dsp
from benchmarks.cluster import take_turns
from benchmarks.common import circumstances, line, options, table, write_down
from benchmarks.hosts import Emulated, Network, Ranks, Wire, script, stoppable, why_not
from benchmarks.methods import Shape, Step, all_ranks
from dsp.report.plan import shortest

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {  # the exact ones first
    "dsp": ("dsp", {}),
    "dsp, overlapped": ("dsp", {"overlap": 4}),
    "ulysses": ("ulysses", {}),
    "dsp, fp8 sent": ("dsp", {"wire": "fp8"}),
    "dsp, both": ("dsp", {"overlap": 4, "wire": "fp8"}),
}
NOISE = 1.03  # of the best one's time, up to which another is as good
STEPS: dict[str, Step] = {}  # of this rank, by configuration


def drawn(count: int, ranks: int, seed: int) -> list[Network]:
    """Networks, the same for the same seed: rates and delays are drawn evenly on a logarithmic scale."""
    draw, networks = random.Random(seed), []
    for _ in range(count):
        node = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
        near = Wire(round(300 * 10 ** draw.random()), round(0.01 * 10 ** draw.random(), 3))
        far = Wire(round(30 * 30 ** draw.random()), round(0.05 * 40 ** draw.random(), 3), draw.choice([0, 0, 0, 5e-4]))
        networks.append(Network(near, far, node))
    return networks


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


def hardware(node: int, nbytes: int) -> dict[str, Any]:
    """The hardware that `dsp.hardware` measures here, by exchanges of so many bytes."""
    return asdict(dsp.comm.hardware.measured(all_ranks(), node=node, nbytes=nbytes, rounds=9))


# --------------------------------------------------------------------------------------- the program, from what it has


@cache
def plans_of(shape: Shape, ranks: int) -> dict[str, dsp.Plan]:
    return {name: shape.plan(method, ranks, **how) for name, (method, how) in CONFIGURATIONS.items()}


def revived(of: Mapping[str, Any]) -> dsp.Hardware:
    """The hardware that was written down."""
    links = {name: of[name] and dsp.Link(**of[name]) for name in ("link", "network")}
    return dsp.Hardware(**{**of, **links, "packing": {name: dsp.Link(**link) for name, link in of["packing"].items()}})


def averaged(shape: Shape, ranks: int) -> list[dsp.comm.hardware.Exchange]:
    """The average of gradients in a step."""
    return dsp.comm.hardware.all_reduced(4 * sum(p.numel() for p in shape.bare("meta")[0].parameters()), ranks)


def predictions(report: Mapping[str, Any], each: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of a step by configuration on one of the networks that were found."""
    shape, ranks, free = Shape(**report["shape"]), report["ranks"], report["free"]
    plans, weights = plans_of(shape, ranks), averaged(shape, ranks)
    whole = plans["dsp"].takes(revived(free["hardware"]), weights, overlap=False)
    slower = (statistics.median(map(sum, free["rounds"]["dsp"])) - whole.step + whole.compute) / whole.compute
    here = revived(each["hardware"])
    here = replace(here, flops=here.flops / slower, stream=here.stream / slower)
    return {name: plan.takes(here, weights, overlap=False).step for name, plan in plans.items()}


def relative(rounds: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, float]:
    """The time of each configuration over that of the best one, so that a round that was slow for all counts as any."""
    means = [statistics.geometric_mean(map(sum, same)) for same in zip(*rounds.values())]
    shares = {name: statistics.median(sum(one) / m for one, m in zip(times, means)) for name, times in rounds.items()}
    return {name: share / min(shares.values()) for name, share in shares.items()}


def judged(report: Mapping[str, Any], each: Mapping[str, Any]) -> dict[str, Any]:
    """The configurations on one network, the best one, and the one that would be chosen."""
    predicted, against = predictions(report, each), relative(each["rounds"])
    plans = plans_of(Shape(**report["shape"]), report["ranks"])
    chosen = [*plans][shortest([(plan.wire, predicted[name]) for name, plan in plans.items()])]
    rows = {
        name: {
            "seconds": statistics.median(map(sum, times)), "relative": against[name],
            "waits": statistics.median(waited for _, waited in times), "predicted": predicted[name],
        }
        for name, times in each["rounds"].items()
    }  # fmt: skip
    return {"rows": rows, "best": min(against, key=against.__getitem__), "chosen": chosen}


def verdict(networks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How good the choices are: how many are the best, within noise, and by how much the others are slower."""
    taken = [each["rows"][each["chosen"]] for each in networks]
    plain = [row["relative"] / each["rows"]["dsp"]["relative"] for row, each in zip(taken, networks)]
    off, regret = [abs(row["predicted"] / row["seconds"] - 1) for row in taken], [row["relative"] for row in taken]
    fixed = {name: [each["rows"][name]["relative"] for each in networks] for name in CONFIGURATIONS}
    return {
        "networks": len(taken), "picked": sum(r <= NOISE for r in regret),
        "regret": {"median": statistics.median(regret), "worst": max(regret)},
        "against plain": {"median": statistics.median(plain), "worst": max(plain)},
        "off": {"median": statistics.median(off), "worst": max(off)},
        "always": {name: {"picked": sum(r <= NOISE for r in rs), "worst": max(rs)} for name, rs in fixed.items()},
    }  # fmt: skip


def show(each: Mapping[str, Any]) -> None:
    print("\n".join(table(["configuration", "s a step", "x the best", "waits", "predicted"])))
    for name, r in each["rows"].items():
        print(line([name, *(f"{r[key]:.3f}" for key in ("seconds", "relative", "waits", "predicted"))]))
    print(f"the best: {each['best']}; chosen: {each['chosen']}", flush=True)


def conclude(report: Mapping[str, Any]) -> None:
    v = report["verdict"]
    regret, plain, off = (
        f"{v[k]['median']:.2f}, at worst {v[k]['worst']:.2f}" for k in ("regret", "against plain", "off")
    )
    print(f"\npicked best: {v['picked']} of {v['networks']}, within {NOISE - 1:.0%} of the best one's time")
    print(f"regret (chosen / best): {regret}; chosen / plain DSP: {plain}\nerror of the chosen one's prediction: {off}")
    for name, entry in v["always"].items():
        print(f"  always {name}: the best on {entry['picked']}, at worst {entry['worst']:.2f}")


# ------------------------------------------------------------------------------------------------------------ measuring


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, networks=20, ranks=2, rounds=5, seed=0, hidden=64, depth=2, frames=32, side=16, out=None
    )
    if reason := why_not(Emulated):
        print(f"skipped: networks cannot be emulated here: {reason}")
        return 0
    shape = Shape(o.hidden, max(8, o.ranks), o.depth, 1, o.frames, o.side)
    report = circumstances(arguments) | {"shape": asdict(shape), "ranks": o.ranks}
    plain = plans_of(shape, o.ranks)["dsp"]
    nbytes = plain.bytes["forward"] // max(plain.calls["forward"], 1) * o.ranks // (o.ranks - 1)
    with stoppable(), Emulated(o.ranks) as hosts, Ranks(__file__, o.ranks, hosts) as ranks:
        report["bytes"] = {name: max(ranks.ask("build", name=name, shape=vars(shape))) for name in CONFIGURATIONS}

        def measure(node: int, names: Sequence[str]) -> dict[str, Any]:
            here = ranks.ask("hardware", node=node, nbytes=nbytes)[0]
            return {"hardware": here, "rounds": take_turns(names, o.rounds, lambda n: ranks.ask("timed", name=n))}

        hosts.rate(None)
        report |= {"free": measure(o.ranks, ["dsp"]), "networks": []}
        for network in drawn(o.networks, o.ranks, o.seed):
            hosts.shape(network)
            each = {"network": asdict(network), **measure(network.node, list(CONFIGURATIONS))}
            report["networks"].append(each | judged(report, each))
            print(f"\n{network}")
            show(report["networks"][-1])
    report["verdict"] = verdict(report["networks"])
    conclude(report)
    write_down("networks", o.out, report)
    return 0


if __name__ == "__main__":
    script(main, build=build, timed=timed, hardware=hardware)
