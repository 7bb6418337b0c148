"""MP4 files, read again by the decoder that plays them; GIFs, by Pillow; titles under clips."""

import sys
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.clips import played
from tests.support.refusals import refused
from zoo.pictures import GAP, GREY, LINE, LINES, _wrapped, save_gif, save_mp4, tile, title


def smooth(n, c, t, h, w):
    """Clips whose colours change slowly in space and time, in [-1, 1]."""
    time, row, column = (torch.linspace(-1, 1, size) for size in (t, h, w))
    planes = [time[:, None, None] * row[:, None], (row[:, None] * column).expand(t, h, w), column.expand(t, h, w)]
    return torch.stack([planes[i].expand(t, h, w) for i in range(c)]).expand(n, c, t, h, w)


@pytest.mark.parametrize(("channels", "fps"), [(3, 24000 / 1001), (1, 8)])
def test_an_mp4_plays_as_it_was(tmp_path, channels, fps):
    video = smooth(1, channels, 7, 64, 96)
    save_mp4(tmp_path / "deep" / "a.mp4", video, fps=fps)
    frames, rate, codec, form = played(tmp_path / "deep" / "a.mp4")
    assert (codec, form) == ("h264", "yuv420p")
    assert rate == Fraction(fps).limit_denominator(1001)
    expected = ((video[0] + 1) * 127.5).permute(1, 2, 3, 0).expand(7, 64, 96, 3)
    assert frames.shape == expected.shape
    assert (frames - expected).abs().mean() < 3
    assert (frames - expected).abs().max() < 25
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.mp4"]


def test_an_mp4_keeps_its_colours(tmp_path):
    """A matrix other than the one the file names would move saturated colours by tens of levels."""
    colours = torch.tensor([[200, 30, 20], [20, 190, 40], [30, 40, 210]], dtype=torch.uint8)
    video = colours.repeat_interleave(32, 0).T[None, :, None, None].expand(1, 3, 3, 64, 96)
    save_mp4(tmp_path / "a.mp4", video)
    frames, *_ = played(tmp_path / "a.mp4")
    for i, colour in enumerate(colours):
        assert (frames[:, :, 32 * i + 8 : 32 * i + 24].int() - colour.int()).abs().max() <= 6


def test_odd_sizes_repeat_a_row_and_a_column_and_clips_go_side_by_side(tmp_path):
    save_mp4(tmp_path / "odd.mp4", smooth(1, 3, 2, 65, 97))
    assert played(tmp_path / "odd.mp4")[0].shape == (2, 66, 98, 3)
    save_mp4(tmp_path / "two.mp4", smooth(2, 3, 2, 66, 68), columns=2)
    assert played(tmp_path / "two.mp4")[0].shape == (2, 66, 2 * 68 + GAP, 3)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_gif_shows_the_grid(tmp_path, channels):
    video = torch.linspace(-1, 1, 3 * channels * 4 * 16 * 16).view(3, channels, 4, 16, 16)
    save_gif(tmp_path / "samples" / "a.gif", video, fps=10)
    with Image.open(tmp_path / "samples" / "a.gif") as gif:
        assert gif.n_frames == 4
        assert gif.size == (2 * 64 + GAP, 2 * 64 + GAP)  # three clips on a 2 x 2 grid, enlarged four times
        assert gif.info["duration"] == 100
        gif.seek(2)
        grid = torch.from_numpy(np.array(gif.convert("RGB"))).int()
    expected = ((video[1, :, 2] + 1) * 127.5).round().repeat_interleave(4, 1).repeat_interleave(4, 2)
    shown = grid[:64, 66:].permute(2, 0, 1)[:channels]
    assert (shown - expected).abs().max() <= (0 if channels == 1 else 16)  # 256 colours
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["a.gif"]


def test_a_gif_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    refused(r"\(n c t h w\).*\(2, 4, 3, 8, 8\)", save_gif, tmp_path / "a.gif", torch.zeros(2, 4, 3, 8, 8))
    save_gif(tmp_path / "a.gif", torch.zeros(1, 1, 2, 8, 8))
    before = (tmp_path / "a.gif").read_bytes()
    monkeypatch.setattr(Image.Image, "save", mock.Mock(side_effect=OSError("No space left on device")))
    refused("No space", save_gif, tmp_path / "a.gif", torch.ones(1, 1, 2, 8, 8), error=OSError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.gif"]
    assert (tmp_path / "a.gif").read_bytes() == before


def test_an_mp4_that_cannot_be_written_is_not_there(tmp_path, monkeypatch):
    refused(r"\(n c t h w\).*\(2, 4, 3, 8, 8\)", save_mp4, tmp_path / "a.mp4", torch.zeros(2, 4, 3, 8, 8))
    refused("fps above 0, got 0", save_mp4, tmp_path / "a.mp4", smooth(1, 3, 2, 64, 64), fps=0)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ValueError, match=r"writing MP4 needs PyAV: pip install -e '\.\[video\]'"):
        save_mp4(tmp_path / "a.mp4", smooth(1, 3, 2, 64, 64))
    assert not list(tmp_path.iterdir())


def test_titles_stand_under_the_clips(tmp_path):
    video = torch.full((3, 3, 2, 64, 80), -1.0)
    frames = tile(video, 2, ["one", "a caption that takes three lines of this width", ""], "a head over all")
    high = title(["a caption that takes three lines of this width"], 80).shape[1]
    assert high == 3 * LINE
    assert frames.shape == (2, LINE + 2 * (64 + high) + GAP, 2 * 80 + GAP, 3)
    assert torch.equal(frames[0, :LINE, :, 0], title(["a head over all"], 162)[0])
    under = slice(LINE + 64, LINE + 64 + high)
    first, second, third = frames[0, under, :80], frames[0, under, 82:], frames[0, -high:, :80]
    assert torch.equal(first[:LINE, :, 0], title(["one"], 80)[0])
    assert first[LINE:].eq(GREY).all()
    assert second[-LINE:].max() > 200
    assert third.eq(GREY).all()
    assert frames[:, LINE : LINE + 64, :80].eq(0).all()
    save_gif(tmp_path / "a.gif", video, titles=["", "é", "猫"])
    assert (tmp_path / "a.gif").is_file()


def test_long_titles_are_cut_off():
    assert title(["word " * 30], 40).shape == (1, LINES * LINE, 40)
    assert torch.equal(title(["a" * 30], 40), title(["a" * 40], 40))


def test_a_long_title_takes_few_measurements():
    """Also a word of 100,000 letters, and as many words; the lines are those of cutting letter after letter."""

    def lines(text: str, width: int) -> tuple[list[str], int]:
        measured: list[str] = []

        def fits(line: str) -> bool:
            measured.append(line)
            return len(line) <= width

        return _wrapped(text, fits), len(measured)

    for text in ("a" * 100_000, "a " * 50_000, "ab " + "a" * 100_000):
        assert lines(text, 20)[1] < 120
        assert all(len(line) <= 20 for line in lines(text, 20)[0])
    assert lines("one two three four five six seven", 9)[0] == ["one two", "three", "four five", "six seven"]
    assert lines("one two three four five six seven eight", 9)[0] == ["one two", "three", "four five", "six seve…"]
    assert lines("abcdefghij kl", 5)[0] == ["abcd…", "kl"]
    assert lines("abc", 0)[0] == ["…"]
    assert lines("", 5)[0] == [""]
