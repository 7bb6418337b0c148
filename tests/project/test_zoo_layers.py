"""The layers of the zoo: models, layers and data know neither dsp nor the trainer, and no file another's privates."""

import ast
import re

import pytest
from torch import nn

import zoo
from tests.support.paths import ROOT
from zoo.contract import Model, check, members

FILES = sorted(path.resolve() for path in ROOT.glob("zoo/**/*.py"))  # train.py and infer.py, too: zoo/cli links to them
# zoo.load is a program, too
PROGRAMS = {
    ROOT / name
    for name in (
        "train.py",
        "infer.py",
        "zoo/cli/__init__.py",
        "zoo/video/encode.py",
        "zoo/data/protein/example_families.py",
        "zoo/video/example_clips.py",
        "zoo/__init__.py",
    )
}


def imported(tree):
    """(module, names taken from it, or the name it has here) of every import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module, [alias.name for alias in node.names]
            yield from ((f"{node.module}.{alias.name}", []) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


def test_imports():
    for path in FILES:
        imports_what_it_may(path)


def imports_what_it_may(path):
    tree = ast.parse(path.read_text())
    ours = {name: taken for name, taken in imported(tree) if name.split(".")[0] in ("dsp", "zoo", "train", "infer")}
    if path not in PROGRAMS and ROOT / "zoo/training" not in path.parents:
        known = ("dsp", "zoo.training", "torch.distributed")
        assert not [name for name, _ in imported(tree) if f"{name}.".startswith(tuple(f"{k}." for k in known))], path
    assert not [name for taken in ours.values() for name in taken if name.startswith("_")], path
    modules = {name.rpartition(".")[2] for name in ours}
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    assert not [n.attr for n in reads if n.value.id in modules and n.attr.startswith("_") and n.attr[1] != "_"], path


def test_of_dsp_the_zoo_takes_what_is_documented():
    page, rooms = (ROOT / "docs/api.md").read_text(), {"dsp", "dsp.embedded", "dsp.hardware"}
    documented = {*re.findall(r"(?:::: |heading: )([\w.]+)", page)} | rooms
    for path in FILES:
        tree = ast.parse(path.read_text())
        taken = {f"{m}.{name}" for m, names in imported(tree) if m.split(".")[0] == "dsp" for name in names}
        reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        taken |= {ast.unparse(node) for node in reads if ast.unparse(node.value) in rooms} - rooms
        assert not taken - documented, path


def test_missing_members_of_a_model_are_named():
    bare = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="Linear does not meet the contract of a model of the zoo") as error:
        check(bare)
    assert all(f"  {name}: " in str(error.value) for name in members(Model))
    model = zoo.create("latte", "test")
    assert check(model) is model
    model.cores = ["blocks.*"]
    with pytest.raises(TypeError, match=r"another type:\n  cores: [^\n]*$"):
        check(model)
