"""torch.compile put aside: compiled code runs operation by operation where dsp follows it, and compiled in stages."""

from __future__ import annotations

from typing import Any

import torch

from dsp.private import compiler_loaded


class CompileOff:
    """Switches torch.compile off while it is entered: between stages glue has to see each operation.

    Nothing is done where no compiler was loaded. It may be entered again within, as modes of torch are.
    """

    def __init__(self) -> None:
        self.stances: list[Any] = []

    def __enter__(self) -> None:
        self.stances.append(torch.compiler.set_stance("force_eager") if compiler_loaded() else None)

    def __exit__(self, *exc: Any) -> None:
        if self.stances and (stance := self.stances.pop()) is not None:
            stance.__exit__(None, None, None)
