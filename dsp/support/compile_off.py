"""torch.compile switched off between stages, where dsp has to see each operation; inside stages code stays compiled."""

from __future__ import annotations

from typing import Any

import torch

from dsp.support.private import compiler_loaded


class CompileOff:
    """A context in which torch.compile is off. It may be entered several times, as modes of torch may.

    It does nothing if no compiler was loaded.
    """

    def __init__(self) -> None:
        self.stances: list[Any] = []

    def __enter__(self) -> None:
        self.stances.append(torch.compiler.set_stance("force_eager") if compiler_loaded() else None)

    def __exit__(self, *exc: Any) -> None:
        if self.stances and (stance := self.stances.pop()) is not None:
            stance.__exit__(None, None, None)
