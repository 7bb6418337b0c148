"""How long a step takes, by method and number of ranks: calibrated on the emulated hosts, predicted for H100 clusters.

    python benchmarks/cost_model.py                 # benchmarks/results/cost-model.json and cost-model.svg
    python benchmarks/cost_model.py --measured FILE --out FILE

The estimator is that of `dsp.Plan.takes` and of ``train.py dry_run=true``: counted FLOPs, bytes touched and bytes sent
over rates. Here the rates are fitted to the steps that cluster.py measured, by least squares of relative
errors, none negative:

    compute, memory     seconds a FLOP of a core, and a byte touched; ranks share the cores, and all of them the memory
    latency             seconds a collective
    all-to-all, hops,   how many times as long a kind of collective takes as its bytes at the rate that cluster.py
    gathers, all-reduce measured of the link, in an all-to-all or from rank to rank

Each (ranks, link, method) is then predicted by what was fitted without it: without its step, its forward, and its rows
of the sweep and of scaling. The second part takes the hardware from data sheets, and nothing from the first.
"""

import itertools
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.optimize import nnls

import dsp
from benchmarks.common import RESULTS, ROOT, circumstances, options, rate_name, read, write_down
from benchmarks.methods import METHODS, TABLE_9, Shape
from dsp.comm.hardware import all_reduced
from dsp.embedded import Timing
from zoo.training import config as cfg
from zoo.training.dry_run import Memory, known_hardware, steps_on
from zoo.training.model import without_weights
from zoo.training.task_lookup import create_task

PARAMETERS = ("compute", "memory", "latency", "all-to-all", "hops", "gathers", "all-reduce")
PATTERN = {  # kind of collective: its parameter, and the pattern in which cluster.py measured the link
    "switch": ("all-to-all", "all_to_all"),
    "reduce_scatter": ("all-to-all", "all_to_all"),
    "ring": ("hops", "ring"),
    "gather": ("gathers", "ring"),
    "all_reduce": ("all-reduce", "ring"),
}
AIM = 0.15  # of the error


# --------------------------------------------------------------------------------------------------------- calibration


@dataclass(frozen=True)
class Point:
    """One measured step or forward."""

    kind: str  # "sweep", "weak" or "strong"
    mode: str  # "train" or "infer"
    ranks: int
    rate: float  # of the links, Mbit/s; 0 is no limit
    method: str
    shape: Shape
    seconds: float
    spread: float  # of the rounds: (most - least) / median

    @property
    def left_out_with(self) -> tuple[int, float, str]:
        return self.ranks, self.rate, self.method


@dataclass(frozen=True)
class Measured:
    points: list[Point]
    links: dict[float, dict[str, float]]  # rate -> pattern -> bytes a second
    cores: int
    recompute: str

    @classmethod
    def read(cls, report: dict[str, Any]) -> "Measured":
        shape, sweep, points = Shape(**report["shape"]), report["sweep"], []
        rows = [
            {"kind": "sweep", "mode": mode, "ranks": sweep["ranks"], "rate": one["rate"], "method": method, **row}
            for one in sweep["rates"] for mode, rows in one["modes"].items() for method, row in rows.items()
        ]  # fmt: skip
        for row in [*rows, *({"rate": report["scaling_rate"], **row} for row in report["scaling"])]:
            larger = replace(shape, batch=shape.batch * (row["ranks"] if row["kind"] == "weak" else 1))
            of, s = (row[key] for key in ("kind", "mode", "ranks", "rate", "method")), row["seconds"]
            points.append(Point(*of, larger, s["median"], (s["most"] - s["least"]) / s["median"]))
        links = {one["rate"]: {k: 125e3 * v for k, v in one["measured"].items()} for one in sweep["rates"]}
        if report["scaling_rate"] not in links:
            raise SystemExit(f"the link of the scaling, {report['scaling_rate']} Mbit/s, is not measured in the sweep")
        return cls(points, links, report["machine"]["cores"], sweep["recompute"])


@cache
def plan(shape: Shape, method: str, ranks: int, mode: str, recompute: str) -> dsp.Plan:
    how = {"recompute": recompute != "no" and mode == "train", "save_exchanges": recompute == "saved"}
    with torch.no_grad() if mode == "infer" else nullcontext():
        return shape.plan(method, ranks, **how)


@cache
def weights(shape: Shape) -> int:
    return sum(p.numel() for p in shape.bare("meta")[0].parameters())


def hardware(values: dict[str, float], point: Point, measured: Measured) -> dsp.Hardware:
    """One emulated host, where the parameters have these values; one that is 0 takes no time."""

    def rate(name: str, times: float = 1.0) -> float:
        return 1 / (values[name] * times) if values[name] else math.inf

    busy = max(1.0, point.ranks / measured.cores)  # ranks that share a core; all of them share the memory
    links = measured.links[point.rate]
    link = dsp.Link(f"{point.rate:g} Mbit/s", values["latency"], links["ring"])
    share = {kind: links[pattern] / links["ring"] * rate(name) for kind, (name, pattern) in PATTERN.items()}
    return dsp.Hardware(
        link, memory=math.inf, flops=rate("compute", busy), stream=rate("memory", point.ranks), node=point.ranks,
        share=share,
    )  # fmt: skip


def predict(values: dict[str, float], point: Point, measured: Measured) -> float:
    """Seconds of a point: what cluster.py runs averages all gradients at once, when backward is done."""
    scheme = plan(point.shape, point.method, point.ranks, point.mode, measured.recompute)
    averaged = (
        all_reduced(4 * (weights(point.shape) - scheme.cut_weights), point.ranks) if point.mode == "train" else []
    )
    return scheme.takes(hardware(values, point, measured), averaged, overlap=False).step


def design(measured: Measured) -> Any:
    """(points, parameters): what each parameter adds to each point at a value of 1; the model is their sum."""
    units = [{name: float(name == one) for name in PARAMETERS} for one in PARAMETERS]
    return np.array([[predict(unit, point, measured) for unit in units] for point in measured.points])


def fit(columns: Any, seconds: Any) -> dict[str, float]:
    """The least squares of relative errors, none negative; columns are scaled, for they differ by 10^12."""
    relative = columns / seconds[:, None]
    scale = np.maximum(np.linalg.norm(relative, axis=0), 1e-300)
    coefficients, _ = nnls(relative / scale, np.ones(len(seconds)))
    return dict(zip(PARAMETERS, (float(v) for v in coefficients / scale)))


def leave_one_out(measured: Measured) -> tuple[dict[str, float], list[float]]:
    """The parameters of all points; and each point as those of the others predict it."""
    columns, seconds = design(measured), np.array([p.seconds for p in measured.points])
    predicted = []
    for point in measured.points:
        others = [p.left_out_with != point.left_out_with for p in measured.points]
        predicted.append(predict(fit(columns[others], seconds[others]), point, measured))
    return fit(columns, seconds), predicted


def calibration(measured: Measured) -> dict[str, Any]:
    values, predicted = leave_one_out(measured)
    rows = []
    for point, seconds in zip(measured.points, predicted):
        nothing = dict.fromkeys(PARAMETERS, 0.0)
        parts = {name: predict(nothing | {name: value}, point, measured) for name, value in values.items()}
        row = {key: value for key, value in asdict(point).items() if key != "shape"}
        row |= {"predicted": seconds, "error": seconds / point.seconds - 1, "fitted": sum(parts.values())}
        rows.append(row | {"parts": parts})
    errors = [abs(row["error"]) for row in rows]
    same: dict[Any, list[float]] = {}  # what was measured twice: in the sweep, and in scaling on as many ranks
    for p in measured.points:
        same.setdefault(replace(p, kind="", seconds=0, spread=0), []).append(p.seconds)
    repeats = [max(each) / min(each) - 1 for each in same.values() if len(each) > 1]
    over = sum(e > AIM for e in errors)
    return {
        "parameters": values, "points": rows, "median": statistics.median(errors), "worst": max(errors), "over": over,
        "repeats": {"count": len(repeats), "median": statistics.median(repeats), "worst": max(repeats)},
    }  # fmt: skip


def show_calibration(report: dict[str, Any]) -> None:
    print("fitted: " + ", ".join(f"{name} {value:.3g}" for name, value in report["parameters"].items()))
    for row in report["points"]:
        name = f"{row['kind']} {row['mode']} {row['ranks']} ranks, {rate_name(row['rate'])}, {METHODS[row['method']]}"
        mark = "  over" if abs(row["error"]) > AIM else ""
        print(
            f"{name:<55}{row['seconds']:8.3f} s, predicted {row['predicted']:8.3f}{row['error']:+8.1%}, rounds differ "
            f"by {row['spread']:.0%}{mark}"
        )
    repeats = report["repeats"]
    print(
        f"leave-one-out error: median {report['median']:.1%}, worst {report['worst']:.1%}, {report['over']} of "
        f"{len(report['points'])} over {AIM:.0%}; the {repeats['count']} measured twice differ by "
        f"{repeats['median']:.1%}, at most {repeats['worst']:.1%}"
    )


# ---------------------------------------------------------------------------------------------------------- prediction

PATCHES = 4096  # of a frame, in all that the paper ran
RUN = ROOT / "configs/paper.yaml"  # what the runs of the paper have in common
TABLE_4 = {  # sp of each method on 128 GPUs for 128, 256, 512 and 1024 frames; None: it ran out of memory or heads
    "720m": {
        "dsp": (2, 4, 8, 16), "ulysses": (2, 4, 8, 16), "megatron_sp": (2, 4, 16, None), "ring": (2, 4, 8, 16),
    },
    "3b": {
        "dsp": (4, 8, 16, 32), "ulysses": (4, 8, 16, 32), "megatron_sp": (4, 16, None, None), "ring": (4, 8, 16, 32),
    },
}  # fmt: skip
WEAK = {"720m": ((64, (1, 2, 4, 8)), (256, (8, 16, 32))), "3b": ((16, (1, 2, 4, 8)), (128, (8, 16, 32, 64)))}
STRONG = {"720m": ((64, (1, 2, 4, 8)), (256, (8, 16, 32, 64))), "3b": ((16, (1, 2, 4, 8)), (128, (8, 16, 32, 64)))}
CLUSTERS = ((8, "h100"), (128, "h100"), (1024, "h100"), (128, "a100"), (8, "l40s"))
MODELS = (("720m", 64), ("720m", 256), ("3b", 128), ("3b", 1024))  # and frames
MOST_SP = 64


def deeper(one: dsp.Plan, two: dsp.Plan, depth: int) -> dsp.Plan:
    """The plan of a model of `depth` layers from those of one and two: every further layer adds the same."""

    def more(a: int, b: int) -> int:
        return b + (depth - 2) * (b - a)

    sends = {}
    for phase, sent in two.sends.items():
        before = {kind: one.sends[phase].get(kind, (0, 0)) for kind in sent}
        sends[phase] = {kind: tuple(map(more, before[kind], both)) for kind, both in sent.items()}
    numbers = ("flops", "flops_alone", "touched", "touched_alone", "cut_weights")
    return replace(two, sends=sends, **{name: more(getattr(one, name), getattr(two, name)) for name in numbers})


class Deep:
    """The dry run's estimator for a Transformer-2D on a number of frames; plans are made of shallow models."""

    def __init__(self, size: str, frames: int, batch: int, device: str) -> None:
        options = [
            str(RUN), "dry_run=true", f"model.size={size}", f"data.buckets=[{frames}x128x128]", f"train.batch={batch}",
        ]  # fmt: skip

        def setup(*more: str) -> tuple[Any, ...]:
            config = cfg.load([*options, f"hardware.device={device}", *more])
            task = create_task(config)
            return known_hardware(config), config, task, without_weights(config, task)[1]

        hardware, config, task, objective = setup()
        self.memory = Memory(config, task, objective.model)
        self.config, self.depth = config, objective.model.config.depth
        shallow = (setup(f"model.overrides.depth={depth}") for depth in (1, 2))
        self.shallow = [steps_on(*one, self.memory) for one in shallow]
        deep = steps_on(hardware, config, task, objective, self.memory)
        self.steps = replace(deep, plan=self.plan)
        self.plans: dict[tuple[Any, ...], dsp.Plan] = {}

    def plan(self, method: str, sp: int) -> dsp.Plan:
        key = method, sp, torch.is_grad_enabled()
        if key not in self.plans:
            self.plans[key] = deeper(*(one.plan(method, sp) for one in self.shallow), self.depth)
        return self.plans[key]

    def may_fit(self, dp: int, sp: int) -> bool:
        """Tell whether a method that cuts no weights fits; the others take more."""
        return self.memory.total(sp, shard=dp) <= self.steps.hardware.memory

    def forward(self, method: str, sp: int) -> float:
        """Seconds until a sample is through the model, whose weights are there."""
        with torch.no_grad():
            return self.plan(method, sp).takes(self.steps.hardware).step

    def on(self, device: str) -> "Deep":
        """The same on other hardware."""
        other = copy(self)
        hardware = known_hardware(replace(self.config, hardware=replace(self.config.hardware, device=device)))
        other.steps = replace(self.steps, hardware=hardware)
        return other


@cache
def steps(size: str, frames: int, batch: int = 1) -> Deep:
    return Deep(size, frames, batch, "h100")


def step(size: str, frames: int, method: str, dp: int, sp: int, batch: int = 1) -> Timing | None:
    """None where the method cannot run so."""
    try:
        return steps(size, frames, batch).steps.timing(method, dp, sp)
    except ValueError:
        return None


def useful(size: str, frames: int, timing: Timing) -> float:
    """The share of the time in which a rank does what one rank alone would do."""
    return timing.seconds.alone / timing.sp / timing.seconds.step


def figure_5() -> list[dict[str, Any]]:
    """End to end on 128 GPUs: tokens/s by method at its own (sp, dp)."""
    rows = []
    for size, methods in TABLE_4.items():
        for i, frames in enumerate((128, 256, 512, 1024)):
            for method, each in methods.items():
                sp = each[i]
                timing = step(size, frames, method, 128 // sp, sp) if sp else None
                if timing:
                    row = {"size": size, "frames": frames, "method": method, "sp": sp, "rate": timing.rate}
                    rows.append(row | {"useful": useful(size, frames, timing)})
    return rows


def scaling(settings: dict[str, Any], weak: bool) -> list[dict[str, Any]]:
    """Figures 6, 7 and 8: sp alone over N, a sample a rank of the least number (weak), or one sample (strong)."""
    rows = []
    for size, parts in settings.items():
        for frames, sizes in parts:
            for n, method in itertools.product(sizes, METHODS):
                batch = n // sizes[0] if weak else 1
                timing = step(size, frames, method, 1, n, batch) if n > 1 or method == "dsp" else None
                if timing:
                    row = {"size": size, "frames": frames, "ranks": n, "method": method, "rate": timing.rate}
                    if not weak and n == sizes[-1]:
                        row["forward"] = steps(size, frames).forward(method, n)
                    rows.append(row)
    return rows


def table_9() -> list[dict[str, Any]]:
    """Communication of forward and backward at 8M tokens, within a node and beyond one."""
    one, rows = steps("720m", 2048), []
    for n, method in itertools.product((8, 16), TABLE_9):
        plan = one.plan(method, n)
        sent = replace(plan, sends=plan.sends | {"recompute": {}}).exchanges
        rows.append({"ranks": n, "method": method, "seconds": one.steps.hardware.seconds(*sent)})
    return rows


def over_ranks() -> list[dict[str, Any]]:
    """Up to 1024 GPUs: one sample on all of them; and the best dp x sp for every method."""
    rows = []
    for n in (2**i for i in range(3, 11)):
        for method in METHODS:
            timing = step("3b", 1024, method, 1, n)
            if timing:
                row = {"kind": "one sample", "size": "3b", "frames": 1024, "ranks": n, "method": method}
                rows.append(row | described(timing, steps("3b", 1024)))
            best = most(steps("3b", 128), n, (method,))
            if best:
                row = {"kind": "best", "size": "3b", "frames": 128, "ranks": n, "method": method}
                rows.append(row | described(best, steps("3b", 128)))
    return rows


def most(one: Deep, ranks: int, methods: Sequence[str] = tuple(METHODS)) -> Timing | None:
    """The (dp, sp, method) of most tokens/s, of those that fit. On sp=1 all methods are the same."""
    timings = []
    for sp in (2**i for i in range(ranks.bit_length()) if 2**i <= MOST_SP):
        for method in methods if sp > 1 else ("dsp",):
            if not one.may_fit(ranks // sp, sp):
                continue
            try:
                timing = one.steps.timing(method, ranks // sp, sp)
            except ValueError:
                continue
            if one.steps.fits(timing):
                timings.append(timing)
    return max(timings, key=lambda timing: timing.rate, default=None)


def described(timing: Timing, one: Deep) -> dict[str, Any]:
    e = timing.seconds
    parts = {"compute": e.compute, "comm": e.comm, "weights": e.weights}
    return {
        "dp": timing.dp, "sp": timing.sp, "seconds": e.step, "tokens_per_s": timing.rate, "held": timing.held,
        "fits": one.steps.fits(timing), **parts,
    }  # fmt: skip


def best_table() -> list[dict[str, Any]]:
    rows = []
    for (size, frames), (ranks, device) in itertools.product(MODELS, CLUSTERS):
        one = steps(size, frames).on(device)
        row = {"size": size, "frames": frames, "ranks": ranks, "device": device}
        for name, methods in (("best", tuple(METHODS)), ("rival", tuple(m for m in METHODS if m != "dsp"))):
            timing = most(one, ranks, methods)
            row[name] = {"method": timing.method, **described(timing, one)} if timing else None
        rows.append(row)
    return rows


def main(arguments: Sequence[str]) -> int:
    o = options(__doc__, arguments, measured=RESULTS / "cluster.json", out=None, only_calibration=False)
    if not o.measured.exists():
        print(f"there is no {o.measured}: python benchmarks/cluster.py measures it")
        return 1
    steps_there = read(o.measured)
    report = circumstances(arguments) | {
        "measured": {key: steps_there[key] for key in ("commit", "machine", "shape")},
        "aim": AIM, "patches": PATCHES, "calibration": calibration(Measured.read(steps_there)),
    }  # fmt: skip
    show_calibration(report["calibration"])
    if o.only_calibration:
        return 0
    report |= {
        "figure_5": figure_5(), "figure_6": scaling(WEAK, True), "figure_7": scaling(STRONG, False),
        "table_9": table_9(), "ranks": over_ranks(), "best": best_table(),
    }  # fmt: skip
    write_down("cost-model", o.out, report)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
