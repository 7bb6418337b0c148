"""The notebooks of docs/ run from top to bottom and show what they print; the API page names what there is.

``UPDATE_DOCS=1 pytest -m "slow or not slow" tests/docs/test_notebook.py`` writes their outputs anew.
"""

import ast
import contextlib
import io
import json
import os
from typing import Any
from xml.etree import ElementTree

import pytest

import dsp
import zoo
from tests.support.pages import rough
from tests.support.paths import ROOT
from tests.support.slow import long

DOCS = ROOT / "docs"


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run(source: str, space: dict[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a cell: what it prints, and the value of its last line if that is an expression."""
    tree, printed = ast.parse(source), io.StringIO()
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "notebook", "exec"), space)
        value = None if last is None else eval(compile(ast.Expression(last.value), "notebook", "eval"), space)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(text)})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            data = {"text/html": lines(value._repr_html_()), "text/plain": lines(str(value))}
        outputs.append({"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"})
    return outputs


@pytest.mark.parametrize("name", ["plan", long("diffusers")])
def test_a_notebook_shows_what_its_cells_print(name, tmp_path, monkeypatch):
    path = DOCS / f"{name}.ipynb"
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)  # a reader's files lie beside the notebook
    space: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            outputs = run("".join(cell["source"]), space)
            if os.environ.get("UPDATE_DOCS"):
                cell["outputs"] = outputs
            assert rough(json.dumps(cell["outputs"])) == rough(json.dumps(outputs)), "".join(cell["source"])
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def test_a_plan_is_a_picture_in_a_notebook():
    notebook = json.loads((DOCS / "plan.ipynb").read_text())
    shown = [out["data"].get("text/html", []) for c in notebook["cells"] for out in c.get("outputs", ())]
    [html] = ["".join(html) for html in shown if html]
    ElementTree.fromstring(html)
    assert html.count("<rect") >= 4


def test_the_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    for module in (dsp, zoo):
        for name in module.__all__:
            assert f"| `{module.__name__}.{name}` |" in page
