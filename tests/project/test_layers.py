"""The order of the library's layers: a file imports from those before it, and nothing private; and its measures."""

from __future__ import annotations

import ast
from collections.abc import Container
from pathlib import Path

from tests.support.paths import ROOT

HOME = ROOT / "dsp"
LAYERS = """
text private launch lines world notation planner messages formats wire hardware
tensors compile_off observers exchange legs routes packed collectives pending sent rows deal count gradients
layout sharded moves ops randomness methods signature stages known pipelines slices calls traits between
rules core glue overlap report guard compiled plan run parallel house check cluster discovery embedded cluster_check
""".split()
ROOMS = {
    "planner": "problem index loops elimination sweep",
    "rules": """call elementwise statistics along joins attention flex products sequences shape windows sources
        written_out functions""",
    "plan": """script record recorder events values choices tracing solve program
        places operation names backwards operations measuring rehearsal reads
        cost overlap traffic advice make""",
    "run": """lookup views writes forward whole stage_calls inputs outputs runtime
        traffic_check piecewise recipes follow gradient_hooks functions
        scripted glue hooks graph parallel""",
    "core": """precision meter reads skeleton equal_modules record carrier backward keys unseen watch writes copies
        offers checkpoints inputs persistent growth unplanned stage_calls recording run hooks gradient_hooks placement
        decide observed parallel""",
    "glue": "traffic local sources offers",
    "overlap": "options hidden chunked pieces choice ahead",
    "report": "without_data idle quickest traffic legs picture table names cost measure advice plan",
    "compiled": "guards tidy reasons recorded graphs replay",
    "guard": "agreement traffic notes advice guards",
    "cluster": "choose",
    "check": "report compare modes independence check",
    "discovery": "dims calls recording shapes repeats search folds choice patterns discover",
    "embedded": "blocks pairs grid place core ulysses low_rank ring tensor method timing",
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


def test_files_import_in_no_circle_even_when_used_or_for_types_alone() -> None:
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in FILES}
    needs = {name: imported(file, modules) - {name, "dsp"} for name, file in modules.items() if name != "dsp"}
    while done := {name for name, left in needs.items() if not left & needs.keys()}:
        needs = {name: left for name, left in needs.items() if name not in done}
    assert not needs, {name: left & needs.keys() for name, left in needs.items()}


def imported(file: Path, modules: Container[str]) -> set[str]:
    """The modules of dsp that a file imports anywhere: at its top, for types, or in a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "dsp":
            names = [f"{node.module}.{a.name}" for a in node.names]
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant)}
    return found


def test_no_class_name_is_used_twice() -> None:
    """But by core and glue, which are to take the place of run and plan."""
    places: dict[str, list[str]] = {}
    for file in FILES:
        if file.relative_to(HOME).parts[0] in ("run", "plan"):
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(HOME)))
    assert not {name: found for name, found in places.items() if len(found) > 1}
