"""Core, glue and report do all that dsp does, and load nothing of run and plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

CODE = """
import sys
from importlib import import_module
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsp
from tests.support import toys

store, rank = sys.argv[1:]
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)
mesh, name = init_device_mesh("cpu", (2,)), "Grid"
inputs = toys.inputs(name, 1, 6, 4)
assert dsp.plan(toys.make(name), kwargs=inputs, size=2).bytes["forward"] > 0
assert dsp.choose(toys.make(name), kwargs=inputs, hardware=dsp.Hardware("nvlink4", 1e9, 1e12), sizes=(1, 2)).smallest
assert len(dsp.discover(toys.make(name), kwargs=inputs)) > 1
dsp.parallelize(toys.make(name), mesh)(**inputs)
assert dsp.check(toys.make(name), kwargs=inputs, mesh=mesh, thorough=False)
home = Path(dsp.__file__).parent
for file in home.rglob("*.py"):
    parts = file.relative_to(home.parent).with_suffix("").parts
    if parts[1] not in ("run", "plan"):
        import_module(".".join(parts).removesuffix(".__init__"))
print("loaded", *[m for m in sys.modules if m.startswith("dsp.") and m.split(".")[1] in ("run", "plan")])
dist.destroy_process_group()
"""


def test_nothing_of_run_and_plan_is_loaded(tmp_path: Path) -> None:
    calls = [[sys.executable, "-c", CODE, str(tmp_path / "store"), str(rank)] for rank in range(2)]
    new = {**os.environ, "DSP_HOUSE": "new"}
    ranks = [subprocess.Popen(call, cwd=ROOT, env=new, stdout=subprocess.PIPE, text=True) for call in calls]
    said = [rank.communicate(timeout=250)[0].splitlines()[-1:] for rank in ranks]
    assert said == [["loaded"], ["loaded"]]
