"""Memory a rank of a training step by method, and the longest video and the largest batch that fit a budget of it.

    python benchmarks/memory/by_method.py      # 1, 2 and 4 ranks; benchmarks/results/memory.json and memory.svg
    python benchmarks/memory/by_method.py --budget 64 --ranks 1 2 --methods dsp megatron_lm --out FILE

Measured is resident memory at its highest during forward and backward, above what the process held just before, plus
the weights that the rank has; optimizer states, which depend on weights alone, are not in it. Freed memory goes back to
the system at once. `peak` is one shape on all numbers of ranks, with nothing recomputed and with every stage, against
the memory of one rank divided by their number. `longest` (frames) and `batch` (samples) are the most that stay within
the budget (MiB a rank), found by doubling and bisection of measured peaks, as in the two figures of Ring Self-Attention
(Li et al., arXiv 2105.13120): there against tensor parallelism, with attention that keeps its matrix, which none here
does. `--limit`: the most frames that are tried.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from benchmarks.common import Series, circumstances, figure, line, options, table, write_down
from benchmarks.methods.hosts import GIVE_PAGES, Ranks, highest, serve, stoppable
from benchmarks.methods.rivals import METHODS, Shape, Step, by_ranks

FINE = 16  # bisection ends within a sixteenth
HEAD = "method", "ranks", "MiB a rank", "stages recomputed"


def peak(method: str, shape: dict[str, int], recompute: str) -> int:
    """Bytes of a step on this rank: its weights, and what forward and backward took at most."""
    step = Step(method, Shape(**shape), recompute)
    dist.barrier()
    return highest(lambda: step.backward(step.forward()))[0] + step.weights[0]


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest count that fits, to a part in FINE: doubled until one does not, then bisected. 0 if 1 does not."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while low and high - low > max(1, low // FINE):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_peak(ranks: Ranks, method: str, shape: Shape, recompute: str = "no") -> int:
    return max(ranks.ask("peak", method=method, shape=vars(shape), recompute=recompute))


def of_method(ranks: Ranks, method: str, shape: Shape, budget: int, unit: int, limit: int) -> dict[str, Any]:
    """One row. `longest` is in frames, of which `unit` are added at a time so that they divide over all ranks."""
    measure = partial(largest_peak, ranks, method)
    for recompute in ("no", "again"):  # load what is loaded once, and make connections
        measure(replace(shape, frames=2 * ranks.size, side=4), recompute)
    short = replace(shape, frames=unit)
    return {
        "method": method, "ranks": ranks.size, "peak": measure(shape), "recomputed": measure(shape, "again"),
        "longest": unit * most(lambda k: measure(replace(shape, frames=k * unit)) <= budget, limit // unit),
        "batch": most(lambda k: measure(replace(short, batch=k)) <= budget, limit // unit),
    }  # fmt: skip


def cells(row: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """A row of the table; in brackets beside that of one rank: N times the memory, and as many times as long."""
    memory = (f"{row[key] / 2**20:.0f} ({row[key] * row['ranks'] / one[key]:.2f})" for key in ("peak", "recomputed"))
    counts = (f"{row[key]} ({row[key] / max(one[key], 1):.1f}×)" for key in ("longest", "batch"))
    return [METHODS[row["method"]] if row["ranks"] > 1 else "one rank", str(row["ranks"]), *memory, *counts]


def picture(found: dict[str, Any]) -> str:
    rows, sizes = found["rows"], sorted({row["ranks"] for row in found["rows"]})
    one = next(row for row in rows if row["ranks"] == 1)
    panels = []
    for key, title, unit, scale in (
        ("peak", "Memory of a training step", "MiB a rank", 2**-20),
        ("longest", f"Longest video in {found['budget'] / 2**20:.0f} MiB a rank", "frames", 1),
        ("batch", f"Largest batch in {found['budget'] / 2**20:.0f} MiB a rank", "samples", 1),
    ):
        ideal = [one[key] * scale * (1 / n if key == "peak" else n) for n in sizes]
        series = [Series("in proportion", "#9198a1", list(enumerate(ideal)), dashed=True)]
        panels.append(by_ranks(title, rows, found["methods"], key, unit, scale, series))
    return figure("Memory by method", panels, "dashed: in proportion to the ranks, from one rank's")


def main(arguments: Sequence[str]) -> int:
    o = options(
        __doc__, arguments, {"methods": METHODS}, ranks=[1, 2, 4], methods=list(METHODS), budget=128.0, hidden=64,
        depth=2, frames=64, side=8, limit=1024, out=None,
    )  # fmt: skip
    if 1 not in o.ranks:
        raise SystemExit("--ranks: all is compared with 1, so it has to be among them")
    if not Path("/proc/self/clear_refs").exists():
        print("skipped: resident memory is read from /proc, which only Linux has")
        return 0
    shape = Shape(o.hidden, max(8, *o.ranks), o.depth, 1, o.frames, o.side)
    budget, unit = int(o.budget * 2**20), max(o.ranks)
    rows: list[dict[str, Any]] = []
    print("\n".join(table([*HEAD, "longest, frames", "batch"], [])))
    with stoppable():
        for n in sorted(o.ranks):
            with Ranks(__file__, n, pages=GIVE_PAGES) as ranks:
                for method in o.methods if n > 1 else ["dsp"]:  # one rank alone has no method
                    rows.append(of_method(ranks, method, shape, budget, unit, o.limit))
                    print(line(cells(rows[-1], rows[0])), flush=True)
    found = circumstances(arguments) | {"shape": asdict(shape), "budget": budget, "methods": o.methods, "rows": rows}
    write_down("memory", o.out, found, picture(found))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve({"peak": peak})
    else:
        sys.exit(main(sys.argv[1:]))
