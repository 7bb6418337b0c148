"""Functions and methods of TorchScript between stages. Torch shows them to no mode: here each becomes one operation.

It has no rule, so it runs on full tensors. Without this it would run on this rank's part, as a plain tensor.
"""

from __future__ import annotations

from typing import Any

from torch.overrides import handle_torch_function

from dsp.between import Between
from dsp.private import SCRIPTED, _get_current_function_mode


class Scripted:
    """A call of something scripted, as a mode sees it."""

    def __init__(self, own: Any, call: Any) -> None:
        self.own, self.call, self.__name__ = own, call, f"{own.name} of TorchScript"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scripted) and self.own is other.own

    def __hash__(self) -> int:
        return id(self.own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.own, *args, **kwargs)


def followed(kind: Any) -> None:
    """Let modes between stages see calls of this kind."""
    own = kind.__call__

    def call(scripted: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(_get_current_function_mode(), Between):
            return handle_torch_function(Scripted(scripted, own), (), *args, **kwargs)
        return own(scripted, *args, **kwargs)

    kind.__call__ = call


for _kind in SCRIPTED:
    followed(_kind)
