"""The core: docs/core.md lists its files in the order to read, and they train a model alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

FILES = re.findall(r"^\| `(dsp/\S+\.py)` \|", (ROOT / "docs/core.md").read_text(), re.M)
NAMES = ["dsp/__init__.py", "dsp/check/__init__.py", "dsp/plan/__init__.py", "dsp/run/__init__.py"]  # and no code
LINES = 8_680

ALONE = '''
import os, sys, tempfile, traceback
from functools import partial
from importlib.abc import MetaPathFinder

import torch
import torch.distributed as dist
import zoo
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

RANKS, CORE = 3, set(sys.argv[1:])


class Core(MetaPathFinder):
    """Refuses every module of dsp that is not one of the core."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "dsp" and name not in CORE:
            raise ModuleNotFoundError(f"{name} is not in the core", name=name)


assert not any(name.partition(".")[0] == "dsp" for name in sys.modules)
sys.meta_path.insert(0, Core())
from dsp.run.runtime import parallelize


def train(mesh):
    """The loss and every gradient of two steps."""
    torch.manual_seed(0)
    model = zoo.create("transformer2d", "test").double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)  # no gate is closed
    if mesh is not None:
        parallelize(model, mesh)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(2):
        torch.manual_seed(step)
        inputs = model.example_inputs(2, frames=5, height=8, width=4)
        optimizer.zero_grad()
        loss = model(**{k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}).square().mean()
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        for grad in grads if mesh is not None else ():
            dist.all_reduce(grad)
            grad /= RANKS
        found += [loss.detach(), *[grad.clone() for grad in grads]]
        optimizer.step()
    return found


def rank(number, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    found, expected = train(init_device_mesh("cpu", (RANKS,))), train(None)
    assert any(t.abs().max() > 0 for t in expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)
    own = {name for name in sys.modules if name.partition(".")[0] == "dsp"}
    assert own == CORE, f"listed, and not needed: {sorted(CORE - own)}"


children = []
with tempfile.TemporaryDirectory() as folder:
    for number in range(RANKS):
        if not (child := os.fork()):
            try:
                rank(number, f"{folder}/store")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
'''


def module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_transformer2d_trains_by_the_core_alone() -> None:
    made = subprocess.run(
        [sys.executable, "-c", ALONE, *map(module, NAMES + FILES)], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def test_each_file_of_the_core_imports_from_those_before_it() -> None:
    before = {"dsp"}
    for file in FILES:
        assert not {name for name in imports(ROOT / file) if name not in before}, file
        before.add(module(file))


def imports(file: Path) -> set[str]:
    """The modules of dsp that are loaded with a file."""
    found, names = set(), {module(name) for name in FILES}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "dsp":
            whole = {f"{node.module}.{a.name}" for a in node.names}
            found |= whole & names or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.partition(".")[0] == "dsp"}
    return found


def test_the_core_is_short() -> None:
    assert len(FILES) <= 44
    assert sum(len((ROOT / file).read_text().splitlines()) for file in FILES) <= LINES


def test_import_dsp_loads_no_more_than_names() -> None:
    code = "import sys, dsp; print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'dsp'))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["dsp", "dsp.check", "dsp.plan"]
