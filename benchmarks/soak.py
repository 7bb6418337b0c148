"""The memory of the ranks of a long run of the demo, with validation, samples, checkpoints and wandb offline.

    python benchmarks/soak.py [--steps 3000] [--ranks 2] [--more train.batch=8 ...] [--out soak.json]

A row every 100 steps: the anonymous memory of each rank in MiB. At the end its growth: the mean of the last fifth of
steps against that of the second fifth (in the first one models, caches and libraries are still loaded).
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import ROOT, circumstances, options, save

# as the demo, in smaller steps, and whatever a run does now and then is done often
OFTEN = [
    "train.batch=8", "log.every=25", "eval.every=50", "eval.clips=16", "sample.every=100", "sample.clips=4",
    "sample.steps=5", "checkpoint.every=250", "wandb.mode=offline", "train.timeout=600",
]  # fmt: skip
EVERY = 100  # steps between two rows


def children(pid: int) -> list[int]:
    """The processes that a process has started, in their order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def anonymous(pid: int) -> float:
    """The anonymous memory of a process in MiB."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024


def reached(records: Path) -> int:
    """The last step in the records of a run; 0 before the first."""
    with suppress(OSError, ValueError, IndexError):
        return int(json.loads(records.read_text().splitlines()[-1])["step"])
    return 0


def growth(rows: Sequence[tuple[int, list[float]]]) -> list[float]:
    """The growth of each rank's memory from the second fifth of rows to the last, as a share of the former."""
    fifth = max(1, len(rows) // 5)
    early, late = rows[fifth : 2 * fifth], rows[-fifth:]
    return [mean(e) and mean(m) / mean(e) - 1 for e, m in zip(*(zip(*(r for _, r in part)) for part in (early, late)))]


def soak(folder: Path, steps: int, ranks: int, more: Sequence[str]) -> list[tuple[int, list[float]]]:
    """Run the demo; the memory of each rank, by step."""
    settings = [f"runs_dir={folder}", "name=soak", f"train.steps={steps}", *OFTEN, *more]
    launch = [sys.executable, "-m", "dsp.cluster.launch", "--nproc-per-node", str(ranks), str(ROOT / "train.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    rows: list[tuple[int, list[float]]] = []
    with (folder / "soak.log").open("w") as log:
        job = subprocess.Popen(
            [*launch, str(ROOT / "configs/demo.yaml"), *settings], env=environment, stdout=log, stderr=log
        )
    while job.poll() is None:
        time.sleep(0.5)
        step = reached(folder / "soak/metrics.jsonl") // EVERY * EVERY
        if step > (rows[-1][0] if rows else 0):
            with suppress(OSError):  # a rank that has just ended
                rows.append((step, [anonymous(rank) for rank in children(job.pid)[:ranks]]))
                print(f"step {step:>6}  " + "  ".join(f"{mib:8.1f}" for mib in rows[-1][1]), flush=True)
    if job.returncode:
        raise SystemExit((folder / "soak.log").read_text()[-3000:])
    return rows


def main(arguments: Sequence[str]) -> int:
    o = options(__doc__, arguments, steps=3000, ranks=2, more=[""], out=None)
    with tempfile.TemporaryDirectory(prefix="dsp-soak-") as folder:
        rows = soak(Path(folder), o.steps, o.ranks, [text for text in o.more if text])
    grown = growth(rows)
    print("growth " + ", ".join(f"{100 * share:+.1f} %" for share in grown))
    if o.out:
        save(o.out, {**circumstances(arguments), "rows": rows, "growth": grown})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
