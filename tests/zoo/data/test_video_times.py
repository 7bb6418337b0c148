"""Frames by their times, kept in ticks of the file: each once at its own rate, the nearest at others."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from zoo.data.video_folder import VideoFolder, probe, source_frame
from zoo.video.clips import Bucket, cut

av = pytest.importorskip("av")
CODECS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def film(path: Path, times: list[Fraction], rate: Fraction) -> Path:
    """A file whose frames are shown at these times, in seconds."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(CODECS[path.suffix[1:]], rate=rate)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90000) if path.suffix != ".avi" else 1 / rate
        for i, at in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 20 + 4 * i, np.uint8), "rgb24")
            frame.time_base = stream.codec_context.time_base
            frame.pts = round(at / frame.time_base)
            for packet in stream.encode(frame):
                file.mux(packet)
        for packet in stream.encode():
            file.mux(packet)
    return path


@pytest.mark.parametrize("suffix", CODECS)
@pytest.mark.parametrize("rate", ["24", "25", "30", "60", "30000/1001"])
def test_each_frame_once_at_its_own_rate(tmp_path, suffix: str, rate: str) -> None:
    fps = Fraction(rate)
    path = film(tmp_path / f"film.{suffix}", [i / fps for i in range(30)], fps)
    (clip,) = cut("film", probe(path), "", Bucket((32, 40, 30)[2], 32, 40, float(fps)))
    assert [*clip.chosen] == [*range(30)]
    folder = VideoFolder(tmp_path, frames=30, height=32, width=40, fps=float(fps))
    assert len(folder) == 1  # it is long enough
    assert [folder._source_frame(folder.videos[0], 0, i) for i in range(30)] == [*range(30)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_from_every_frame_on(tmp_path, suffix: str) -> None:
    """Times are rounded up or down, those of the first frame of a clip as well."""
    video = probe(film(tmp_path / f"film.{suffix}", [Fraction(i, 30) for i in range(24)], Fraction(30)))
    for start in range(20):
        assert [source_frame(video, video.times[start], i / 30) for i in range(4)] == [*range(start, start + 4)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_the_nearest_frame_at_other_rates_and_of_changing_ones(tmp_path, suffix: str) -> None:
    steps = [1, 1, 5, 1, 9, 2, 2, 3, 1, 4]
    times = [Fraction(sum(steps[:i]), 30) for i in range(len(steps))]
    video = probe(film(tmp_path / f"film.{suffix}", times, Fraction(30)))
    for fps in (8, 12.5, 48):
        for i in range(int(times[-1] * fps)):
            off = [abs(float(at) - i / fps) for at in times]
            chosen = source_frame(video, video.times[0], i / fps)
            assert off[chosen] <= min(off) + 1.1 * video.tick
