"""The notebook of docs/ runs from top to bottom, and the API page names what there is."""

import ast
import json
import re
from xml.etree import ElementTree

import dsp
import zoo
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def shown(source, space):
    """The value of a cell's last line, if it is an expression, as a notebook would show it."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "plan.ipynb", "exec"), space)
    return None if last is None else eval(compile(ast.Expression(last.value), "plan.ipynb", "eval"), space)


def test_the_notebook():
    notebook = json.loads((DOCS / "plan.ipynb").read_text())
    assert notebook["nbformat"] == 4
    space = {}
    found = [shown("".join(c["source"]), space) for c in notebook["cells"] if c["cell_type"] == "code"]
    _, stages, plan, sent, svg = found
    assert stages["space.*"] == "b t [s c]" or len(stages) >= 2
    html = plan._repr_html_()
    ElementTree.fromstring(re.search("<svg.*</svg>", html, re.S)[0])
    assert html.count("<rect") >= 4
    assert sent[1] == 0 < sent[2]
    assert svg.startswith("<svg")


def test_the_api_page_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    for module in (dsp, zoo):
        for name in module.__all__:
            assert f"`{module.__name__}.{name}" in page, f"python tools/api_page.py writes {module.__name__}.{name}"
