"""The report as a page: what is right, what is wrong and why, and the numbers, where a GPU has made them."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterator
from typing import Any

from benchmarks.common import between, table

Report = dict[str, Any]
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
    "trainer": "The records and the weights of a run beside those of a plain one: relative differences.",
    "calibration": "The rates are fitted to the points above; the errors are of points that were left out of the fit. "
    "*Products* and *stream* are shares of the data sheet, of which `dsp.hardware.accelerator` assumes 0.5 and 0.8.",
}  # fmt: skip
HIDDEN = {"ok", "aim", "met", "seconds", "error", "note", "busy", "flops", "touched", "parameters", "tokens", "kernel"}
STATUS = {
    "ok": "right", "failed": "**wrong**", "stopped": "**out of time**", "died": "**died**", "left out": "left out",
}  # fmt: skip


def page(report: Report) -> str:
    return "\n".join(lines(report)) + "\n"


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)


def cases(report: Report) -> Iterator[tuple[str, str, Report]]:
    """The title of the part, the name and the row of every case."""
    return ((part["title"], case, row) for part in report["parts"].values() for case, row in part["cases"].items())


def lines(report: Report) -> Iterator[str]:
    yield "# On a GPU\n"
    yield wrapped(
        "What one command finds on one GPU, in nine minutes: is everything right on CUDA, how fast is it, and what "
        "does the [cost model](cost-model.md) make of it. This page is written by it:"
    )
    yield "\n```bash\npython benchmarks/gpu.py             # JSON to benchmarks/results; --out names another folder"
    yield "python benchmarks/gpu.py --dry-run   # the same on a CPU, at tiny sizes\n```\n"
    if report["dry"]:
        yield wrapped(
            "**There was no GPU.** What follows is the dry run on a CPU: the same code at tiny sizes, with gloo for "
            "NCCL, two ranks for four, and nothing compiled by inductor. It shows that the command runs, and what it "
            "will ask; its times mean nothing and are left out."
        )
    else:
        yield f"On {report['device']}, {report['memory'] / 1e9:.0f} GB."
    on = report["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    yield "\n" + wrapped(
        f"`{report['command']}`, {on['date']}, {on['cores']} cores ({on['device']}), {packages}"
        + ("" if report["dry"] else f"; {report['took']:.0f} s")
        + ("." if report["finished"] else "; it has not finished.")
    )
    yield ""
    yield from table(
        ["part", "cases that are right", "", "s"], (of_part(report, part) for part in report["parts"].values())
    )
    yield "\n## What is wrong\n"
    yield "\n".join(wrong(report)) or "Nothing that ran."
    if unknown := untold(report):
        yield "\n## What it does not tell\n"
        yield from (wrapped(f"- {why} ({'; '.join(of)})." if of else f"- {why}.") for why, of in unknown.items())
    judged = [(case, row) for _, case, row in cases(report) if row.get("met") is not None]
    if judged:
        yield "\n## The aims\n"
        yield from (f"- {row['aim']}: {'met' if row['met'] else 'missed'} by {case}" for case, row in judged)
    for name, part in report["parts"].items() if not report["dry"] else ():
        rows = {case: row for case, row in part["cases"].items() if numbers(row)}
        if name in NOTES and rows:
            yield f"\n## {part['title']}\n\n{wrapped(NOTES[name])}"
            for columns in dict.fromkeys(tuple(numbers(row)) for row in rows.values()):
                mine = {case: row for case, row in rows.items() if tuple(numbers(row)) == columns}
                yield ""
                yield from table(
                    ["", *columns], ([case, *(cell(k, r[k]) for k in columns)] for case, r in mine.items())
                )


def of_part(report: Report, part: Report) -> list[str]:
    judged = [row["ok"] for row in part["cases"].values() if row.get("ok") is not None]
    status = "ran" if part["status"] == "ok" and not judged else STATUS[part["status"]]
    right = f"{sum(judged)} of {len(judged)}" if judged else ""
    return [part["title"], right, status, "" if report["dry"] else f"{part['seconds']:.0f}"]


def wrong(report: Report) -> Iterator[str]:
    """Every case and part that is not right, and why."""
    for part in report["parts"].values():
        if part["status"] in ("stopped", "died"):
            yield f"- {part['title']}: {part['error']}."
    for title, case, row in cases(report):
        if row.get("ok") is False:
            why = row.get("error") or row.get("failed") or ", ".join(f"{k} {cell(k, row[k])}" for k in numbers(row))
            yield f"- {title}, {case}: {why}"


def untold(report: Report) -> dict[str, list[str]]:
    """Why something is not known, and of which cases: packages, parts that were left out, cases with nothing to say."""
    reasons: dict[str, list[str]] = {f"{what}: {name} is not installed": [] for name, what in report["without"].items()}
    reasons |= {f"{p['title']}: {p['error']}": [] for p in report["parts"].values() if p["status"] == "left out"}
    for title, case, row in cases(report):
        if why := row.get("note") or row.get("no profile"):
            reasons.setdefault(f"{title}: {why}", []).append(case)
    return reasons


def summary(report: Report) -> Iterator[str]:
    """The main numbers, for docs/benchmarks.md."""
    parts = report["parts"]
    right = f"{sum(part['status'] == 'ok' for part in parts.values())} of {len(parts)}"
    if report["dry"]:
        yield f"Its dry run on a CPU, of {report['machine']['date']}, went through {right} parts."
        return

    def of(name: str, key: str) -> dict[str, Report]:
        every = parts.get(name, {}).get("cases", {})
        return {case: row for case, row in every.items() if row.get(key) is not None}

    rows = [("parts that are right", right)]
    for case, row in of("step", "tokens/s").items():
        numbers = [f"{row['tokens/s']:,.0f} tokens/s"]
        numbers += [f"MFU {row['mfu']:.1%}"] if row.get("mfu") else []
        numbers += [f"{row['memory'] / 2**30:.0f} GiB"] if row.get("memory") else []
        numbers += [f"{row['outside']:.0%} outside of products and attention"] if "outside" in row else []
        rows.append((f"a step of {row['tokens']:,} tokens, {case}", ", ".join(numbers)))
    if copies := list(of("kernels", "share").values()):
        rate = statistics.median(row["GB/s of a copy"] for row in copies)
        shares = between([row["share"] for row in copies], ".0%")
        rows.append(("the copies of a switch, of a copy's rate", f"{shares}, at {rate:,.0f} GB/s"))
    if graphs := [row["eager / graph"] for row in of("graph", "eager / graph").values()]:
        rows.append(("a local forward, launched / replayed as a CUDA graph", between(graphs)))
    for case, row in (of("host", "host / kernels") | of("diffusers", "host / kernels")).items():
        rows.append((f"the host's time / the kernels', {case}", f"{row['host / kernels']:.2f}"))
    for row in of("calibration", "GB/s").values():
        errors = f"errors of {row['error, median']:.0%}, at most {row['error, worst']:.0%}"
        rows.append(("the cost model's rates", f"{row['TFLOP/s'] or 0:.0f} TFLOP/s, {row['GB/s']:,.0f} GB/s; {errors}"))
    on = report["machine"]
    yield f"On {report['device']}, {on['date']}, torch {on['torch']}; [all of it](gpu.md).\n"
    yield from table(["", ""], rows)


def numbers(row: Report) -> list[str]:
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
