"""Grids of images as PNG files."""

import os

import torch
from torch import Tensor

from zoo.pictures import grid, whole_file


def save_png(path: str | os.PathLike[str], images: Tensor, *, columns: int | None = None) -> None:
    """Write images (n c h w) with values from 0 to 1, c 1 or 3, as one PNG, side by side.

    Small images are enlarged. The file appears whole or not at all.
    """
    from PIL import Image

    n, c, _, _ = images.shape
    if c not in (1, 3) or n < 1:
        raise ValueError(f"save_png: expected images (n c h w) with 1 or 3 channels, got {tuple(images.shape)}")
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    (whole,) = grid(pixels.permute(0, 2, 3, 1)[:, None], columns)
    with whole_file(path) as file:
        Image.fromarray(whole.squeeze(-1).numpy()).save(file, "PNG")
