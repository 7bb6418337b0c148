"""One command for a GPU: is everything right on CUDA, how fast is it, and what does the cost model make of it?

    python benchmarks/gpu.py                                # nine minutes at most; writes results/gpu.json, docs/gpu.md
    python benchmarks/gpu.py --out FOLDER                   # FOLDER/gpu.json, FOLDER/gpu.md
    python benchmarks/gpu.py --out FOLDER --only step host  # some of its parts
    python benchmarks/gpu.py --dry-run                      # on a CPU at tiny sizes, as where there is no GPU
    python benchmarks/gpu.py --peak 990                     # TFLOP/s in bf16 of a GPU whose name does not tell

Each part (benchmarks/gpu_parts/) has a process and a time limit of its own. What fails or hangs is in the report with
its error, and the others go on; the report is written after each part. Packages that are missing are named first.
Then `python benchmarks/tables.py --write` puts the main numbers into docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
BASICS = ("torch", "numpy", "einops")  # without which nothing runs
PIP = {
    "sklearn": "scikit-learn", "PIL": "pillow", "flash_attn": "flash-attn", "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
}  # fmt: skip
MORE = {  # used where they are
    "flash_attn": "More kernels of attention", "fla": "Kernels of scans", "mamba_ssm": "The kernel of Mamba-1",
    "torchao": "Moments in 8 bits",
}  # fmt: skip
BUDGET = 540  # seconds in all; a dry run may take four times as many
RESERVE = 20  # of them, to import, to find the GPU and to write


def absent(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if importlib.util.find_spec(module) is None]


def installing(modules: Sequence[str]) -> str:
    return "pip install " + " ".join(PIP.get(module, module) for module in modules)


def versions() -> dict[str, str]:
    import torch

    versions = {"torch": torch.__version__}
    for name in ("triton", "diffusers", "flash-attn", "fla-core", "mamba-ssm", "torchao", "transformers", "numpy"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def look(dry: bool, peak: float) -> Any:
    """The GPU that is there; looked for in a process of its own, for one that has asked CUDA cannot fork any more."""
    import torch

    from benchmarks.gpu_parts import Machine
    from dsp.comm.hardware import ACCELERATORS

    if dry or not torch.cuda.is_available():
        return Machine("cpu", "no GPU", peak or 1.0, 10.0)
    name = torch.cuda.get_device_name()
    sheet = next((row for key, row in ACCELERATORS.items() if key in name.lower()), None)
    memory = torch.cuda.get_device_properties(0).total_memory
    return Machine("cuda", name, peak or (sheet and sheet[0] * 1e-12), sheet and sheet[3], memory)


def every_part() -> list[Any]:
    from benchmarks.gpu_parts import right, speed, trainer

    # what everything else stands on first; times last, when nothing else runs
    return [part for module in (right, trainer, speed) for part in module.PARTS]


def show(part: dict[str, Any]) -> None:
    """A line for a part, and one for each of its cases that is wrong or missed its aim."""
    error = f": {part['error']}" if part.get("error") else ""
    print(f"{part['status']:<9}{part['seconds']:4.0f} s  {part['title']}{error}")
    for name, row in part["cases"].items():
        if row.get("ok") is False:
            print(f"           wrong: {name}: {row.get('error') or row.get('failed') or row}")
        elif row.get("met") is False:
            print(f"           missed {row['aim']}: {name}")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    if lacking := absent(BASICS):
        print(f"nothing here runs without {', '.join(lacking)}: {installing(lacking)}")
        return 2
    from benchmarks import gpu_parts
    from benchmarks.common import DOCS, RESULTS, circumstances, options, read, save
    from benchmarks.gpu_parts import page, speed

    parts = every_part()
    names = [part.name for part in parts]
    o = options(__doc__, arguments, {"only": names}, dry_run=False, only=names, budget=BUDGET, peak=0.0, out=None)
    if o.only != names and not o.out:
        raise SystemExit("--only needs --out: docs/gpu.md is of all parts")
    parts = [part for part in parts if part.name in o.only]
    if needed := gpu_parts.missing(parts):
        without = sorted({name for names in needed.values() for name in names})
        print(f"{installing(list(needed))}  # left out without: {', '.join(without)}")
    if lacking := absent(tuple(MORE)):
        print(f"{installing(lacking)}  # for more kernels", flush=True)

    try:
        with gpu_parts.FORK.Pool(1) as pool:
            machine = pool.apply_async(look, (o.dry_run, o.peak)).get(60)
    except Exception as problem:
        print(f"CUDA does not start within a minute: {gpu_parts.reason(problem)}; --dry-run goes without it")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends what was started
    json_path, page_path = RESULTS / "gpu.json", DOCS / "gpu.md"
    if o.out:
        o.out.mkdir(parents=True, exist_ok=True)
        json_path, page_path = o.out / "gpu.json", o.out / "gpu.md"
    elif machine.dry and json_path.exists() and not read(json_path)["dry"]:
        print(f"{json_path} is the report of a GPU: say with --out where that of a dry run goes")
        return 2
    print("no GPU: a dry run on the CPU" if machine.dry else f"{machine.name}, peak {machine.peak} TFLOP/s", flush=True)

    document = circumstances([word for word in arguments if word != "--out" and word != str(o.out)])
    document |= {"shape": asdict(machine.of(speed.FULL, speed.TINY)), "device": machine.name, "memory": machine.memory}
    document |= {"peak": machine.peak, "dry": machine.dry, "versions": versions(), "finished": False}
    document |= {"without": {PIP.get(module, module): MORE[module] for module in lacking}}
    shown: set[str] = set()

    def keep(report: dict[str, Any]) -> None:
        document["parts"] = {part.name: report[part.name] for part in parts if part.name in report}
        document["took"] = time.monotonic() - began
        save(json_path, document)
        page_path.write_text(page.page(document))
        for name in report.keys() - shown:
            shown.add(name)
            show(report[name])

    with tempfile.TemporaryDirectory() as folder:
        deadline = began + machine.of(1, 4) * o.budget - RESERVE  # few cores take longer
        report = gpu_parts.run(parts, machine, Path(folder), deadline, keep)
    document["finished"] = True
    keep(report)
    print(f"{document['took']:.0f} s; wrote {json_path} and {page_path}")
    return int(any(part["status"] not in ("ok", "left out") for part in document["parts"].values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
