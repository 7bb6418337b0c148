"""The order of the tests: no test file imports another one."""

import ast

from tests.support.paths import ROOT, TESTS


def test_no_test_imports_another():
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            assert not module.rpartition(".")[2].startswith("test_"), f"{path.relative_to(ROOT)} imports {module}"
            if module.startswith("tests") and isinstance(node, ast.ImportFrom):
                assert not [a.name for a in node.names if a.name.startswith("test_")], path.relative_to(ROOT)
