"""The tables of docs/benchmarks*.md and docs/cost-model.md: what was measured, beside the figures of the paper.

    python benchmarks/tables.py          prints them
    python benchmarks/tables.py --write  and puts them into the pages

They are read from benchmarks/results/{wire,cluster,memory,gpu,cost-model}.json; what has not been measured says so. The
paper is Zhao et al., arXiv 2403.10266 (DSP), or where it says so Li et al., arXiv 2105.13120 (RSA).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import DOCS, PICTURES, RESULTS, Report, between, fill, line, rate_name, table
from benchmarks.common import read as read_results
from benchmarks.gpu_parts.page import summary
from benchmarks.memory import HEAD, cells
from benchmarks.methods import METHODS, PAPER, TABLE_9, Shape, formula

Lines = Iterable[str]
PAGES = [DOCS / f"{name}.md" for name in ("benchmarks", "benchmarks-bytes", "benchmarks-time", "cost-model")]
OPERATIONS = {  # the paper's table 8, and what has those bytes here
    "all_reduce": ("all-reduce", "2M", "Megatron-LM"),
    "all_gather": ("all-gather", "M", "`dsp.gather`, Megatron-SP"),
    "reduce_scatter": ("reduce-scatter", "M", "Megatron-SP"),
    "all_to_all": ("all-to-all", "M/N", "`dsp.switch`, Ulysses"),
}
IN_A_LAYER = {  # the paper's table 9
    "dsp": "2 all-to-all", "ulysses": "4 all-to-all", "megatron_lm": "4 all-reduce",
    "megatron_sp": "4 all-gather + reduce-scatter",
}  # fmt: skip
SCRIPTS = {
    "wire": "wire.py", "cluster": "cluster.py", "memory": "memory.py", "cost-model": "cost_model.py", "gpu": "gpu.py",
}  # fmt: skip
RSA = {"batch": 13.7, "longest": 3.0}  # on 64 GPUs against tensor parallelism
GOALS = {"ulysses": 1.32, "megatron_sp": 4.0}  # times DSP's step: the paper's least lead over Ulysses (figure 5)
PHASES = "forward", "backward", "recompute"
OTHERS = [method for method in METHODS if method != "dsp"]


def read(name: str) -> Report | None:
    path = RESULTS / f"{name}.json"
    return read_results(path) if path.exists() else None


def by_method(rows: Iterable[Report]) -> dict[str, list[Report]]:
    """The rows of each method, by the number of ranks."""
    ordered = sorted(rows, key=lambda row: row["ranks"])
    groups = {method: [row for row in ordered if row["method"] == method] for method in METHODS}
    return {method: each for method, each in groups.items() if each}


def named(methods: Iterable[str]) -> list[str]:
    return [METHODS[method] for method in methods]


def listed(values: Iterable[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def times(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}–{ratio['most']:.2f})"


def when(name: str) -> Callable[[Report], Iterator[str]]:
    """How, when and where something was measured, and its picture."""

    def lines(report: Report) -> Iterator[str]:
        on, one = report["machine"], Shape(**report["shape"])
        yield (
            f"`{report['command']}`, {on['date']}, {on['cores']} cores ({on['device']}), torch {on['torch']}, commit "
            f"{report['commit']}, load {on['load']:.0f} at the "
            f"start. The model has hidden size {one.hidden} and {one.heads} heads; T = {one.frames}, S = {one.places}, "
            f"batch {one.batch}."
        )
        if (PICTURES / f"{name}.svg").exists():
            yield f"\n![Measured by benchmarks/{SCRIPTS[name]}](images/{name}.svg)"

    return lines


def screen_table(_: Report) -> Iterator[str]:
    """One row of each measurement and one of the model: what all other tables are about."""

    def row(name: str, cells: dict[str, str]) -> str:
        return line([name, *(cells.get(method, "does not fit") for method in METHODS)])

    yield from table(["", *METHODS.values()], [])
    if report := read("wire"):
        m, n = Shape(**report["shape"]).activation, max(row["ranks"] for row in report["rows"])
        cells = {r["method"]: f"{r['step']['again'] / m:.2f}" for r in report["rows"] if r["ranks"] == n}
        yield row(f"bytes a rank sends in a layer of a training step, {n} ranks, in M", cells)
    if report := read("cluster"):
        for one in report["sweep"]["rates"]:
            if one["rate"] in (100, 1000, 0):
                cells = {m: f"{r['ratio']['median']:.2f}" for m, r in one["modes"]["train"].items()}
                yield row(f"time of a training step over DSP's, 4 hosts, {rate_name(one['rate'])}", cells)
    if report := read("memory"):
        n = max(row["ranks"] for row in report["rows"])
        for key, name, scale in (
            ("peak", "MiB a rank of a training step", 2**-20), ("longest", "frames in 128 MiB a rank", 1)
        ):  # fmt: skip
            one = next(row[key] for row in report["rows"] if row["ranks"] == 1) * scale
            cells = {r["method"]: f"{r[key] * scale:.0f}" for r in report["rows"] if r["ranks"] == n}
            yield row(f"{name}, {n} ranks (one: {one:.0f})", cells)
    if report := read("cost-model"):
        best = [r for r in report["ranks"] if (r["kind"], r["ranks"]) == ("best", 1024)]
        cells = {r["method"]: f"{r['tokens_per_s'] / 1024 / 1e3:.1f}" for r in best}
        yield row("*not measured:* thousand tokens/s a GPU, 3B, 0.5M tokens a sample, 1024 H100", cells)


def wire_table(report: Report) -> Lines:
    """Table 3: a row a method, units of M a layer; all numbers of ranks in a cell."""
    m, sizes = Shape(**report["shape"]).activation, sorted({row["ranks"] for row in report["rows"]})
    rows = []
    for method, each in by_method(report["rows"]).items():
        phases = [listed((max(0, r["bytes"][p] / m) for r in each), ".2f") for p in PHASES]
        steps = [(r["step"]["again"] / m, sum(formula(method, r["ranks"]).values())) for r in each]
        step = ", ".join(f"{a:.2f} ({100 * (a / b - 1):+.1f}%)" for a, b in steps)
        kept = listed((r["step"].get("saved", r["step"]["again"]) / m for r in each), ".2f")
        rows.append([METHODS[method], PAPER[method], *phases, step, kept])
    first = f"forward, N = {', '.join(map(str, sizes))}"
    return table(["method", "paper", first, "backward", "recomputed", "a training step", "kept"], rows)


def collectives_table(report: Report) -> Lines:
    """Table 8."""
    sizes = sorted({row["ranks"] for row in report["collectives"]})
    rows = []
    for key, (name, paper, users) in OPERATIONS.items():
        mine = [r for r in report["collectives"] if r["collective"] == key]
        rows.append([name, paper, *(listed((r[k] for r in mine), ".3f") for k in ("measured", "formula")), users])
    measured = f"measured in M, N = {', '.join(map(str, sizes))}"
    return table(["collective", "paper", measured, "x (N-1)/N", "is"], rows)


def sweep_table(mode: str) -> Callable[[Report], Lines]:
    """The time of a step or a forward by rate, in seconds for DSP and times that for the others."""

    def lines(report: Report) -> Lines:
        rows = []
        for one in report["sweep"]["rates"]:
            of, link = one["modes"][mode], [rate_name(one["rate"]), f"{one['measured']['all_to_all']:.0f}"]
            rows.append([*link, f"{of['dsp']['seconds']['median']:.3f}", *(times(of[m]["ratio"]) for m in OTHERS)])
        return table(["link", "measured, Mbit/s", "DSP, s", *named(OTHERS)], rows)

    return lines


def shares_table(report: Report) -> Lines:
    """Shares of a training step: the time of its bytes on the link, and what it takes more than without a limit."""
    both = "share_of_link", "share_measured"
    rows = (
        [rate_name(one["rate"])] + [" / ".join(f"{one['modes']['train'][m][k]:.0%}" for k in both) for m in METHODS]
        for one in report["sweep"]["rates"] if one["rate"]
    )  # fmt: skip
    return table(["link", *METHODS.values()], rows)


def verdict(report: Report) -> Iterator[str]:
    """The verdict on the steps: whether DSP is ever behind, and from which link on it leads by so much."""
    rates = report["sweep"]["rates"]
    points = [
        (row["ratio"], method, f"{'a step' if mode == 'train' else 'a forward'} at {rate_name(one['rate'])}")
        for one in rates for mode, rows in one["modes"].items() for method, row in rows.items() if method != "dsp"
    ]  # fmt: skip
    points += [
        (row["ratio"], row["method"], f"{row['kind']} scaling on {row['ranks']} ranks")
        for row in report["scaling"] if row["method"] != "dsp"
    ]  # fmt: skip
    ratio, method, where = min(points, key=lambda point: point[0]["median"])
    behind = [f"{METHODS[m]}, {w}" for r, m, w in points if r["median"] < 1]
    yield (
        f"- Of {len(points)} comparisons on 2 and more ranks DSP's median is behind in {len(behind) or 'none'}"
        f"{': ' + '; '.join(behind) if behind else ''}. The closest is {METHODS[method]}, {where}: {times(ratio)}."
    )
    if rounds := [f"{METHODS[m]}, {w}, {r['least']:.2f}" for r, m, w in points if r["least"] < 1]:
        yield f"- In {len(rounds)} of them some round had it behind: {'; '.join(rounds)}."
    for method, goal in GOALS.items():
        over = [one for one in rates if one["rate"] and one["modes"]["train"][method]["ratio"]["median"] >= goal]
        if not over:
            yield f"- {goal:g} times DSP's step is not reached by {METHODS[method]} on any link here."
            continue
        one = max(over, key=lambda one: one["rate"])
        train = one["modes"]["train"]
        both = [(train[m]["share_of_link"], train[m]["share_measured"], METHODS[m]) for m in ("dsp", method)]
        shares = " and ".join(f"{link:.0%} to {measured:.0%} ({name})" for link, measured, name in both)
        yield (
            f"- {METHODS[method]} takes {goal:g} times DSP's step and more up to {rate_name(one['rate'])}: there "
            f"{times(train[method]['ratio'])}, with a share of communication of {shares}."
        )


def communication_table(report: Report) -> Lines:
    """Table 9: the paper's milliseconds, and here the bytes and the time that a slow link adds, all against DSP's."""
    n, cluster = max(row["ranks"] for row in report["rows"]), read("cluster")
    sent = {row["method"]: row["step"]["no"] for row in report["rows"] if row["ranks"] == n}
    added: dict[str, float] = {}
    title = "time added / DSP"
    if cluster:
        rates = {one["rate"]: one["modes"]["train"] for one in cluster["sweep"]["rates"]}
        least = min(rate for rate in rates if rate)
        title = f"time added, {cluster['sweep']['ranks']} ranks at {rate_name(least)} / DSP"
        for method in rates[least]:
            slow, free = (rates[rate][method]["parts"] for rate in (least, 0))
            added[method] = sum(slow[part] - free[part] for part in ("forward", "backward"))
    rows = []
    for method, ms in TABLE_9.items():
        ours = f"{added[method] / added['dsp']:.1f}" if added else "not measured"
        ratios = f"{ms / TABLE_9['dsp']:.1f}", f"{sent[method] / sent['dsp']:.1f}", ours
        rows.append([METHODS[method], IN_A_LAYER[method], f"{ms:,}", *ratios])
    return table(["method", "a layer", "paper, ms", "paper / DSP", f"bytes here / DSP, {n} ranks", title], rows)


def scaling_table(report: Report) -> Lines:
    """Figures 6 to 8: DSP in tokens/s, or seconds of a forward; the others times DSP's time."""
    lines = []
    for kind in ("weak", "strong"):
        for mode, title in (("train", "training"), ("infer", "a forward")):
            rows = {(r["ranks"], r["method"]): r for r in report["scaling"] if (r["kind"], r["mode"]) == (kind, mode)}
            for n in sorted({ranks for ranks, _ in rows}):
                dsp = rows[n, "dsp"]
                head = [f"{kind}, {title}", n, f"{dsp['tokens_per_s']:,.0f}", f"{dsp['seconds']['median']:.3f}"]
                lines.append(head + [times(rows[n, m]["ratio"]) if (n, m) in rows else "" for m in OTHERS])
    return table([f"at {rate_name(report['scaling_rate'])}", "ranks", "DSP, tokens/s", "s", *named(OTHERS)], lines)


def memory_table(report: Report) -> Lines:
    """Figure 9."""
    one, budget = report["rows"][0], f"{report['budget'] / 2**20:.0f} MiB"
    return table([*HEAD, f"frames in {budget}", f"samples in {budget}"], (cells(row, one) for row in report["rows"]))


def rsa_table(report: Report) -> Lines:
    """The sequences that fit with sequence parallelism, against tensor parallelism."""
    n = max(row["ranks"] for row in report["rows"])
    rows = {row["method"]: row for row in report["rows"] if row["ranks"] == n}
    tensor = rows.pop("megatron_lm")
    lines = (
        [title, RSA[key], *(f"{row[key] / max(tensor[key], 1):.1f}" for row in rows.values())]
        for key, title in (("batch", "largest batch"), ("longest", "longest"))
    )
    return table(["/ Megatron-LM", "RSA, 64 GPUs", *(f"{name}, {n} ranks" for name in named(rows))], lines)


def gpu_table(report: Report) -> Iterator[str]:
    """The main numbers of docs/gpu.md."""
    if report["dry"]:
        yield "Not run on a GPU yet: `python benchmarks/gpu.py` writes `benchmarks/results/gpu.json`."
    yield from summary(report)


def cost_when(report: Report) -> Iterator[str]:
    one, values, repeats = report["calibration"], report["calibration"]["parameters"], report["calibration"]["repeats"]
    flops, stream = (1e-9 / values[name] if values[name] else math.inf for name in ("compute", "memory"))
    kinds = ", ".join(f"{name} {values[name]:.2f}" for name in ("all-to-all", "hops", "gathers", "all-reduce"))
    yield (
        f"`{report['command']}`, {report['machine']['date']}, from the measurements of "
        f"{report['measured']['machine']['date']}: the error of a "
        f"point has a median of {one['median']:.1%} and is {one['worst']:.0%} at the worst; {one['over']} of "
        f"{len(one['points'])} are over {report['aim']:.0%}. (What was measured "
        f"twice, {repeats['count']} points, differs by {repeats['median']:.1%}, at most {repeats['worst']:.0%}.) "
        f"Fitted: {flops:.3g} GFLOP/s a core, {stream:.3g} GB/s of its memory, {1e3 * values['latency']:.2g} ms a "
        f"collective, and times the bytes at the link's measured rate: {kinds}."
    )
    yield "\n![The cost model beside the measurements, and for clusters](images/cost-model.svg)"


def cost_table(report: Report) -> Lines:
    """Signed errors of every point, predicted without it: of the step, and of the forward."""
    points = {(p["kind"], p["rate"], p["ranks"], p["method"], p["mode"]): p for p in report["calibration"]["points"]}

    def errors(*key: Any) -> str:
        values = [points[(*key, mode)]["error"] for mode in ("train", "infer") if (*key, mode) in points]
        return " / ".join(f"**{v:+.0%}**" if abs(v) > report["aim"] else f"{v:+.0%}" for v in values)

    rows = (
        [rate_name(rate) + ("" if kind == "sweep" else f", {kind}"), n, *(errors(kind, rate, n, m) for m in METHODS)]
        for kind, rate, n in dict.fromkeys(key[:3] for key in points)
    )
    return table(["link", "ranks", *METHODS.values()], rows)


def cost_paper_table(report: Report) -> Lines:
    """Every number that the paper's text has of its figures 5 to 8 and table 9, and the model's."""
    five = {(r["size"], r["frames"], r["method"]): r for r in report["figure_5"]}
    in_five = [m for m in OTHERS if any(key[2] == m for key in five)]

    def ahead(method: str) -> str:
        return between([five[s, f, "dsp"]["rate"] / r["rate"] for (s, f, m), r in five.items() if m == method])

    def lost(method: str, form: str) -> str:
        drops = []
        for size in {key[0] for key in five}:
            mine = sorted((f, r["useful"]) for (s, f, m), r in five.items() if (s, m) == (size, method))
            drops.append(1 - mine[-1][1] / mine[0][1])
        return between(drops, form)

    def gains(figure: str, key: str) -> str:
        rows = {(r["size"], r["frames"], r["ranks"], r["method"]): r[key] for r in report[figure] if key in r}
        words = []
        for method in OTHERS:
            pairs = [(rows[(*case, "dsp")], value) for (*case, m), value in rows.items() if m == method]
            words.append(f"{METHODS[method]} {between([a / b if key == 'rate' else b / a for a, b in pairs])}")
        return ", ".join(words)

    def rate(figure: str, size: str, frames: int, n: int) -> float:
        rows = (r for r in report[figure] if (r["size"], r["frames"], r["ranks"]) == (size, frames, n))
        return next(r["rate"] for r in rows if r["method"] == "dsp")

    loss = 1 - rate("figure_6", "3b", 128, 64) / rate("figure_6", "3b", 128, 8) / 8
    speed = [rate("figure_7", s, f, n) / rate("figure_7", s, f, 1) for s, f, n in (("720m", 64, 8), ("3b", 16, 4))]
    rows = [
        ("figure 5, tokens/s of DSP / Ulysses", "1.32 to 1.75", ahead("ulysses")),
        ("figure 5, of DSP / others", "up to 10", ", ".join(f"{METHODS[m]} {ahead(m)}" for m in in_five[1:])),
        ("figure 5, FLOPS of DSP lost from 0.5M to 4M tokens", "23% at most", lost("dsp", ".1%")),
        ("figure 5, of the others, to their longest", "40% at least",
         ", ".join(f"{METHODS[m]} {lost(m, '.0%')}" for m in in_five)),
        ("figure 6, weak scaling: tokens/s of DSP / others", "more than 1.807", gains("figure_6", "rate")),
        ("figure 6, lost by DSP a GPU from 8 to 64", "15%", f"{loss:.1%} (3B)"),
        ("figure 7, strong scaling: DSP on 8 (720M) and 4 (3B) GPUs / one", "8, 4 (linear)", listed(speed, ".2f")),
        ("figure 7, tokens/s of DSP / others", "more, no number", gains("figure_7", "rate")),
        ("figure 8, latency of others / DSP", "more, no number", gains("figure_7", "forward")),
    ]  # fmt: skip
    nine = {(r["method"], r["ranks"]): r["seconds"] for r in report["table_9"]}
    for method, ms in TABLE_9.items():
        if method != "dsp":
            ratios = ", ".join(f"{nine[method, n] / nine['dsp', n]:.1f} on {n}" for n in sorted({n for _, n in nine}))
            title = f"table 9, communication of {METHODS[method]} / DSP at 8M tokens"
            rows.append((title, f"{ms / TABLE_9['dsp']:.1f}", ratios))
    return table(["", "paper", "model"], rows)


def cost_ranks_table(report: Report) -> Lines:
    """By method over N: one sample on all ranks, in seconds; and the best dp x sp, in tokens/s."""
    rows = {(r["kind"], r["ranks"], r["method"]): r for r in report["ranks"]}
    sizes = sorted({n for _, n, _ in rows})

    def cell(kind: str, row: Report | None) -> str:
        if row is None:
            return "none"
        if kind == "best":
            return f"{row['tokens_per_s'] / 1e3:.0f} ({row['dp']} × {row['sp']})"
        return f"{row['seconds']:.1f}" + ("" if row["fits"] else "*")

    titles = {"one sample": "4M tokens on all, s", "best": "0.5M tokens, best dp × sp, k tokens/s"}
    lines = (
        [title, METHODS[method], *(cell(kind, rows.get((kind, n, method))) for n in sizes)]
        for kind, title in titles.items() for method in METHODS
    )  # fmt: skip
    return table(["", "method", *sizes], lines)


def cost_best_table(report: Report) -> Lines:
    """The best (dp, sp, method) for a model, a length and a cluster."""

    def mesh(one: Report) -> str:
        return f"dp {one['dp']} × sp {one['sp']}" + (f", {METHODS[one['method']]}" if one["sp"] > 1 else "")

    lines = []
    for r in report["best"]:
        tokens, best, rival = r["frames"] * report["patches"], r["best"], r["rival"]
        cells = ["does not fit", "", "", "", ""]
        if best:
            cells = [
                mesh(best),
                f"{best['seconds']:.1f} s",
                f"{best['tokens_per_s']:,.0f}",
                f"{best['held'] / 2**30:.0f}",
                "",
            ]
        if best and rival and best["sp"] > 1:
            without = mesh(rival) + ("" if rival["sp"] > 1 else ", no sp")
            cells[-1] = f"{without}: {rival['tokens_per_s'] / best['tokens_per_s'] - 1:+.1%}"
        lines.append([r["size"].upper(), f"{tokens / 2**20:g}M", f"{r['ranks']} {r['device'].upper()}", *cells])
    numbers = ["best", "a step", "tokens/s", "GiB a rank", "best without DSP"]
    return table(["model", "tokens a sample", "cluster", *numbers], lines)


TABLES: dict[str, tuple[str, Callable[[Report], Lines]]] = {  # the results that each is made of
    "screen": ("wire", screen_table),
    "wire-when": ("wire", when("wire")), "wire": ("wire", wire_table), "collectives": ("wire", collectives_table),
    "communication": ("wire", communication_table), "cluster-when": ("cluster", when("cluster")),
    "train": ("cluster", sweep_table("train")), "infer": ("cluster", sweep_table("infer")),
    "shares": ("cluster", shares_table), "verdict": ("cluster", verdict), "scaling": ("cluster", scaling_table),
    "memory-when": ("memory", when("memory")), "memory": ("memory", memory_table), "rsa": ("memory", rsa_table),
    "gpu": ("gpu", gpu_table), "cost-when": ("cost-model", cost_when), "cost": ("cost-model", cost_table),
    "cost-paper": ("cost-model", cost_paper_table), "cost-ranks": ("cost-model", cost_ranks_table),
    "cost-best": ("cost-model", cost_best_table),
}  # fmt: skip


def lines_of(name: str) -> Lines:
    source, make = TABLES[name]
    report = read(source)
    if report is None:
        return [f"Not measured yet: `python benchmarks/{SCRIPTS[source]}` writes `benchmarks/results/{source}.json`."]
    return make(report)


def written(page: str) -> str:
    return fill(page, {name: lines_of(name) for name in TABLES})


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        for page in PAGES:
            page.write_text(written(page.read_text()))
    else:
        for name in TABLES:
            print("\n".join(lines_of(name)), end="\n\n")
