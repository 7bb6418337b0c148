"""The fenced blocks of the pages of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT

FRAMEWORKS = [ROOT / f"docs/{name}.md" for name in ("frameworks", "fsdp", "trainers", "pipeline")]
"""Pages whose blocks are programs of their own: test_frameworks.py runs them."""


WALKED = [ROOT / "docs/lora.md"]
"""Pages that test_lora.py goes through, command by command."""

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


def rough(text: str) -> str:
    """Without numbers that are nothing but rounding, which tensor has the largest of them, and lines of the page."""
    text = re.sub(r"(?<=\.md|\.py):\d+", ":~", text)
    return re.sub(r"\d\.\de-\d\d( \(.*\))?|0\.0e\+00( \(.*\))?", "~", text)
