"""Ranks of jobs of dsp-launch are killed at random: do the jobs go on by themselves, and with the same samples?

Two kills of three are each for a job of three ranks, which goes on with two (`--min-ranks 2`); the others are all for
one job of two ranks, which goes on with as many. Jobs are started as a user starts them, in processes of their own, but
for a program that notes the samples it draws.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isclose
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import ROOT
from zoo.training.records import read_metrics

PROGRAM = """
import json, os, sys
import train
from zoo.training.tasks.video import Task
plain = Task.sample_indices
def sample_indices(self, step, *more):
    chosen = plain(self, step, *more)
    with open(os.environ["DRAWN"], "a") as file:
        file.write(json.dumps([step, chosen]) + "\\n")
    return chosen
Task.sample_indices = sample_indices
sys.exit(train.main(sys.argv[1:]))
"""
GOES_ON = 30.0  # seconds from a kill to the next step
END = 600.0  # seconds for a job


def children(pid: int) -> list[int]:
    """The processes that a process has started, in their order: of a launcher its ranks."""
    with suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def computed(pid: int) -> float:
    """The seconds that a process has had of a core."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def samples(path: Path) -> dict[int, set[str]]:
    """The samples that were drawn for each step, by all ranks of all starts; one set of them if all drew alike."""
    drawn = defaultdict(set)
    for line in path.read_text().splitlines():
        step, chosen = json.loads(line)
        drawn[step].add(json.dumps(chosen))
    return dict(drawn)


class Job:
    """A job of dsp-launch that trains the tiny configuration."""

    def __init__(self, runs: Any, name: str, launch: list[str]):
        self.folder, self.log, self.drawn = runs.folder / name, runs.folder / f"{name}.log", runs.folder / f"{name}.ids"
        (program := runs.folder / "drawing.py").write_text(PROGRAM)
        command = [sys.executable, "-m", "dsp.cluster.launch", *launch, str(program)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "DRAWN": str(self.drawn), "OMP_NUM_THREADS": "1"}
        arguments = runs.arguments(name, "train.timeout=120")
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log)

    def records(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    def wait(self, condition: Callable[[list[dict[str, Any]]], Any]) -> Any:
        """Wait until the records fulfil a condition; its value, None if the job ends before."""
        end = time.monotonic() + END
        while time.monotonic() < end and self.process.poll() is None:
            if value := condition(self.records()):
                return value
            time.sleep(0.1)
        return None

    def kill(self, rank: int) -> tuple[float, float] | None:
        """Kill a rank; the seconds until the job has taken its next step, and those that its slowest rank has computed
        by then, None if it does not go on."""
        before = sum("resumed" in record for record in self.records())
        os.kill(children(self.process.pid)[rank], signal.SIGKILL)
        killed = time.time()
        first = self.wait(lambda records: next((r for r in since(records, before + 1) if "loss" in r), None))
        return first and (first["time"] - killed, max(map(computed, children(self.process.pid)), default=0.0))

    def end(self) -> int | None:
        """Wait for the job's end; its exit status, None if it had to be killed."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(END)
        for pid in (self.process.pid, *children(self.process.pid)):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()
        return None


def since(records: list[dict[str, Any]], start: int) -> list[dict[str, Any]]:
    """The records after the `start`-th resume; none if there were fewer."""
    places = [0, *(k for k, record in enumerate(records) if "resumed" in record)]
    return records[places[start] :] if start < len(places) else []


def restarts(runs: Any, count: int, chance: random.Random, report: Any) -> None:
    """SIGKILL for ranks of jobs, at any step; nobody starts them again but their launcher."""
    quiet = Job(runs, "undisturbed", ["--nproc-per-node", "2"])
    report.hold(quiet.end() == 0, "the undisturbed job does not end")
    expected, took, work, equal, alone = samples(quiet.drawn), [], [], 0, count * 2 // 3
    jobs = [(3, ["--min-ranks", "2"], 1)] * alone + [(2, [], count - alone)] * (count > alone)
    for i, (ranks, fewer, kills) in enumerate(jobs):
        launch = ["--nproc-per-node", str(ranks), "--restarts", str(kills), *fewer]
        job, name = Job(runs, f"restart{i}", launch), f"restart {i}"
        for kill in range(kills):
            first = 1 if kill else 4  # there is a checkpoint
            victim, ahead = chance.randrange(ranks), chance.randint(first, max(4, runs.steps * 3 // 4 // kills))
            job.wait(lambda records: len(since(records, kill)) > ahead)  # noqa: B023
            time.sleep(chance.random() * 0.05)
            done = job.kill(victim) if job.process.poll() is None else None
            if report.hold(done is not None, f"{name}: after kill {kill} it does not go on"):
                seconds, busy = done
                took.append(seconds)
                work.append(busy)
                text = f"the next step came after {seconds:.1f} s, of which a rank computed {busy:.1f} s"
                print(f"{name}: rank {victim} of {ranks} was killed; {text}", flush=True)
                report.hold(seconds <= GOES_ON, f"{name}: {text}")
            report.hold(f"error: rank {victim} (" in job.log.read_text(), f"{name}: rank {victim} is not named")
        report.hold(job.end() == 0, f"{name} does not end: {job.log.read_text()[-600:]}")
        records = job.records()
        resumed = [record["resumed"] for record in records if "resumed" in record]
        report.hold(resumed[-1:] == [2], f"{name}: it went on with {resumed} ranks")
        losses = {record["step"]: record["loss"] for record in records if "loss" in record}
        alike = losses.keys() == runs.curve.keys() and all(
            isclose(loss, runs.curve[step], rel_tol=1e-4) for step, loss in losses.items()
        )
        report.hold(alike, f"{name}: another curve")
        equal += report.hold(samples(job.drawn) == expected, f"{name}: other samples")
    more = {"jobs": len(jobs), "of_three_ranks": alone, "same_samples": equal, "load": f"{os.getloadavg()[1]:.0f}"}
    report.add("restarts", len(took), **more, **{f"{name}_s": f"{value:.1f}" for name, value in spent(took, work)})


def spent(took: Sequence[float], work: Sequence[float]) -> Iterator[tuple[str, float]]:
    """The seconds from a kill to the next step, by name, and those that a rank computed meanwhile."""
    if took:
        yield from (("median", median(took)), ("slowest", max(took)), ("median_computing", median(work)))
