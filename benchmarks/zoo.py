"""What sequence parallelism costs each model of the zoo, by its plan, against the rivals' formulas.

    python benchmarks/zoo.py            prints the tables of docs/zoo.md
    python benchmarks/zoo.py --write    and puts them into it

Everything is planned on meta tensors at published sizes, so it takes seconds and no memory. The rivals, a forward of a
model with k sequence mixers along the dim they shard (the cheapest they could choose) and n sublayers in all, with M
bytes of residual over N ranks; each number is what one rank sends:

    Ulysses       k x 4 M/N x (N-1)/N     queries, keys, values and outputs, each switched
    ring          k x 2 M/N x (N-1)       keys and values go round
    Megatron-SP   n x 2 M/N x (N-1)       an all-gather before and a reduce-scatter after each sublayer
    Megatron-LM   the same bytes, as one all-reduce
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dsp
import zoo

PAGE = Path(__file__).resolve().parents[1] / "docs/zoo.md"
RANKS = 8
VIDEO = {"frames": 64, "height": 64, "width": 64}


@dataclass
class Entry:
    """A model at a size, the lengths it is planned at, and the sublayers that Megatron would cut."""

    title: str
    model: str
    size: str
    sublayers: int  # of the whole model: mixers, cross attentions and MLPs
    lengths: dict[str, int] = field(default_factory=lambda: VIDEO)
    options: dict[str, Any] = field(default_factory=dict)


ENTRIES = [
    Entry("Transformer-2D 720M", "transformer2d", "720m", sublayers=28 * 4),
    Entry("Transformer-2D 3B", "transformer2d", "3b", sublayers=36 * 4),
    Entry("Latte XL/2, class", "latte", "XL/2", sublayers=28 * 2, options={"conditioning": "class"}),
    Entry("Latte-1, text", "latte", "T2V", sublayers=28 * 5),
]


@dataclass
class Row:
    entry: Entry
    parameters: int
    residual: int  # bytes of the residual stream
    layers: int
    plan: dsp.Plan
    mixers: dict[str, int]  # dim -> stages of the blocks that compute over it


def measure(entry: Entry) -> Row:
    with torch.device("meta"):
        model = zoo.create(entry.model, entry.size, **entry.options)
        inputs = model.example_inputs(1, **entry.lengths)
    plan = dsp.plan(model, kwargs=inputs, size=RANKS, dtype=torch.bfloat16)
    blocks = [row for row in plan.stages if any(char.isdigit() for char in row.name)]
    dims = {dim for row in blocks for dim in row.computes} & {"t", "s", "h", "w"}
    mixers = {dim: sum(dim in row.computes for row in blocks) for dim in sorted(dims)}
    patch = getattr(model.config, "patch", (1, 1, 1))
    cells = 1
    for length, side in zip((entry.lengths["frames"], entry.lengths["height"], entry.lengths["width"]), patch):
        cells *= -(-length // side)
    count = sum(p.numel() for p in model.parameters())
    return Row(entry, count, 2 * cells * model.config.hidden, model.config.depth, plan, mixers)


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f}" if count else "0"


def video_table(rows: list[Row]) -> Iterator[str]:
    yield "| model | parameters | M, MiB | computes over | switches | a layer | DSP | Ulysses | ring | Megatron |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        calls, each = row.plan.calls["forward"], row.residual / RANKS
        k, over = min(row.mixers.values()), ", ".join(f"{d} {n}×" for d, n in row.mixers.items())
        yield (
            f"| {row.entry.title} | {row.parameters / 1e6:,.0f}M | {mib(row.residual)} | {over} | {calls} "
            f"| {calls / row.layers:.2g} | {mib(row.plan.bytes['forward'])} "
            f"| {mib(k * 4 * each * (RANKS - 1) / RANKS)} | {mib(k * 2 * each * (RANKS - 1))} "
            f"| {mib(row.entry.sublayers * 2 * each * (RANKS - 1))} |"
        )


TABLES = {"video": lambda: video_table([measure(entry) for entry in ENTRIES])}


def fill(page: str) -> str:
    """The page with every table between its marks, `<!-- table: name -->` and `<!-- end -->`, made anew."""
    for name, table in TABLES.items():
        before, mark, rest = page.partition(f"<!-- table: {name} -->\n")
        if mark:
            page = before + mark + "\n".join(table()) + "\n" + rest[rest.index("<!-- end -->") :]
    return page


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(fill(PAGE.read_text()))
    else:
        for make in TABLES.values():
            print("\n".join(make()), end="\n\n")
