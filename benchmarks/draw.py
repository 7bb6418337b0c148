"""Every picture of the pages, drawn from benchmarks/results; nothing is measured again.

    pip install -e '.[benchmarks]'                    # matplotlib
    python benchmarks/draw.py                         # docs/images/*.svg
    python benchmarks/draw.py --only wire --out DIR   # DIR/wire.svg, and wire-light.png and wire-dark.png to look at

A background is transparent, and ink is a grey that reads on white and on black, since a page may be either.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import PICTURES, RESULTS, Report, options, rate_name, read
from benchmarks.methods import COLOURS, METHODS, Shape, layouts, two_layers

INK = "#777b82"
STYLE = {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 10, "xtick.labelsize": 10,
    "ytick.labelsize": 10, "font.sans-serif": ["DejaVu Sans", "Verdana"], "text.color": INK, "axes.labelcolor": INK,
    "axes.titlecolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y", "grid.color": INK, "grid.alpha": 0.3,
    "axes.titlelocation": "left", "legend.frameon": False, "axes.facecolor": "none", "svg.fonttype": "none",
    "svg.hashsalt": "dsp",
}  # fmt: skip
MARKERS = dict(zip(METHODS, "osD^v"))
WIDE = 8.6  # inches: 826 pixels, in which letters of 10 points have 13; in a column of 690, 11
BANDS = {"t": "#3b82f6", "s": "#d97706", "heads": "#0f9d70", "whole": INK}  # of the dims of an activation
RING = "↻"


def style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def panels(rows: int, columns: int, high: float) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row."""
    from matplotlib.figure import Figure

    figure = Figure((WIDE, high), layout="constrained")
    return figure, [*figure.subplots(rows, columns, squeeze=False).flat]


def plot(ax: Any, method: str, points: Sequence[tuple[float, ...]], hollow: Sequence[bool] = ()) -> None:
    """The line of a method; (x, y, least, most) has whiskers. Lines below are wider, or one would hide the next."""
    place, colour = [*METHODS].index(method), COLOURS[method]
    xs = [x + 0.04 * (place - 2) * (len(more) > 1) for x, *more in points]  # whiskers stand side by side
    ys, look = [p[1] for p in points], {"color": colour, "zorder": 9 - place, "linewidth": 1.5 + 0.8 * place}
    for x, (_, _, *ends) in zip(xs, points):
        ax.plot([x, x][: len(ends)], ends, **look | {"linewidth": 1.5})
    ax.plot(xs, ys, label=METHODS[method], marker=MARKERS[method], markersize=5 + place, **look)
    for x, y, ring in zip(xs, ys, hollow):
        if ring:
            ax.plot(x, y, "o", color=colour, markersize=14, fillstyle="none", zorder=9)


def dash(ax: Any, points: Sequence[tuple[float, float]], colour: str = INK) -> None:
    ax.plot(*zip(*points), "--", color=colour, linewidth=1.5, zorder=10)


def label(ax: Any, title: str, places: Sequence[Any], below: str, log: bool = False) -> None:
    """Titles and ticks: places along x are evenly spaced, numbers along y are plain."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set(title=title, xlabel=below)
    ax.set_xticks(range(len(places)), places)
    if log:
        ax.set_yscale("log")
        few = ax.get_ylim()[1] < 200 * ax.get_ylim()[0]
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    else:
        ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def legend(figure: Any, axes: Sequence[Any], **more: dict[str, Any]) -> None:
    """One below all panels: the methods, and `more` kinds of lines."""
    from matplotlib.lines import Line2D

    handles, names = axes[0].get_legend_handles_labels()
    every = {Line2D([], [], color=h.get_color(), marker=h.get_marker(), linewidth=2): n for h, n in zip(handles, names)}
    every |= {Line2D([], [], color=INK, **how): name.replace("_", " ") for name, how in more.items()}
    figure.legend([*every], [*every.values()], loc="outside lower center", ncols=len(every) if len(every) < 7 else 4)


# ------------------------------------------------------------------------------------------------------------ pictures


def wire(report: Report) -> Any:
    """Bytes a rank sends in a layer, by method and number of ranks; dashes are formulas."""
    sizes, m = sorted({row["ranks"] for row in report["rows"]}), Shape(**report["shape"]).activation
    figure, axes = panels(1, 2, 3.6)
    titles = {"A layer, forward": ("forward",), "A layer of a training step, stages recomputed": None}
    for ax, (title, phases) in zip(axes, titles.items()):
        for method in METHODS:
            rows = sorted((r for r in report["rows"] if r["method"] == method), key=lambda row: row["ranks"])
            for key in ("bytes", "formula") if rows else ():
                points = [(sizes.index(r["ranks"]), sum(r[key][p] for p in phases or r[key]) / m) for r in rows]
                dash(ax, points) if key == "formula" else plot(ax, method, points)
        label(ax, title, sizes, "ranks", log=True)
        ax.set_ylabel("bytes a rank sends / M")
    legend(figure, axes, the_formula={"linestyle": "--"})
    return figure


def by_ranks(ax: Any, title: str, rows: Sequence[Report], key: str, scale: float = 1) -> None:
    """A line a method over the number of ranks; one rank alone has no method."""
    sizes = sorted({row["ranks"] for row in rows})
    for method in METHODS:
        mine = sorted((r for r in rows if r["method"] == method or r["ranks"] == 1), key=lambda r: r["ranks"])
        if any(row["method"] == method for row in mine):
            plot(ax, method, [(sizes.index(r["ranks"]), r[key] * scale) for r in mine])
    label(ax, title, sizes, "ranks")


def cluster(report: Report) -> Any:
    """Time by method and rate of a link, over DSP's, and tokens/s by the number of ranks."""
    rates = report["sweep"]["rates"]
    figure, axes = panels(2, 2, 6.4)
    for ax, mode, title in zip(axes, ("train", "infer"), ("a training step", "a forward")):
        for method in report["methods"]:
            ratios = [one["modes"][mode][method]["ratio"] for one in rates]
            plot(ax, method, [(i, r["median"], r["least"], r["most"]) for i, r in enumerate(ratios)])
        names = [short(one["rate"]) for one in rates]
        hosts = report["sweep"]["ranks"]
        label(ax, f"Time of {title} / DSP's, {hosts} hosts", names, "rate of a link, bit/s", log=True)
    for ax, kind in zip(axes[2:], ("weak", "strong")):
        rows = [r for r in report["scaling"] if r["kind"] == kind and r["mode"] == "train"]
        by_ranks(ax, f"Tokens/s, {kind} scaling at {rate_name(report['scaling_rate'])}", rows, "tokens_per_s")
    legend(figure, axes, least_to_most={"linewidth": 1.5, "marker": "|", "linestyle": "none", "markersize": 12})
    return figure


def short(megabits: float) -> str:
    return rate_name(megabits).removesuffix("bit/s")


def memory(report: Report) -> Any:
    """Memory a rank, and what fits a budget of it; dashes are in proportion to the ranks."""
    rows, budget = report["rows"], f"in {report['budget'] / 2**20:.0f} MiB a rank"
    one = next(row for row in rows if row["ranks"] == 1)
    figure, axes = panels(1, 3, 3.4)
    titles = "MiB a rank of a step", f"Frames {budget}", f"Samples {budget}"
    for ax, key, title in zip(axes, ("peak", "longest", "batch"), titles):
        scale = 2**-20 if key == "peak" else 1
        sizes = sorted({row["ranks"] for row in rows})
        dash(ax, [(i, one[key] * scale * (1 / n if key == "peak" else n)) for i, n in enumerate(sizes)])
        by_ranks(ax, title, rows, key, scale)
    legend(figure, axes, in_proportion={"linestyle": "--"})
    return figure


def cost_model(report: Report) -> Any:
    """Steps and forwards as measured and as predicted; below, predictions for clusters from data sheets."""
    figure, axes = panels(2, 2, 6.4)
    for ax, mode, title in zip(axes, ("train", "infer"), ("a training step", "a forward")):
        rows = [row for row in report["calibration"]["points"] if (row["kind"], row["mode"]) == ("sweep", mode)]
        rates = list(dict.fromkeys(row["rate"] for row in rows))
        for method in METHODS:
            mine = [row for row in rows if row["method"] == method]
            plot(ax, method, [(rates.index(row["rate"]), row["seconds"]) for row in mine])
            dash(ax, [(rates.index(row["rate"]), row["predicted"]) for row in mine], COLOURS[method])
        label(ax, f"Seconds of {title}", [short(rate) for rate in rates], "rate of a link, bit/s", log=True)
    kinds = {"one sample": "Seconds of a step: 3B, 4M tokens on all ranks"}
    kinds |= {"best": "Thousand tokens/s a GPU: 3B, 0.5M tokens"}
    for ax, (kind, title) in zip(axes[2:], kinds.items()):
        rows = [row for row in report["ranks"] if row["kind"] == kind]
        sizes = list(dict.fromkeys(row["ranks"] for row in rows))
        for method in METHODS:
            mine = [row for row in rows if row["method"] == method]
            values = (r["tokens_per_s"] / r["ranks"] / 1e3 if kind == "best" else r["seconds"] for r in mine)
            places = (sizes.index(row["ranks"]) for row in mine)
            plot(ax, method, [*zip(places, values)], [not row.get("fits", True) for row in mine])
        label(ax, title, sizes, "H100s", log=kind == "one sample")
    ring = {"marker": "o", "fillstyle": "none", "linestyle": "none", "markersize": 12}
    legend(figure, axes, predicted_without_the_point={"linestyle": "--"}, more_than_fits_the_GPUs=ring)
    return figure


def decoding(report: Report) -> Any:
    """The most that a rank holds, beside weights and 1/N of the rest."""
    peaks = {int(n): max(each) * 1e-9 for n, each in report["peak"].items()}
    weights, first = report["weights"] * 1e-9, next(iter(peaks))
    figure, (ax,) = panels(1, 1, 3.2)
    ax.plot(range(len(peaks)), [*peaks.values()], color=COLOURS["dsp"], marker="o", linewidth=2, label="a rank holds")
    ideal = [weights + (peaks[first] - weights) * first / n for n in peaks]
    ax.plot(range(len(peaks)), ideal, "--", color=INK, marker="o", label="weights, and 1/N of the rest")
    size = f"{report['rows']} x {report['columns']}"
    label(ax, f"GB a rank, decoding {size} pixels by AutoencoderKLWan", [*peaks], "ranks")
    ax.legend()
    figure.set_figwidth(6.2)
    return figure


def fold_memory(report: Report) -> Any:
    """Bars of MiB a rank, each beside the share of one rank's memory."""
    runs = report["runs"][::-1]
    one = next(row["mib"] for row in runs if row["kind"] == "dsp" and row["ranks"] == 1)
    ours = [row["kind"] == "dsp" for row in runs]
    names = [f"dsp, {row['ranks']} rank{'s' * (row['ranks'] > 1)}" for row in runs]
    names = [name if flag else "OpenFold3, 1 process" for name, flag in zip(names, ours)]
    figure, (ax,) = panels(1, 1, 2.6)
    colours = [COLOURS["dsp"] if flag else INK for flag in ours]
    ax.bar_label(ax.barh(names, [row["mib"] for row in runs], color=colours, height=0.6), fmt="%.0f MiB", padding=4)
    for i, row in enumerate(runs):
        if row["ranks"] > 1:
            ax.plot([one / row["ranks"]] * 2, [i - 0.4, i + 0.4], color="#d64541", label="one rank's memory / ranks")
    ax.set(title=f"Memory a rank of one training step, {report['residues']} residues")
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.grid(visible=False)
    ax.margins(x=0.2)
    ax.legend(*([each[0]] for each in ax.get_legend_handles_labels()), loc="lower right")
    figure.set_figwidth(6.6)
    return figure


def ribbon(_: Report) -> Any:
    """The layout of an activation by method, stage by stage, by real plans of two layers of the paper's 720M model.

    A colour is the dim that is sharded; under each block is what a rank sends in it and in the switch before.
    """
    plans = {method: two_layers(method) for method in METHODS}
    stages = plans["dsp"].stages
    figure, (ax,) = panels(1, 1, 4.6)
    for y, (method, plan) in enumerate(plans.items()):
        ax.text(-0.12, y, METHODS[method], ha="right", va="center")
        ax.text(len(stages) - 0.05, y, mib(plan.bytes["forward"]), ha="left", va="center")
        last = ""
        for x, row in enumerate(plan.stages):
            bands = layouts(method, row)
            if x:
                same = last == bands[0]  # a bridge of one colour, or a switch
                ax.plot(x - 0.09, y, marker="s" if same else ">", color=BANDS[last] if same else INK, markersize=7)
            for i, dim in enumerate(bands):
                wide = 0.82 / len(bands)
                ax.barh(y, wide, 0.42, x + i * wide, color=BANDS[dim], edgecolor="white", linewidth=0.8)
                turns = method == "ring" and len(bands) > 1 and i == 1
                letter = RING if turns else {"heads": "h", "whole": "–"}.get(dim, dim)
                ax.text(x + (i + 0.5) * wide, y, letter, color="white", ha="center", va="center", weight="bold")
            if row.bytes:
                ax.text(x + 0.41, y + 0.42, mib(row.bytes), ha="center", va="center")
            last = bands[-1]
    for x, row in enumerate(stages):
        over = [dim for dim in row.computes if dim in "ts"]
        words = f"{row.name.replace('blocks.', '')}\n{'over ' + ', '.join(over) if over else ''}"
        ax.text(x + 0.41, -0.72, words, ha="center", va="center")
    ax.text(len(stages) - 0.05, -0.62, "sends", ha="left", va="center")
    names = {
        "t": "t, frames",
        "s": "s, patches",
        "heads": "h, heads and channels",
        "whole": "–, nothing: whole on each",
    }
    for dim, name in names.items():
        ax.barh(0, 0, color=BANDS[dim], label=name)
    ax.plot([], [], ">", color=INK, label="a switch")
    ax.plot([], [], marker=f"${RING}$", color=INK, linestyle="none", markersize=8, label="keys and values go round")
    ax.set(xlim=(-1.0, len(stages) + 0.6), ylim=(len(METHODS) - 0.35, -1.1))
    ax.set_axis_off()
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


PICTURES_OF: dict[str, Callable[[Report], Any]] = {
    "wire": wire, "cluster": cluster, "memory": memory, "cost-model": cost_model, "decoding": decoding,
    "fold-memory": fold_memory, "ribbon": ribbon,
}  # fmt: skip


def redraw(name: str, report: Report, path: Path, look: bool = False) -> None:
    """Draw a picture as SVG; `look`: and as PNG on a light and on a dark page."""
    if find_spec("matplotlib") is None:
        print(f"no {path.name}: it needs matplotlib (pip install -e '.[benchmarks]'), then python benchmarks/draw.py")
        return
    with style():
        figure = PICTURES_OF[name](report)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        for page, colour in {"light": "white", "dark": "#0d1117"}.items() if look else ():
            figure.savefig(path.with_name(f"{name}-{page}.png"), facecolor=colour, dpi=96)
    print("wrote", path)


def main(arguments: Sequence[str]) -> None:
    o = options(__doc__, arguments, {"only": PICTURES_OF}, only=list(PICTURES_OF), out=None)
    (o.out or PICTURES).mkdir(parents=True, exist_ok=True)
    for name in o.only:
        source = RESULTS / f"{name}.json"
        redraw(name, read(source) if source.exists() else {}, (o.out or PICTURES) / f"{name}.svg", o.out is not None)


if __name__ == "__main__":
    main(sys.argv[1:])
