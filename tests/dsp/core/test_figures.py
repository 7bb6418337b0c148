"""Figures that keep the library small enough to hold: what a call passes through, and how many ideas there are."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT

MOST = {"first": (44, 413), "cached": (18, 89)}  # files and functions of dsp that a call of the README's model enters

CALLS = """
import json, os, sys
import torch, torch.distributed as dist, dsp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from dsp.parallel import parallelize

torch.set_num_threads(1)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("sp",))
root = os.path.dirname(dsp.__file__)


class Two(nn.Module):
    stages = {"": "x=b t s c", "space": "b t [s c]", "time": "b [t] s [c]"}

    def __init__(self):
        super().__init__()
        self.space, self.time = nn.Identity(), nn.Identity()

    def forward(self, x):
        return self.time(self.space(x))


def entered(call):
    places = set()

    def note(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and not code.co_name.startswith("<"):
            places.add((os.path.relpath(code.co_filename, root), code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(places)


model, x = parallelize(Two(), mesh), torch.randn(1, 8, 8, 32)
first = entered(lambda: model(x))
model(x)
print(json.dumps({"first": first, "cached": entered(lambda: model(x))}))
"""


@pytest.fixture(scope="module")
def calls() -> dict[str, list[Any]]:
    done = subprocess.run([sys.executable, "-c", CALLS], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("call", MOST)
def test_a_call_passes_through_few_files_and_functions(calls: dict[str, list[Any]], call: str) -> None:
    files = sorted({file for file, _ in calls[call]})
    sizes = len(files), len(calls[call])
    assert all(size <= most for size, most in zip(sizes, MOST[call])), (sizes, files, calls[call])
