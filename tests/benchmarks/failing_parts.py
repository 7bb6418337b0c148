"""Parts of benchmarks/gpu.py that fail, hang and die: a program that prints what the runner makes of them, as JSON.

`failing_parts.py failing|alone FOLDER`. The runner forks its parts, so it must not run where threads have worked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_parts  # noqa: E402
from benchmarks.gpu_parts import Machine, Part  # noqa: E402

RIGHT = {"one": lambda: {"ok": True, "error of it": 1e-9}}


def fails() -> dict[str, Any]:
    raise ZeroDivisionError(f"in {ROOT}/nowhere.py")


def hangs() -> dict[str, Any]:
    if os.fork() == 0:  # and so does what it started
        time.sleep(200)
    time.sleep(200)
    return {}


def dies() -> dict[str, Any]:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def part(name: str, cases: dict[str, Any], **more: Any) -> Part:
    return Part(name, f"The part {name}", lambda m, earlier: cases, **{"limit": 120, **more})


def failing(folder: Path) -> Any:
    """The report, and the parts that were in it each time it was kept."""
    kept: list[list[str]] = []
    parts = [
        part("right", RIGHT),
        part("wrong", {"two": fails, **RIGHT}),
        part("late", {**RIGHT, "three": hangs}, limit=5),
        part("dead", {**RIGHT, "x": dies}),
        part("lacking", RIGHT, needs=("no_such_module",)),
        part("last", RIGHT, alone=True),
    ]
    machine = Machine("cuda", "a GPU")
    found = gpu_parts.run(parts, machine, folder, time.monotonic() + 140, lambda report: kept.append([*report]))
    return found, kept


def alone(folder: Path) -> Any:
    """The batches, the report, and the report where no time is left."""
    machine, first = Machine("cpu", "no GPU"), part("first", RIGHT)
    told = Part("told", "", lambda m, earlier: {"seen": lambda: {"ok": "first" in earlier}}, 120, alone=True)
    batches = [[p.name for p in batch] for batch in gpu_parts.batches([told, first])]
    found = gpu_parts.run([told, first], machine, folder, time.monotonic() + 140, lambda report: None)
    return batches, found, gpu_parts.run([told], machine, folder, time.monotonic(), lambda report: None)


if __name__ == "__main__":
    print(json.dumps({"failing": failing, "alone": alone}[sys.argv[1]](Path(sys.argv[2]))))
