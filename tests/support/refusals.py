"""A call that has to end in an error."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(
    message: str, call: Callable[..., Any], *args: Any, error: type[Exception] = ValueError, **named: Any
) -> None:
    """Call it, and see it raise an error whose text the pattern `message` matches."""
    with pytest.raises(error, match=message):
        call(*args, **named)
