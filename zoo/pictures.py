"""Grids of pictures as PNG and GIF files, and as MP4 files written by FFmpeg through PyAV (extra `video`).

A file is complete or absent. Letters: n pictures or clips, c channels, t frames, h w height and width; y x of the grid.
"""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from zoo.files import whole_file

GAP = 2  # pixels between pictures
SIDE = 64  # pixels of a picture's short side, at least
GREY = 96
LINE = 14  # pixels of the height of a title's line
LINES = 4  # of a title, at most
_CODECS = ("libx264", "libopenh264", "mpeg4")  # H.264, if this FFmpeg can encode it


def grid(pixels: Tensor, columns: int | None = None, titles: Sequence[str] | None = None, head: str = "") -> Tensor:
    """Clips (n t h w c), uint8, side by side on grey, each with its title under it: the frames (t y x c) of one grid.

    Small clips are enlarged by an integer factor, until their short side is at least ``SIDE`` pixels. Long titles take
    several lines; `head` is a title over the grid.
    """
    n, t, h, w, c = pixels.shape
    columns, scale = columns or math.ceil(math.sqrt(n)), max(1, math.ceil(SIDE / min(h, w)))
    pixels = pixels.repeat_interleave(scale, dim=2).repeat_interleave(scale, dim=3)
    if titles is not None:
        lines = title(titles, w * scale)
        pixels = torch.cat([pixels, lines[:, None, :, :, None].expand(n, t, -1, -1, c)], dim=2)
    rows, (h, w) = math.ceil(n / columns), pixels.shape[2:4]
    width = columns * (w + GAP) - GAP
    above = title([head], width)[0] if head else pixels.new_empty(0, width)
    top = len(above)
    whole = torch.full((t, top + rows * (h + GAP) - GAP, width, c), GREY, dtype=torch.uint8)
    whole[:, :top] = above[..., None]
    for i in range(n):
        y, x = top + i // columns * (h + GAP), i % columns * (w + GAP)
        whole[:, y : y + h, x : x + w] = pixels[i]
    return whole


def title(texts: Sequence[str], width: int) -> Tensor:
    """Texts in white on grey, (n y width) uint8, in as many lines as the longest takes, at most ``LINES``.

    A word that is wider than `width`, and what follows the last line, is cut off.
    """
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default()
    wrapped = [_wrapped(text, lambda line: font.getlength(line) <= width) for text in texts]
    image = Image.new("L", (width, len(texts) * (high := LINE * max(map(len, wrapped)))), GREY)
    draw = ImageDraw.Draw(image)
    for i, lines in enumerate(wrapped):
        for j, line in enumerate(lines):
            draw.text((1, i * high + j * LINE), line, fill=255, font=font)
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(len(texts), high, width)


def _wrapped(text: str, fits: Callable[[str], bool]) -> list[str]:
    """The lines of a text, broken between words; an ellipsis stands where letters are cut off.

    A text of n letters takes some log n calls of `fits` beside those of the lines that are shown.
    """
    lines, words = [""], text.split()
    for i, word in enumerate(words):
        longer = f"{lines[-1]} {word}".lstrip()
        if not lines[-1] or fits(longer):
            lines[-1] = longer
        elif len(lines) < LINES:
            lines.append(word)
        else:
            lines[-1] = " ".join([lines[-1], *words[i:]])
            break
    return [line if fits(line) else _cut(line, fits) for line in lines]


def _cut(line: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning of a line that fits with an ellipsis."""
    lengths = range(len(line))
    return f"{line[: max(bisect_left(lengths, True, key=lambda n: not fits(f'{line[:n]}…')) - 1, 0)]}…"


def save_png(path: str | os.PathLike[str], images: Tensor, *, columns: int | None = None) -> None:
    """Write images (n c h w) with values from 0 to 1, c 1 or 3, as one PNG, side by side; small ones are enlarged."""
    from PIL import Image

    n, c, _, _ = images.shape
    if c not in (1, 3) or n < 1:
        raise ValueError(f"save_png: expected images (n c h w) with 1 or 3 channels, got {tuple(images.shape)}")
    pixels = (images.detach().float().cpu().clamp(0, 1) * 255).round().to(torch.uint8)
    (whole,) = grid(pixels.permute(0, 2, 3, 1)[:, None], columns)
    with whole_file(path) as file:
        Image.fromarray(whole.squeeze(-1).numpy()).save(file, "PNG")


def save_gif(
    path: str | os.PathLike[str], video: Tensor, *, fps: float = 8.0,
    columns: int | None = None, titles: Sequence[str] | None = None, head: str = "",
) -> None:  # fmt: skip
    """Write clips [n, c, t, h, w] in [-1, 1], or uint8 (c 1 or 3), as one GIF, a grid with the clips side by side.

    Small clips are enlarged; each may have a title under it, and the grid a `head` over it. GIF keeps 256 colours a
    frame and time in 1/100 s.
    """
    from PIL import Image

    frames = tile(video, columns, titles, head)
    first, *later = [Image.fromarray(frame.squeeze(-1).numpy()) for frame in frames]  # mode L or RGB
    with whole_file(path) as file:
        first.save(file, "GIF", save_all=True, append_images=later, duration=round(1000 / fps), loop=0, optimize=False)


def save_mp4(path: str | os.PathLike[str], video: Tensor, *, fps: float = 8.0, columns: int | None = None) -> None:
    """Write clips [n, c, t, h, w] in [-1, 1], or uint8 (c 1 or 3), as one MP4, a grid with the clips side by side.

    H.264 in yuv420p and BT.709, which players everywhere show; small clips are enlarged. The format halves the
    resolution of colour, so the last row or column is repeated where a size is odd.
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


def tile(video: Tensor, columns: int | None = None, titles: Sequence[str] | None = None, head: str = "") -> Tensor:
    """Clips [n, c, t, h, w] in [-1, 1], or uint8, as the frames (t y x c), uint8, of one grid."""
    if video.ndim != 5 or video.shape[1] not in (1, 3) or video.shape[0] < 1 or video.shape[2] < 1:
        raise ValueError(f"expected clips (n c t h w) with 1 or 3 channels, got {tuple(video.shape)}")
    if video.dtype != torch.uint8:
        video = to_pixels(video)
    return grid(video.cpu().permute(0, 2, 3, 4, 1), columns, titles, head)


def to_pixels(video: Tensor) -> Tensor:
    """Values in [-1, 1] as uint8, 0 to 255."""
    return ((video.detach().float().cpu().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)


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
