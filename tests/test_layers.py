"""The order of the library's layers: a file imports from those before it, and nothing private."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
LAYERS = """
text private notation planner
collectives layout sent sharded ops count agreement randomness
rules stages slices twins trace reads residual ledger hardware advice plan choose
glue calls parallel
compare check
dims search patterns discover
embedded
""".split()
FILES = sorted((HOME / "dsp").rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(HOME).as_posix())
def test_a_file_imports_from_layers_before_its_own(file: Path) -> None:
    own = file.relative_to(HOME / "dsp").with_suffix("").parts[0]
    tree = ast.parse(file.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dsp."):
            layer, names = node.module.split(".")[1], [a.name for a in node.names]
            assert own == "__init__" or LAYERS.index(layer) <= LAYERS.index(own), f"{own} imports {layer}"
            if layer != "private":  # which is there to name what is torch's own
                assert not [name for name in names if name.startswith("_")], f"private names of {layer}: {names}"
