"""Curves over the steps of runs, as SVG for a page without scripts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

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


def draw(chart: Chart) -> Markup:
    """The chart as SVG, empty if there is nothing to draw. A logarithmic axis where values span more than a decade."""
    curves = [Curve(c.name, _thinned(c.points), c.colour) for c in chart.curves if c.points]
    values = [y for curve in curves for _, y in curve.points] + [y for _, y in chart.levels]
    if not curves:
        return Markup()
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
        parts.append(Markup('<path class="grid" d="M{} {:.1f}h{}"/>').format(LEFT, y(tick), WIDTH))
        parts.append(_text(LEFT - 8, y(tick) + 4, f"{tick:.3g}", "soft", "end"))
    for tick in _ticks(0, last, False):
        parts.append(_text(x(tick), TOP + HEIGHT + 18, f"{tick:g}", "soft"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 36, "step", "soft"))
    parts += [
        Markup('<path class="mark" d="M{:.1f} {}v{}"><title>resumed from step {:g}</title></path>').format(
            x(m), TOP, HEIGHT, m
        )
        for m in chart.marks
    ]
    for name, level in chart.levels:
        parts.append(Markup('<path class="level" d="M{} {:.1f}h{}"/>').format(LEFT, y(level), WIDTH))
        parts.append(_text(LEFT + WIDTH - 4, y(level) - 5, f"{name} {level:.4g}", "soft", "end"))
    for curve in curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in curve.points)
        dashes = f"{8 * curve.colour} 6" if curve.colour else "none"  # to show the curve under it
        line = Markup('<path class="curve" stroke="{}" stroke-dasharray="{}" d="M{}"/>')
        end = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" fill="{}"><title>{}: {:.5g} at step {:g}</title></circle>')
        a, b = curve.points[-1]
        parts += [line.format(colour, dashes, path), end.format(x(a), y(b), colour, curve.name, b, a)]
    down = TOP + HEIGHT + BELOW
    parts += _legend(curves, down + 12)
    width, height = LEFT + WIDTH + 24, down + 26
    svg = Markup('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0} {1}" width="{0}" role="img">{2}{3}</svg>')
    return svg.format(width, height, Markup("<title>{}</title>").format(chart.title), Markup().join(parts))


def _legend(curves: Sequence[Curve], down: float) -> Iterator[Markup]:
    at = float(LEFT)
    for curve in curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        yield Markup('<circle cx="{:.1f}" cy="{}" r="5" fill="{}"/>').format(at, down - 4, colour)
        yield _text(at + 11, down, f"{curve.name} {curve.points[-1][1]:.4g}", "", "start")
        at += 40 + 7.2 * len(f"{curve.name} {curve.points[-1][1]:.4g}")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(points) // MOST)
    return [*points[:-1:every], points[-1]]


def _ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [v for d in decades for v in (1 * 10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]
        return ticks if len(ticks) <= 7 else [v for v in ticks if math.log10(v) % 1 < 1e-9]
    step = 10.0 ** math.floor(math.log10(high - low or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if (high - low) / s <= 6)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> Markup:
    text = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>')
    return text.format(x, y, anchor, kind, words)
