"""`import dsp` is quick."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT


def test_import_dsp_loads_no_more_than_names() -> None:
    code = "import sys, dsp; print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'dsp'))"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["dsp"]
