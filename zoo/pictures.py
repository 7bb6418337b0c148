"""What the writers of picture files share: a grid of equal pictures, and a file that is whole or absent."""

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

GAP = 2  # pixels between pictures
SIDE = 64  # of a picture, at least


def grid(pixels: Tensor, columns: int | None = None) -> Tensor:
    """Clips (n t h w c) uint8 side by side: the frames (t y x c) of the whole, on grey.

    Small ones are enlarged by a whole factor, pixel for pixel, until their short side is at least ``SIDE`` pixels.
    """
    n, t, h, w, c = pixels.shape
    columns, scale = columns or math.ceil(math.sqrt(n)), max(1, math.ceil(SIDE / min(h, w)))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    rows, h, w = math.ceil(n / columns), h * scale, w * scale
    whole = torch.full((t, rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, c), 96, dtype=torch.uint8)
    for i in range(n):
        y, x = i // columns * (h + GAP), i % columns * (w + GAP)
        whole[:, y : y + h, x : x + w] = pixels[i]
    return whole


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to, which takes its name when all of it is there; its folder is made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
