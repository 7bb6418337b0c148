"""The fenced blocks of the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

FRAMEWORKS = ROOT / "docs/frameworks.md"  # each block a program of its own: test_frameworks.py runs them


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.S | re.M)


class Block(NamedTuple):
    language: str
    text: str
    start: int
    end: int
    line: int


def blocks(path: Path) -> list[Block]:
    source = path.read_text()
    return [
        Block(m[1], m[2], m.start(), m.end(), source.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(source)
    ]
