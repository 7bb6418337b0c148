"""A video file: the times of its frames, and the frames, decoded by FFmpeg through PyAV (extra `video`).

`probe` reads the packets of a file, decodes its first frame, and keeps the times of its frames and keyframes. `read`
opens the file, seeks to the keyframe before the first frame wanted, decodes up to the last one, and closes it: no file
stays open and no pixels are cached.
"""

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Video", "VideoError", "probe", "pyav", "read", "read_frames", "slack", "source_frame"]

MOST_PIXELS, MOST_ASPECT, LONGEST_FRAME = 1 << 26, 20, 3600.0  # limits of a frame: pixels, ratio of sides, seconds
HD = 720  # lines from which on players take BT.709 for the colours of a video that does not name them
_UNTAGGED = 2  # the number of H.273 for colours that are not named


class VideoError(ValueError):
    """A folder or a file that cannot be used, with the reason and what to do."""


@dataclass(frozen=True)
class Video:
    """A file as `probe` finds it: its size, and the times of its frames and keyframes."""

    path: Path
    times: list[int]  # in ticks, ascending, one a frame
    keyframes: list[int]  # in ticks, ascending; empty if the file is always decoded from its beginning
    tick: float  # seconds
    height: int  # of the upright picture
    width: int
    timed: bool = True  # False: the file has no timestamps and `times` counts its frames


def probe(path: Path, verify: bool = False) -> Video | str:
    """Describe a file after decoding its first frame, or return the reason why it cannot be used.

    `verify` decodes the file to its end.
    """
    try:
        return _probe(path, verify)
    except Exception as error:
        return f"broken: {error}"


def source_frame(video: Video, tick: int, seconds: float) -> int:
    """The number of the frame nearest in time to `seconds` after `tick`; of two equally near, the earlier."""
    due = tick + seconds / video.tick
    after = bisect.bisect_left(video.times, due)
    if after in (0, len(video.times)):
        return min(after, len(video.times) - 1)
    early, late = due - video.times[after - 1], video.times[after] - due
    return after if late < early - 1e-6 else after - 1


def slack(video: Video) -> float:
    """The largest error, in ticks, that rounding times to ticks may cause in the distance of two frames.

    webm and mkv store whole milliseconds: at 24 frames a second, times are off by up to a third of a millisecond.
    """
    return min(1.0, (video.times[-1] - video.times[0]) / max(len(video.times) - 1, 1) / 2) + 1e-6 / video.tick


def read(
    video: Video, chosen: Sequence[int], height: int, width: int, *, top: float = 0.5, left: float = 0.5
) -> torch.Tensor:
    """The frames of these numbers (ascending), [3, n, height, width] in [-1, 1].

    Frames are scaled to cover height x width; `top` and `left` are the shares of the excess that are cut off there. A
    VideoError names a file that fails to decode.
    """
    x = torch.empty(len(chosen), height, width, 3, dtype=torch.uint8)
    if chosen:
        ticks = [video.times[i] for i in chosen]
        _decode(video, ticks, lambda i, frame: x[i].copy_(_pixels(frame, height, width, top, left)))
    return x.permute(3, 0, 1, 2).float() / 127.5 - 1


def read_frames(path: Path, height: int, width: int, most: int | None = None) -> torch.Tensor:
    """The frames [3, t, height, width] in [-1, 1] of a video, at most `most`, or the single frame of an image.

    Frames are scaled until they just cover the size, and cropped at the centre. A VideoError: the file cannot be read.
    """
    if not path.is_file():
        raise VideoError(f"no such file: {path}")
    pixels: list[torch.Tensor] = []
    try:
        container, stream = _open(path)
        with container:
            for frame in container.decode(stream):
                pixels.append(_pixels(frame, height, width, 0.5, 0.5))
                if len(pixels) == most:
                    break
    except (pyav().error.FFmpegError, VideoError) as error:
        raise VideoError(f"{path} cannot be read as an image or video: {error}") from error
    if not pixels:
        raise VideoError(f"{path}: no frame of it can be decoded")
    return torch.stack(pixels).permute(3, 0, 1, 2).float() / 127.5 - 1


def pyav() -> Any:
    """The package `av`; a VideoError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise VideoError("reading video files needs PyAV: pip install av") from error
    return av


def _open(path: Path) -> tuple[Any, Any]:
    """The opened container and its video stream; the caller closes the container."""
    container = pyav().open(f"file:{path}")  # the prefix: a colon in a name is then not read as a protocol
    if not container.streams.video:
        container.close()
        raise VideoError("it has no video stream")
    stream = container.streams.video[0]
    if (size := stream.codec_context).width * size.height > MOST_PIXELS:
        container.close()
        raise VideoError(f"its frames have {size.width} x {size.height} pixels, and {MOST_PIXELS:,} is the most")
    return container, stream


def _probe(path: Path, verify: bool) -> Video:
    """Read the times of a video's frames from its packets, and decode its first frame (with `verify`, all of them)."""
    container, stream = _open(path)
    with container:
        tick, (times, keyframes, decoded, sizes) = float(stream.time_base), _packets(container, stream, verify)
        rate, form = stream.average_rate, container.format.name  # cannot be read after the container is closed
    if not decoded:
        raise VideoError("no frame of it can be decoded")
    if form == "avi" or any(time is None for time in times):  # AVI stores no presentation times: count the frames
        count = len(decoded) if verify else len(_probe(path, verify=True).times)
        return Video(path, list(range(count)), [], 1 / float(rate or 25), *sizes, timed=False)
    if verify:
        times = decoded
    if max(sizes) > MOST_ASPECT * min(sizes):
        raise VideoError(f"it is {sizes[0]} x {sizes[1]}: its sides differ by more than a factor of {MOST_ASPECT}")
    places = sorted(set(times))
    longest = max((after - before for before, after in itertools.pairwise(places)), default=0) * tick
    if longest > LONGEST_FRAME:
        raise VideoError(f"a frame of it is on show for {longest:.0f} s: a broken time stamp")
    if form == "gif":
        keyframes = []  # a GIF frame is drawn over the ones before it
    return Video(path, places, sorted(set(keyframes)), tick, *sizes)


def _packets(container: Any, stream: Any, verify: bool) -> tuple[list[int], list[int], list[int], tuple[int, int]]:
    """The times of all frames, of keyframes and of those decoded, the first or all, and height and width."""
    sizes = (0, 0)
    times: list[int] = []
    keyframes: list[int] = []
    decoded: list[int] = []
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            times.append(packet.pts)
            if packet.is_keyframe and packet.pts is not None:
                keyframes.append(packet.pts)
        if verify or not decoded:
            for frame in packet.decode():
                if verify and frame.is_corrupt:
                    raise VideoError(f"frame {len(decoded)} is damaged")
                sizes = sizes if decoded else _upright(frame)
                decoded.append(frame.pts)
    return times, keyframes, decoded, sizes


def _decode(video: Video, ticks: list[int], take: Callable[[int, Any], Any]) -> None:
    """Call `take(i, frame)` with the frame on show at each of `ticks` (ascending), decoding as little as possible."""
    place = bisect.bisect_right(video.keyframes, ticks[0]) - 1
    attempts = [video.keyframes[place], None] if place > 0 else [None]
    try:
        for keyframe in attempts:
            container, stream = _open(video.path)
            with container:
                if keyframe is not None:
                    container.seek(keyframe, stream=stream)
                if _take_frames(_timed(container.decode(stream), video.timed), keyframe, ticks, take):
                    return
    except (pyav().error.FFmpegError, VideoError) as error:
        raise VideoError(
            f"{video.path} broke while it was decoded ({error}): remove it, or let verify=True find and skip such files"
        ) from error
    raise AssertionError("decoding from the beginning always ends in frames or in an error")


def _timed(frames: Iterator[Any], timed: bool) -> Iterator[tuple[int, Any]]:
    for count, frame in enumerate(frames):
        if not timed:
            yield count, frame
        elif frame.pts is not None:
            yield frame.pts, frame


def _take_frames(
    frames: Iterator[tuple[int, Any]], keyframe: int | None, ticks: list[int], take: Callable[[int, Any], Any]
) -> bool:
    """Take the frames on show at `ticks`; False, with nothing taken, if a seek missed `keyframe`."""
    shown, count = None, 0
    for time, frame in frames:
        if keyframe is not None and shown is None:
            if time > keyframe:
                return False
            if time < keyframe:  # leading frames, which may refer to frames that were not decoded
                continue
        while count < len(ticks) and time >= ticks[count]:
            # A packet that shows nothing (VP8's alternate references) leaves the frame before it on show.
            take(count, frame if time == ticks[count] or shown is None else shown)
            count += 1
        if count == len(ticks):
            return True
        shown = frame
    if keyframe is not None and shown is None:
        return False
    raise VideoError(f"it ends {len(ticks) - count} frames early")


def _turns(frame: Any) -> int:
    """The number of counterclockwise quarter turns that put a frame upright."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def _upright(frame: Any) -> tuple[int, int]:
    return (frame.width, frame.height) if _turns(frame) % 2 else (frame.height, frame.width)


def _pixels(frame: Any, height: int, width: int, top: float, left: float) -> torch.Tensor:
    """The frame, upright, scaled to height x width, cropped at shares `top`, `left` of the excess: uint8 [h, w, 3]."""
    turns, sizes = _turns(frame), _upright(frame)
    scale = max(height / sizes[0], width / sizes[1])
    rows, columns = max(height, round(sizes[0] * scale)), max(width, round(sizes[1] * scale))
    if rows * columns > MOST_PIXELS:
        raise VideoError(f"it is {sizes[0]} x {sizes[1]} pixels: too narrow for {height} x {width}")
    stored = (columns, rows) if turns % 2 else (rows, columns)
    untagged_hd = frame.colorspace == _UNTAGGED and frame.height >= HD  # BT.601 is the decoder's guess for all others
    pixels = frame.to_ndarray(
        format="rgb24", height=stored[0], width=stored[1], interpolation="BICUBIC",
        src_colorspace="ITU709" if untagged_hd else None,
    )  # fmt: skip
    image = torch.from_numpy(pixels).rot90(turns)
    y, x = round(top * (rows - height)), round(left * (columns - width))
    return image[y : y + height, x : x + width]
