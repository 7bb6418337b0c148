"""docs/lora.md as a reader follows it: clips, adapters, and the same clip in diffusers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.runs import launched

pytest.importorskip("peft")
PAGE = ROOT / "docs/lora.md"
SHORT = ["train.steps=20", "eval.every=0", "sample.every=20", "sample.steps=2", "wandb.mode=disabled"]


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = launched([sys.executable, *command], cwd=folder, env=environment)
    assert not done.returncode, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def commands() -> list[list[str]]:
    """The commands of the laptop, with fewer steps."""
    text = next(block.text for block in blocks(PAGE) if "tiny_encoders" in block.text)
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [line + SHORT * ("train.py" in line) for line in found]


@pytest.mark.long
def test_the_page_from_clips_to_the_same_clip_in_diffusers(tmp_path: Path) -> None:
    for name in ("train.py", "infer.py", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    for program, *arguments in commands():
        launcher = ["-m", "dsp.cluster.launch"] * (program == "dsp-launch")
        run(tmp_path, *launcher, *arguments)
    assert (tmp_path / "runs/wan_lora_tiny/samples/step-00000020.gif").is_file()
    assert any(tmp_path.rglob("seed-0.gif"))
    (script,) = [block for block in blocks(PAGE) if block.language == "py"]
    (tmp_path / "theirs.py").write_text(script.text)
    printed = run(tmp_path, "theirs.py")
    assert f"```text\n{printed}```" in PAGE.read_text()
