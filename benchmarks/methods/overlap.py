"""The part of communication that `overlap=` hides behind computing, on emulated hosts whose links are held to a rate.

    python benchmarks/methods/overlap.py               # as root; benchmarks/results/overlap.json
    python benchmarks/methods/overlap.py --rounds 3 --shares 0.4 --out FILE

A step, forward and backward, of a small Transformer-2D on two hosts (see hosts.py): with switches in one piece, in 2
and in 4, by the same processes in turn. The rate is chosen so that bytes take a share of a step: by the bytes that a
rank sends, and the seconds of a step without a limit. Of a round, hidden is what a step takes less than that in one
piece, over what that takes longer than without a limit. The switches' bytes are the same in all three.
"""

import statistics
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsp
import zoo
from benchmarks.common import circumstances, options, write_down
from benchmarks.methods.hosts import Hosts, Ranks, serve, stoppable, why_not

WAYS: dict[str, int | None] = {"one piece": None, "2 pieces": 2, "4 pieces": 4}
MODELS: dict[str, Any] = {}  # of this rank, by way: the model and its inputs


# ------------------------------------------------------------------------------------------------------- on every rank


def build(way: str, hidden: int, depth: int, frames: int, side: int) -> dict[str, int]:
    """Make a model ready; bytes and calls of a step."""
    torch.manual_seed(0)
    model = zoo.create("transformer2d", hidden=hidden, depth=depth, heads=4)
    for weight in model.parameters():  # those that begin with zero would let no gradient through
        torch.nn.init.normal_(weight, std=0.02)
    inputs = model.example_inputs(batch=1, frames=frames, height=side, width=side)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    MODELS[way] = dsp.parallelize(model, mesh, gather_output=False, overlap=WAYS[way]), inputs
    step(way)
    with dsp.count_comm() as comm:
        step(way)
    return {"bytes": comm.bytes, "calls": comm.calls}


def step(way: str) -> float:
    """Seconds of a step on this rank, from when all were ready."""
    model, inputs = MODELS[way]
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    dsp.mean(model(**inputs).square()).backward()
    return time.perf_counter() - began


# --------------------------------------------------------------------------------------------------------- the program


def rounds_of(ranks: Ranks, hosts: Hosts, o: Namespace, rate: float) -> list[dict[str, float]]:
    """Seconds of the slowest rank by way, and without a limit, for each round; the ways take turns."""
    found = []
    for i in range(o.rounds):
        hosts.rate(rate)
        names = [*WAYS][i % len(WAYS) :] + [*WAYS][: i % len(WAYS)]
        one = {name: max(ranks.ask("step", way=name)) for name in names}
        hosts.rate(None)
        found.append(one | {"free": max(ranks.ask("step", way="one piece"))})
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """By way: the median seconds, the ratio to one piece, and the part of communication that is hidden."""
    found: dict[str, Any] = {"rounds": rounds, "free": statistics.median(r["free"] for r in rounds)}
    for name in WAYS:
        ratios = [r[name] / r["one piece"] for r in rounds]
        waited = statistics.median(r["one piece"] - r["free"] for r in rounds)
        found[name] = {
            "seconds": statistics.median(r[name] for r in rounds),
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
            "hidden": statistics.median(r["one piece"] - r[name] for r in rounds) / max(waited, 1e-9),
        }
    return found


def main(arguments: list[str] | None = None) -> None:
    o = options(
        __doc__, arguments, rounds=9, shares=[0.3, 0.4, 0.5], hidden=128, depth=3, frames=8, side=32, out=None
    )  # fmt: skip
    if reason := why_not():
        raise SystemExit(f"hosts cannot be emulated: {reason}")
    shape = {"hidden": o.hidden, "depth": o.depth, "frames": o.frames, "side": o.side}
    with stoppable(), Hosts(2) as hosts, Ranks(__file__, 2, hosts) as ranks:
        sent = {name: ranks.ask("build", way=name, **shape)[0] for name in WAYS}
        found: dict[str, Any] = {"shape": shape, "sent": sent, "shares": {}}
        for share in o.shares:
            free = statistics.median(max(ranks.ask("step", way="one piece")) for _ in range(o.rounds))
            rate = sent["one piece"]["bytes"] * 8e-6 / (free * share / (1 - share))
            one = found["shares"][str(share)] = {"rate": rate} | summary(rounds_of(ranks, hosts, o, rate))
            for name in WAYS:
                ratio = one[name]["ratio"]
                print(
                    f"{share:.0%} at {rate:.0f} Mbit/s, {name}: {one[name]['seconds']:.3f} s, "
                    f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f}) of one piece, "
                    f"hides {one[name]['hidden']:.0%}",
                    flush=True,
                )
    write_down("overlap", o.out, circumstances(sys.argv[1:] if arguments is None else arguments) | found)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"build": build, "step": step})
    else:
        main()
