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

from dsp import launch
from tests.support.paths import ROOT
from tests.support.slow import slow_but

ENDS = {
    "an error": ("sys.exit('error: a number is missing')", 1, "error: a number is missing\n"),
    "a status": ("sys.exit(3)", 3, ""),
    "a signal": ("os.kill(os.getpid(), 9)", 137, r"error: rank 1 \(process \d+ on \S+\) was ended by SIGKILL\n"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", slow_but(ENDS, "a status"))
def test_what_ends_a_job_is_said_last_and_once(tmp_path: Path, how: str) -> None:
    """Two jobs at a time do not meet at one port."""
    end, status, said = ENDS[how]
    (tmp_path / "script.py").write_text(f"import os, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(60)\n")
    command = [sys.executable, "-m", "dsp.launch", "--nproc-per-node", "2", "script.py"]
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
