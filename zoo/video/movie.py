"""Grids of clips as MP4 files, written by FFmpeg through PyAV (extra `video`)."""

import os
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from zoo.pictures import whole_file
from zoo.video.gif import tile

__all__ = ["need_av", "save_mp4"]

_CODECS = ("libx264", "libopenh264", "mpeg4")  # H.264, if this FFmpeg has a writer of it


def save_mp4(path: str | os.PathLike[str], video: Tensor, *, fps: float = 8.0, columns: int | None = None) -> None:
    """Write clips [n, c, t, h, w] in [-1, 1], or uint8 (c 1 or 3), as one MP4, a grid with the clips side by side.

    H.264 in yuv420p and BT.709, which players everywhere show; small clips are enlarged. That format halves the
    resolution of colour, so a row or a column is repeated where a size is odd. The file appears whole or not at all.
    """
    av = need_av()
    frames = tile(video, columns)
    if not fps > 0:
        raise ValueError(f"save_mp4: expected fps above 0, got {fps}")
    with whole_file(path) as file, av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(_codec(av), rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = (n + n % 2 for n in frames.shape[1:3])
        stream.pix_fmt, stream.options = "yuv420p", {"crf": "18"}
        code = stream.codec_context
        code.color_range = av.video.reformatter.ColorRange.MPEG
        code.colorspace = code.color_primaries = code.color_trc = 1  # BT.709, by the numbers of H.273
        for pixels in frames:
            frame = av.VideoFrame.from_ndarray(_even(pixels).numpy(), format="rgb24")
            container.mux(stream.encode(frame.reformat(format="yuv420p", dst_colorspace="ITU709")))
        container.mux(stream.encode())


def need_av() -> Any:
    """PyAV; a ValueError if it is not installed."""
    try:
        import av
        import av.video.reformatter
    except ImportError as error:
        raise ValueError("writing MP4 needs PyAV: pip install -e '.[video]' (GIF needs nothing more)") from error
    return av


def _codec(av: Any) -> str:
    for name in _CODECS:
        try:
            return av.Codec(name, "w").name
        except av.error.FFmpegError:
            continue
    raise ValueError(f"the FFmpeg of PyAV {av.__version__} writes none of {', '.join(_CODECS)}")


def _even(pixels: Tensor) -> Tensor:
    """A picture (h w c) as RGB of even sizes."""
    for dim in (0, 1):
        if pixels.shape[dim] % 2:
            pixels = torch.cat([pixels, pixels.narrow(dim, pixels.shape[dim] - 1, 1)], dim)
    return pixels.expand(*pixels.shape[:2], 3).contiguous()
