"""The style of docstrings and pages: how docstrings begin, which words pages use, how long pages are."""

import ast
import re

from tests.support.paths import ROOT

FOLDERS = ("dsp", "zoo", "tests", "tools", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))] + sorted(ROOT.glob("*.py"))
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)


def test_docstrings_begin_with_a_noun_or_a_verb():
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and re.match(r"(What|Whether|Of)\b", text):
                found.append(f"{path.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert not found, "\n".join(found)


def test_docstrings_name_files_that_exist():
    """Python files that a docstring names; two tests cite those of the projects that they compare with."""
    citing = {ROOT / "tests/golden/axial.py", ROOT / "tests/zoo/test_starts.py"}
    found = []
    for path in sorted(set(FILES) - citing):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            for name in re.findall(r"(?<![\w/.])(?:\w+/)*\w+\.py\b", text or ""):
                if not any(other.match(name) for other in FILES):
                    found.append(f"{path.relative_to(ROOT)}: {name}")
    assert not found, "\n".join(found)


def test_tools_are_used():
    """A program in tools/ is named by a page, the site, a step of continuous integration or a test."""
    patterns = ("*.md", "mkdocs.yml", "docs/*.md", ".ci/*", "tests/**/*.py")
    texts = [path.read_text() for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    for path in (ROOT / "tools").glob("*.py"):
        used = (f"tools/{path.name}", f"tools.{path.stem} ")
        assert any(name in text for text in texts for name in used), f"tools/{path.name}"


def test_pages_use_the_words_of_the_style():
    """The words that CONTRIBUTING.md advises against and that no other sense excuses."""
    words = re.compile(r"\b(anew|is none|is no (?!longer)\w+|to and fro|mended?)\b|\btold\b(?! apart)")
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        lines = path.read_text().splitlines()
        fine = ("there is no", "How dims are told")
        found += [f"{path.name}: {line}" for line in lines if words.search(line) and not any(f in line for f in fine)]
    assert not found, "\n".join(found)


def test_pages_are_short():
    """A page has some 120 lines. Listings to look things up in may have more."""
    listings = {"api.md", "zoo-stages.md"}
    lengths = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "docs").glob("*.md")}
    assert {name: n for name, n in lengths.items() if n > 140 and name not in listings} == {}
