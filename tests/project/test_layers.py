"""The order of the library's layers: a file imports from those before it, and nothing private; and its measures."""

from __future__ import annotations

import ast
from collections.abc import Container, Sequence
from pathlib import Path

from tests.support.paths import ROOT

HOME = ROOT / "dsp"
LAYERS = """
support planner comm stages core glue overlap report guard compiled parallel verify cluster discovery embedded
""".split()
ROOMS = {
    "planner": "problem index loops elimination sweep",
    "support": "environment formatting private source_lines python_state tensors",
    "comm": """messages formats wire hardware observers gradients node_routes exchange routes traffic_formulas
        collectives pending count layout halo balanced_rows moves randomness ops""",
    "stages": "notation signature parts methods stage known pipelines",
    "core": """torch_calls torch_traits arguments reads skeleton equal_modules record carrier
        checkpoints meter keys watch writes copies offers inputs growth unplanned module_calls recording run
        gradient_hooks decide observed parallel""",
    "glue": "rules traffic local sources positions lookahead offers",
    "glue.rules": """call elementwise statistics along joins attention flex products sequences shape windows sources
        written_out""",
    "overlap": "options hidden pieces choice ahead",
    "report": "without_data traffic legs picture table names cost measure advice plan",
    "compiled": "guards tidy reasons recorded graphs replay",
    "guard": "agreement traffic notes advice guards",
    "verify": "slices report compare modes independence check",
    "cluster": "choose launch check",
    "discovery": "dims calls recording shapes repeats search folds choice patterns discover",
    "embedded": "blocks pairs grid place core ulysses low_rank ring tensor method timing",
}
FILES = sorted(HOME.rglob("*.py"))


def place(parts: Sequence[str]) -> list[int]:
    """The place of a layer, and of a file in its room; a room's `__init__` is its last, the library's last of all."""
    order, places, room = LAYERS, [], ""
    for part in parts:
        places.append(len(order) if part == "__init__" else order.index(part))
        room = f"{room}.{part}".strip(".")
        order = ROOMS.get(room, "").split()
    return places if not order else [*places, len(order)]


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
                is_file = name in (ROOMS.get(".".join(parts[:-1]), "").split() if len(parts) > 1 else LAYERS)
                assert place(parts if is_file else parts[:-1]) < own, f"{file.name} imports {node.module}"
            if node.module != "dsp.support.private":  # which is there to name what is torch's own
                assert not [name for name in names if name.startswith("_")], f"private names of {node.module}: {names}"


def test_the_root_holds_no_more_than_the_rooms() -> None:
    entries = {path.stem for path in HOME.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries - {"__init__"} == {*LAYERS}
    assert len(LAYERS) <= 15


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
    places: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(file.relative_to(HOME)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


EXECUTOR = {"Parallel", "Runner", "Copies", "Inputs", "Prepared", "StageCall", "Recorder"}


def test_nothing_is_a_subclass_of_what_runs_a_forward() -> None:
    """A new ability is an offer, an observer or a pass; and no class has a fuller twin."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                assert not {ast.unparse(base) for base in node.bases} & EXECUTOR, f"{file.name}: {node.name}"
                assert not node.name.startswith("Full"), file.name


def test_no_tensor_or_module_has_an_attribute_named_after_dsp() -> None:
    assert not [file.name for file in FILES if "._dsp_" in file.read_text() or '"_dsp_' in file.read_text()]
