"""Grids of clips as GIF files."""

import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["save_gif"]


def save_gif(path: str | os.PathLike[str], video: Tensor, *, fps: float = 8.0, columns: int | None = None) -> None:
    """Write clips [n, c, t, h, w] in [-1, 1] (c 1 or 3) as one GIF, a grid with the clips side by side.

    Small clips are enlarged by a whole factor, pixel for pixel, until their short side is at least 64 pixels. The file
    appears whole or not at all. GIF keeps 256 colours a frame and time in 1/100 s.
    """
    from PIL import Image

    n, c, t, h, w = video.shape
    if c not in (1, 3) or n < 1 or t < 1:
        raise ValueError(f"save_gif: expected clips (n c t h w) with 1 or 3 channels, got {tuple(video.shape)}")
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    scale, gap = max(1, math.ceil(64 / min(h, w))), 2
    pixels = ((video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    pixels = pixels.repeat_interleave(scale, dim=3).repeat_interleave(scale, dim=4)
    h, w = h * scale, w * scale
    grid = torch.full((t, rows * (h + gap) - gap, columns * (w + gap) - gap, c), 96, dtype=torch.uint8)
    for i in range(n):
        y, x = i // columns * (h + gap), i % columns * (w + gap)
        grid[:, y : y + h, x : x + w] = pixels[i].permute(1, 2, 3, 0)
    images = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in grid]  # mode L or RGB
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            images[0].save(
                file, "GIF", save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, optimize=False
            )
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
