"""Curves over the steps of runs, as SVG for a page without scripts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#0891b2")
WIDTH, HEIGHT, LEFT, TOP, BELOW = 460, 190, 64, 40, 44
MOST = 400  # points of a curve; more are not visible


@dataclass
class Curve:
    name: str
    points: Sequence[tuple[float, float]]  # (step, value)
    colour: int = 0


@dataclass
class Chart:
    """title: what is drawn, with its unit; level: values to compare with, as (name, value); marks: steps of resumes."""

    title: str
    curves: Sequence[Curve]
    levels: Sequence[tuple[str, float]] = field(default_factory=list)
    marks: Sequence[float] = field(default_factory=list)


def draw(chart: Chart) -> str:
    """The chart as SVG; '' if there is nothing to draw. A logarithmic axis where values span more than a decade."""
    curves = [Curve(c.name, _thinned(c.points), c.colour) for c in chart.curves if c.points]
    values = [y for curve in curves for _, y in curve.points] + [y for _, y in chart.levels]
    if not curves:
        return ""
    low, high, last = min(values), max(values), max(x for curve in curves for x, _ in curve.points)
    log = low > 0 and high / low > 10
    low, high = (low / 1.1, high * 1.1) if log else (min(low, 0.0), high * 1.05 or 1.0)

    def x(step: float) -> float:
        return LEFT + WIDTH * step / max(last, 1)

    def y(value: float) -> float:
        share = math.log(value / low) / math.log(high / low) if log else (value - low) / (high - low)
        return TOP + HEIGHT * (1 - share)

    parts = [_text(LEFT, 18, chart.title + (", logarithmic" if log else ""), "title", "start")]
    for tick in _ticks(low, high, log):
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}h{WIDTH}"/>')
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:.3g}", "soft", "end"))
    for tick in _ticks(0, last, False):
        parts.append(_text(x(tick), TOP + HEIGHT + 18, f"{tick:g}", "soft"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "step", "soft"))
    parts += [
        f'<path class="mark" d="M{x(m):.1f} {TOP}v{HEIGHT}"><title>resumed from step {m:g}</title></path>'
        for m in chart.marks
    ]
    for name, level in chart.levels:
        parts.append(f'<path class="level" d="M{LEFT} {y(level):.1f}h{WIDTH}"/>')
        parts.append(_text(LEFT + WIDTH - 4, y(level) - 5, f"{name} {level:.4g}", "soft", "end"))
    for curve in curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in curve.points)
        dashes = f' stroke-dasharray="{8 * curve.colour} 6"' if curve.colour else ""  # to show the curve under it
        parts.append(f'<path class="curve" stroke="{colour}"{dashes} d="M{path}"/>')
        a, b = curve.points[-1]
        told = f"<title>{escape(curve.name)}: {b:.5g} at step {a:g}</title>"
        parts.append(f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="{colour}">{told}</circle>')
    down = TOP + HEIGHT + BELOW
    parts += _legend(curves, down + 12)
    width, height = LEFT + WIDTH + 24, down + 26
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{escape(chart.title)}</title>" + "".join(parts) + "</svg>"
    )


def _legend(curves: Sequence[Curve], down: float) -> Iterator[str]:
    at = float(LEFT)
    for curve in curves:
        yield f'<circle cx="{at:.1f}" cy="{down - 4}" r="5" fill="{COLOURS[curve.colour % len(COLOURS)]}"/>'
        yield _text(at + 11, down, f"{curve.name} {curve.points[-1][1]:.4g}", "", "start")
        at += 40 + 7.2 * len(f"{curve.name} {curve.points[-1][1]:.4g}")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // MOST)
    return [*points[:-1:every], points[-1]]


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [v for d in decades for v in (1 * 10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]
        return found if len(found) <= 7 else [v for v in found if math.log10(v) % 1 < 1e-9]
    step = 10.0 ** math.floor(math.log10(high - low or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'
