"""The tests that tools/mutations.py names run with `pytest` alone: none of them is for `-m slow` or `-m long`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from tools.mutations import FAULTS


def marked_slow(marks: Iterable[Any]) -> bool:
    return any(mark.name in ("slow", "long", "measurement") for mark in marks)


def runs_in_short(test: Callable[..., Any]) -> bool:
    """True if a test has a case without such a mark: of each `parametrize` one."""
    marks = getattr(test, "pytestmark", [])
    values = [mark.args[1] for mark in marks if mark.name == "parametrize"]
    return not marked_slow(marks) and all(any(not marked_slow(getattr(v, "marks", ())) for v in of) for of in values)


def test_mutations_name_tests_of_the_short_suite() -> None:
    for name in sorted({name for fault in FAULTS for name in fault.tests.split()}):
        file, _, test = name.partition("::")
        module = importlib.import_module(f"tests.{file.replace('/', '.')}")
        chosen = [test.partition("[")[0]] if test else [k for k in vars(module) if k.startswith("test_")]
        assert any(runs_in_short(getattr(module, k)) for k in chosen), f"{name} is slow in every case"
