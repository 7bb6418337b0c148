"""Packages that not every job needs: what is missing is named with the command that installs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.slow import keep_short

CASES = {
    "Bio": ("protein_demo", "error: task protein: Biopython is not installed: pip install -e '.[protein]'"),
    "sklearn": ("demo", "error: data: scikit-learn is not installed: pip install -e '.[train]'"),
    "omegaconf": ("demo", "the trainer needs omegaconf, which is not installed: pip install -e '.[train]'"),
}


@pytest.mark.parametrize("absent", keep_short(CASES, in_slow=["sklearn"]))
def test_a_missing_package_is_named_with_the_command(tmp_path: Path, absent: str) -> None:
    config, said = CASES[absent]
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{absent!r}] = None")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", f"configs/{config}.yaml", f"runs_dir={tmp_path}", "train.steps=1"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert done.stderr.strip().split("\n")[-1].endswith(said)


@pytest.mark.slow
def test_infer_names_a_missing_package_and_goes_without_what_it_does_not_need(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['Bio'] = None")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}

    def infer(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "zoo.cli.infer", *arguments]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)

    assert infer("--help").returncode == 0
    assert infer("--dca", "x.cif").stderr == "error: Biopython is not installed: pip install -e '.[protein]'\n"


@pytest.mark.slow
def test_the_library_and_the_models_need_the_core_alone(tmp_path: Path) -> None:
    others = "omegaconf wandb PIL sklearn Bio av diffusers safetensors transformers yaml".split()
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({others}))")
    code = "import dsp, zoo; zoo.create('latte', 'test'); zoo.create('evoformer', 'test'); print(dsp.__version__)"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert not done.returncode, done.stderr
    assert done.stdout.strip().count(".") == 2
