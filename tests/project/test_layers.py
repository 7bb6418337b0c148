"""The order of the library's layers: a file imports from those before it, and nothing private; and its measures."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.support.paths import ROOT

HOME = ROOT / "dsp"
LAYERS = """
text private launch lines world notation planner messages hardware routes overlap
tensors compile_off observers wire exchange collectives chunked pending sent rows deal count gradients layout sharded
moves ops randomness methods signature stages known slices
rules plan run check discovery embedded cluster_check
""".split()
ROOMS = {
    "planner": "problem index loops elimination sweep",
    "rules": """call elementwise statistics along joins attention flex products sequences shape windows sources
        written_out functions between""",
    "plan": """script record recorder events places skeleton precision meter operation names values operations backwards
        choices stage_cache without_data tracer tracing reads picture hidden table solve program cost
        overlap traffic advice make choose""",
    "run": """views writes notes kept traffic_check lookup forward gradient_hooks functions piecewise recipes
        follow glue inputs outputs agreement stage_calls hooks guards tidy graph pipelines parallel""",
    "check": "report compare modes independence check",
    "discovery": "dims calls recording shapes repeats search folds choice patterns discover",
    "embedded": "blocks pairs grid core ulysses low_rank ring tensor method timing",
}
FILES = sorted(HOME.rglob("*.py"))


def place(parts: tuple[str, ...]) -> tuple[int, int]:
    """The place of a layer, and of a file in its room; a room's `__init__` is its last, the library's last of all."""
    layer, *file = parts
    if layer == "__init__":
        return len(LAYERS), 0
    order = ROOMS.get(layer, "").split()
    return LAYERS.index(layer), order.index(file[0]) if file and file[0] != "__init__" else len(order)


def test_a_file_imports_from_layers_before_its_own() -> None:
    for file in FILES:
        imports_from_before(file)


def imports_from_before(file: Path) -> None:
    own = place(file.relative_to(HOME).with_suffix("").parts)
    tree = ast.parse(file.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dsp":
            names = [a.name for a in node.names]
            for name in names:
                parts = (*str(node.module).split(".")[1:], name)
                is_file = name in (LAYERS if len(parts) == 1 else ROOMS.get(parts[0], "").split() * (len(parts) == 2))
                assert place(parts if is_file else parts[:-1]) < own, f"{file.name} imports {node.module}"
            if node.module != "dsp.private":  # which is there to name what is torch's own
                assert not [name for name in names if name.startswith("_")], f"private names of {node.module}: {names}"


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(HOME)))
    assert not {name: found for name, found in places.items() if len(found) > 1}
