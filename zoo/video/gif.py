"""Grids of clips as GIF files."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.pictures import grid, whole_file

__all__ = ["save_gif", "tile"]


def save_gif(
    path: str | os.PathLike[str],
    video: Tensor,
    *,
    fps: float = 8.0,
    columns: int | None = None,
    titles: Sequence[str] | None = None,
) -> None:
    """Write clips [n, c, t, h, w] in [-1, 1], or uint8 (c 1 or 3), as one GIF, a grid with the clips side by side.

    Small clips are enlarged; each may have a title under it. The file appears whole or not at all. GIF keeps 256
    colours a frame and time in 1/100 s.
    """
    from PIL import Image

    frames = tile(video, columns, titles)
    first, *rest = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in frames]  # mode L or RGB
    with whole_file(path) as file:
        first.save(file, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, optimize=False)


def tile(video: Tensor, columns: int | None = None, titles: Sequence[str] | None = None) -> Tensor:
    """Clips [n, c, t, h, w] in [-1, 1], or uint8, as the frames (t y x c), uint8, of one grid."""
    if video.ndim != 5 or video.shape[1] not in (1, 3) or video.shape[0] < 1 or video.shape[2] < 1:
        raise ValueError(f"expected clips (n c t h w) with 1 or 3 channels, got {tuple(video.shape)}")
    if video.dtype != torch.uint8:
        video = to_pixels(video)
    return grid(video.cpu().permute(0, 2, 3, 4, 1), columns, titles)


def to_pixels(video: Tensor) -> Tensor:
    """Values in [-1, 1] as uint8, 0 to 255."""
    return ((video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
