"""What the writers of picture files share: a grid of equal pictures, and a file that is whole or absent."""

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

GAP = 2  # pixels between pictures
SIDE = 64  # of a picture, at least
GREY = 96
LINE = 14  # height of a title


def grid(pixels: Tensor, columns: int | None = None, titles: Sequence[str] | None = None) -> Tensor:
    """Clips (n t h w c) uint8 side by side: the frames (t y x c) of the whole, on grey, each with its title under it.

    Small ones are enlarged by a whole factor, pixel for pixel, until their short side is at least ``SIDE`` pixels.
    """
    n, t, h, w, c = pixels.shape
    columns, scale = columns or math.ceil(math.sqrt(n)), max(1, math.ceil(SIDE / min(h, w)))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    if titles is not None:
        lines = torch.stack([title(text, w * scale) for text in titles])
        pixels = torch.cat([pixels, lines[:, None, :, :, None].expand(n, t, LINE, w * scale, c)], dim=2)
    rows, (h, w) = math.ceil(n / columns), pixels.shape[2:4]
    whole = torch.full((t, rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, c), GREY, dtype=torch.uint8)
    for i in range(n):
        y, x = i // columns * (h + GAP), i % columns * (w + GAP)
        whole[:, y : y + h, x : x + w] = pixels[i]
    return whole


def title(text: str, width: int) -> Tensor:
    """One line of white on grey (LINE width), uint8; cut where it is too long."""
    from PIL import Image, ImageDraw, ImageFont

    font, cut = ImageFont.load_default(), text
    while cut and font.getlength(cut if cut == text else f"{cut}…") > width:
        cut = cut[:-1]
    image = Image.new("L", (width, LINE), GREY)
    ImageDraw.Draw(image).text((1, 0), cut if cut == text else f"{cut}…", fill=255, font=font)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(LINE, width)


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
