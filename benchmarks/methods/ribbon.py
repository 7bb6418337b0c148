"""A picture of what each method does to the layout of an activation, stage by stage, from real plans.

    python benchmarks/methods/ribbon.py [FILE]         # docs/images/ribbon.svg

A ribbon is a forward of two layers of the paper's 720M model; its colour is the dim that the activation is sharded
over. DSP changes it between stages and leaves their inside alone. The others keep s sharded (Megatron-LM nothing), and
where a stage computes over all of s, or its weights are cut, change it inside: to heads and back, a ring, whole and
back. Under each ribbon is what a rank sends, by the plan.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import dsp
import dsp.embedded
import zoo
from benchmarks.common import STYLE, escape, text
from benchmarks.methods.rivals import METHODS
from dsp.plan.table import StageRow

RANKS, LAYERS = 8, 2
LENGTHS = {"frames": 64, "height": 128, "width": 128}
COLOURS = {"t": "#3b82f6", "s": "#f59e0b", "heads": "#10b981", "whole": "#9198a1"}
INSIDE = {  # what is sharded inside of a stage, once and for attention and MLP each
    "ulysses": ("heads",),
    "ring": ("s",),
    "megatron_sp": ("heads", "heads"),
    "megatron_lm": ("heads", "heads"),
}
LEFT, TOP, WIDE, GAP, HIGH, DOWN = 132, 74, 128, 26, 30, 78
RING = "↻"


def plan(method: str, ranks: int = RANKS, layers: int = LAYERS) -> dsp.Plan:
    with torch.device("meta"):
        model: Any = zoo.create("transformer2d", "720m", depth=layers)
        inputs = model.example_inputs(1, **LENGTHS)
    return dsp.embedded.plan(model, kwargs=inputs, size=ranks, method=method, dtype=torch.bfloat16, gather_output=False)


def layouts(method: str, row: StageRow) -> list[str]:
    """The dim that the activation is sharded over through one stage, from its start to its end."""
    outside = row.layout or "whole"
    if method not in row.switch:
        return [outside]
    return [outside, *(x for inside in INSIDE[method] for x in (inside, outside))]


def size(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


def ribbon(method: str, y: float) -> Iterator[str]:
    found = plan(method)
    yield text(LEFT - 14, y + 20, METHODS[method], "", "end")
    last = ""
    for i, row in enumerate(found.stages):
        x = LEFT + i * (WIDE + GAP)
        bands = layouts(method, row)
        width = WIDE / len(bands)
        if i:
            colour = COLOURS[last] if last == bands[0] else "#59636e"
            shape = f"M{x - GAP} {y + 10}h{GAP}v10h-{GAP}z" if last == bands[0] else f"M{x - 18} {y + 8}l10 7l-10 7z"
            yield f'<path d="{shape}" fill="{colour}"/>'
        for j, dim in enumerate(bands):
            yield (
                f'<rect x="{x + j * width:.1f}" y="{y}" width="{width:.1f}" height="{HIGH}" fill="{COLOURS[dim]}"'
                f' class="band"/>'
            )
            letter = (
                RING if method == "ring" and len(bands) > 1 and j == 1 else {"heads": "h", "whole": "–"}.get(dim, dim)
            )
            yield text(x + (j + 0.5) * width, y + 20, letter, "letter")
        if row.bytes:
            yield text(x + (0 if method == "dsp" else WIDE / 2), y + HIGH + 17, size(row.bytes), "soft")
        last = bands[-1]
    x = LEFT + len(found.stages) * (WIDE + GAP)
    yield text(x, y + 20, size(found.bytes["forward"]), "", "start")


def picture() -> str:
    rows = plan("dsp").stages
    names = [row.name.replace("blocks.", "") for row in rows]
    width = LEFT + (len(rows) + 1) * (WIDE + GAP) - 20
    height = TOP + len(METHODS) * DOWN + 58
    style = STYLE + ".letter { fill: #ffffff; font-weight: 600 } .band { stroke: #ffffff; stroke-opacity: 0.6 }\n"
    title = f"What the activation is sharded over, on {RANKS} ranks"
    parts = [text(LEFT, 24, title, "title", "start")]
    for i, (row, name) in enumerate(zip(rows, names)):
        middle = LEFT + i * (WIDE + GAP) + WIDE / 2
        parts.append(text(middle, TOP - 28, name))
        over = [dim for dim in row.computes if dim in "ts"]
        parts.append(text(middle, TOP - 11, f"over {', '.join(over)}" if over else "", "soft"))
    parts.append(text(LEFT + len(rows) * (WIDE + GAP), TOP - 28, "sends", "", "start"))
    for i, method in enumerate(METHODS):
        parts += ribbon(method, TOP + i * DOWN)
    at = float(LEFT)
    words = {
        "t": "t, frames",
        "s": "s, patches",
        "heads": "h, heads and channels",
        "whole": "–, nothing: whole on each",
    }
    for dim, name in words.items():
        parts.append(f'<rect x="{at}" y="{height - 52}" width="14" height="14" rx="3" fill="{COLOURS[dim]}"/>')
        parts.append(text(at + 21, height - 40, name, "", "start"))
        at += 52 + 7 * len(name)
    parts.append(text(at, height - 40, f"{RING}  keys and values go round", "", "start"))
    note = "triangles: a switch; bytes under a block are those of the block and of the triangle before it"
    parts.append(text(LEFT, height - 14, note, "soft", "start"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{escape(title)}</title><style>{style}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs/images/ribbon.svg"
    path.write_text(picture())
    print(path)
