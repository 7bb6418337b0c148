"""The cost of sequence parallelism for each model of the zoo, by its plan, against the rivals' formulas.

    python benchmarks/zoo_tables.py            prints the tables of docs/zoo.md and docs/zoo-stages.md
    python benchmarks/zoo_tables.py --write    and puts them into it

Everything is planned on meta tensors at published sizes, so it takes seconds and no memory. The rivals, a forward of a
model with k sequence mixers along the dim they shard (the cheapest they could choose) and n sublayers in all, with M
bytes of residual over N ranks; each number is what one rank sends:

    Ulysses       k x 4 M/N x (N-1)/N     queries, keys, values and outputs, each switched
    ring          k x 2 M/N x (N-1)       keys and values go round
    Megatron-SP   n x 2 M/N x (N-1)       an all-gather before and a reduce-scatter after each sublayer
    Megatron-LM   the same bytes, as one all-reduce
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dsp
import zoo
from benchmarks.common import DOCS, fill, table

PAGES = DOCS / "zoo.md", DOCS / "zoo-stages.md"
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
    Entry(title, *name.split(maxsplit=1), sublayers=sublayers, options=options)
    for title, name, sublayers, options in (
        ("Transformer-2D 720M", "transformer2d 720m", 28 * 4, {}),
        ("Transformer-2D 3B", "transformer2d 3b", 36 * 4, {}),
        ("STDiT v1 XL/2", "stdit v1-XL/2", 28 * 4, {}),
        ("STDiT v2 XL/2", "stdit v2-XL/2", 28 * 4, {}),
        ("STDiT v3 XL/2", "stdit v3-XL/2", 28 * 6, {}),
        ("STDiT v3 3B/2", "stdit v3-3B/2", 28 * 6, {}),
        ("Latte V1 XL/2", "latte XL/2", 28 * 2, {}),
        ("Latte V2 XL/2", "latte XL/2", 28 * 2, {"variant": 2}),
        ("Latte V3 XL/2", "latte XL/2", 28 * 3, {"variant": 3}),
        ("Latte V4 XL/2", "latte XL/2", 28 * 2, {"variant": 4}),
        ("Latte-1, text", "latte T2V", 28 * 5, {}),
        ("Axial video XL/2, in turn", "axial_video XL/2", 27 * 2, {}),
        ("Axial video XL/2, summed", "axial_video XL/2", 9 * 2, {"order": "summed"}),
        ("ST-Mamba B/2, st", "st_mamba B/2", 24, {}),
        ("ST-Mamba B/2, sst", "st_mamba B/2", 24, {"order": "sst", "mixer": "mamba2"}),
        ("ST-RWKV-6 B/2", "st_rwkv B/2", 24 * 2, {}),
        ("HunyuanVideo 13B", "hunyuan 13B", 20 * 2 + 40, {}),
        ("Wan 2.1 1.3B", "wan 1.3B", 30 * 3, {}),
        ("Wan 2.1 14B", "wan 14B", 40 * 3, {}),
    )
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


def video_table(entries: Sequence[Entry] = ENTRIES) -> Iterable[str]:
    rows = []
    for row in map(measure, entries):
        each, k = row.residual / RANKS, min(row.mixers.values())
        along = ", ".join(f"{dim} {n}×" for dim, n in row.mixers.items())
        rivals = (k * 4 * each * (RANKS - 1) / RANKS, k * 2 * each * (RANKS - 1))
        sent = map(mib, (row.plan.bytes["forward"], *rivals, row.entry.sublayers * 2 * each * (RANKS - 1)))
        name = [row.entry.title, f"{row.parameters / 1e6:,.0f}M", mib(row.residual)]
        rows.append([*name, along, row.plan.calls["forward"], *sent])
    head = "model", "parameters", "M, MiB", "attends or scans along", "switches", "DSP", "Ulysses", "ring", "Megatron"
    return table(head, rows)


def pair_table(sizes: Sequence[tuple[int, int]] = PAIRS) -> Iterable[str]:
    """A block of the Evoformer, as the difference of two models: FastFold's schedule (arXiv 2203.00854) by formula."""
    s, rows = 512, []
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
        rows.append([s, r, n, calls, mib(sent), mib(fastfold), f"{sent / fastfold:.2f}"])
    return table(["s", "r", "ranks", "collectives", "DSP, MiB", "FastFold, MiB", "DSP / FastFold"], rows)


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


if __name__ == "__main__":
    tables = {name: [*make()] for name, make in TABLES.items()}
    if "--write" in sys.argv[1:]:
        for page in PAGES:
            page.write_text(fill(page.read_text(), tables))
    else:
        print("\n\n".join("\n".join(lines) for lines in tables.values()))
