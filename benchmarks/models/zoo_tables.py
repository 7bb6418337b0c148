"""The cost of sequence parallelism for each model of the zoo, by its plan, against the rivals' formulas.

    python benchmarks/models/zoo_tables.py            prints the tables of docs/zoo.md
    python benchmarks/models/zoo_tables.py --write    and puts them into it

Everything is planned on meta tensors at published sizes, so it takes seconds and no memory. The rivals, a forward of a
model with k sequence mixers along the dim they shard (the cheapest they could choose) and n sublayers in all, with M
bytes of residual over N ranks; each number is what one rank sends:

    Ulysses       k x 4 M/N x (N-1)/N     queries, keys, values and outputs, each switched
    ring          k x 2 M/N x (N-1)       keys and values go round
    Megatron-SP   n x 2 M/N x (N-1)       an all-gather before and a reduce-scatter after each sublayer
    Megatron-LM   the same bytes, as one all-reduce
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import dsp
import zoo

PAGE = Path(__file__).resolve().parents[2] / "docs/zoo.md"
RANKS = 8
VIDEO = {"frames": 64, "height": 64, "width": 64}


@dataclass
class Entry:
    """A model at a size, and the sublayers that Megatron would cut."""

    title: str
    model: str
    size: str
    sublayers: int  # of the whole model: mixers, cross attentions and MLPs
    options: dict[str, Any] = field(default_factory=dict)


ENTRIES = [
    Entry("Transformer-2D 720M", "transformer2d", "720m", sublayers=28 * 4),
    Entry("Transformer-2D 3B", "transformer2d", "3b", sublayers=36 * 4),
    Entry("STDiT v1 XL/2", "stdit", "v1-XL/2", sublayers=28 * 4),
    Entry("STDiT v2 XL/2", "stdit", "v2-XL/2", sublayers=28 * 4),
    Entry("STDiT v3 XL/2", "stdit", "v3-XL/2", sublayers=28 * 6),
    Entry("STDiT v3 3B/2", "stdit", "v3-3B/2", sublayers=28 * 6),
    Entry("Latte V1 XL/2", "latte", "XL/2", sublayers=28 * 2),
    Entry("Latte V2 XL/2", "latte", "XL/2", sublayers=28 * 2, options={"variant": 2}),
    Entry("Latte V3 XL/2", "latte", "XL/2", sublayers=28 * 3, options={"variant": 3}),
    Entry("Latte V4 XL/2", "latte", "XL/2", sublayers=28 * 2, options={"variant": 4}),
    Entry("Latte-1, text", "latte", "T2V", sublayers=28 * 5),
    Entry("Axial video XL/2, in turn", "axial_video", "XL/2", sublayers=27 * 2),
    Entry("Axial video XL/2, summed", "axial_video", "XL/2", sublayers=9 * 2, options={"order": "summed"}),
    Entry("ST-Mamba B/2, st", "st_mamba", "B/2", sublayers=24),
    Entry("ST-Mamba B/2, sst", "st_mamba", "B/2", sublayers=24, options={"order": "sst", "mixer": "mamba2"}),
    Entry("ST-RWKV-6 B/2", "st_rwkv", "B/2", sublayers=24 * 2),
    Entry("HunyuanVideo 13B", "hunyuan", "13B", sublayers=20 * 2 + 40),
    Entry("Wan 2.1 1.3B", "wan", "1.3B", sublayers=30 * 3),
    Entry("Wan 2.1 14B", "wan", "14B", sublayers=40 * 3),
]


PAIRS = [(r, n) for r in (768, 2048) for n in (2, 4, 8, 16)]  # residues, ranks


@dataclass
class Row:
    entry: Entry
    parameters: int
    residual: int  # bytes of the residual stream
    plan: dsp.Plan
    mixers: dict[str, int]  # dim -> stages of the blocks that compute over it


def measure(entry: Entry) -> Row:
    with torch.device("meta"):
        model = zoo.create(entry.model, entry.size, **entry.options)
        inputs = model.example_inputs(1, **VIDEO)
    plan = dsp.plan(model, kwargs=inputs, size=RANKS, dtype=torch.bfloat16, gather_output=False)
    blocks = [row for row in plan.stages if any(char.isdigit() for char in row.name)]
    dims = {dim for row in blocks for dim in row.computes}
    dims &= {"n"} if "n" in dims else {"t", "s", "h", "w"}  # where all places are one dim, h are heads
    mixers = {dim: sum(dim in row.computes for row in blocks) for dim in sorted(dims)}
    tokens = VIDEO["frames"] * (VIDEO["height"] // 2) * (VIDEO["width"] // 2)  # patches of 2 x 2 cells in all of them
    count = sum(p.numel() for p in model.parameters())
    return Row(entry, count, 2 * tokens * model.config.hidden, plan, mixers)


def mib(count: float) -> str:
    return f"{count / 2**20:,.1f}" if count else "0"


def video_table(entries: Sequence[Entry] = ENTRIES) -> Iterator[str]:
    yield "| model | parameters | M, MiB | attends or scans along | switches | DSP | Ulysses | ring | Megatron |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in map(measure, entries):
        each, k = row.residual / RANKS, min(row.mixers.values())
        yield (
            f"| {row.entry.title} | {row.parameters / 1e6:,.0f}M | {mib(row.residual)} "
            f"| {', '.join(f'{dim} {n}×' for dim, n in row.mixers.items())} | {row.plan.calls['forward']} "
            f"| {mib(row.plan.bytes['forward'])} "
            f"| {mib(k * 4 * each * (RANKS - 1) / RANKS)} | {mib(k * 2 * each * (RANKS - 1))} "
            f"| {mib(row.entry.sublayers * 2 * each * (RANKS - 1))} |"
        )


def pair_table(sizes: Sequence[tuple[int, int]] = PAIRS) -> Iterator[str]:
    """A block of the Evoformer, as the difference of two models: FastFold's schedule (arXiv 2203.00854) by formula."""
    yield "| s | r | ranks | collectives | DSP, MiB | FastFold, MiB | DSP / FastFold |"
    yield "|---|---|---|---|---|---|---|"
    s = 512
    for r, n in sizes:
        plans = []
        for depth in (2, 3):
            with torch.device("meta"):
                model = zoo.create("evoformer", "af2", depth=depth, extra_depth=0)
                inputs = model.example_inputs(1, rows=s, residues=r)
            plans.append(dsp.plan(model, kwargs=inputs, size=n, dtype=torch.bfloat16, gather_output=False))
        sent, calls = (
            getattr(plans[1], kind)["forward"] - getattr(plans[0], kind)["forward"] for kind in ("bytes", "calls")
        )
        fastfold = 2 * (n - 1) / n * (r * r * (272 + 512 / n) + s * r * (32 + 512 / n))
        yield f"| {s} | {r} | {n} | {calls} | {mib(sent)} | {mib(fastfold)} | {sent / fastfold:.2f} |"


def stages_list() -> Iterator[str]:
    """Every model's stages, as they stand in it."""
    for name in zoo.list_models():
        with torch.device("meta"):
            stages = zoo.create(name).stages
        yield f"**{name}**"
        yield "```"
        shown = {key: stage for key, stage in stages.items() if not key.startswith("extra_")}  # as the blocks are
        width = max(map(len, shown))
        yield from (f"{key:<{width}}  {stage}".rstrip() for key, stage in shown.items())
        yield "```"


TABLES = {"video": video_table, "pair": pair_table, "stages": stages_list}


def fill(page: str, tables: Mapping[str, Callable[[], Iterator[str]]] = TABLES) -> str:
    """The page with every table between its marks, `<!-- table: name -->` and `<!-- end -->`, made anew."""
    for name, table in tables.items():
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
