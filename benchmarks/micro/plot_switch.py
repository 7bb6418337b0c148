"""The picture of the switch: a grid of t x s cells, coloured by the rank that holds them, before and after.

    python benchmarks/micro/plot_switch.py [FILE]      # docs/images/switch.svg

Sizes that do not divide, on purpose: 7 frames of 10 patches over 4 ranks, cut as the library cuts them. Hand-written
SVG that follows the reader's light or dark mode.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dsp.planner import chunk_sizes

RANKS, T, S = 4, 7, 10
COLOURS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899")
CELL, GAP = 26, 2
LEFT, TOP, MIDDLE = 44, 72, 150  # where the left grid starts, and the room between the grids
WIDTH, HEIGHT = 2 * LEFT + 2 * S * CELL + MIDDLE, TOP + T * CELL + 98

STYLE = """
  text { font: 13px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace }
  .title { font-size: 15px; font-weight: 600 }
  .soft { fill: #59636e }
  .line { stroke: #59636e; stroke-width: 2; fill: none }
  .tip { fill: #59636e }
  .dot { stroke: #ffffff; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .soft, .tip { fill: #9198a1 }
    .line { stroke: #9198a1 }
    .dot { stroke: #0d1117 }
  }
"""


def owners(length: int) -> list[int]:
    """The rank that holds each index of a sharded dim."""
    return [rank for rank, size in enumerate(chunk_sizes(length, RANKS)) for _ in range(size)]


def text(x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{style}">{words}</text>'


def grid(x0: float, sharded: str) -> Iterator[str]:
    """Cells in the colour of their rank; a dot in the colour of the rank where a cell goes to, or came from."""
    by_t, by_s = owners(T), owners(S)
    for t in range(T):
        for s in range(S):
            here, there = (by_t[t], by_s[s]) if sharded == "t" else (by_s[s], by_t[t])
            x, y, side = x0 + s * CELL, TOP + t * CELL, CELL - GAP
            yield f'<rect x="{x:g}" y="{y:g}" width="{side}" height="{side}" rx="4" fill="{COLOURS[here]}"/>'
            if here != there:
                middle = f'cx="{x + side / 2:g}" cy="{y + side / 2:g}"'
                yield f'<circle {middle} r="5" fill="{COLOURS[there]}" class="dot"/>'


def panel(x0: float, sharded: str, stage: str, whole: str) -> Iterator[str]:
    width, height = S * CELL - GAP, T * CELL - GAP
    centre, bottom = x0 + width / 2, TOP + height
    yield text(centre, TOP - 40, f"sharded along {sharded}", "title")
    yield text(centre, TOP - 14, "s &#8594;", "soft")
    yield text(x0 - 16, TOP + height / 2 - 4, "t", "soft")
    yield text(x0 - 16, TOP + height / 2 + 13, "&#8595;", "soft")
    yield from grid(x0, sharded)
    yield text(centre, bottom + 26, stage, "code")
    yield text(centre, bottom + 46, whole, "soft")


def arrow(x0: float, x1: float, y: float) -> Iterator[str]:
    yield f'<path class="line" d="M {x0:g} {y:g} H {x1 - 8:g}"/>'
    yield f'<path class="tip" d="M {x1:g} {y:g} l -12 -6 v 12 z"/>'


def picture() -> str:
    right = LEFT + S * CELL + MIDDLE
    start, end = LEFT + S * CELL + 18, right - 38
    centre, middle = (start + end) / 2, TOP + T * CELL / 2
    parts = [
        *panel(LEFT, "t", "b t [s c]", "whole frames: attention over s"),
        *panel(right, "s", "b [t] s [c]", "whole histories: attention over t"),
        text(centre, middle - 34, "switch", "title"),
        text(centre, middle - 14, "one all-to-all", "soft"),
        *arrow(start, end, middle),
        text(centre, middle + 24, "dot: where a", "soft"),
        text(centre, middle + 41, "cell goes, or", "soft"),
        text(centre, middle + 58, "came from", "soft"),
    ]
    step = 92
    x, y = WIDTH / 2 - RANKS * step / 2 + 8, HEIGHT - 18
    for rank, colour in enumerate(COLOURS):
        at = x + rank * step
        parts.append(f'<rect x="{at:g}" y="{y - 12:g}" width="14" height="14" rx="3" fill="{colour}"/>')
        parts.append(text(at + 21, y, f"rank {rank}", anchor="start"))
    title = f"A grid of t x s cells on {RANKS} ranks, sharded along t, then switched to be sharded along s"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "docs/images/switch.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture())
    print(path)
