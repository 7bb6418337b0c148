"""Faults of every kind, one after another: is anything lost, is every fault one line, does everyone leave?

    python benchmarks/faults/faults.py [--kills 30] [--launchers 3] [--hangs 10] [--damages 100] [--configs 200]
                                       [--files 200] [--mutations 15000] [--memory 14] [--only KIND ...] [--seed 0]
                                       [--out faults.json]

kills      SIGKILL for a rank of two, at any moment or inside a save, then resume; the curve is that of a quiet run
launchers  SIGKILL for torchrun; its ranks have to leave
hangs      SIGSTOP for a rank, or a loader that sleeps; the others have to name it and leave
damages    to a checkpoint, mostly the newest, or to the records; then resume: what was damaged is named, and the curve
           is the same, or one line says why not
configs    configurations that cannot be: one line each, within seconds
files      damaged videos, structures, alignments and folders of latents: an error of the reader's own, or a result
mutations  of the bytes of all these texts, read without the rest of a run
memory     of reading a hostile file, beside that of a sound one as large

Ranks are forked from this process, so that one start takes a second. Prints a line for each kind, and what broke.
`--only kills hangs` does these; `--out` keeps what it has of other kinds, so that all may be done in pieces.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sklearn.datasets  # noqa: E402, F401 (ranks are forked with it)
import torch  # noqa: E402

import train  # noqa: E402
from benchmarks.faults import inputs, memory  # noqa: E402
from zoo.training.records import read_metrics  # noqa: E402

TINY = """
model: {name: transformer2d, size: test, overrides: {in_channels: 1, num_classes: 10}}
data: {name: digits, frames: 5, height: 6, width: 6, digit: 5}
optim: {lr: 1e-3, warmup: 2}
train: {batch: 1, timeout: 10}
eval: {every: 0}
sample: {every: 0}
log: {every: 1}
checkpoint: {every: 3}
wandb: {mode: disabled}
"""
LEAVE = 60.0  # seconds within which everyone has to be gone; what it took is reported
PATIENT = ["train.timeout=120"]  # where nothing hangs: a machine may be busy


class Report:
    """The findings, by kind."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.broken: list[str] = []

    def add(self, kind: str, count: int, **more: Any) -> None:
        self.found[kind] = {"count": count, **more}
        print(f"{kind:<10} {count:>6}  " + ", ".join(f"{key} {value}" for key, value in more.items()), flush=True)

    def hold(self, sound: bool, what: str) -> bool:
        if not sound:
            self.broken.append(what)
            print(f"BROKEN: {what}", flush=True)
        return sound


class Ranks:
    """Some ranks of one start of train.py, forked."""

    def __init__(self, count: int, arguments: Sequence[str], log: Path, patch: Callable[[int], None] | None = None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.log, self.statuses = log, [None] * count
        log.write_text("")
        self.pids = [self._fork(rank, count, port, arguments, patch) for rank in range(count)]

    def _fork(self, rank: int, count: int, port: int, arguments: Sequence[str], patch: Any) -> int:
        if pid := os.fork():
            return pid
        status = 99
        try:
            out = os.open(self.log, os.O_WRONLY | os.O_APPEND)
            os.dup2(out, 1)
            os.dup2(out, 2)
            torch.set_num_threads(1)
            if count > 1:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if patch:
                patch(rank)
            status = train.main(list(arguments))
        finally:
            os._exit(status)

    def running(self) -> list[int]:
        """The ranks that are still there."""
        for rank, pid in enumerate(self.pids):
            if self.statuses[rank] is None and os.waitpid(pid, os.WNOHANG)[0]:
                self.statuses[rank] = 0  # type: ignore[call-overload]
        return [rank for rank, status in enumerate(self.statuses) if status is None]

    def wait(self, seconds: float, but: Sequence[int] = ()) -> float | None:
        """Until all have left but those; the seconds it took, None if they did not."""
        began = time.monotonic()
        while set(self.running()) - set(but):
            if time.monotonic() - began > seconds:
                return None
            time.sleep(0.02)
        return time.monotonic() - began

    def end(self) -> None:
        for rank in self.running():
            os.kill(self.pids[rank], signal.SIGKILL)
        self.wait(LEAVE)

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def steps(self) -> int:
        """How many steps were logged."""
        return sum(line.startswith("step ") and "  loss " in line for line in self.lines())


def losses(directory: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_metrics(directory / "metrics.jsonl") if "loss" in record}


def until(condition: Callable[[], Any], ranks: Ranks, seconds: float = 120.0, every: float = 0.01) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and ranks.running():
        if condition():
            return True
        time.sleep(every)
    return bool(condition())


def unfinished(run: Path, since: int) -> bool:
    """Tell whether a checkpoint is being written that was begun after `since` (ns), or was and is not whole."""
    for path in run.glob("checkpoints/*.incomplete"):
        with suppress(OSError):
            if path.stat().st_mtime_ns > since:
                return True
    return False


class Runs:
    """The tiny configuration in a folder of its own, and the curve of a quiet run."""

    def __init__(self, folder: Path, steps: int):
        self.folder, self.steps, self.file = folder, steps, folder / "tiny.yaml"
        self.file.write_text(TINY)
        quiet = Ranks(2, self.arguments("quiet", *PATIENT), folder / "quiet.log")
        if quiet.wait(600) is None or len(losses(folder / "quiet")) != steps:
            quiet.end()
            raise SystemExit("the quiet run did not end:\n" + quiet.log.read_text()[-3000:])
        self.curve = losses(folder / "quiet")

    def arguments(self, name: str, *more: str) -> list[str]:
        own = [f"runs_dir={self.folder}", f"name={name}", f"train.steps={self.steps}"]
        return [str(self.file), *own, *more]

    def same(self, directory: Path) -> bool:
        """Tell whether the records are the quiet curve, or its beginning, each step once."""
        found = [record for record in read_metrics(directory / "metrics.jsonl") if "loss" in record]
        return [(r["step"], r["loss"]) for r in found] == list(self.curve.items())[: len(found)]


def kills(runs: Runs, count: int, chance: random.Random, report: Report) -> None:
    """SIGKILL for one rank of two, again and again, in one run that is resumed each time."""
    directory, took, inside, steps = runs.folder / "killed", [], 0, set()
    for i in range(3 * count):
        if len(took) == count:
            break
        began = time.time_ns()  # what an earlier kill left is no save of this start
        saves = partial(unfinished, directory, began)
        ranks = Ranks(2, runs.arguments("killed", "resume=true", *PATIENT), runs.folder / "killed.log")
        victim, ahead = chance.randrange(2), chance.randint(1, 12)  # steps of this start before the kill
        reached = until(lambda: ranks.steps() >= ahead, ranks)  # noqa: B023
        if i % 2 == 0:
            reached = until(saves, ranks, every=0.0005)
        elif reached:
            time.sleep(chance.random() * 0.05)
        if not reached or len(ranks.running()) < 2:
            ranks.end()
            shutil.rmtree(directory, ignore_errors=True)  # it is through: begin anew
            continue
        saving = saves()
        os.kill(ranks.pids[victim], signal.SIGKILL)
        left = ranks.wait(LEAVE)
        if report.hold(left is not None, f"kill {i}: rank {1 - victim} stays"):
            took.append(left)
        ranks.end()
        inside += saving and saves()  # begun before the kill, and whole never
        steps |= losses(directory).keys()
        lines = ranks.lines()
        report.hold(not any("Traceback" in line for line in lines), f"kill {i}: a traceback in {lines[-5:]}")
        named = [line for line in lines if re.match(rf"error: rank {victim} \(.*\) is gone", line)]
        report.hold(len(named) == 1 and lines[-1] == named[0], f"kill {i}: rank {victim} is not named: {lines[-2:]}")
        report.hold(runs.same(directory), f"kill {i}: the curve is another")
    last = Ranks(2, runs.arguments("killed", "resume=true", *PATIENT), runs.folder / "killed.log")
    report.hold(last.wait(600) is not None, "the killed run does not end")
    last.end()
    report.hold(losses(directory) == runs.curve, "after all kills the curve is another")
    slowest = f"{max(took, default=0):.1f}"
    met = len(runs.curve.keys() & steps)
    equal = f"{met} of {len(runs.curve)}"
    report.add("kills", len(took), inside_a_save=inside, slowest_leaving_s=slowest, equal_steps=equal)


def launchers(runs: Runs, count: int, _: Any, report: Report) -> None:
    took = []
    for i in range(count):
        directory = runs.folder / f"orphan{i}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(ROOT / "train.py")]
        arguments = runs.arguments(f"orphan{i}", "train.steps=1000000", "train.timeout=60")
        with (runs.folder / "orphan.log").open("w") as log:
            process = subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
        end = time.monotonic() + 300
        while len(losses(directory)) < 2 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.1)
        process.kill()
        process.wait()
        began, seen = time.monotonic(), -1
        while seen != (seen := len(losses(directory))) and time.monotonic() - began < LEAVE:
            time.sleep(4)  # as long as nobody records anything any more
        owner = json.loads((directory / "owner.json").read_text())["pid"]
        while Path(f"/proc/{owner}/cmdline").exists() and Path(f"/proc/{owner}/cmdline").read_bytes():
            if not report.hold(time.monotonic() - began < LEAVE, f"launcher {i}: rank 0 stays"):
                os.kill(owner, signal.SIGKILL)
                break
            time.sleep(0.1)
        took.append(time.monotonic() - began)
    report.add("launchers", count, gone_within_s=f"{max(took, default=0):.1f}")


def _sleeps(rank: int) -> Callable[[int], None]:
    def patch(mine: int) -> None:
        from zoo.training.tasks.video import Task

        plain = Task.batch

        def batch(self: Any, objective: Any, step: int, *rest: Any, **more: Any) -> Any:
            if mine == rank and step == 5:
                time.sleep(10_000)
            return plain(self, objective, step, *rest, **more)

        Task.batch = batch  # type: ignore[method-assign]

    return patch


def hangs(runs: Runs, count: int, _: Any, report: Report) -> None:
    took = []
    for i in range(count):
        victim, name = i // 2 % 2, f"hung{i}"
        patch = _sleeps(victim) if i % 2 else None
        ranks = Ranks(2, runs.arguments(name), runs.folder / "hung.log", patch)
        if until(lambda: len(losses(runs.folder / name)) >= 4, ranks) and not patch:  # noqa: B023
            os.kill(ranks.pids[victim], signal.SIGSTOP)
        left = ranks.wait(LEAVE, but=() if patch else (victim,))
        if report.hold(left is not None, f"hang {i}: the others stay"):
            took.append(left)
        ranks.end()
        lines = ranks.lines()
        word = r"nothing has moved .*" if patch else ""
        named = [line for line in lines if re.match(rf"error: {word}rank {victim} \(", line)]
        report.hold(len(named) == 1 and lines[-1] == named[0], f"hang {i}: rank {victim} is not named: {lines[-2:]}")
        report.hold(not any("Traceback" in line for line in lines), f"hang {i}: a traceback: {lines[-4:]}")
        records = {path.name for path in (runs.folder / name).glob("flight/*/rank-*.json")}
        expected = {f"rank-{rank}.json" for rank in (0, 1) if patch or rank != victim}
        report.hold(records == expected, f"hang {i}: flight records {sorted(records)}")
        shutil.rmtree(runs.folder / name, ignore_errors=True)
    report.add("hangs", count, timeout_s=10, slowest_leaving_s=f"{max(took, default=0):.1f}")


def damages(runs: Runs, count: int, chance: random.Random, report: Report) -> None:
    """Damage to a run that has finished all but its last steps; then it is resumed by one process."""
    whole, victim, log = runs.folder / "whole", runs.folder / "damaged", runs.folder / "damaged.log"
    done = Ranks(1, runs.arguments("whole", "train.steps=12", "checkpoint.keep=3"), log)
    done.wait(600)
    curve, newest = losses(whole), "checkpoints/step-00000009"
    shutil.rmtree(whole / "checkpoints" / "step-00000012")
    told = went_on = changed = 0
    for i in range(count):
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(whole, victim, symlinks=True)
        what = inputs.damage(victim, chance)
        other = inputs.contents(victim / newest) != inputs.contents(whole / newest)
        ranks = Ranks(1, [*runs.arguments("damaged"), "resume=true", "train.steps=12"], log)
        report.hold(ranks.wait(LEAVE) is not None, f"damage {i}, {what}: no end")
        ranks.end()
        lines = ranks.lines()
        errors = [line for line in lines if line.startswith("error: ")]
        report.hold(not any("Traceback" in line for line in lines), f"damage {i}, {what}: {lines[-4:]}")
        finished = any(line.startswith("finished 12 steps") for line in lines)
        if report.hold(finished or len(errors) == 1, f"damage {i}, {what}: neither an end nor an error: {lines[-3:]}"):
            told, went_on = told + (not finished), went_on + finished
        after = losses(victim) if finished else {}
        wrong = [step for step, loss in after.items() if curve[step] != loss]
        named = bool(errors) or any("damaged" in line for line in lines)
        silent = finished and len(after) < 12 and not named
        report.hold(not wrong and not silent, f"damage {i}, {what}: other records {wrong}, of {len(after)} steps")
        absent = not (victim / newest).exists() and not any("resumed from step 9" in line for line in lines)
        changed += other
        if other:  # of the newest checkpoint: found, or gone and the step that the run goes on from is another
            report.hold(named or absent, f"damage {i}, {what}: not found: {lines[:4]}")
        else:
            report.hold(
                bool(errors) or "resumed from step 9" in lines, f"damage {i}, {what}: the newest was sound: {lines[:4]}"
            )
    found = {"went_on_with_the_same_curve": went_on, "refused_in_one_line": told}
    report.add("damages", count, of_the_newest_checkpoint=changed, **found)


KINDS: dict[str, Callable[..., None]] = {
    "kills": kills, "launchers": launchers, "hangs": hangs, "damages": damages, "configs": inputs.configs,
    "files": inputs.files, "mutations": inputs.mutations, "memory": memory.memory,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Faults of every kind.")
    usual = {"kills": 30, "launchers": 3, "hangs": 10, "damages": 100, "configs": 200, "files": 200}
    usual |= {"mutations": 15000, "memory": memory.KINDS}
    for name, count in usual.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--only", nargs="+", choices=usual, default=list(usual), help="kinds to do; all else is left")
    parser.add_argument("--steps", type=int, default=120, help="of the run that is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for what was found, beside what is in it of other kinds")
    options = parser.parse_args(arguments)
    report, began = Report(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dsp-faults-"))
    wanted = {name: getattr(options, name) for name in options.only if getattr(options, name)}
    try:
        runs = Runs(folder, options.steps) if wanted.keys() & {"kills", "launchers", "hangs", "damages"} else None
        for name, count in wanted.items():
            kind: Any = KINDS[name]
            place = runs if name in ("kills", "launchers", "hangs", "damages") else folder
            kind(place, count, random.Random(f"{name} {options.seed}"), report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(report.broken)} broken, in {time.monotonic() - began:.0f} s")
    if options.out:
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        broken = [what for what in before.pop("broken", ()) if what.split()[0] + "s" not in wanted] + report.broken
        options.out.write_text(json.dumps({**before, **report.found, "broken": broken}, indent=1) + "\n")
    return bool(report.broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
