"""Grids of clips as GIF files."""

import os

import torch
from torch import Tensor

from zoo.pictures import grid, whole_file

__all__ = ["save_gif"]


def save_gif(path: str | os.PathLike[str], video: Tensor, *, fps: float = 8.0, columns: int | None = None) -> None:
    """Write clips [n, c, t, h, w] in [-1, 1] (c 1 or 3) as one GIF, a grid with the clips side by side.

    Small clips are enlarged. The file appears whole or not at all. GIF keeps 256 colours a frame and time in 1/100 s.
    """
    from PIL import Image

    n, c, t, _, _ = video.shape
    if c not in (1, 3) or n < 1 or t < 1:
        raise ValueError(f"save_gif: expected clips (n c t h w) with 1 or 3 channels, got {tuple(video.shape)}")
    pixels = ((video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    frames = grid(pixels.permute(0, 2, 3, 4, 1), columns)
    first, *rest = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in frames]  # mode L or RGB
    with whole_file(path) as file:
        first.save(file, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, optimize=False)
