"""A case of a parametrized test that shows for one more model, mesh or size what others show: for `pytest -m slow`."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def long(*values: Any, id: str | None = None) -> Any:
    """One of the longest of such cases: for `pytest -m long`, by hand before a release."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def slow_but(values: Any, *kept: Any, but: Any = None) -> list[Any]:
    """All values, of which those not kept are for `-m slow`; with `but`, for `-m long` if they are not among those."""
    found = []
    for value in values:
        mark = slow if but is None or value in but else long
        found.append(value if value in kept else mark(*value) if isinstance(value, tuple) else mark(value))
    return found
