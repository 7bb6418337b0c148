"""The shared parts of the scripts: options, ranks, results, tables of pages, pictures in light and dark mode."""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES, DOCS = ROOT / "benchmarks/results", ROOT / "docs/images", ROOT / "docs"
STYLE = """
text { font: 13px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
.title { font-size: 15px; font-weight: 600 } .soft { fill: #59636e } .line { fill: none; stroke-width: 2 }
.formula { fill: none; stroke-width: 1.5; stroke-dasharray: 5 4 } .on { stroke: #1f2328 } .hollow { fill: #ffffff }
.grid { stroke: #9198a1; stroke-opacity: 0.35 }
.spread { stroke-width: 1.5; fill: none } .dot { stroke: #ffffff; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft { fill: #9198a1 } .dot { stroke: #0d1117 }
.on { stroke: #e6edf3 } .hollow { fill: #0d1117 } }
"""
WIDTH, HEIGHT = 330, 230  # of the plotted area of a panel
LEFT, TOP, BELOW, BETWEEN = 62, 66, 58, 34
COLUMNS = 3
DODGE = 3  # pixels between the whiskers of two series
LETTER = 7.6  # pixels of a letter, in a wide font
NEAR = 3.0  # pixels: two lines that are no farther apart hide one another


def options(
    text: str | None, arguments: Sequence[str] | None = None, choices: Mapping[str, Iterable[str]] | None = None,
    **defaults: Any,
) -> argparse.Namespace:  # fmt: skip
    """The options of a script by their defaults: False is a flag, a list takes several values, None is a path."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how: dict[str, Any] = {"action": "store_true"}
        if default is not False:
            one = default[0] if isinstance(default, list) else default
            how = {"type": Path if one is None else type(one), "default": default, "help": f"{default}"}
            how |= {"nargs": "+"} if isinstance(default, list) else {}
            how |= {"choices": list(choices[name])} if choices and name in choices else {}
        parser.add_argument(f"--{name.replace('_', '-')}", **how)
    return parser.parse_args(arguments)


def _rank(rank: int, n: int, store: str, work: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    work(init_device_mesh("cpu", (n,), mesh_dim_names=("sp",)), *arguments)
    dist.destroy_process_group()


def on_ranks(n: int, work: Callable[..., None], *arguments: Any) -> None:
    """Have n gloo processes, forked from this one, call `work(mesh, *arguments)`."""
    with tempfile.TemporaryDirectory() as folder:
        given = (n, f"{folder}/store", work, arguments)
        torch.multiprocessing.start_processes(_rank, given, nprocs=n, start_method="fork")


def circumstances(arguments: Sequence[str]) -> dict[str, Any]:
    """When, where, of which commit and how something was measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return {
        "command": " ".join(["python", name, *arguments]),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "processor": names[0] if names else platform.machine(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__.split("+")[0],
    }


def write_down(name: str, out: Path | None, found: Any, picture: str = "") -> None:
    """Write numbers to OUT.json and their picture to OUT.svg, by default to where the docs look."""
    numbers, drawn = (RESULTS / name, PICTURES / name) if out is None else (out, out)
    written = {f"{numbers}.json": json.dumps(found, indent=1) + "\n"} | ({f"{drawn}.svg": picture} if picture else {})
    for path, text in written.items():
        Path(path).write_text(text)
    print("wrote", " and ".join(written))


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """The lines of a table of a page."""
    yield line(head).replace("|  |", "| |", 1)
    yield "|---" * len(head) + "|"
    yield from map(line, rows)


def fill(page: str, tables: Mapping[str, Iterable[str]]) -> str:
    """The page with new tables between their marks, `<!-- table: name -->` and `<!-- end -->`."""
    for name, lines in tables.items():
        before, mark, rest = page.partition(f"<!-- table: {name} -->\n")
        if mark:
            page = before + mark + "\n".join(lines) + "\n" + rest[rest.index("<!-- end -->") :]
    return page


def between(values: Sequence[float], form: str = ".2f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


@dataclass
class Series:
    """One line: (x, y) or (x, y, least, most) with the spread of y. `x` counts along the panel's labels."""

    name: str
    colour: str
    points: Sequence[tuple[float, ...]]
    dashed: bool = False  # a formula: no dots, and not in the legend
    hollow: Sequence[float] = ()  # the x of points whose dots are rings


@dataclass
class Panel:
    title: str
    labels: Sequence[str]  # along x, evenly
    series: Sequence[Series] = field(default_factory=list)
    below: str = ""  # what x is
    log: bool = False
    unit: str = ""  # of y


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def ticks(low: float, high: float, log: bool) -> list[float]:
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [v for d in decades for v in (1 * 10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]
    step = 10.0 ** math.floor(math.log10(high or 1))
    step = next(s for s in (step / 5, step / 2, step, 2 * step) if high / s <= 6)
    return [i * step for i in range(int(high / step) + 1)]


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'


def escape(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def draw(panel: Panel, left: float, top: float) -> list[str]:
    values = [v for s in panel.series for point in s.points for v in point[1:]]
    high = max(values) * 1.1
    low = min(values) / 1.15 if panel.log else 0.0
    last = max(len(panel.labels) - 1, 1)

    def x(i: float) -> float:
        return left + 20 + (WIDTH - 40) * i / last

    def y(v: float) -> float:
        share = math.log(v / low) / math.log(high / low) if panel.log else v / high
        return top + HEIGHT * (1 - share)

    parts = [text(left, top - 14, f"{panel.title}{', ' if panel.unit else ''}{panel.unit}", "", "start")]
    for tick in ticks(low, high, panel.log):
        parts.append(f'<path class="grid" d="M{left:.1f} {y(tick):.1f}h{WIDTH}"/>')
        parts.append(text(left - 8, y(tick) + 4, number(tick), "soft", "end"))
    parts += [text(x(i), top + HEIGHT + 18, label, "soft") for i, label in enumerate(panel.labels)]
    parts.append(text(left + WIDTH / 2, top + HEIGHT + 38, panel.below, "soft"))
    drawn: list[tuple[Series, list[tuple[float, float]]]] = []
    for place, series in enumerate(panel.series):
        aside = DODGE * (place - (len(panel.series) - 1) / 2) if any(len(p) == 4 for p in series.points) else 0.0
        drawn.append((series, [(x(point[0]) + aside, y(point[1])) for point in series.points]))
    solid = [each for each in drawn if not each[0].dashed]
    for i, (series, spots) in reversed(list(enumerate(solid))):  # the first lies on top, and is as thin as it can be
        wider = sum(hidden(spots, above) for _, above in solid[:i])
        parts.append(path(spots, series, "line", f' style="stroke-width:{2 + 3 * wider}"' if wider else ""))
        for (across, down), point in zip(spots, series.points):
            if len(point) == 4:
                whisker = f"M{across:.1f} {y(point[2]):.1f}V{y(point[3]):.1f}"
                parts.append(f'<path class="spread" stroke="{series.colour}" d="{whisker}"/>')
            ring = point[0] in series.hollow
            paint = f'class="hollow" stroke="{series.colour}" stroke-width="2"'
            paint = paint if ring else f'class="dot" fill="{series.colour}"'
            parts.append(f'<circle {paint} cx="{across:.1f}" cy="{down:.1f}" r="{4 + 2 * wider:g}"/>')
    for series, spots in drawn:
        if series.dashed:  # in ink where it lies on the line that it is of
            own = any(other.name == series.name and hidden(spots, line) for other, line in solid)
            parts.append(path(spots, series, "formula on" if own else "formula"))
    return parts


def path(spots: Sequence[tuple[float, float]], series: Series, kind: str, more: str = "") -> str:
    line = "L".join(f"{across:.1f} {down:.1f}" for across, down in spots)
    colour = "" if kind.endswith(" on") else f' stroke="{series.colour}"'
    return f'<path class="{kind}"{colour}{more} d="M{line}"/>'


def hidden(spots: Sequence[tuple[float, float]], above: Sequence[tuple[float, float]]) -> bool:
    """Tell whether more than two thirds of a line lie under another."""
    over = {round(across): down for across, down in above}
    near = [abs(down - over.get(round(across), math.inf)) < NEAR for across, down in spots]
    return sum(near) > 2 / 3 * len(near)


def figure(title: str, panels: Sequence[Panel], note: str = "") -> str:
    """Panels side by side, three at most or rows of two, under one title and one legend."""
    columns = len(panels) if len(panels) <= COLUMNS else 2
    lefts = [LEFT + i * (WIDTH + BETWEEN + LEFT) for i in range(columns)]
    parts = [text(LEFT - 40, 24, title, "title", "start")]
    for i, panel in enumerate(panels):
        parts += draw(panel, lefts[i % columns], TOP + i // columns * (HEIGHT + BELOW + BETWEEN))
    names = {s.name: s.colour for panel in panels for s in panel.series if not s.dashed}
    rows = -(-len(panels) // columns)
    at, down = float(LEFT), TOP + rows * (HEIGHT + BELOW + BETWEEN) - BETWEEN + 8
    for name, colour in names.items():
        parts.append(f'<circle cx="{at:.1f}" cy="{down - 4}" r="5" fill="{colour}"/>')
        parts.append(text(at + 11, down, name, "", "start"))
        at += 38 + 7.2 * len(name)
    width = max(lefts[-1] + WIDTH + 20, at)
    height = down + 14
    for line in (short for own in note.split("\n") for short in wrap(own, int((width - LEFT) / LETTER))):
        parts.append(text(LEFT, height + 8, line, "soft", "start"))
        height += 22
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )
