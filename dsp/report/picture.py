"""A plan as a picture: a ribbon of its stages, each in the colour of the dim that is sharded while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from dsp.support.formatting import human

COLOURS = ("#3b82f6", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2", "#be185d", "#4d7c0f")
WHOLE = "#6b7280"
WIDE, GAP, HIGH, ROW, MARGIN, TOP, PER_ROW = 118, 34, 30, 120, 16, 92, 8
LONGEST = 22  # letters of a line of a name, in the space of a band and a gap
STYLE = """
text { font: 12px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 14px; font-weight: 600 } .soft { fill: #59636e } .letter { fill: #ffffff; font-weight: 600 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft { fill: #9198a1 } }
"""


def ribbon(rows: Sequence[tuple[Any, int]], title: str) -> str:
    """An SVG of the rows of a plan's table and how often each is repeated: a band a row, an arrow for each move.

    Under an arrow are the bytes that the busiest rank sends before the stage that it points to.
    """
    dims = list(dict.fromkeys(row.layout for row, _ in rows if row.layout))
    colours = {dim: COLOURS[i % len(COLOURS)] for i, dim in enumerate(dims)}
    lines = -(-len(rows) // PER_ROW)
    width = MARGIN * 2 + min(len(rows), PER_ROW) * (WIDE + GAP)
    parts = [_text(MARGIN, 24, title, "title", "start"), *_legend(colours, any(r.layout is None for r, _ in rows))]
    for i, (row, times) in enumerate(rows):
        x, y = MARGIN + GAP + i % PER_ROW * (WIDE + GAP), TOP + i // PER_ROW * ROW
        parts += _band(row, times, x, y, colours)
    height = TOP + lines * ROW
    width = max(width, int(MARGIN * 2 + 8.6 * len(title)), 130 * (len(dims) + 1))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _band(row: Any, times: int, x: float, y: float, colours: dict[str, str]) -> Iterator[str]:
    colour = colours.get(row.layout, WHOLE)
    first, second = _two_lines(row.name)
    yield f"<g><title>{escape(row.name)}: computes over {escape(' '.join(row.computes) or 'nothing')}</title>"
    yield _text(x + WIDE / 2, y - 3, first)
    yield _text(x + WIDE / 2, y + 12, second)
    yield _text(x + WIDE / 2, y + 27, f"×{times}" if times > 1 else "", "soft")
    yield f'<rect x="{x}" y="{y + 34}" width="{WIDE}" height="{HIGH}" rx="4" fill="{colour}"/>'
    yield _text(x + WIDE / 2, y + 54, row.layout or "whole", "letter")
    if row.switch:
        arrow = f"M{x - GAP + 6} {y + 49}h{GAP - 16}m-7 -6l8 6l-8 6"
        yield f'<path d="{arrow}" fill="none" stroke="#59636e" stroke-width="2"/>'
        yield _text(x - GAP / 2, y + 80, row.switch, "soft")
        yield _text(x - GAP / 2, y + 95, human(row.bytes), "soft")
    yield "</g>"


def _two_lines(name: str) -> tuple[str, str]:
    """The name in lines of at most `LONGEST` letters, broken at a dot; its middle is left out if two are too short."""
    if len(name) <= LONGEST:
        return "", name
    dots = [i + 1 for i, letter in enumerate(name) if letter == "." and i < LONGEST]
    fits = [i for i in dots if len(name) - i <= LONGEST]
    if fits:  # the lines of most even length
        at = min(fits, key=lambda i: abs(len(name) - 2 * i))
        return name[:at], name[at:]
    return name[: LONGEST - 1] + "…", "…" + name[1 - LONGEST :]


def _legend(colours: dict[str, str], whole: bool) -> Iterator[str]:
    at = float(MARGIN)
    for name, colour in [(f"sharded along {d}", c) for d, c in colours.items()] + ([("whole", WHOLE)] if whole else []):
        yield f'<rect x="{at:.0f}" y="40" width="14" height="14" rx="3" fill="{colour}"/>'
        yield _text(at + 20, 52, name, "soft", "start")
        at += 38 + 6.6 * len(name)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'
