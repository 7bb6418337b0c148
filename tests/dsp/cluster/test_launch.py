"""dsp-launch: the ranks' own words come last, and the exit status is that of the rank that failed first."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import ProcessFailure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from dsp.cluster import launch
from tests.support.paths import ROOT
from tests.support.slow import keep_short

ENDS = {
    "an error": ("sys.exit('error: a number is missing')", 1, "error: a number is missing\n"),
    "a status": ("sys.exit(3)", 3, ""),
    "a signal": ("os.kill(os.getpid(), 9)", 137, r"error: rank 1 \(process \d+ on \S+\) was ended by SIGKILL\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", keep_short(ENDS, only=["a status"]))
def test_the_end_of_a_job_is_printed_last_and_once(tmp_path: Path, how: str) -> None:
    """Two jobs at a time do not meet at one port."""
    end, status, said = ENDS[how]
    (tmp_path / "script.py").write_text(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "dsp.cluster.launch", "--nproc-per-node", "2", "script.py"]
    home = str(ROOT)
    jobs = [
        subprocess.Popen(
            command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": home}, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2 if how == "a signal" else 1)
    ]
    for job in jobs:
        err = job.communicate(timeout=120)[1]
        assert job.returncode == status, err
        assert re.match(said, err)
        assert err.count("\n") == bool(said)


@pytest.mark.parametrize(("kills", "said"), [(3, ""), (4, ": the kernel ended a process because memory ran out")])
def test_memory_is_named_only_where_the_kernel_says_so(tmp_path, monkeypatch, capsys, kills, said):
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom_kill 3\n")
    monkeypatch.setattr(launch, "COUNTERS", (str(tmp_path / "absent"), str(counter)))

    def run(args):
        counter.write_text(f"low 0\noom_kill {kills}\n")
        raise ChildFailedError("script", {1: ProcessFailure(1, 4711, -signal.SIGKILL, "/nowhere")})

    monkeypatch.setattr(launch, "run", run)
    assert launch.main(["--nproc-per-node", "2", "script.py"]) == 137
    assert re.fullmatch(rf"error: rank 1 \(process 4711 on \S+\) was ended by SIGKILL{said}\n", capsys.readouterr().err)


def failures(codes):
    """The error of a job whose ranks ended with these codes, the first of them first."""
    found = {}
    for i, (rank, code) in enumerate(codes.items()):
        found[rank] = ProcessFailure(rank, 100 + rank, code, "/nowhere")
        found[rank].timestamp = i
    return ChildFailedError("script", found)


KILL, TERM = -signal.SIGKILL, -signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "ends", "sizes", "status", "said"),
    [
        ([], [{1: KILL}], [3], 137, ""),
        (["--restarts", "2"], [{1: KILL, 0: 1, 2: TERM}, {}], [3, 3], 0, "restart 1 of 2: on 3 ranks"),
        (
            ["--restarts", "2", "--min-ranks", "1"],
            [{1: KILL, 0: 1}, {0: KILL}, {}],
            [3, 2, 1],
            0,
            "restart 2 of 2: on 1",
        ),
        (
            ["--restarts", "2", "--min-ranks", "1"],
            [{0: 1, 1: KILL, 2: 1}, {}],
            [3, 2],
            0,
            "error: rank 1 (process 101 on",
        ),
        (
            ["--restarts", "3", "--min-ranks", "2"],
            [{1: KILL}, {0: KILL}],
            [3, 2],
            137,
            "1 ranks are left, and --min-ranks",
        ),
        (["--restarts", "1", "--min-ranks", "1"], [{1: KILL, 2: KILL}, {}], [3, 1], 0, "on 1 ranks"),
        (["--restarts", "1", "--min-ranks", "1"], [{0: 1}, {0: 1}], [3, 3], 1, "restart 1 of 1: on 3 ranks"),
        (["--restarts", "3", "--min-ranks", "1"], [{0: 2, 1: KILL}], [3], 2, ""),
        (["--restarts", "3", "--min-ranks", "1"], [{0: 75}], [3], 75, ""),
    ],
)
def test_a_job_goes_on_with_the_ranks_that_are_left(monkeypatch, capsys, options, ends, sizes, status, said):
    started = []

    def run(args):
        started.append(args)
        if codes := ends[len(started) - 1]:
            raise failures(codes)

    monkeypatch.setattr(launch, "run", run)
    assert launch.main(["--nproc-per-node", "3", *options, "train.py", "a.yaml"]) == status
    assert [int(args.nproc_per_node) for args in started] == sizes
    again = [args.training_script_args for args in started]
    assert again == [["a.yaml"], *[["a.yaml", "resume=true"]] * (len(ends) - 1)]
    assert said in capsys.readouterr().err
    assert all(args.standalone for args in started)


@pytest.mark.parametrize("number", ["x", "0", "-1", ""])
def test_a_number_of_ranks_that_is_none_is_one_line(monkeypatch, capsys, number):
    monkeypatch.setattr(launch, "run", None)  # nothing is started
    with pytest.raises(SystemExit):
        launch.main([f"--nproc-per-node={number}", "train.py"])
    assert "error: --nproc-per-node: " in capsys.readouterr().err.splitlines()[-1]


def test_restarts_are_for_one_node(capsys):
    with pytest.raises(SystemExit):
        launch.main(["--nnodes", "2", "--restarts", "1", "train.py"])
    assert "torchrun has --nnodes MIN:MAX --max-restarts" in capsys.readouterr().err
