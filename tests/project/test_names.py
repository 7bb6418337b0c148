"""Names say what a thing is: none of a local, argument, attribute, function or class is a pronoun or a participle."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

FOLDERS = ("dsp", "tools", "benchmarks", "zoo")
WORDS = {"own", "found", "made", "told", "apart", "again"}
# in dsp and zoo these too: they say which, or what became of a thing, but not what it is
IN_DSP = set(
    """
given held kept taken drawn stated asked left came gone fresh rest others what how where there here mine its theirs
""".split()
)
# in zoo a left side is one of pictures and pairs, and theirs are the names that published weights have beside ours
IN_ZOO = IN_DSP - {"left", "theirs"}
PUBLIC = {  # of the API, where users write them, and of what is written to files
    "dsp/cluster/check.py": {"what"},
    "dsp/comm/routes.py": {"given"},
    "dsp/comm/wire.py": {"given"},
    "dsp/embedded/method.py": {"given"},
    "dsp/embedded/timing.py": {"held"},
    "dsp/overlap/options.py": {"given"},
    "dsp/report/plan.py": {"given"},
    "dsp/report/table.py": {"how"},
    "zoo/training/tasks/protein_options.py": {"drawn"},
}


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every name that a tree defines."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.MatchMapping(rest=str(name)):
                yield node.lineno, name


def unclear(tree: ast.AST, words: set[str]) -> list[tuple[int, str]]:
    """The names of a tree that say nothing of what they name, whatever their case and underscores."""
    return [(line, name) for line, name in bound(tree) if name.strip("_").lower() in words]


def words_of(path: str) -> set[str]:
    """The words that are no names in a file of the project."""
    words = {"dsp": IN_DSP, "zoo": IN_ZOO}.get(path.partition("/")[0], set())
    return WORDS | (words - PUBLIC.get(path, set()))


def test_names_say_what_a_thing_is() -> None:
    names = [
        f"{path}:{line}: {name}"
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        for path in [file.relative_to(ROOT).as_posix()]
        for line, name in unclear(ast.parse(file.read_text()), words_of(path))
    ]
    assert not names, "name what it is, or return it at once:\n" + "\n".join(names)


SOURCE = """
import apart as again
class Made:
    found: int
    def own(self, told, *apart, again=1, **_made):
        self.own = [found for found in told if (made := found)]
def _told():
    with open("a") as apart:
        lambda found: found.own
    try:
        pass
    except ValueError as again:
        pass
    match 1:
        case [made, *own]:
            pass
        case {"a": 1, **told}:
            pass
        case int() as found:
            pass
founder, made_of, knots_apart = 1, 2, 3
"""


def test_every_kind_of_name_is_read() -> None:
    lines = [line for line, _ in unclear(ast.parse(SOURCE), WORDS)]
    assert sorted(lines) == [2, 3, 4, *[5] * 5, *[6] * 3, 7, 8, 9, 12, 15, 15, 17, 19]


def test_names_of_the_interface_stay_in_their_files() -> None:
    for path, names in PUBLIC.items():
        assert {name for _, name in unclear(ast.parse((ROOT / path).read_text()), IN_DSP)} == names, path
    files = "zoo/layers.py", "dsp/parallel.py", "dsp/embedded/timing.py", "benchmarks/faults.py"
    assert ["held" in words_of(path) for path in files] == [True, True, False, False]
    assert ["left" in words_of(path) for path in files] == [False, True, True, False]
