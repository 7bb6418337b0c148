"""A case of a parametrized test that shows for one more model, mesh or size what others show: for `pytest -m slow`."""

from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def long(*values: Any, id: str | None = None) -> Any:
    """One of the longest of such cases: for `pytest -m long`, by hand before a release."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def slow_but(values: Any, *kept: Any) -> list[Any]:
    """All values, of which those not kept are for `-m slow`."""
    return [value if value in kept else slow(value) for value in values]
