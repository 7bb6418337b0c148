"""One static page of a run, or of several beside each other, that opens without a server and without the network.

    python -m zoo.training.report runs/demo                  # runs/demo/report.html; a run writes its own at its end
    python -m zoo.training.report runs/a runs/b --out ab.html

The page has curves with their baselines, samples, the plan as a ribbon, memory, throughput, and configurations with
their changes at resumes, all from the files in the runs' directories.
"""

import argparse
import base64
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

from zoo.training import UserError, command
from zoo.training.charts import Chart, Curve, draw
from zoo.training.config import leaves, load
from zoo.training.records import read_metrics
from zoo.training.tracking import duration, higher, label

CHARTS = (  # key of the records, title, factor
    ("loss", "training loss", 1), ("val_loss", "validation loss", 1), ("grad_norm", "gradient norm", 1),
    ("lr", "learning rate", 1), ("tokens_per_s", "tokens a second", 1), ("seconds_per_step", "seconds a step", 1),
    ("mfu", "share of the devices' peak (MFU), %", 100), ("data_wait", "waiting for data, % of a step", 100),
    ("comm_share", "communication, % of a step", 100), ("memory_bytes", "memory of a rank, GiB at most", 2**-30),
)  # fmt: skip
SHOWN = {"loss", "val_loss", "time", "step", *(key for key, _, _ in CHARTS)}
STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; margin: 2em auto;
  max-width: 1120px; padding: 0 1em; color: #1f2328; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #9198a155 }
pre { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; overflow-x: auto }
table { border-collapse: collapse } td, th { padding: 2px 14px 2px 0; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(460px, 1fr)); gap: 1em }
svg { max-width: 100%; height: auto } img { max-width: 100%; image-rendering: pixelated }
text { font-size: 12px; fill: #1f2328 } .title { font-weight: 600; font-size: 13px }
.soft { fill: #59636e; color: #59636e }
.grid { stroke: #9198a1; stroke-opacity: .3 } .curve { fill: none; stroke-width: 1.8 }
.level { stroke: #59636e; stroke-dasharray: 5 4 } .mark { stroke: #59636e; stroke-opacity: .5; stroke-dasharray: 2 3 }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 } text { fill: #e6edf3 }
  .soft { fill: #9198a1; color: #9198a1 } }
"""


@dataclass
class Run:
    """A run, as its directory describes it."""

    directory: Path

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory / "metrics.jsonl")

    @cached_property
    def options(self) -> dict[str, str]:
        """Every option with its value; the lines of the file if another version wrote it."""
        path = self.directory / "config.yaml"
        try:
            return {key: str(value) for key, value, _ in leaves(load([str(path)]))}
        except UserError:
            lines = path.read_text().splitlines() if path.exists() else []
            return {f"line {i}": line for i, line in enumerate(lines, 1)}

    @cached_property
    def opening(self) -> list[str]:
        """The first lines of the log: model, mesh, plan, memory."""
        path = self.directory / "console.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        starts = [i for i, line in enumerate(lines) if line.startswith("model   ")]
        return [*takewhile(lambda line: not line.startswith("run     "), lines[starts[-1] :])] if starts else []

    @property
    def resumes(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "resumed" in record]

    def points(self, key: str, factor: float = 1.0) -> list[tuple[float, float]]:
        return [(r["step"], r[key] * factor) for r in self.records if isinstance(r.get(key), int | float)]

    @cached_property
    def last(self) -> dict[str, float]:
        """The last value of everything that was recorded."""
        found: dict[str, float] = {}
        for record in self.records:
            found |= {key: value for key, value in record.items() if isinstance(value, int | float)}
        return found

    @property
    def floors(self) -> dict[str, float]:
        return {key: value for key, value in self.last.items() if "_floor" in key}


def page(runs: Sequence[Run]) -> str:
    """The whole page."""
    title = " and ".join(run.name for run in runs)
    body = [*_head(runs, title), *_results(runs), *_charts(runs), *_pictures(runs), *_plans(runs), *_options(runs)]
    text = "\n".join([*body, *_resumes(runs)])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>\n'
        f"<body>\n{text}\n</body></html>\n"
    )


def _head(runs: Sequence[Run], title: str) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    for run in runs:
        steps, wanted = run.last.get("step", 0), run.options.get("train.steps", "?")
        spent = duration(run.last.get("elapsed", 0.0))
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.last["time"])) if "time" in run.last else "never"
        yield f"<p><b>{escape(run.name)}</b>: step {steps:g} of {escape(wanted)} after {spent}; last record {when}</p>"
        if run.opening:
            yield f"<pre>{escape(chr(10).join(run.opening))}</pre>"


def _results(runs: Sequence[Run]) -> Iterator[str]:
    measures = list(dict.fromkeys(key for run in runs for key in run.last if key.startswith("val_")))
    measures.sort(key=lambda key: (key != "val_loss", key))
    if not measures:
        return
    yield "<h2>On held-out data</h2><table><tr><th>measure</th><th></th>"
    yield "".join(f"<th>{escape(run.name)}</th>" for run in runs) + "<th>without a model</th></tr>"
    floors: Mapping[str, float] = {key: value for run in runs for key, value in run.floors.items()}
    for key in measures:
        own = {k: v for k, v in floors.items() if _judges(k, key)}
        cells = "".join(f'<td class="n">{run.last[key]:.4g}</td>' if key in run.last else "<td></td>" for run in runs)
        beside = "; ".join(f"{k.partition('_floor')[0]} {v:.4g}" for k, v in own.items())
        better = f"{'higher' if higher(key) else 'lower'} is better"
        yield f'<tr><td>{escape(label(key))}</td><td class="soft">{better}</td>{cells}<td>{escape(beside)}</td></tr>'
    yield "</table>"


def _judges(floor: str, key: str) -> bool:
    """Tell whether a baseline belongs to this measure: `x_floor` to the loss, `x_floor_<measure>` to another."""
    _, _, of = floor.partition("_floor")
    return (of.removeprefix("_") or "loss") == key.removeprefix("val_")


def _charts(runs: Sequence[Run]) -> Iterator[str]:
    yield '<h2>Curves</h2><div class="charts">'
    more = sorted({k for run in runs for k in run.last if k.startswith(("val_", "loss_"))} - SHOWN)
    marks = sorted({record["step"] for run in runs for record in run.resumes})
    for key, title, factor in (*CHARTS, *((key, "held-out " * key.startswith("val_") + label(key), 1) for key in more)):
        curves = [Curve(run.name, run.points(key, factor), i) for i, run in enumerate(runs)]
        floors = {k: v for run in runs for k, v in run.floors.items() if _judges(k, key) and key.startswith("val_")}
        levels = [(k.replace("_", " "), v) for k, v in floors.items()]
        yield draw(Chart(title, curves, levels, marks))
    yield "</div>"


def _pictures(runs: Sequence[Run]) -> Iterator[str]:
    found = {run.name: sorted((run.directory / "samples").glob("step-*")) for run in runs}
    if any(found.values()):
        yield "<h2>Samples</h2>"
    for name, paths in found.items():
        for path in paths[-1:]:
            kind = f"image/{path.suffix[1:]}"
            data = base64.b64encode(path.read_bytes()).decode()
            yield f"<p>{escape(name)}, {path.stem}</p>"
            yield f'<img alt="samples of {path.stem}" src="data:{kind};base64,{data}">'


def _plans(runs: Sequence[Run]) -> Iterator[str]:
    drawn: dict[str, list[str]] = {}
    for run in runs:
        path = run.directory / "plan.svg"
        if path.exists():
            drawn.setdefault(path.read_text(), []).append(run.name)
    if drawn:
        yield "<h2>Plan</h2>"
    for svg, names in drawn.items():
        yield f"<p>{escape(', '.join(names))}</p>{svg}"


def _options(runs: Sequence[Run]) -> Iterator[str]:
    keys = list(dict.fromkeys(key for run in runs for key in run.options))
    differ = [key for key in keys if len({run.options.get(key) for run in runs}) > 1]
    yield "<h2>Configuration</h2>"
    heads = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    if len(runs) > 1:
        rows = (
            f"<tr><td>{escape(key)}</td>"
            + "".join(f"<td>{escape(run.options.get(key, 'absent'))}</td>" for run in runs) + "</tr>" for key in differ
        )  # fmt: skip
        yield f"<table><tr><th>where they differ</th>{heads}</tr>{''.join(rows)}</table>"
    same = "".join(
        f"<tr><td>{escape(key)}</td><td>{escape(runs[0].options[key])}</td></tr>"
        for key in keys
        if key not in differ and key in runs[0].options
    )
    yield f"<details{'' if len(runs) > 1 else ' open'}><summary>{'all else' if len(runs) > 1 else 'every option'}"
    yield f"</summary><table>{same}</table></details>"


def _resumes(runs: Sequence[Run]) -> Iterator[str]:
    rows = [(run, record) for run in runs for record in run.resumes]
    if not rows:
        return
    heads = "".join(f"<th>{head}</th>" for head in ("run", "from step", "when", "ranks", "with another"))
    yield f"<h2>Resumes</h2><table><tr>{heads}</tr>"
    for run, record in rows:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record.get("time", 0)))
        changed = "<br>".join(escape(change) for change in record.get("changes", ())) or "nothing"
        yield f"<tr><td>{escape(run.name)}</td><td>{record['step']}</td><td>{when}</td>"
        yield f"<td>{record['resumed']}</td><td>{changed}</td></tr>"
    yield "</table>"


def write(directories: Sequence[Path], out: Path) -> Path:
    """Write the page of these runs. A UserError names a directory that holds no run."""
    for directory in directories:
        if not (directory / "metrics.jsonl").exists():
            raise UserError(f"{directory} holds no metrics.jsonl: expected the directory of a run")
    out.write_text(page([Run(directory) for directory in directories]), encoding="utf-8")
    return out


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m zoo.training.report", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", type=Path, nargs="+", help="directories of runs")
    parser.add_argument("--out", type=Path, help="the page; of one run RUN/report.html, of several ./report.html")
    options = parser.parse_args(arguments)
    out = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    return command(lambda: [write(options.runs, out)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
