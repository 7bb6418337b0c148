"""The faults of benchmarks/faults.py, in little."""

import json
import random

import pytest
import sklearn.datasets  # noqa: F401 (here, so that ranks are forked with it)

from tests.support.paths import ROOT


@pytest.fixture
def inputs(script):
    return script("fault_inputs")


class Found:
    def __init__(self):
        self.broken, self.found = [], {}

    def hold(self, sound, what):
        if not sound:
            self.broken.append(what)
        return sound

    def add(self, kind, count, **more):
        self.found[kind] = {"count": count, **more}


def test_damaged_files_end_in_an_error_of_their_reader(inputs, tmp_path):
    found = Found()
    inputs.mutations(tmp_path, 600, random.Random(1), found)
    assert found.broken == []
    assert found.found["mutations"]["refused"] > 200


@pytest.mark.long
def test_a_few_of_every_kind(inputs, tmp_path):
    """In a process of its own, which forks its ranks before torch has started a thread."""
    import subprocess
    import sys

    counts = {"kills": 2, "launchers": 1, "hangs": 2, "damages": 6, "mutations": 50, "memory": 1}
    command = [sys.executable, str(ROOT / "benchmarks/faults.py"), "--steps", "30"]
    command += ["--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [*command, *(f"--{name}={count}" for name, count in counts.items())],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.pop("broken") == []
    assert {kind: entry["count"] for kind, entry in found.items() if kind != "kills"} == {
        kind: count for kind, count in counts.items() if kind != "kills"
    }
