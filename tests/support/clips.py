"""Clips in files: a GIF to be encoded, an MP4 read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image


def played(path):
    """The frames (t h w 3) of a movie, and its stream's rate, codec and pixel format."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [torch.from_numpy(frame.to_ndarray(format="rgb24")) for frame in container.decode(stream)]
        return torch.stack(frames), stream.average_rate, stream.codec_context.name, stream.codec_context.pix_fmt


def gif(path: Path, frames: int, height: int, width: int) -> None:
    """A bright square on a slope of grey, at 10 frames a second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pictures = []
    for i in range(frames):
        pixels = np.tile(np.linspace(0, 150, width, dtype=np.uint8), (height, 1))
        pixels[i % height : i % height + 8, i % width : i % width + 8] = 255
        pictures.append(Image.fromarray(pixels))
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=100, loop=0)
