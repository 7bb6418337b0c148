"""Memory a rank of a training step by method, and the longest video and the largest batch that fit a budget of it.

    python benchmarks/memory/by_method.py      # 1, 2 and 4 ranks; benchmarks/results/memory.json and memory.svg
    python benchmarks/memory/by_method.py --budget 64 --ranks 1 2 --methods dsp megatron_lm --out FILE

What is measured is resident memory at its highest during forward and backward, above what the process held just before,
plus the weights that the rank has; optimizer states, which depend on weights alone, are not in it. Freed memory goes
back to the system at once. `peak` is one shape on all numbers of ranks, with nothing recomputed and with every stage,
against the memory of one rank divided by their number. `longest` (frames) and `batch` (samples) are the most that stay
within the budget a rank, found by doubling and bisection of measured peaks, as in the two figures of Ring
Self-Attention (Li et al., arXiv 2105.13120): there against tensor parallelism, with attention that keeps its matrix,
which none here does. Its run of 114K tokens is one sequence with sparse attention (Linformer): here one frame of as
many patches, by ring attention and by its sparse form, and the longest such frame that fits `--long-budget`.
"""

import argparse
import gc
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from benchmarks.common import Panel, Series, figure, write_down
from benchmarks.methods.hosts import GIVE_PAGES, Ranks, serve, stoppable
from benchmarks.methods.rivals import COLOURS, METHODS, Shape, Step, circumstances

FINE = 16  # bisection ends within a sixteenth
LONG = {"hidden": 32, "heads": 1, "depth": 1, "frames": 1}  # attention to all keys takes minutes for a long sequence


def resident(field: str = "VmRSS") -> int:
    """Bytes; VmHWM is the highest since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak(method: str, shape: dict[str, int], recompute: str) -> tuple[int, float]:
    """Bytes of a step on this rank, its weights and what forward and backward took at most; and their seconds."""
    step = Step(method, Shape(**shape), recompute)
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, began = resident(), time.perf_counter()
    step.backward(step.forward())
    seconds = time.perf_counter() - began
    took = resident("VmHWM") - before + step.weights[0]
    del step
    gc.collect()
    return took, seconds


def most(fits: Callable[[int], bool], limit: int, fine: int = FINE) -> int:
    """The largest count that fits, to a part in `fine`: doubled until one does not, then bisected. 0 if 1 does not."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    high = min(high, limit + 1)
    while low and high - low > max(1, low // fine):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Measure:
    """Peaks of a method on some ranks: the largest of them, in bytes."""

    def __init__(self, ranks: Ranks, method: str) -> None:
        self.ranks, self.method = ranks, method

    def __call__(self, shape: Shape, recompute: str = "no") -> int:
        return self.timed(shape, recompute)[0]

    def timed(self, shape: Shape, recompute: str = "no") -> tuple[int, float]:
        """With the seconds of the slowest."""
        found = self.ranks.ask("peak", method=self.method, shape=vars(shape), recompute=recompute)
        return max(took for took, _ in found), max(seconds for _, seconds in found)

    def warm(self, shape: Shape) -> None:
        """Load what is loaded once, and make connections."""
        small = replace(shape, frames=2 * self.ranks.size, side=4, wide=0)
        for recompute in ("no", "again"):
            self(small, recompute)


def of_method(measure: Measure, shape: Shape, budget: int, unit: int, limit: int) -> dict[str, Any]:
    """One row. `longest` is in frames, of which `unit` are added at a time so that they divide over all ranks."""
    measure.warm(shape)
    row: dict[str, Any] = {"method": measure.method, "ranks": measure.ranks.size}
    row["peak"], row["recomputed"] = measure(shape), measure(shape, "again")
    row["longest"] = unit * most(lambda k: measure(replace(shape, frames=k * unit)) <= budget, limit // unit)
    short = replace(shape, frames=unit)
    row["batch"] = most(lambda k: measure(replace(short, batch=k)) <= budget, limit // unit)
    return row


def of_long(measure: Measure, shape: Shape, budget: int, limit: int) -> list[dict[str, Any]]:
    """Two rows: attention to all keys, and to `shape.low_rank` sums; `longest` is in tokens of one frame."""
    rows = []
    for low_rank in (0, shape.low_rank):
        one = replace(shape, low_rank=low_rank)
        measure.warm(one)
        took, seconds = measure.timed(one)
        rows.append({"ranks": measure.ranks.size, "low_rank": low_rank, "peak": took, "seconds": seconds})
    rows[-1]["longest"] = shape.wide * most(lambda k: measure(replace(one, side=k)) <= budget, limit, 2 * FINE)
    return rows


def show(row: dict[str, Any], one: dict[str, Any]) -> str:
    cells = [METHODS[row["method"]] if row["ranks"] > 1 else "one rank", str(row["ranks"])]
    for key in ("peak", "recomputed"):
        cells.append(f"{row[key] / 2**20:.0f} ({row[key] * row['ranks'] / one[key]:.2f})")
    cells += [f"{row[key]} ({row[key] / max(one[key], 1):.1f}x)" for key in ("longest", "batch")]
    return "| " + " | ".join(cells) + " |"


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
        for method in found["methods"]:
            mine = sorted((r for r in rows if r["method"] == method or r["ranks"] == 1), key=lambda r: r["ranks"])
            series.append(
                Series(METHODS[method], COLOURS[method], [(sizes.index(r["ranks"]), r[key] * scale) for r in mine])
            )
        panels.append(Panel(title, list(map(str, sizes)), series, "ranks", unit=unit))
    return figure("Memory by method", panels, "dashed: in proportion to the ranks, from one rank's")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Memory a rank of a training step, and what fits a budget of it.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="1 among them")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--budget", type=float, default=128, help="MiB a rank")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--frames", type=int, default=64)
    parser.add_argument("--side", type=int, default=8, help="patches a side of a frame")
    parser.add_argument("--limit", type=int, default=1024, help="frames at most, and rows of patches of a long frame")
    parser.add_argument("--long", type=int, nargs="*", default=[448, 256], help="patches of one long frame; or nothing")
    parser.add_argument("--long-budget", type=float, default=256, help="MiB a rank")
    parser.add_argument("--low-rank", type=int, default=32, help="sums of keys that Linformer attends to")
    parser.add_argument("--out", type=Path, help="for OUT.json and OUT.svg")
    options = parser.parse_args(arguments)
    if 1 not in options.ranks:
        parser.error("--ranks: all is compared with 1, so it has to be among them")
    if not Path("/proc/self/clear_refs").exists():
        print("skipped: resident memory is read from /proc, which only Linux has")
        return 0
    shape = Shape(options.hidden, max(8, *options.ranks), options.depth, 1, options.frames, options.side)
    budget, unit = int(options.budget * 2**20), max(options.ranks)
    found = circumstances(shape, arguments) | {"budget": budget, "methods": options.methods, "rows": []}
    if options.long:
        side, wide = options.long
        long = Shape(**LONG, side=side, wide=wide, low_rank=options.low_rank)
        found["long"] = {"shape": vars(long), "budget": int(options.long_budget * 2**20), "rows": []}
    print("| method | ranks | MiB a rank (x ranks / one rank's) | recomputed | longest, frames | batch |")
    print("|---|---|---|---|---|---|")
    with stoppable():
        for n in sorted(options.ranks):
            with Ranks(__file__, n, pages=GIVE_PAGES) as ranks:
                for method in options.methods if n > 1 else ["dsp"]:  # one rank alone has no method
                    found["rows"].append(of_method(Measure(ranks, method), shape, budget, unit, options.limit))
                    print(show(found["rows"][-1], found["rows"][0]), flush=True)
                if options.long:
                    for row in of_long(Measure(ranks, "ring"), long, found["long"]["budget"], options.limit):
                        found["long"]["rows"].append(row)
                        print(row, flush=True)
    print("wrote", write_down("memory", options.out, found, picture(found)))
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        logging.getLogger("dsp").setLevel(logging.ERROR)  # a frame alone is embedded whole, every time
        serve({"peak": peak})
    else:
        sys.exit(main(sys.argv[1:]))
