"""The rates of this GPU for the cost model: they explain steps and forwards of several shapes.

The model is that of `dsp.Plan.takes`: counted FLOPs over a rate, and bytes touched over another, operation by operation
as they run uncompiled. Both rates are fitted by least squares of relative errors; each point is then predicted by a fit
without it. Beside them stand the shares of the data sheet that `dsp.hardware.accelerator` takes where it is told none.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

import dsp
import dsp.embedded
from benchmarks.gpu_parts import Cases, Machine, Part, Row
from benchmarks.gpu_parts.speed import FULL, TINY, model_of
from benchmarks.methods.rivals import Shape

ASSUMED = 0.5, 0.8  # of accelerator(): the share of products, and of memory
FULL_SHAPES = [
    Shape(hidden, hidden // 72, 2, 1, frames, side)
    for hidden in (1152, 2304) for frames, side in ((4, 64), (16, 64), (64, 16), (64, 32))
]  # fmt: skip
TINY_SHAPES = [Shape(48, 4, 1, 1, frames, 4) for frames in (4, 8)]


def counted(shape: Shape, train: bool, again: bool = False) -> tuple[int, int]:
    """FLOPs, and bytes touched, of a step or a forward."""
    model, inputs = model_of(shape, "meta")
    with nullcontext() if train else torch.no_grad():
        plan = dsp.embedded.plan(model, kwargs=inputs, size=1, method="dsp", recompute=again, gather_output=False)
    return plan.flops, plan.touched


def point(machine: Machine, shape: Shape, train: bool) -> Row:
    model, inputs = model_of(shape, machine.device)

    def run() -> None:
        with nullcontext() if train else torch.no_grad():
            y = model(**inputs)
            if train:
                y.float().square().mean().backward()

    flops, touched = counted(shape, train)
    return {"flops": flops, "touched": touched, "measured, s": machine.seconds(run, machine.of(5, 1), machine.of(3, 1))}


def fit(rows: Sequence[Row]) -> tuple[float, float]:
    """Seconds a FLOP and seconds a byte, of least squares of relative errors, neither negative."""
    columns = np.array([[row["flops"], row["touched"]] for row in rows]) / np.array(
        [[row["measured, s"]] for row in rows]
    )
    scale = np.linalg.norm(columns, axis=0)
    found, *_ = np.linalg.lstsq(columns / scale, np.ones(len(rows)), rcond=None)
    for i in (0, 1):
        if found[i] < 0:  # then the other one alone
            found = np.zeros(2)
            column = columns[:, 1 - i] / scale[1 - i]
            found[1 - i] = column.sum() / (column @ column)
    compute, memory = found / scale
    return float(compute), float(memory)


def seconds(rates: tuple[float, float], flops: float, touched: float) -> float:
    return rates[0] * flops + rates[1] * touched


def fitted(machine: Machine, rows: dict[str, Row], earlier: dict[str, Any]) -> Row:
    """The rates of all points; how far each is off without itself; the compiled 720M step beside what they say."""
    points = list(rows.values())
    if len(points) < 3:
        return {"ok": False, "error": f"{len(points)} points are too few for two rates"}
    rates = fit(points)
    errors = []
    for one in points:
        others = fit([row for row in points if row is not one])
        errors.append(abs(seconds(others, one["flops"], one["touched"]) / one["measured, s"] - 1))
    flops, stream = (1 / rate if rate else None for rate in rates)
    row: Row = {
        "TFLOP/s": flops and 1e-12 * flops, "GB/s": stream and 1e-9 * stream,
        "error, median": statistics.median(errors), "error, worst": max(errors),
        "aim": "errors of 15%", "met": None if machine.dry else max(errors) <= 0.15,
    }  # fmt: skip
    if machine.peak and machine.stream:
        row["products"] = flops and flops / (machine.peak * 1e12)
        row["stream"] = stream and stream / (machine.stream * 1e9)
        assumed = 1 / (ASSUMED[0] * machine.peak * 1e12), 1 / (ASSUMED[1] * machine.stream * 1e9)
        off = [abs(seconds(assumed, one["flops"], one["touched"]) / one["measured, s"] - 1) for one in points]
        row |= {"error as assumed, median": statistics.median(off), "error as assumed, worst": max(off)}
    first = next(iter(earlier.get("step", {}).get("cases", {}).values()), None)  # in which stages are recomputed
    if first and "step, s" in first:
        predicted = seconds(rates, *counted(machine.of(FULL, TINY), True, again=True))
        row["the compiled step / its prediction"] = first["step, s"] / predicted
    return row


def cases(machine: Machine, earlier: dict[str, Any]) -> Cases:
    rows: dict[str, Row] = {}

    def kept(name: str, shape: Shape, train: bool) -> Row:
        rows[name] = point(machine, shape, train)
        return rows[name]

    found: Cases = {}
    for one in machine.of(FULL_SHAPES, TINY_SHAPES):
        for train in (False, True):
            name = f"hidden {one.hidden}, {one.frames} x {one.places}, {'a step' if train else 'a forward'}"
            found[name] = partial(kept, name, one, train)
    return found | {"rates": partial(fitted, machine, rows, earlier)}


PARTS = [Part("calibration", "The cost model's rates", cases, 45, alone=True)]
