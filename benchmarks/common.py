"""The shared parts of the scripts: options, ranks, results with their circumstances, tables of pages."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES, DOCS = ROOT / "benchmarks/results", ROOT / "docs/images", ROOT / "docs"
Report = dict[str, Any]
CIRCUMSTANCES = "command", "commit", "machine"


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


# ------------------------------------------------------------------------------------------------------------- results


def circumstances(arguments: Sequence[str]) -> Report:
    """How, of which commit, when and on which machine something is measured."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return {
        "command": " ".join(["python", name, *arguments]),
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "machine": {
            "date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(),
            "device": names[0] if names else platform.machine(), "torch": torch.__version__.split("+")[0],
            "load": os.getloadavg()[0],
        },
    }  # fmt: skip


def save(path: Path, report: Report) -> None:
    """Write {"command", "commit", "machine", "results": {...}}; a reader sees all of this report or of another."""
    results = {key: value for key, value in report.items() if key not in CIRCUMSTANCES}
    written = {key: report[key] for key in CIRCUMSTANCES} | {"results": results}
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(written, indent=1, default=str) + "\n")
    aside.replace(path)


def read(path: Path) -> Report:
    """Results and their circumstances together, as `save` was given them."""
    written = json.loads(path.read_text())
    return {key: written[key] for key in CIRCUMSTANCES} | written["results"]


def write_down(name: str, out: Path | None, report: Report) -> None:
    """Save results to OUT.json and draw OUT.svg of them, by default where the docs look."""
    from benchmarks import draw

    numbers, drawn = (RESULTS / name, PICTURES / name) if out is None else (out, out)
    save(path := Path(f"{numbers}.json"), report)
    print("wrote", path)
    if name in draw.PICTURES_OF:
        draw.redraw(name, report, Path(f"{drawn}.svg"))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


# -------------------------------------------------------------------------------------------------------------- tables


def line(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table(head: Sequence[object], rows: Iterable[Iterable[object]] = ()) -> Iterator[str]:
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


def rate_name(megabits: float) -> str:
    if not megabits:
        return "no limit"
    return f"{megabits / 1000:g} Gbit/s" if megabits >= 1000 else f"{megabits:g} Mbit/s"
