"""Grids of images as PNG files."""

import math
import os
from pathlib import Path

import torch
from torch import Tensor


def save_png(path: str | os.PathLike[str], images: Tensor, *, columns: int | None = None) -> None:
    """Write images (n c h w) with values from 0 to 1, c 1 or 3, as one PNG, side by side.

    Small images are enlarged by a whole factor until their short side is at least 64 pixels. The file appears whole or
    not at all.
    """
    from PIL import Image

    n, c, h, w = images.shape
    if c not in (1, 3) or n < 1:
        raise ValueError(f"save_png: expected images (n c h w) with 1 or 3 channels, got {tuple(images.shape)}")
    columns, scale, gap = columns or math.ceil(math.sqrt(n)), max(1, math.ceil(64 / min(h, w))), 2
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3).permute(0, 2, 3, 1)
    h, w, rows = h * scale, w * scale, math.ceil(n / columns)
    grid = torch.full((rows * (h + gap) - gap, columns * (w + gap) - gap, c), 96, dtype=torch.uint8)
    for i in range(n):
        y, x = i // columns * (h + gap), i % columns * (w + gap)
        grid[y : y + h, x : x + w] = pixels[i]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    Image.fromarray(grid.squeeze(-1).numpy()).save(part, "PNG")
    os.replace(part, path)
