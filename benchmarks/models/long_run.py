"""A run of long sequences that is killed halfway and resumed: is its curve one curve?

    python benchmarks/models/long_run.py [--config configs/long_run.yaml] [--ranks 4] [--kill-at 28] [key=value ...]

Starts the ranks, kills one of them with SIGKILL once step `--kill-at` is recorded, waits until the others have noticed,
starts all of them again with resume=true, and compares what metrics.jsonl held when they were killed with what it holds
at the end. Every step has to be there once; those that were trained again after the checkpoint, and those before it,
have to be the same to the last bit. The two offline parts of wandb are read back: the last has to hold the same curve,
and the first, whose end a kill may cut off, nothing else.
Writes OUT.json and OUT.svg.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import write_down
from zoo.training import UserError
from zoo.training import config as cfg
from zoo.training.records import read_metrics
from zoo.training.tracking import duration

ROOT = Path(__file__).resolve().parents[2]
SAME = ("loss", "grad_norm", "lr")  # what a step recorded twice has to agree on
NOTICE = 300  # seconds that the other ranks may take to see that one is gone


class Ranks:
    """The ranks of one start of train.py, without torchrun, which would end them before they noticed anything."""

    def __init__(self, count: int, arguments: Sequence[str], log: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        fixed = {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
        self.log = log
        self.processes = []
        with log.open("w") as file:
            for rank in range(count):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(ROOT / "train.py"), *arguments]
                environment = os.environ | address | fixed | own
                self.processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def failed(self, what: str) -> SystemExit:
        return SystemExit(f"{what}; the end of {self.log}:\n{self.log.read_text()[-3000:]}")


def steps_of(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if "loss" in record]


def kill(ranks: Ranks, metrics: Path, at: int) -> float:
    """SIGKILL for rank 0, which keeps the records, once step `at` is there. Returns when the others had left, in s."""
    while not any(record["step"] >= at for record in steps_of(read_metrics(metrics))):
        if not ranks.running():
            raise ranks.failed(f"the run ended before step {at} was recorded")
        time.sleep(0.02)
    ranks.processes[0].kill()
    began = time.monotonic()
    while ranks.running():
        if time.monotonic() - began > NOTICE:
            raise ranks.failed(f"the other ranks still wait {NOTICE} s after one was killed")
        time.sleep(0.02)
    if ranks.processes[0].returncode != -9:
        raise ranks.failed(f"the run was over before it could be killed at step {at}")
    return time.monotonic() - began


def compare(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]], saved: int, steps: int) -> list[int]:
    """The steps that were trained twice. A SystemExit names what is not one and the same curve."""
    first, last = ({record["step"]: record for record in steps_of(records)} for records in (before, after))
    recorded = [record["step"] for record in steps_of(after)]
    if recorded != list(range(1, steps + 1)):
        raise SystemExit(f"the records are not one curve: they hold the steps {recorded}")
    for step, record in first.items():
        for key in SAME:
            if record[key] != last[step][key]:
                raise SystemExit(f"step {step}: {key} was {record[key]!r} before the kill and is {last[step][key]!r}")
    return [step for step in first if step > saved]


def wandb_curve(directory: Path) -> tuple[dict[int, float], int]:
    """{step: loss} of the last offline part of a run, and how many parts there are: of one run, which agree."""
    logs = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    if len({log.name for log in logs}) != 1:
        raise SystemExit(f"expected offline records of one wandb run, found {[str(log) for log in logs]}")
    curve: dict[int, float] = {}  # of all parts: the first may have been cut short, and what it has must be the same
    last: dict[int, float] = {}
    for log in logs:
        last = {}
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in out.splitlines():
            item = json.loads(line).get("history", {}).get("item", {})
            if "train/loss" in item:
                step, loss = item["train/step"], item["train/loss"]
                if curve.setdefault(step, loss) != loss:
                    raise SystemExit(f"wandb has two losses of step {step}: {curve[step]!r} and {loss!r}")
                last[step] = loss
    return last, len(logs)


STYLE = """
text { font: 13px -apple-system, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; fill: #1f2328 }
path, .ring { fill: none } .first { stroke: #3b82f6; stroke-width: 2 } .second { stroke: #e8863c; stroke-width: 4 }
.axis { stroke: #9198a1 } .saved, .killed { stroke: #9198a1; stroke-dasharray: 4 4 } .killed, .ring { stroke: #d64541 }
.judged { fill: #2da44e } .soft { fill: #59636e }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .soft { fill: #9198a1 } }
"""


def picture(found: dict[str, Any], before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> str:
    """The losses by step: before the kill, after the resumption, and validation."""
    left, top, width, height = 56, 40, 600, 220
    steps, killed, saved = found["steps"], found["killed_after_step"], found["resumed_from_step"]
    most = 1.05 * max(record["loss"] for record in steps_of(after))
    first, second = steps_of(before), [record for record in steps_of(after) if record["step"] >= saved]

    def x(step: float) -> float:
        return round(left + width * step / steps, 1)

    def y(loss: float) -> float:
        return round(top + height * (1 - loss / most), 1)

    def line(points: Sequence[tuple[float, float]], kind: str) -> str:
        return f'<path class="{kind}" d="M{"L".join(f"{x(step)} {y(loss)}" for step, loss in points)}"/>'

    def dot(step: float, loss: float, kind: str) -> str:
        return f'<circle class="{kind}" cx="{x(step)}" cy="{y(loss)}" r="4.5"/>'

    def text(across: float, down: float, anchor: str, words: str, kind: str = "soft") -> str:
        return f'<text class="{kind}" x="{across}" y="{down}" text-anchor="{anchor}">{words}</text>'

    whole = left + width + 24, top + height + 52
    title = f"Loss by step, {found['tokens']:,} tokens a sample over {found['ranks']} ranks"
    legend = {
        "first": "before the kill",
        "second": "resumed",
        "ring": "trained twice, to the same bits",
        "judged": "validation",
    }
    parts = [
        line([(0, most), (0, 0), (steps, 0)], "axis"),
        line([(saved, 0), (saved, most)], "saved"),
        line([(killed, 0), (killed, most)], "killed"),
        line([(record["step"], record["loss"]) for record in second], "second"),
        line([(record["step"], record["loss"]) for record in first], "first"),
        *(dot(record["step"], record["loss"], "ring") for record in first if record["step"] > saved),
        *(dot(record["step"], record["val_loss"], "judged") for record in after if "val_loss" in record),
        *(text(left - 8, y(i / 2) + 4, "end", f"{i / 2:g}") for i in range(int(2 * most) + 1)),
        *(text(x(step), top + height + 18, "middle", str(step)) for step in range(0, steps + 1, max(1, steps // 6))),
        text(x(saved) - 6, top + 12, "end", f"checkpoint, step {saved}"),
        text(x(killed) + 6, top + 12, "start", f"killed after step {killed}"),
        text(left, 24, "start", title, "title"),
    ]
    across = left
    for kind, words in legend.items():
        down, sign = whole[1] - 14, f'<path class="{kind}" d="M{across} {whole[1] - 14}h18"/>'
        sign = (
            sign if kind in ("first", "second") else f'<circle class="{kind}" cx="{across + 9}" cy="{down}" r="4.5"/>'
        )
        parts += [sign, text(across + 24, down + 4, "start", words)]
        across += 44 + 7 * len(words)
    size = f'viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" height="{whole[1]}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def killed_and_resumed(arguments: Sequence[str], directory: Path, ranks: int, at: int) -> tuple[Any, Any, float]:
    """The records when rank 0 was killed and at the end of the run; and seconds until the others had left."""
    directory.mkdir(parents=True, exist_ok=True)
    metrics = directory / "metrics.jsonl"
    with Ranks(ranks, arguments, directory / "killed.log") as first:
        noticed = kill(first, metrics, at)
    before = read_metrics(metrics)
    print(f"killed after step {steps_of(before)[-1]['step']}; the others left {noticed:.1f} s later", flush=True)
    with Ranks(ranks, [*arguments, "resume=true"], directory / "resumed.log") as second:
        while second.running():
            time.sleep(0.1)
        if any(process.returncode for process in second.processes):
            raise second.failed("the resumed run failed")
    return before, read_metrics(metrics), noticed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Kill a long run halfway, resume it, and compare.")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the configuration")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/long_run.yaml", help="what to train")
    parser.add_argument("--ranks", type=int, default=4, help="processes that share each sample")
    parser.add_argument("--kill-at", type=int, default=28, help="kill rank 0 once this step is recorded")
    parser.add_argument("--out", type=Path, help="for OUT.json and OUT.svg")
    options = parser.parse_args(arguments)
    given = [str(options.config), *options.overrides, "log.every=1", f"parallel.sp={options.ranks}"]
    try:
        config = cfg.load(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    directory = Path(config.runs_dir) / str(config.name)
    if directory.exists():
        parser.error(f"{directory} is there already: this run has to begin at its beginning; name=... gives another")

    began = time.monotonic()
    before, after, noticed = killed_and_resumed(given, directory, options.ranks, options.kill_at)
    took = time.monotonic() - began
    said = re.search(r"resumed from step (\d+)", (directory / "resumed.log").read_text())
    saved = int(said[1]) if said else 0
    again = compare(before, after, saved, config.train.steps)
    curve, parts = wandb_curve(directory)
    if curve != {record["step"]: record["loss"] for record in steps_of(after)}:
        raise SystemExit("wandb holds another curve than metrics.jsonl")

    task, every = cfg.create_task(config), steps_of(after)
    task.model()
    found = {
        "tokens": task.tokens, "ranks": options.ranks, "steps": config.train.steps, "seconds": round(took),
        "killed_after_step": steps_of(before)[-1]["step"], "noticed_after_seconds": round(noticed, 1),
        "resumed_from_step": saved, "trained_twice": again, "wandb_parts": parts,
        "loss": [every[0]["loss"], every[-1]["loss"]],
        "val_loss": {record["step"]: record["val_loss"] for record in after if "val_loss" in record},
        "comm_bytes": every[-1]["comm_bytes"], "memory_bytes": max(record["memory_bytes"] for record in every),
    }  # fmt: skip
    written = write_down("long-run", options.out, found, picture(found, before, after))
    judged = ", ".join(f"{loss:.4g} after step {step}" for step, loss in found["val_loss"].items())
    print(
        f"{config.train.steps} steps of {task.tokens:,} tokens over {options.ranks} ranks, both starts in "
        f"{duration(took)}; resumed from step {saved}\n"
        f"every step is recorded once; {len(again)} were trained twice, equal bit for bit: {again}\n"
        f"wandb: {parts} offline parts of one run; the last holds the same curve\n"
        f"loss {every[0]['loss']:.4g} -> {every[-1]['loss']:.4g}; validation {judged or 'none'}\n"
        f"wrote {written}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
