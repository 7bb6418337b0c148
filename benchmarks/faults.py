"""Faults of every kind, one after another: is anything lost, is every fault one line, does everyone leave?

    python benchmarks/faults.py [--kills 30] [--restarts 30] [--launchers 3] [--hangs 10] [--damages 100]
                [--mutations 15000] [--memory 14] [--only KIND ...] [--steps 120] [--seed 0] [--out faults.json]

kills      SIGKILL for a rank of two, at any moment or inside a save, then resume; the curve is that of a quiet run
restarts   SIGKILL for a rank of a job of `dsp-launch --restarts`: it goes on by itself, also on fewer ranks, with the
           samples and the curve of an undisturbed one
launchers  SIGKILL for torchrun; its ranks have to leave
hangs      SIGSTOP for a rank, or a loader that sleeps; the others have to name it and leave
damages    to a checkpoint, mostly the newest, or to the records; then resume: what was damaged is named, and the curve
           is the same, or one line says why not
mutations  of the bytes of all that is read (videos, structures, alignments, latents, records, configurations): an error
           of the reader's own, or a result
memory     of reading a hostile file, beside that of a sound one as large

Ranks are forked from this process, so that one start takes a second. Prints a line for each kind, and what broke.
`--only kills hangs` does these; `--out` keeps what it has of other kinds, so that all may be done in pieces.
"""

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

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sklearn.datasets  # noqa: F401 (ranks are forked with it)
import torch

import train
from benchmarks import fault_inputs as inputs
from benchmarks.common import ROOT, options
from benchmarks.fault_restarts import restarts
from zoo.training.records import read_metrics

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
        self.kinds: dict[str, dict[str, Any]] = {}
        self.broken: list[str] = []

    def add(self, kind: str, count: int, **more: Any) -> None:
        self.kinds[kind] = {"count": count, **more}
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
        options = [f"runs_dir={self.folder}", f"name={name}", f"train.steps={self.steps}"]
        return [str(self.file), *options, *more]

    def same(self, directory: Path) -> bool:
        """Tell whether the records are the quiet curve, or its beginning, each step once."""
        records = [record for record in read_metrics(directory / "metrics.jsonl") if "loss" in record]
        return [(r["step"], r["loss"]) for r in records] == list(self.curve.items())[: len(records)]


def named(lines: list[str], pattern: str) -> bool:
    """Tell whether one line names the rank, as the last that is said, and nothing is a traceback."""
    matches = [line for line in lines if re.match(pattern, line)]
    return len(matches) == 1 and lines[-1] == matches[0] and not any("Traceback" in line for line in lines)


def kills(runs: Runs, count: int, chance: random.Random, report: Report) -> None:
    """SIGKILL for one rank of two, again and again, in one run that is resumed each time."""
    directory, log, took, inside, steps = runs.folder / "killed", runs.folder / "killed.log", [], 0, set()
    arguments = runs.arguments("killed", "resume=true", *PATIENT)
    for i in range(3 * count):
        if len(took) == count:
            break
        saves = partial(unfinished, directory, time.time_ns())  # what an earlier kill left is no save of this start
        ranks = Ranks(2, arguments, log)
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
        took += [left] if report.hold(left is not None, f"kill {i}: rank {1 - victim} stays") else []
        ranks.end()
        inside += saving and saves()  # begun before the kill, and whole never
        steps |= losses(directory).keys()
        lines = ranks.lines()
        sound = named(lines, rf"error: rank {victim} \(.*\) is gone")
        report.hold(sound, f"kill {i}: rank {victim} is not named in one line: {lines[-5:]}")
        report.hold(runs.same(directory), f"kill {i}: the curve is another")
    last = Ranks(2, arguments, log)
    report.hold(last.wait(600) is not None, "the killed run does not end")
    last.end()
    report.hold(losses(directory) == runs.curve, "after all kills the curve is another")
    equal = f"{len(runs.curve.keys() & steps)} of {len(runs.curve)}"
    report.add("kills", len(took), inside_a_save=inside, slowest_leaving_s=slowest(took), equal_steps=equal)


def slowest(seconds: Sequence[float]) -> str:
    return f"{max(seconds, default=0):.1f}"


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
    report.add("launchers", count, gone_within_s=slowest(took))


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
        took += [left] if report.hold(left is not None, f"hang {i}: the others stay") else []
        ranks.end()
        lines = ranks.lines()
        sound = named(lines, rf"error: {'nothing has moved .*' if patch else ''}rank {victim} \(")
        report.hold(sound, f"hang {i}: rank {victim} is not named in one line: {lines[-4:]}")
        records = {path.name for path in (runs.folder / name).glob("flight/*/rank-*.json")}
        expected = {f"rank-{rank}.json" for rank in (0, 1) if patch or rank != victim}
        report.hold(records == expected, f"hang {i}: flight records {sorted(records)}")
        shutil.rmtree(runs.folder / name, ignore_errors=True)
    report.add("hangs", count, timeout_s=10, slowest_leaving_s=slowest(took))


def damages(runs: Runs, count: int, chance: random.Random, report: Report) -> None:
    """Damage to a run that has finished all but its last steps; then it is resumed by one process."""
    whole, victim, log = runs.folder / "whole", runs.folder / "damaged", runs.folder / "damaged.log"
    Ranks(1, runs.arguments("whole", "train.steps=12", "checkpoint.keep=3"), log).wait(600)
    curve, newest = losses(whole), "checkpoints/step-00000009"
    shutil.rmtree(whole / "checkpoints" / "step-00000012")
    refused = went_on = changed = 0
    for i in range(count):
        shutil.rmtree(victim, ignore_errors=True)
        shutil.copytree(whole, victim, symlinks=True)
        name = f"damage {i}, {inputs.damage(victim, chance)}"
        other = inputs.contents(victim / newest) != inputs.contents(whole / newest)
        ranks = Ranks(1, [*runs.arguments("damaged"), "resume=true", "train.steps=12"], log)
        report.hold(ranks.wait(LEAVE) is not None, f"{name}: no end")
        ranks.end()
        lines = ranks.lines()
        errors = [line for line in lines if line.startswith("error: ")]
        finished = any(line.startswith("finished 12 steps") for line in lines)
        one_way = (finished or len(errors) == 1) and not any("Traceback" in line for line in lines)
        if report.hold(one_way, f"{name}: neither an end nor an error in one line: {lines[-4:]}"):
            refused, went_on = refused + (not finished), went_on + finished
        after = losses(victim) if finished else {}
        wrong = [step for step, loss in after.items() if curve[step] != loss]
        notice = bool(errors) or any("damaged" in line for line in lines)
        silent = finished and len(after) < 12 and not notice
        report.hold(not wrong and not silent, f"{name}: other records {wrong}, of {len(after)} steps")
        resumed = any("resumed from step 9" in line for line in lines)
        changed += other
        # of the newest checkpoint: found, or gone and the step that the run goes on from is another
        right = notice or (not (victim / newest).exists() and not resumed) if other else bool(errors) or resumed
        report.hold(right, f"{name}: the newest checkpoint was {'damaged' if other else 'sound'}: {lines[:4]}")
    more = {"went_on_with_the_same_curve": went_on, "refused_in_one_line": refused}
    report.add("damages", count, of_the_newest_checkpoint=changed, **more)


OF_RUNS: dict[str, Callable[..., None]] = {
    "kills": kills, "restarts": restarts, "launchers": launchers, "hangs": hangs, "damages": damages,
}  # fmt: skip
OF_FILES: dict[str, Callable[..., None]] = {"mutations": inputs.mutations, "memory": inputs.memory}


def main(arguments: Sequence[str]) -> int:
    usual = {"kills": 30, "restarts": 30, "launchers": 3, "hangs": 10, "damages": 100, "mutations": 15000, "memory": 14}
    o = options(__doc__, arguments, {"only": usual}, **usual, only=list(usual), steps=120, seed=0, out=None)
    report, began = Report(), time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dsp-faults-"))
    wanted = {name: getattr(o, name) for name in o.only if getattr(o, name)}
    try:
        runs = Runs(folder, o.steps) if wanted.keys() & OF_RUNS.keys() else None
        for name, count in wanted.items():
            place = runs if name in OF_RUNS else folder
            (OF_RUNS | OF_FILES)[name](place, count, random.Random(f"{name} {o.seed}"), report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(report.broken)} broken, in {time.monotonic() - began:.0f} s")
    if o.out:
        before = json.loads(o.out.read_text()) if o.out.exists() else {}
        broken = [what for what in before.pop("broken", ()) if what.split()[0] + "s" not in wanted] + report.broken
        o.out.write_text(json.dumps({**before, **report.kinds, "broken": broken}, indent=1) + "\n")
    return bool(report.broken)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
