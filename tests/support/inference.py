"""infer.py in tests: in this process and in others, on a tiny run."""

from __future__ import annotations

import importlib
import sys

import pytest
from PIL import Image

from tests.support.paths import ROOT
from tests.support.runs import Runs


def infer(*arguments):
    sys.path.insert(0, str(ROOT))
    return importlib.import_module("infer").main([str(a) for a in arguments])


def infer_here(mesh, arguments):
    assert infer(*arguments) == 0


@pytest.fixture(name="run", scope="module")
def tiny_run(trainer, tmp_path_factory):
    return Runs(trainer, tmp_path_factory.mktemp("infer"))("sample.every=0")


def frames(path):
    with Image.open(path) as gif:
        for i in range(gif.n_frames):
            gif.seek(i)
            yield gif.convert("L")
