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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from markupsafe import Markup

from zoo.files import read_bytes
from zoo.training import UserError, user_error
from zoo.training.charts import Chart, Curve, draw
from zoo.training.config import saved
from zoo.training.console import command
from zoo.training.records import read_metrics
from zoo.training.records import write as write_file
from zoo.training.tracking import display_name, duration, higher_is_better

CHARTS = (  # key of the records, title, factor
    ("loss", "training loss", 1), ("val_loss", "validation loss", 1), ("grad_norm", "gradient norm", 1),
    ("lr", "learning rate", 1), ("tokens_per_s", "tokens a second", 1), ("seconds_per_step", "seconds a step", 1),
    ("mfu", "share of the devices' peak (MFU), %", 100), ("data_wait", "waiting for data, % of a step", 100),
    ("comm_share", "communication, % of a step", 100), ("memory_bytes", "memory of a rank, GiB at most", 2**-30),
)  # fmt: skip
MOST = 1 << 28  # bytes of a file that the page shows
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
        """Every option with its value."""
        return {key: str(value) for key, value in saved(self.directory / "config.yaml").items()}

    @cached_property
    def opening(self) -> list[str]:
        """The first lines of the log: model, mesh, plan, memory."""
        path = self.directory / "console.log"
        lines = read_bytes(path, MOST).decode(errors="replace").splitlines() if path.exists() else []
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
        values: dict[str, float] = {}
        for record in self.records:
            values |= {key: value for key, value in record.items() if isinstance(value, int | float)}
        return values

    @property
    def baselines(self) -> dict[str, float]:
        return {key: value for key, value in self.last.items() if key.startswith("baseline_")}


def page(runs: Sequence[Run]) -> Markup:
    """The page. What is not written here in tags is escaped as it is put in: a run's files may hold anything."""
    title = " and ".join(run.name for run in runs)
    body = [*_head(runs, title), *_results(runs), *_charts(runs), *_pictures(runs), *_plans(runs), *_options(runs)]
    return Markup(
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{}</title>'
        '<meta name="viewport" content="width=device-width"><style>{}</style></head>\n<body>\n{}\n</body></html>\n'
    ).format(title, Markup(STYLE), Markup("\n").join([*body, *_resumes(runs)]))


def _each(tags: str, values: Iterable[Any]) -> Markup:
    """The tags, once for each value, which takes the place of {}."""
    return Markup().join(Markup(tags).format(value) for value in values)


def _day(seconds: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (TypeError, ValueError, OverflowError, OSError):
        return "at an unknown time"


def _head(runs: Sequence[Run], title: str) -> Iterator[Markup]:
    yield Markup("<h1>{}</h1>").format(title)
    for run in runs:
        steps, wanted = run.last.get("step", 0), run.options.get("train.steps", "?")
        spent = duration(run.last.get("elapsed", 0.0))
        when = _day(run.last["time"]) if "time" in run.last else "never"
        text = Markup("<p><b>{}</b>: step {:g} of {} after {}; last record {}</p>")
        yield text.format(run.name, steps, wanted, spent, when)
        if run.opening:
            yield Markup("<pre>{}</pre>").format("\n".join(run.opening))


def _results(runs: Sequence[Run]) -> Iterator[Markup]:
    measures = list(dict.fromkeys(key for run in runs for key in run.last if key.startswith("val_")))
    measures.sort(key=lambda key: (key != "val_loss", key))
    if not measures:
        return
    yield Markup("<h2>On held-out data</h2><table><tr><th>measure</th><th></th>")
    yield _each("<th>{}</th>", (run.name for run in runs)) + Markup("<th>without a model</th></tr>")
    baselines: Mapping[str, float] = {key: value for run in runs for key, value in run.baselines.items()}
    for key in measures:
        levels = {k: v for k, v in baselines.items() if _judges(k, key)}
        cells = _each('<td class="n">{}</td>', (f"{run.last[key]:.4g}" if key in run.last else "" for run in runs))
        beside = "; ".join(f"{k.split('_')[1]} {v:.4g}" for k, v in levels.items())
        better = f"{'higher' if higher_is_better(key) else 'lower'} is better"
        row = Markup('<tr><td>{}</td><td class="soft">{}</td>{}<td>{}</td></tr>')
        yield row.format(display_name(key), better, cells, beside)
    yield Markup("</table>")


def _judges(baseline: str, key: str) -> bool:
    """Tell whether a baseline belongs to this measure: `baseline_x` to the loss, `baseline_x_<measure>` to another."""
    _, _, *measure = baseline.split("_", 2)
    return (measure or ["loss"]) == [key.removeprefix("val_")]


def _charts(runs: Sequence[Run]) -> Iterator[Markup]:
    yield Markup('<h2>Curves</h2><div class="charts">')
    more = sorted({k for run in runs for k in run.last if k.startswith(("val_", "loss_"))} - SHOWN)
    marks = sorted({record["step"] for run in runs for record in run.resumes})
    extra = ((key, "held-out " * key.startswith("val_") + display_name(key), 1) for key in more)
    for key, title, factor in (*CHARTS, *extra):
        curves = [Curve(run.name, run.points(key, factor), i) for i, run in enumerate(runs)]
        baselines = {
            k: v for run in runs for k, v in run.baselines.items() if _judges(k, key) and key.startswith("val_")
        }
        levels = [(k.replace("_", " "), v) for k, v in baselines.items()]
        yield draw(Chart(title, curves, levels, marks))
    yield Markup("</div>")


def _image(path: Path, label: str, kind: str) -> Markup:
    """A picture in the page itself. As an image it runs no script, also if it is an SVG that holds one."""
    data = base64.b64encode(read_bytes(path, MOST)).decode()
    return Markup('<img alt="{}" src="data:image/{};base64,{}">').format(label, kind, data)


def _pictures(runs: Sequence[Run]) -> Iterator[Markup]:
    latest = {run.name: sorted((run.directory / "samples").glob("step-*"))[-1:] for run in runs}
    if any(latest.values()):
        yield Markup("<h2>Samples</h2>")
    for name, paths in latest.items():
        for path in paths:
            yield Markup("<p>{}, {}</p>").format(name, path.stem)
            yield _image(path, f"samples of {path.stem}", path.suffix[1:])


def _plans(runs: Sequence[Run]) -> Iterator[Markup]:
    pictures: dict[Markup, list[str]] = {}
    for run in runs:
        path = run.directory / "plan.svg"
        if path.exists():
            pictures.setdefault(_image(path, "plan", "svg+xml"), []).append(run.name)
    if pictures:
        yield Markup("<h2>Plan</h2>")
    for image, names in pictures.items():
        yield Markup("<p>{}</p>{}").format(", ".join(names), image)


def _options(runs: Sequence[Run]) -> Iterator[Markup]:
    keys = list(dict.fromkeys(key for run in runs for key in run.options))
    differ = [key for key in keys if len({run.options.get(key) for run in runs}) > 1]
    row = Markup("<tr><td>{}</td>{}</tr>")
    yield Markup("<h2>Configuration</h2>")
    if len(runs) > 1:
        heads = _each("<th>{}</th>", (run.name for run in runs))
        rows = (row.format(k, _each("<td>{}</td>", (run.options.get(k, "absent") for run in runs))) for k in differ)
        table = Markup("<table><tr><th>where they differ</th>{}</tr>{}</table>")
        yield table.format(heads, Markup().join(rows))
    same = [key for key in keys if key not in differ and key in runs[0].options]
    begin = Markup("<details><summary>all else" if len(runs) > 1 else "<details open><summary>every option")
    rows = (row.format(key, _each("<td>{}</td>", [runs[0].options[key]])) for key in same)
    yield begin + Markup("</summary><table>{}</table></details>").format(Markup().join(rows))


def _resumes(runs: Sequence[Run]) -> Iterator[Markup]:
    rows = [(run, record) for run in runs for record in run.resumes]
    if not rows:
        return
    heads = _each("<th>{}</th>", ("run", "from step", "when", "ranks", "with another"))
    yield Markup("<h2>Resumes</h2><table><tr>{}</tr>").format(heads)
    for run, record in rows:
        changes = record.get("changes", ())
        changed = Markup("<br>").join(changes if isinstance(changes, list) else ()) or "nothing"
        cells = run.name, record["step"], _day(record.get("time")), record["resumed"], changed
        yield Markup("<tr>{}</tr>").format(_each("<td>{}</td>", cells))
    yield Markup("</table>")


def write(directories: Sequence[Path], out: Path) -> Path:
    """Write the page of these runs. A UserError names a directory that holds no run."""
    for directory in directories:
        if not (directory / "metrics.jsonl").exists():
            raise UserError(f"{directory} holds no metrics.jsonl: expected the directory of a run")
    text = user_error(page, [Run(directory) for directory in directories])  # a file that is none, as a FIFO
    write_file(out, text)
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
