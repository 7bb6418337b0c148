"""The report as a page: what is right, what is wrong and why, and the numbers, where a GPU has made them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

Found = dict[str, Any]
NOTES = {
    "models": "Relative errors of all outputs and of all gradients, in norm.",
    "step": "MFU is the FLOPs of forward and backward, each once, over the step and the data sheet's peak. *Outside* "
    "is the share of the device's busy time that is neither attention nor products; *idle* that in which it waits.",
    "kernels": "*Share* is the rate of pack and unpack together, of the rate of plain copies of as many bytes. "
    "Attention is forward and backward.",
    "graph": "Replayed numbers agree with the eager ones.",
    "host": "*Host* is the time until everything is launched. Where it is below the kernels' the device never waits "
    "for it; where it is about as much, the host may have waited for the device's queue. The seven others of a rank of "
    "8 are pretended: no time is spent on the wire.",
    "diffusers": "As above.",
    "calibration": "The rates are fitted to the points above; the errors are of points that were left out of the fit. "
    "*Products* and *stream* are shares of the data sheet, of which `dsp.hardware.accelerator` assumes 0.5 and 0.8.",
}  # fmt: skip
HIDDEN = {"ok", "aim", "met", "seconds", "error", "note", "busy", "flops", "touched", "parameters", "tokens", "kernel"}
STATUS = {
    "ok": "right", "failed": "**wrong**", "stopped": "**out of time**", "died": "**died**", "left out": "left out",
}  # fmt: skip


def page(found: Found) -> str:
    return "\n".join(lines(found)) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def lines(found: Found) -> Iterator[str]:
    yield "# On a GPU\n"
    yield wrapped(
        "What one command finds on one GPU, in nine minutes: is everything right on CUDA, how fast is it, and what "
        "does the [cost model](benchmarks.md#cost-model) make of it. This page is written by it:"
    )
    yield "\n```bash\npython benchmarks/gpu.py             # JSON to benchmarks/results; --out names another folder"
    yield "python benchmarks/gpu.py --dry-run   # the same on a CPU, at tiny sizes\n```\n"
    if found["dry"]:
        yield wrapped(
            "**There was no GPU.** What follows is the dry run on a CPU: the same code at tiny sizes, with gloo for "
            "NCCL, two ranks for four, and nothing compiled by inductor. It shows that the command runs, and what it "
            "will ask; its times mean nothing and are left out."
        )
    else:
        yield f"On {found['device']}, {found['memory'] / 1e9:.0f} GB."
    yield "\n" + wrapped(
        f"`{found['command']}`, {found['date']}, {found['cores']} cores ({found['processor']}), "
        f"{', '.join(f'{name} {version}' for name, version in found['versions'].items())}"
        + ("" if found["dry"] else f"; {found['took']:.0f} s")
        + ("." if found["finished"] else "; it has not finished.")
    )
    yield "\n| part | cases that are right | | s |\n|---|---|---|---|"
    for part in found["parts"].values():
        judged = [row for row in part["cases"].values() if row.get("ok") is not None]
        right = f"{sum(row['ok'] for row in judged)} of {len(judged)}" if judged else ""
        took = "" if found["dry"] else f"{part['seconds']:.0f}"
        status = "ran" if part["status"] == "ok" and not judged else STATUS[part["status"]]
        yield f"| {part['title']} | {right} | {status} | {took} |"
    yield from wrong(found)
    yield from untold(found)
    yield from missed(found)
    if found["dry"]:
        return
    for name, part in found["parts"].items():
        rows = {case: row for case, row in part["cases"].items() if numbers(row)}
        if name in NOTES and rows:
            yield f"\n## {part['title']}\n\n{wrapped(NOTES[name])}"
            for columns in dict.fromkeys(tuple(numbers(row)) for row in rows.values()):
                yield f"\n| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}"
                for case, row in rows.items():
                    if tuple(numbers(row)) == columns:
                        yield f"| {case} | {' | '.join(cell(key, row[key]) for key in columns)} |"


def wrong(found: Found) -> Iterator[str]:
    """Every case and part that is not right, and why."""
    told = []
    for part in found["parts"].values():
        if part["status"] in ("stopped", "died"):
            told.append(f"- {part['title']}: {part['error']}.")
        for case, row in part["cases"].items():
            if row.get("ok") is False:
                why = row.get("error") or row.get("failed") or ", ".join(f"{k} {cell(k, row[k])}" for k in numbers(row))
                told.append(f"- {part['title']}, {case}: {why}")
    yield "\n## What is wrong\n"
    yield "\n".join(told) if told else "Nothing that ran."


def untold(found: Found) -> Iterator[str]:
    """Parts that were left out and cases that have nothing to say, and why."""
    without = found["without"].items()
    told: dict[str, list[str]] = {f"{what}: {package} is not installed": [] for package, what in without}
    for part in found["parts"].values():
        if part["status"] == "left out":
            told[f"{part['title']}: {part['error']}"] = []
        for case, row in part["cases"].items():
            if why := row.get("note") or row.get("no profile"):
                told.setdefault(f"{part['title']}: {why}", []).append(case)
    if told:
        yield "\n## What it does not tell\n"
        for why, cases in told.items():
            yield wrapped(f"- {why} ({'; '.join(cases)})." if cases else f"- {why}.")


def missed(found: Found) -> Iterator[str]:
    told = [
        f"- {row['aim']}: {'missed' if row['met'] is False else 'met'} by {case}"
        for part in found["parts"].values()
        for case, row in part["cases"].items()
        if row.get("met") is not None
    ]
    if told:
        yield "\n## The aims\n"
        yield "\n".join(told)


def summary(found: Found) -> Iterator[str]:
    """The main numbers, for docs/benchmarks.md."""
    parts = found["parts"]
    right = f"{sum(part['status'] == 'ok' for part in parts.values())} of {len(parts)}"
    if found["dry"]:
        yield f"Its dry run on a CPU, of {found['date']}, went through {right} parts."
        return

    def cases(name: str, key: str) -> dict[str, Found]:
        every = parts.get(name, {}).get("cases", {})
        return {case: row for case, row in every.items() if row.get(key) is not None}

    yield f"On {found['device']}, {found['date']}, torch {found['torch']}; [all of it](gpu.md).\n\n| | |\n|---|---|"
    yield f"| parts that are right | {right} |"
    for case, row in cases("step", "tokens/s").items():
        numbers = [f"{row['tokens/s']:,.0f} tokens/s"]
        numbers += [f"MFU {row['mfu']:.1%}"] if row.get("mfu") else []
        numbers += [f"{row['memory'] / 2**30:.0f} GiB"] if row.get("memory") else []
        numbers += [f"{row['outside']:.0%} outside of products and attention"] if "outside" in row else []
        yield f"| a step of {row['tokens']:,} tokens, {case} | {', '.join(numbers)} |"
    if copies := list(cases("kernels", "share").values()):
        rate = statistics.median(row["GB/s of a copy"] for row in copies)
        shares = between([row["share"] for row in copies], ".0%")
        yield f"| the copies of a switch, of a copy's rate | {shares}, at {rate:,.0f} GB/s |"
    if graphs := [row["eager / graph"] for row in cases("graph", "eager / graph").values()]:
        yield f"| a local forward, launched / replayed as a CUDA graph | {between(graphs, '.2f')} |"
    for case, row in (cases("host", "host / kernels") | cases("diffusers", "host / kernels")).items():
        yield f"| the host's time / the kernels', {case} | {row['host / kernels']:.2f} |"
    for row in cases("calibration", "GB/s").values():
        errors = f"errors of {row['error, median']:.0%}, at most {row['error, worst']:.0%}"
        yield f"| the cost model's rates | {row['TFLOP/s'] or 0:.0f} TFLOP/s, {row['GB/s']:,.0f} GB/s; {errors} |"


def between(values: list[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def numbers(row: Found) -> list[str]:
    return [
        key for key, value in row.items() if key not in HIDDEN and isinstance(value, (int, float)) and value is not None
    ]


def cell(key: str, value: Any) -> str:
    if key in ("mfu", "outside", "idle", "share", "products", "stream") or key.startswith("error"):
        return f"{value:.0%}"
    if key == "memory":
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.3g}"
    return f"{value:,.0f}"
