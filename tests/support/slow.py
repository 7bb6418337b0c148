"""A case of a parametrized test that shows for one more model, mesh or size what others show: for `pytest -m slow`."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def every_slow(*values: Any) -> Any:
    """One of such cases that all stay slow, where `tests/conftest.py` makes three of four long."""
    return pytest.param(*values, marks=pytest.mark.slow(every=True))


def long(*values: Any, id: str | None = None) -> Any:
    """One of the longest of such cases: for `pytest -m long`, by hand before a release."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def keep_short(values: Any, only: Any = (), *, in_slow: Any = None) -> list[Any]:
    """All values; those not in `only` are for `-m slow`, or for `-m long` where `in_slow` is given and lacks them."""
    cases = []
    for value in values:
        mark = slow if in_slow is None or value in in_slow else long
        cases.append(value if value in only else mark(*value) if isinstance(value, tuple) else mark(value))
    return cases
