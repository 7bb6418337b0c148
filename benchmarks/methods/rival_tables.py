"""The tables of docs/benchmarks.md, from what the measurements wrote, beside the figures of the paper.

    python benchmarks/methods/rival_tables.py          prints them
    python benchmarks/methods/rival_tables.py --write  and puts them into the page

They are read from benchmarks/results/{wire,cluster,memory,gpu,cost-model}.json; what has not been measured says so. The
paper is Zhao et al., arXiv 2403.10266 (DSP), or where it says so Li et al., arXiv 2105.13120 (RSA).
"""

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu_parts.page import summary
from benchmarks.methods.rivals import METHODS, PAPER, ROOT, Shape, formula
from benchmarks.models.zoo_tables import fill

IMAGES, RESULTS = ROOT / "docs/images", ROOT / "benchmarks/results"
PAGE = ROOT / "docs/benchmarks.md"
OPERATIONS = {  # the paper's table 8, and what has those bytes here
    "all_reduce": ("all-reduce", "2M", "Megatron-LM"),
    "all_gather": ("all-gather", "M", "`dsp.gather`, Megatron-SP"),
    "reduce_scatter": ("reduce-scatter", "M", "Megatron-SP"),
    "all_to_all": ("all-to-all", "M/N", "`dsp.switch`, Ulysses"),
}
TABLE_9 = {  # collectives a layer, and ms of communication at 8M tokens
    "dsp": ("2 all-to-all", 914),
    "ulysses": ("4 all-to-all", 5828),
    "megatron_lm": ("4 all-reduce", 8412),
    "megatron_sp": ("4 all-gather + reduce-scatter", 51908),
}
SCRIPTS = {"wire": "methods/wire", "cluster": "methods/cluster", "memory": "memory/by_method"}
RSA = {"batch": 13.7, "longest": 3.0}  # on 64 GPUs against tensor parallelism


def read(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def missing(name: str) -> str:
    return f"Not measured yet: `python benchmarks/{SCRIPTS[name]}.py` writes `benchmarks/results/{name}.json`."


def when(name: str) -> Iterator[str]:
    """How, when and where something was measured, and its picture."""
    found = read(name)
    if found is None:
        yield missing(name)
        return
    where = found.get("device") or f"{found['cores']} cores ({found['processor']})"
    yield (
        f"`{found['command']}`, {found['date']}, {where}, torch {found['torch']}, load {found['load']:.0f} at the "
        f"start. {described(found['shape'])}"
    )
    if (IMAGES / f"{name}.svg").exists():
        yield f"\n![Measured by benchmarks/{SCRIPTS[name]}.py](images/{name}.svg)"


def described(shape: dict[str, int]) -> str:
    one = Shape(**shape)
    return (
        f"The model has hidden size {one.hidden} and {one.heads} heads; T = {one.frames}, S = {one.places}, "
        f"batch {one.batch}."
    )


def methods_of(rows: list[dict[str, Any]]) -> list[str]:
    return [method for method in METHODS if any(row["method"] == method for row in rows)]


def screen_table() -> Iterator[str]:
    """One row of each measurement and one of the model: what all else on the page is about."""
    yield f"| | {' | '.join(METHODS.values())} |"
    yield "|---|" + "---|" * len(METHODS)
    if found := read("wire"):
        m, rows = Shape(**found["shape"]).activation, found["rows"]
        n = max(row["ranks"] for row in rows)
        told = {r["method"]: f"{r['step']['again'] / m:.2f}" for r in rows if r["ranks"] == n}
        yield _line(f"bytes a rank sends in a layer of a training step, {n} ranks, in M", told)
    if found := read("cluster"):
        for one in found["sweep"]["rates"]:
            rows = one["modes"]["train"]
            if one["rate"] not in (100, 1000, 0):
                continue
            told = {m: f"{rows[m]['ratio']['median']:.2f}" if "ratio" in rows[m] else "1" for m in rows}
            yield _line(f"time of a training step over DSP's, 4 hosts, {rate_name(one['rate'])}", told)
    if found := read("memory"):
        n, rows = max(row["ranks"] for row in found["rows"]), found["rows"]
        for key, name, scale in (
            ("peak", "MiB a rank of a training step", 2**-20), ("longest", "frames in 128 MiB a rank", 1)
        ):  # fmt: skip
            one = next(row[key] for row in rows if row["ranks"] == 1) * scale
            told = {r["method"]: f"{r[key] * scale:.0f}" for r in rows if r["ranks"] == n}
            yield _line(f"{name}, {n} ranks (one: {one:.0f})", told)
    if found := read("cost-model"):
        n, rows = 1024, [row for row in found["ranks"] if row["kind"] == "best"]
        told = {r["method"]: f"{r['tokens_per_s'] / n / 1e3:.1f}" for r in rows if r["ranks"] == n}
        yield _line("*not measured:* thousand tokens/s a GPU, 3B, 0.5M tokens a sample, 1024 H100", told)


def _line(name: str, told: dict[str, str]) -> str:
    return f"| {name} | {' | '.join(told.get(method, 'does not fit') for method in METHODS)} |"


def wire_table() -> Iterator[str]:
    """Table 3: a row a method, units of M a layer; all numbers of ranks in a cell."""
    found = read("wire")
    if found is None:
        yield missing("wire")
        return
    m, sizes = Shape(**found["shape"]).activation, sorted({row["ranks"] for row in found["rows"]})
    numbers = ", ".join(map(str, sizes))
    yield f"| method | paper | forward, N = {numbers} | backward | recomputed | a training step | kept |"
    yield "|---|---|---|---|---|---|---|"
    for method in methods_of(found["rows"]):
        rows = sorted((row for row in found["rows"] if row["method"] == method), key=lambda row: row["ranks"])
        cells = [METHODS[method], PAPER[method]]
        for phase in ("forward", "backward", "recompute"):
            measured = ", ".join(f"{max(0, row['bytes'][phase] / m):.2f}" for row in rows)
            cells.append(measured)
        steps = [(row["step"]["again"] / m, sum(formula(method, row["ranks"]).values())) for row in rows]
        cells.append(", ".join(f"{a:.2f} ({100 * (a / b - 1):+.1f}%)" for a, b in steps))
        cells.append(", ".join(f"{row['step'].get('saved', row['step']['again']) / m:.2f}" for row in rows))
        yield "| " + " | ".join(cells) + " |"


def collectives_table() -> Iterator[str]:
    """Table 8."""
    found = read("wire")
    if found is None or not found.get("collectives"):
        yield missing("wire")
        return
    sizes = sorted({row["ranks"] for row in found["collectives"]})
    yield f"| collective | paper | measured in M, N = {', '.join(map(str, sizes))} | x (N-1)/N | is |"
    yield "|---|---|---|---|---|"
    for key, (name, paper, users) in OPERATIONS.items():
        rows = sorted((r for r in found["collectives"] if r["collective"] == key), key=lambda row: row["ranks"])
        measured, expected = (", ".join(f"{row[kind]:.3f}" for row in rows) for kind in ("measured", "formula"))
        yield f"| {name} | {paper} | {measured} | {expected} | {users} |"


def rate_name(megabits: float) -> str:
    if not megabits:
        return "no limit"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits:g} Mbit/s"


def times(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}–{ratio['most']:.2f})"


def sweep_table(mode: str) -> Iterator[str]:
    """The time of a step or a forward by rate, in seconds for DSP and times that for the others."""
    found = read("cluster")
    if found is None:
        yield missing("cluster")
        return
    sweep, others = found["sweep"], [method for method in found["methods"] if method != "dsp"]
    names = " | ".join(METHODS[method] for method in others)
    yield f"| link | measured, Mbit/s | DSP, s | {names} |"
    yield "|---|---|---|" + "---|" * len(others)
    for one in sweep["rates"]:
        rows = one["modes"][mode]
        ratios = " | ".join(times(rows[method]["ratio"]) for method in others)
        seconds = rows["dsp"]["seconds"]["median"]
        yield f"| {rate_name(one['rate'])} | {one['measured']['all_to_all']:.0f} | {seconds:.3f} | {ratios} |"


def shares_table() -> Iterator[str]:
    """Shares of a training step: the time of its bytes on the link, and what it takes more than without a limit."""
    found = read("cluster")
    if found is None:
        yield missing("cluster")
        return
    sweep, methods = found["sweep"], found["methods"]
    yield "| link | " + " | ".join(METHODS[method] for method in methods) + " |"
    yield "|---|" + "---|" * len(methods)
    for one in sweep["rates"]:
        if not one["rate"]:
            continue
        rows = one["modes"]["train"]
        cells = []
        for method in methods:
            row = rows[method]
            measured = f" / {100 * row['share_measured']:.0f}%" if "share_measured" in row else ""
            cells.append(f"{100 * row['share_of_link']:.0f}%{measured}")
        yield f"| {rate_name(one['rate'])} | " + " | ".join(cells) + " |"


GOALS = {"ulysses": 1.32, "megatron_sp": 4.0}  # times DSP's step: the paper's least lead over Ulysses (figure 5)


def verdict() -> Iterator[str]:
    """The verdict on the steps: whether DSP is ever behind, and from which link on it leads by so much."""
    found = read("cluster")
    if found is None:
        yield missing("cluster")
        return
    points = [
        (row["ratio"], method, f"{'a step' if mode == 'train' else 'a forward'} at {rate_name(one['rate'])}")
        for one in found["sweep"]["rates"]
        for mode, rows in one["modes"].items()
        for method, row in rows.items()
        if method != "dsp"
    ]
    points += [
        (row["ratio"], row["method"], f"{row['kind']} scaling on {row['ranks']} ranks")
        for row in found["scaling"]
        if row["method"] != "dsp"
    ]
    ratio, method, where = min(points, key=lambda point: point[0]["median"])
    behind = [f"{METHODS[m]}, {w}" for r, m, w in points if r["median"] < 1]
    yield (
        f"- Of {len(points)} comparisons on 2 and more ranks DSP's median is behind in {len(behind) or 'none'}"
        f"{': ' + '; '.join(behind) if behind else ''}. The closest is {METHODS[method]}, {where}: {times(ratio)}."
    )
    rounds = [point for point in points if point[0]["least"] < 1]
    if rounds:
        listed = "; ".join(f"{METHODS[m]}, {w}, {r['least']:.2f}" for r, m, w in rounds)
        yield f"- In {len(rounds)} of them some round had it behind: {listed}."
    for method, goal in GOALS.items():
        rates = [one for one in found["sweep"]["rates"] if one["rate"]]
        over = [one for one in rates if one["modes"]["train"][method]["ratio"]["median"] >= goal]
        if not over:
            yield f"- {goal:g} times DSP's step is not reached by {METHODS[method]} on any link here."
            continue
        one = max(over, key=lambda one: one["rate"])["modes"]["train"]
        shares = " and ".join(
            f"{100 * one[m]['share_of_link']:.0f}% to {100 * one[m]['share_measured']:.0f}% ({METHODS[m]})"
            for m in ("dsp", method)
        )
        rate = rate_name(max(each["rate"] for each in over))
        yield (
            f"- {METHODS[method]} takes {goal:g} times DSP's step and more up to {rate}: there "
            f"{times(one[method]['ratio'])}, with a share of communication of {shares}."
        )


def communication_table() -> Iterator[str]:
    """Table 9: the paper's milliseconds, and here the bytes and the time that a slow link adds, all against DSP's."""
    wire, cluster = read("wire"), read("cluster")
    if wire is None:
        yield missing("wire")
        return
    n = max(row["ranks"] for row in wire["rows"])
    steps = {row["method"]: row["step"]["no"] for row in wire["rows"] if row["ranks"] == n}
    added: dict[str, float] = {}
    slow = ""
    if cluster:
        rates = {one["rate"]: one["modes"]["train"] for one in cluster["sweep"]["rates"]}
        least = min(rate for rate in rates if rate)
        if 0 in rates:
            slow = f", {cluster['sweep']['ranks']} ranks at {rate_name(least)}"
            for method in rates[least]:
                parts = [rates[r][method]["parts"] for r in (least, 0)]
                a, b = (p["forward"] + p["backward"] for p in parts)
                added[method] = a - b
    yield f"| method | a layer | paper, ms | paper / DSP | bytes here / DSP, {n} ranks | time added{slow} / DSP |"
    yield "|---|---|---|---|---|---|"
    for method, (what, ms) in TABLE_9.items():
        ours = f"{added[method] / added['dsp']:.1f}" if added.get("dsp", 0) > 0 else "not measured"
        cells = [METHODS[method], what, f"{ms:,}", f"{ms / 914:.1f}", f"{steps[method] / steps['dsp']:.1f}", ours]
        yield "| " + " | ".join(cells) + " |"


def scaling_table() -> Iterator[str]:
    """Figures 6 to 8: DSP in tokens/s, or seconds of a forward; the others times DSP's time."""
    found = read("cluster")
    if found is None:
        yield missing("cluster")
        return
    others = [method for method in found["methods"] if method != "dsp"]
    yield (
        f"| at {rate_name(found['scaling_rate'])} | ranks | DSP, tokens/s | s | "
        + " | ".join(METHODS[m] for m in others)
        + " |"
    )
    yield "|---|---|---|---|" + "---|" * len(others)
    for kind in ("weak", "strong"):
        for mode, title in (("train", "training"), ("infer", "a forward")):
            rows = {(r["ranks"], r["method"]): r for r in found["scaling"] if r["kind"] == kind and r["mode"] == mode}
            for n in sorted({ranks for ranks, _ in rows}):
                dsp = rows[n, "dsp"]
                ratios = [times(rows[n, m]["ratio"]) if (n, m) in rows else "" for m in others]
                head = [f"{kind}, {title}", str(n), f"{dsp['tokens_per_s']:,.0f}", f"{dsp['seconds']['median']:.3f}"]
                yield "| " + " | ".join([*head, *ratios]) + " |"


def memory_table() -> Iterator[str]:
    """Figure 9, and the two figures of RSA."""
    found = read("memory")
    if found is None:
        yield missing("memory")
        return
    one = next(row for row in found["rows"] if row["ranks"] == 1)
    budget = f"{found['budget'] / 2**20:.0f} MiB"
    yield f"| method | ranks | MiB a rank | stages recomputed | frames in {budget} | samples in {budget} |"
    yield "|---|---|---|---|---|---|"
    for row in found["rows"]:
        cells = [METHODS[row["method"]] if row["ranks"] > 1 else "one rank", str(row["ranks"])]
        for key in ("peak", "recomputed"):
            cells.append(f"{row[key] / 2**20:.0f} ({row[key] * row['ranks'] / one[key]:.2f})")
        cells += [f"{row[key]} ({row[key] / max(one[key], 1):.1f}×)" for key in ("longest", "batch")]
        yield "| " + " | ".join(cells) + " |"


def rsa_table() -> Iterator[str]:
    """The sequences that fit with sequence parallelism, against tensor parallelism."""
    found = read("memory")
    rows = {(row["method"], row["ranks"]): row for row in found["rows"]} if found else {}
    n = max((ranks for _, ranks in rows), default=1)
    if ("megatron_lm", n) not in rows:
        yield missing("memory")
        return
    tensor = rows["megatron_lm", n]
    ours = [method for method in METHODS if method != "megatron_lm" and (method, n) in rows]
    yield f"| / Megatron-LM | RSA, 64 GPUs | {' | '.join(f'{METHODS[m]}, {n} ranks' for m in ours)} |"
    yield "|---|---|" + "---|" * len(ours)
    for key, title in (("batch", "largest batch"), ("longest", "longest")):
        ratios = (f"{rows[m, n][key] / max(tensor[key], 1):.1f}" for m in ours)
        yield f"| {title} | {RSA[key]} | {' | '.join(ratios)} |"


def long_table() -> Iterator[str]:
    """RSA's 114K tokens: one sequence, with attention to all keys and to sums of them."""
    memory = read("memory")
    found = memory.get("long") if memory else None
    if found is None:
        yield missing("memory")
        return
    one, budget = Shape(**found["shape"]), found["budget"]
    size = f"{budget / 2**20:.0f} MiB"
    first = {row["low_rank"]: row for row in found["rows"] if row["ranks"] == 1}
    yield (
        f"| {one.tokens:,} tokens, attention to | ranks | MiB a rank | fit in {size} | a step, s | longest in {size} |"
    )
    yield "|---|---|---|---|---|---|"
    for row in sorted(found["rows"], key=lambda row: (row["low_rank"], row["ranks"])):
        alone = first[row["low_rank"]]
        name = f"{row['low_rank']} sums (Linformer)" if row["low_rank"] else "all keys"
        cells = [name, str(row["ranks"])]
        cells.append(f"{row['peak'] / 2**20:.0f} ({row['peak'] * row['ranks'] / alone['peak']:.2f})")
        cells.append("yes" if row["peak"] <= budget else "no")
        cells.append(f"{row['seconds']:.1f}")
        ratio = row.get("longest", 0) / max(alone.get("longest", 0), 1)
        cells.append(f"{row['longest']:,} ({ratio:.2f}×)" if "longest" in row else "")
        yield "| " + " | ".join(cells) + " |"


def gpu_table() -> Iterator[str]:
    """The main numbers of docs/gpu.md."""
    found = read("gpu")
    if found is None or found["dry"]:
        yield "Not run on a GPU yet: `python benchmarks/gpu.py` writes `benchmarks/results/gpu.json`."
    if found is not None:
        yield from summary(found)


def cost() -> dict[str, Any] | None:
    return read("cost-model")


def no_cost() -> str:
    return "Not made yet: `python benchmarks/methods/cost_model.py` writes `benchmarks/results/cost-model.json`."


def cost_when_table() -> Iterator[str]:
    found = cost()
    if found is None:
        yield no_cost()
        return
    one, values = found["calibration"], found["calibration"]["parameters"]
    over = f"{one['over']} of {len(one['points'])} are over {found['aim']:.0%}"
    again = one["repeats"]
    yield (
        f"`{found['command']}`, {found['date']}, from the measurements of {found['measured']['date']}: the error of a "
        f"point has a median of {one['median']:.1%} and is {one['worst']:.0%} at the worst; {over}. (What was measured "
        f"twice, {again['count']} points, differs by {again['median']:.1%}, at most {again['worst']:.0%}.) Fitted: "
        f"{1e-9 / values['compute'] if values['compute'] else math.inf:.3g} GFLOP/s a core, "
        f"{1e-9 / values['memory'] if values['memory'] else math.inf:.3g} GB/s of its memory, "
        f"{1e3 * values['latency']:.2g} ms a collective, and times the bytes at the link's measured rate: "
        + ", ".join(f"{name} {values[name]:.2f}" for name in ("all-to-all", "hops", "gathers", "all-reduce"))
        + "."
    )
    yield "\n![The cost model beside the measurements, and for clusters](images/cost-model.svg)"


def cost_table() -> Iterator[str]:
    """Signed errors of every point, predicted without it: of the step, and of the forward."""
    found = cost()
    if found is None:
        yield no_cost()
        return
    points = {(p["kind"], p["rate"], p["ranks"], p["method"], p["mode"]): p for p in found["calibration"]["points"]}
    methods = [m for m in METHODS if any(key[3] == m for key in points)]

    def error(key: tuple[Any, ...]) -> str:
        if key not in points:
            return ""
        value = points[key]["error"]
        return f"**{value:+.0%}**" if abs(value) > found["aim"] else f"{value:+.0%}"

    yield "| link | ranks | " + " | ".join(METHODS[m] for m in methods) + " |"
    yield "|---|---|" + "---|" * len(methods)
    for kind, rate, n in dict.fromkeys(key[:3] for key in points):
        pairs = ([error((kind, rate, n, m, mode)) for mode in ("train", "infer")] for m in methods)
        cells = [" / ".join(filter(None, pair)) for pair in pairs]
        name = rate_name(rate) if kind == "sweep" else f"{rate_name(rate)}, {kind}"
        yield f"| {name} | {n} | " + " | ".join(cells) + " |"


def between(values: list[float], form: str = ".2f") -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def cost_paper_table() -> Iterator[str]:
    """Every number that the paper's text has of its figures 5 to 8 and table 9, and the model's."""
    found = cost()
    if found is None:
        yield no_cost()
        return
    five = {(r["size"], r["frames"], r["method"]): r for r in found["figure_5"]}

    def ahead(method: str) -> str:
        return between([five[s, f, "dsp"]["rate"] / r["rate"] for (s, f, m), r in five.items() if m == method])

    def lost(method: str) -> list[float]:
        drops = []
        for size in {key[0] for key in five}:
            mine = sorted((f, r["useful"]) for (s, f, m), r in five.items() if (s, m) == (size, method))
            drops.append(1 - mine[-1][1] / mine[0][1])
        return drops

    def gains(figure: str, key: str, method: str) -> str:
        rows = {(r["size"], r["frames"], r["ranks"], r["method"]): r[key] for r in found[figure] if key in r}
        pairs = [(rows[(*case, "dsp")], value) for (*case, m), value in rows.items() if m == method]
        return between([a / b if key == "rate" else b / a for a, b in pairs])

    def rate(figure: str, size: str, frames: int, n: int) -> float:
        rows = (r for r in found[figure] if (r["size"], r["frames"], r["ranks"]) == (size, frames, n))
        return next(r["rate"] for r in rows if r["method"] == "dsp")

    others = [m for m in METHODS if m != "dsp"]
    in_five = [m for m in others if any(key[2] == m for key in five)]
    all_of = {m: METHODS[m] for m in others}
    yield "| | paper | model |"
    yield "|---|---|---|"
    yield f"| figure 5, tokens/s of DSP / Ulysses | 1.32 to 1.75 | {ahead('ulysses')} |"
    rest = ", ".join(f"{METHODS[m]} {ahead(m)}" for m in in_five if m != "ulysses")
    yield f"| figure 5, of DSP / others | up to 10 | {rest} |"
    yield f"| figure 5, FLOPS of DSP lost from 0.5M to 4M tokens | 23% at most | {between(lost('dsp'), '.1%')} |"
    rest = ", ".join(f"{METHODS[m]} {between(lost(m), '.0%')}" for m in in_five)
    yield f"| figure 5, of the others, to their longest | 40% at least | {rest} |"
    rest = ", ".join(f"{name} {gains('figure_6', 'rate', m)}" for m, name in all_of.items())
    yield f"| figure 6, weak scaling: tokens/s of DSP / others | more than 1.807 | {rest} |"
    loss = 1 - rate("figure_6", "3b", 128, 64) / rate("figure_6", "3b", 128, 8) / 8
    yield f"| figure 6, lost by DSP a GPU from 8 to 64 | 15% | {loss:.1%} (3B) |"
    speed = [rate("figure_7", s, f, n) / rate("figure_7", s, f, 1) for s, f, n in (("720m", 64, 8), ("3b", 16, 4))]
    both = ", ".join(f"{s:.2f}" for s in speed)
    yield f"| figure 7, strong scaling: DSP on 8 (720M) and 4 (3B) GPUs / one | 8, 4 (linear) | {both} |"
    rest = ", ".join(f"{name} {gains('figure_7', 'rate', m)}" for m, name in all_of.items())
    yield f"| figure 7, tokens/s of DSP / others | more, no number | {rest} |"
    rest = ", ".join(f"{name} {gains('figure_7', 'forward', m)}" for m, name in all_of.items())
    yield f"| figure 8, latency of others / DSP | more, no number | {rest} |"
    nine = {(r["method"], r["ranks"]): r["seconds"] for r in found["table_9"]}
    sizes = sorted({n for _, n in nine})
    for method, (_, ms) in ((m, row) for m, row in TABLE_9.items() if m != "dsp"):
        ratios = ", ".join(f"{nine[method, n] / nine['dsp', n]:.1f} on {n}" for n in sizes)
        yield f"| table 9, communication of {METHODS[method]} / DSP at 8M tokens | {ms / 914:.1f} | {ratios} |"


def cost_ranks_table() -> Iterator[str]:
    """By method over N: one sample on all ranks, in seconds; and the best dp x sp, in tokens/s."""
    found = cost()
    if found is None:
        yield no_cost()
        return
    rows = {(r["kind"], r["ranks"], r["method"]): r for r in found["ranks"]}
    sizes = sorted({n for _, n, _ in rows})
    yield "| | method | " + " | ".join(f"{n}" for n in sizes) + " |"
    yield "|---|---|" + "---|" * len(sizes)
    for kind, title in (("one sample", "4M tokens on all, s"), ("best", "0.5M tokens, best dp × sp, k tokens/s")):
        for method in METHODS:
            cells = []
            for n in sizes:
                r = rows.get((kind, n, method))
                if r is None:
                    cells.append("none")
                elif kind == "best":
                    cells.append(f"{r['tokens_per_s'] / 1e3:.0f} ({r['dp']} × {r['sp']})")
                else:
                    cells.append(f"{r['seconds']:.1f}" + ("" if r["fits"] else "*"))
            yield f"| {title} | {METHODS[method]} | " + " | ".join(cells) + " |"


def cost_best_table() -> Iterator[str]:
    """The best (dp, sp, method) for a model, a length and a cluster."""
    found = cost()
    if found is None:
        yield no_cost()
        return
    yield "| model | tokens a sample | cluster | best | a step | tokens/s | GiB a rank | best without DSP |"
    yield "|---|---|---|---|---|---|---|---|"
    for r in found["best"]:
        tokens = r["frames"] * found["patches"]
        head = [r["size"].upper(), f"{tokens / 2**20:g}M", f"{r['ranks']} {r['device'].upper()}"]
        best, rival = r["best"], r["rival"]
        if best is None:
            yield "| " + " | ".join([*head, "does not fit", "", "", "", ""]) + " |"
            continue
        name = f"dp {best['dp']} × sp {best['sp']}" + (f", {METHODS[best['method']]}" if best["sp"] > 1 else "")
        numbers = [f"{best['seconds']:.1f} s", f"{best['tokens_per_s']:,.0f}", f"{best['held'] / 2**30:.0f}"]
        other = ""
        if rival and best["sp"] > 1:
            how = METHODS[rival["method"]] if rival["sp"] > 1 else "no sp"
            lead = rival["tokens_per_s"] / best["tokens_per_s"] - 1
            other = f"dp {rival['dp']} × sp {rival['sp']}, {how}: {lead:+.1%}"
        yield "| " + " | ".join([*head, name, *numbers, other]) + " |"


TABLES = {
    "screen": screen_table,
    "wire-when": lambda: when("wire"),
    "wire": wire_table,
    "collectives": collectives_table,
    "communication": communication_table,
    "cluster-when": lambda: when("cluster"),
    "train": lambda: sweep_table("train"),
    "infer": lambda: sweep_table("infer"),
    "shares": shares_table,
    "verdict": verdict,
    "scaling": scaling_table,
    "memory-when": lambda: when("memory"),
    "memory": memory_table,
    "rsa": rsa_table,
    "long": long_table,
    "gpu": gpu_table,
    "cost-when": cost_when_table,
    "cost": cost_table,
    "cost-paper": cost_paper_table,
    "cost-ranks": cost_ranks_table,
    "cost-best": cost_best_table,
}


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(fill(PAGE.read_text(), TABLES))
    else:
        for make in TABLES.values():
            print("\n".join(make()), end="\n\n")
