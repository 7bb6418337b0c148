"""The lines of the user's code that an operation or an error comes from."""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import traceback
from types import FrameType
from typing import NamedTuple

import torch

_DSP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))
_OURS = (_DSP, _TORCH, os.path.join(os.path.dirname(_TORCH), "einops"))
INSIDE = (*(path + os.sep for path in _OURS), os.path.abspath(contextlib.__file__))


class Line(NamedTuple):
    """A frame of the user's code, and the line that runs in it."""

    frame: FrameType
    number: int

    @property
    def short(self) -> str:
        """The name of the file and the number of the line, as ``model.py:37``."""
        return f"{os.path.basename(self.frame.f_code.co_filename)}:{self.number}"

    def __str__(self) -> str:
        """The line with its source text, if the file can be read."""
        text = linecache.getline(self.frame.f_code.co_filename, self.number, self.frame.f_globals).strip()
        return f"{self.short}, '{text}'" if text else self.short


@functools.cache
def inside(filename: str) -> bool:
    """Tell whether a file belongs to dsp, torch, einops or contextlib, and so not to the user."""
    return os.path.abspath(filename).startswith(INSIDE)


def lines_of(error: BaseException) -> list[Line]:
    """The lines of the user's code that an error came through, the outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    return [Line(frame, number) for frame, number in frames if not inside(frame.f_code.co_filename)]


def line_now() -> str:
    """The line of the user's code that runs now; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not inside(frame.f_code.co_filename):
            return Line(frame, frame.f_lineno).short
        frame = frame.f_back
    return ""
