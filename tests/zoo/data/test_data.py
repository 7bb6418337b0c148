"""Data: pure functions of (seed, epoch, index), frame ranges that equal slices, and files that cannot be trusted."""

import logging
import math
import shutil
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.support.refusals import refused
from zoo.data import progress, video_file
from zoo.data.digits import MovingDigits, spell
from zoo.data.sampling import batch_indices, frame_range, hash_seed, order
from zoo.data.shapes import COLOURS, GROUND, NAMES, SHAPES, MovingShapes
from zoo.data.video_file import VideoError, probe, read_frames, source_frame
from zoo.data.video_folder import VideoFolder
from zoo.pictures import save_gif
from zoo.video.clips import Bucket, cut

# Sampling


def test_seeds_are_mixed_and_refuse_what_is_not_an_integer():
    seeds = {hash_seed(name, seed, step) for name in ("a", "b") for seed in range(20) for step in range(20)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert hash_seed("a", 12, 3) != hash_seed("a", 1, 23)
    assert hash_seed(np.int64(3), torch.tensor(4)) == hash_seed(3, 4)
    with pytest.raises(TypeError):
        hash_seed([1, 2])  # type: ignore[arg-type]


def test_progress_of_a_long_preparation_is_logged(caplog, monkeypatch):
    seconds = iter([0.0, 4.0, 12.0, 13.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    with caplog.at_level(logging.INFO):
        assert list(progress.counted("abcd", 4, "reading", logging.getLogger())) == list("abcd")
    assert [record.getMessage() for record in caplog.records] == ["reading: 2 of 4, 12 s left"]


def test_order_is_a_permutation_of_its_own_for_every_seed_and_epoch():
    first = order(0, 0, 100)
    assert first.sort().values.tolist() == list(range(100))
    assert torch.equal(order(0, 0, 100), first)
    assert not torch.equal(order(0, 1, 100), first)
    assert not torch.equal(order(1, 0, 100), first)
    first[0] = -1  # a caller may do as it likes with its copy
    assert order(0, 0, 100).min() == 0
    refused("at least one sample", order, 0, 0, 0)


@pytest.mark.parametrize(("batch", "n"), [(4, 10), (5, 10), (7, 3), (1, 1)])
def test_batches_visit_every_sample_once_an_epoch_and_resume_from_the_step(batch, n):
    steps = [batch_indices(3, step, batch, n) for step in range(3 * n)]
    stream = [pair for epochs, indices in steps for pair in zip(epochs, indices)]
    for epoch in range(3):
        assert sorted(i for e, i in stream if e == epoch) == list(range(n))
    assert [i for _, i in stream[:n]] == order(3, 0, n).tolist()
    assert batch_indices(3, 2, batch, n) == steps[2]
    refused("batch=0", batch_indices, 3, 2, 0, n)


def test_frame_ranges():
    assert frame_range(None, 5) == range(5)
    assert frame_range(slice(2, 9), 5) == range(2, 5)
    assert len(frame_range(range(7, 7), 5)) == 0
    for outside in (range(3, 6), range(-1, 2)):
        refused("outside a clip of 5", frame_range, outside, 5)
    with pytest.raises(ValueError, match="range or a slice"):
        frame_range(3, 5)  # type: ignore[arg-type]


# Digits, shapes


def check_dataset(data, label=None) -> None:
    """The promises of every data set: shape, range, purity, and that a range of frames is the slice of the clip."""
    clip, state = data.clip(1, 2), torch.get_rng_state()
    x = clip["x"]
    assert x.shape == (data.shape[0], data.frames, *data.shape[1:])
    assert x.dtype == torch.float32
    assert x.abs().max() <= 1
    data.clip(0, 5)
    assert torch.equal(state, torch.get_rng_state())
    step = -(-data.frames // 3)
    for lo in range(0, data.frames + step, step):
        held = range(min(lo, data.frames), min(lo + step, data.frames))
        part = data.clip(1, 2, held)
        assert torch.equal(part["x"], x[:, held.start : held.stop])
        assert part["label"] == clip["label"] == label
    assert torch.equal(data.clip(1, 2, slice(2, 4))["x"], x[:, 2:4])


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (MovingDigits, {"frames": 7, "size": (15, 18), "digit": 10.0}),
        (MovingShapes, {"frames": 6, "size": (20, 26), "radius": (4.0, 6.0)}),
    ],
)
def test_made_clips_keep_the_promises_of_a_data_set(make, options):
    data, again = make(**options), make(**options)
    check_dataset(data, 1)
    x = data.clip(1, 2)["x"]
    assert torch.equal(again.clip(1, 2)["x"], x)
    for other in (data.clip(1, 3), make(**options, seed=1).clip(1, 2)):  # the same thing on another path
        assert not torch.equal(other["x"], x)
        assert other["label"] == 1
    assert not torch.equal(make(split="validation", **options).clip(1, 2)["x"], x)


def test_shapes_are_as_large_as_they_are_said_to_be():
    """The area of each, by its corners; and the colour of its class inside."""
    refused("shapes that fit", MovingShapes, size=(20, 26))
    for label in range(16):
        named, shape = NAMES[label].split()
        colour = COLOURS[named]
        frame = MovingShapes(frames=1, size=(64, 64), radius=(20.0, 20.0)).clip(label, 0)["x"][:, 0] / 2 + 0.5
        ground, paint = (torch.tensor(c)[:, None, None] for c in (GROUND, colour))
        area = ((frame - ground) / (paint - ground)).mean(0).sum().item()
        corners = {"square": 4, "triangle": 3}.get(shape, 0)
        expect = {"disc": math.pi * 16**2, "star": 5 * 20 * 9 * math.sin(math.pi / 5)}.get(shape, 0)
        expect = expect or corners / 2 * 20**2 * math.sin(2 * math.pi / corners)
        assert area == pytest.approx(expect, rel=0.03), shape


def test_shapes_without_a_tilt_stand_upright():
    """Each is its own mirror image; a triangle stands on an edge, a star on two feet, and they do not spin."""
    still = {"frames": 3, "size": (40, 40), "radius": (20.0, 20.0)}  # no room to move
    for label in range(0, 16, 4):
        straight, tilted = (MovingShapes(**still, tilt=tilt).clip(label, 0)["x"] for tilt in (0.0, 0.5))
        assert torch.equal(straight[:, 0], straight[:, 2])
        torch.testing.assert_close(straight, straight.flip(3))
        covered = straight[0, 0] > 0
        if (corners := SHAPES[NAMES[label].split()[1]]) in (3, 5):
            assert covered[4, 19:21].all()
            assert not covered[-2].any()
        if corners:
            assert (tilted[:, 0] - tilted[:, 2]).abs().max() > 0.1


def test_digits_show_the_images_of_scikit_learn():
    """A digit of its own size that does not move is the original image, at a whole-pixel place."""
    from sklearn.datasets import load_digits

    data = MovingDigits("validation", frames=3, size=(8, 8), digit=8.0)
    truth = load_digits()
    for index in (0, 5, len(data) - 1):
        clip = data.clip(index, 0)
        image = truth.images[data.samples[index]] / 8 - 1
        assert clip["label"] == truth.target[data.samples[index]]
        for frame in clip["x"][0]:
            np.testing.assert_allclose(frame, image, atol=1e-6)


def test_digits_move_straight_at_their_speed_and_bounce():
    data = MovingDigits(frames=40, size=(20, 24), digit=8.0, speed=(1.5, 1.5))
    light = data.clip(3, 0)["x"][0].double() + 1
    mass = light.sum((1, 2))
    y = (light.sum(2) * torch.arange(20)).sum(1) / mass
    x = (light.sum(1) * torch.arange(24)).sum(1) / mass
    torch.testing.assert_close(mass, mass[:1].expand(40), rtol=1e-3, atol=0)  # never cut off by a wall
    steps = torch.stack([y.diff(), x.diff()], 1)
    free = (steps[1:] - steps[:-1]).norm(dim=1) < 1e-3
    assert free.sum() > 20
    torch.testing.assert_close(
        steps[1:][free].norm(dim=1), torch.full_like(steps[1:][free][:, 0], 1.5), atol=1e-3, rtol=0
    )
    assert (steps[:, 0].sign().unique().numel(), steps[:, 1].sign().unique().numel()) == (2, 2)
    assert (y.max() - y.min()) > 10


def test_digits_are_split_by_image():
    train, validation = MovingDigits("train"), MovingDigits("validation", seed=5)
    assert len(train) == 1500
    assert len(validation) == 297
    assert not set(train.samples) & set(validation.samples)
    assert validation.samples == MovingDigits("validation").samples
    assert {validation.clip(i, 0, range(0))["label"] for i in range(297)} == set(range(10))
    for bad in ({"split": "test"}, {"frames": 0}, {"digit": 17.0}, {"speed": (2.0, 1.0)}):
        refused("MovingDigits", MovingDigits, **bad)


def test_digits_are_spelled():
    letters, there = spell(torch.tensor([7, 2, 10]))
    assert letters.shape == (3, 5, 26)
    assert there.sum(1).tolist() == [5, 3, 0]
    assert "".join(chr(97 + i) for i in letters[0].argmax(-1)) == "seven"
    assert torch.equal(letters.sum(-1), there.float())
    assert len({frozenset(row.nonzero()[:, 1].tolist()) for row in spell(torch.arange(11))[0]}) == 11


# Video folder


def picture(i: int, height: int = 36, width: int = 48) -> np.ndarray:
    """Frame `i` of the test videos: a bright box on the move, its brightness the frame's number."""
    frame = np.full((height, width, 3), 30, np.uint8)
    y, x = (2 * i) % (height - 8), (3 * i) % (width - 8)
    frame[y : y + 8, x : x + 8] = (255, 40 + 5 * i, 0)
    frame[-4:, :] = 6 * i
    return frame


def write(path: Path, codec: str, n: int = 25, rate=10, rotation: int = 0, times=None, **options: str) -> Path:
    """A real video of n frames, shown at a rate or at `times` in seconds."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = picture(0).shape[:2]
        stream.pix_fmt = "yuv420p"
        if times:
            stream.codec_context.time_base = 1 / rate if path.suffix == ".avi" else Fraction(1, 90000)
        if rotation:
            stream.set_display_rotation(rotation)
        for i in range(len(times or range(n))):
            frame = av.VideoFrame.from_ndarray(picture(i), format="rgb24")
            if times:
                frame.time_base = stream.codec_context.time_base
                frame.pts = round(times[i] / frame.time_base)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def write_gif(path: Path, n: int = 25, milliseconds: int = 100) -> Path:
    frames = [Image.fromarray(picture(i)) for i in range(n)]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0)
    return path


FILES = {
    "b-frames.mp4": {"codec": "libx264", "bf": "3", "g": "8"},
    "open-gop.mp4": {"codec": "libx264", "x264-params": "bframes=3:keyint=8:min-keyint=4:open-gop=1:scenecut=0"},
    "vp9.webm": {"codec": "libvpx-vp9", "g": "8", "deadline": "realtime", "cpu-used": "8"},
    "vp8-altref.webm": {"codec": "libvpx", "g": "9", "auto-alt-ref": "1", "lag-in-frames": "6", "deadline": "good"},
    "mpeg4.avi": {"codec": "mpeg4", "bf": "2", "g": "8"},
    "b-frames.avi": {"codec": "libx264", "bf": "3", "g": "8"},
    "mpeg4.mov": {"codec": "mpeg4", "bf": "2", "g": "8"},
    "h264.mkv": {"codec": "libx264", "bf": "2", "g": "6"},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    for name, options in FILES.items():
        write(root / name, **options)
    write_gif(root / "gif.gif")
    return root


def alone(videos: Path, name: str, tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(videos / name, folder / name)
    return folder


def decoded(path: Path) -> Tensor:
    """All frames (3 t h w) in [-1, 1]."""
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(3, 0, 1, 2).float() / 127.5 - 1


@pytest.mark.parametrize("name", [*FILES, "gif.gif"])
def test_every_format_gives_the_frames_of_a_whole_decode(videos, tmp_path, name):
    """Whatever range is asked for, at whatever place of the file, bit for bit."""
    folder = alone(videos, name, tmp_path)
    truth = decoded(folder / name)
    assert truth.shape[1] == 25
    data = VideoFolder(folder, frames=7, height=36, width=48, stride=2)
    assert len(data.videos[0].times) == 25
    starts = set()
    for epoch in range(12):
        x = data.clip(0, epoch)["x"]
        fits = [s for s in range(13) if torch.equal(x, truth[:, s : s + 13 : 2])]
        assert len(fits) == 1
        starts.add(fits[0])
        assert torch.equal(data.clip(0, epoch, range(3, 6))["x"], x[:, 3:6])
        assert torch.equal(data.clip(0, epoch, range(6, 7))["x"], x[:, 6:7])
    assert len(starts) > 4


@pytest.mark.parametrize("name", ["b-frames.mp4", "vp9.webm"])
def test_a_rank_decodes_only_what_it_needs(videos, tmp_path, name, monkeypatch):
    data = VideoFolder(alone(videos, name, tmp_path), frames=25, height=36, width=48)
    seen: list[int] = []
    original = video_file._timed

    def counting(frames, timed):
        for time, frame in original(frames, timed):
            seen.append(time)
            yield time, frame

    monkeypatch.setattr(video_file, "_timed", counting)
    # from a keyframe every 8 frames, not from the beginning
    for held, least, most in ((range(20, 22), 2, 8), (range(2, 4), 4, 4), (range(9, 9), 0, 0)):
        seen.clear()
        data.clip(0, 0, held)
        assert least <= len(seen) <= most


def test_a_seek_that_lands_too_late_starts_over(videos, tmp_path):
    """A file whose index is wrong costs time, not frames: the keyframe asked for is not where the seek lands."""
    data = VideoFolder(alone(videos, "b-frames.mp4", tmp_path), frames=25, height=36, width=48)
    expected = data.clip(0, 0, range(10, 13))["x"]
    ticks = data.videos[0].times
    data.videos[0] = replace(data.videos[0], keyframes=[ticks[0], ticks[9]])  # frame 9 is no keyframe
    assert torch.equal(data.clip(0, 0, range(10, 13))["x"], expected)


def test_video_folder_keeps_the_promises_of_a_data_set(videos):
    data = VideoFolder(videos, frames=6, height=24, width=24, stride=2, seed=3)
    assert len(data) == len(FILES) + 1
    check_dataset(data)
    assert not torch.equal(
        VideoFolder(videos, frames=6, height=24, width=24, stride=2).clip(1, 2)["x"], data.clip(1, 2)["x"]
    )


def test_gif_palette_and_disposal_match_pillow(tmp_path):
    """Partial frames, each with its own palette, some restored to the background or to the frame before."""
    frames = []
    for i in range(6):
        frame = Image.new("RGBA", (20, 16), (200, 30, 30, 255) if i == 0 else (0, 0, 0, 0))
        frame.paste((10 * i, 250 - 30 * i, 90, 255), (i * 2, i, i * 2 + 6, i + 6))
        frames.append(frame)
    path = tmp_path / "gif.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=50, disposal=[1, 1, 3, 3, 1, 1], loop=0)
    with Image.open(path) as gif:
        theirs = []
        for i in range(gif.n_frames):
            gif.seek(i)
            theirs.append(np.asarray(gif.convert("RGB")))
    ours = VideoFolder(tmp_path, frames=6, height=16, width=20).clip(0, 0)["x"].permute(1, 2, 3, 0)
    np.testing.assert_array_equal(((ours + 1) * 127.5).round().byte().numpy(), np.stack(theirs))


def test_another_rate_takes_the_frames_on_show(tmp_path):
    truth = decoded(write_gif(tmp_path / "a.gif", n=20, milliseconds=50))  # 20 frames a second
    for fps, places in ((5, [0, 4, 8, 12, 16]), (40, [0, 0, 1, 1, 2]), (20, range(20))):
        data = VideoFolder(tmp_path, frames=len(places), height=36, width=48, fps=fps)
        x = data.clip(0, 1)["x"]
        assert any(torch.equal(x, truth[:, [s + i for i in places]]) for s in range(20 - places[-1]))
        assert torch.equal(data.clip(0, 1, range(1, 4))["x"], x[:, 1:4])


def test_frames_are_scaled_to_cover_and_cut(tmp_path):
    write(tmp_path / "a.mp4", "libx264", n=3)  # 36 x 48
    data = VideoFolder(tmp_path, frames=3, height=18, width=18, crop="center")
    assert data.clip(0, 0)["x"].shape == (3, 3, 18, 18)
    wide = VideoFolder(tmp_path, frames=3, height=18, width=24, crop="center").clip(0, 0)["x"]
    assert torch.equal(data.clip(0, 0)["x"], wide[..., 3:21])
    cut = VideoFolder(tmp_path, frames=3, height=18, width=18)
    places = {next(x for x in range(7) if torch.equal(cut.clip(0, e)["x"], wide[..., x : x + 18])) for e in range(12)}
    assert len(places) > 3
    assert VideoFolder(tmp_path, frames=3, height=72, width=50).clip(0, 0)["x"].shape == (3, 3, 72, 50)  # enlarged


COLOURS_NAMED = [
    (718, None, "ITU601"),
    (720, None, "ITU709"),
    (720, 1, "ITU709"),
    (718, 1, "ITU709"),
    (720, 6, "ITU601"),
]
CODECS_OF_COLOURS = {"mpeg4": "mp4", "libx264": "mp4", "libvpx-vp9": "webm"}  # the first names no colours


@pytest.mark.parametrize(
    ("codec", "height", "tag", "matrix"),
    [(codec, *case) for codec in CODECS_OF_COLOURS for case in COLOURS_NAMED if codec != "mpeg4" or not case[1]],
)
def test_colours_are_those_that_a_video_names_or_that_players_take(tmp_path, codec, height, tag, matrix):
    """BT.709 from 720 lines on where it names none."""
    colours, path = [(200, 40, 60), (30, 180, 90)], tmp_path / f"a.{CODECS_OF_COLOURS[codec]}"
    pixels = np.repeat(np.array(colours, np.uint8), 32, 0)[None].repeat(height, 0)
    with av.open(path, "w") as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, height, "yuv420p"
        stream.codec_context.colorspace = tag or 2
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p", dst_colorspace=matrix)
        container.mux([*stream.encode(frame), *stream.encode()])
    shown = read_frames(path, height, 64)[:, 0, height // 2, [8, 56]].T
    assert ((shown + 1) * 127.5 - torch.tensor(colours)).abs().max() < 6


def test_images_have_their_own_colours(tmp_path):
    """JPEG is BT.601 at any size, and what is RGB is not converted."""
    pixels = np.full((720, 64, 3), (200, 40, 60), np.uint8)
    for suffix in ("png", "jpg", "gif", "bmp"):
        Image.fromarray(pixels).save(tmp_path / f"a.{suffix}")
        shown = (read_frames(tmp_path / f"a.{suffix}", 720, 64)[:, 0, 300, 30] + 1) * 127.5
        assert (shown - torch.tensor([200, 40, 60])).abs().max() < 6, suffix


def test_a_rotation_tag_is_obeyed(tmp_path):
    """Phones write pixels on their side, and a matrix that says how to turn them."""
    write(tmp_path / "plain.mp4", "libx264", n=2)
    write(tmp_path / "turned.mp4", "libx264", n=2, rotation=90)
    data = VideoFolder(tmp_path, frames=2, height=48, width=36)
    x = data.clip([v.path.name for v in data.videos].index("turned.mp4"), 0)["x"]
    with av.open(str(tmp_path / "turned.mp4")) as container:
        turns = next(container.decode(video=0)).rotation // 90
    assert turns in (1, -1)
    assert torch.equal(x[:, 0], decoded(tmp_path / "plain.mp4")[:, 0].rot90(turns, (1, 2)))


def test_broken_and_short_videos_are_named_skipped_and_counted(videos, tmp_path, caplog):
    good = write(tmp_path / "good.mp4", "libx264", n=12)
    (tmp_path / "deep").mkdir()
    write_gif(tmp_path / "deep" / "fine.GIF", n=12)
    write(tmp_path / "short.mp4", "libx264", n=3)
    (tmp_path / "noise.webm").write_bytes(bytes(range(256)) * 20)
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "cut.mp4").write_bytes(good.read_bytes()[: good.stat().st_size // 2])  # its index is at the end
    (tmp_path / "notes.txt").write_text("not a video")
    (tmp_path / "._good.mp4").write_bytes(b"what a Mac leaves behind")
    with caplog.at_level(logging.INFO, "zoo.data.video_folder"):
        data = VideoFolder(tmp_path, frames=8, height=16, width=16)
    assert [v.path.name for v in data.videos] == ["fine.GIF", "good.mp4"]
    assert sorted(path.name for path, _ in data.skipped) == ["cut.mp4", "empty.mp4", "noise.webm", "short.mp4"]
    lines = [record.getMessage() for record in caplog.records]
    assert sum("skipped" in line for line in lines) == 5
    assert any("short.mp4: too short: 3 frames, and 8 frames at stride 1" in line for line in lines)
    assert any("noise.webm: broken" in line for line in lines)
    assert lines[-1] == f"2 videos under {tmp_path}, 4 skipped"


def test_a_folder_without_a_usable_video_is_one_clear_error(tmp_path):
    refused("no such folder", VideoFolder, tmp_path / "absent", error=VideoError)
    refused(r"no videos under .* \(looked for .mp4", VideoFolder, tmp_path, error=VideoError)
    write(tmp_path / "a.mp4", "libx264", n=3)
    (tmp_path / "b.mp4").touch()
    with pytest.raises(VideoError, match=r"none of the 2 videos .* the first is .*a.mp4: too short"):
        VideoFolder(tmp_path, frames=8, height=16, width=16)
    with pytest.raises(VideoError, match=r"in 0.20 s, and 8 at 5 a second"):
        VideoFolder(tmp_path, frames=8, height=16, width=16, fps=5)
    for bad in ({"stride": 0}, {"stride": 2, "fps": 4}, {"crop": "left"}, {"fps": -1}):
        with pytest.raises(VideoError):
            VideoFolder(tmp_path, frames=2, height=16, width=16, **bad)


def test_damage_in_the_middle_raises_by_name_and_verify_skips_it(tmp_path):
    """The scan reads packets, so it sees nothing wrong with a packet full of nonsense; decoding does."""
    path = write(tmp_path / "bad.mp4", "libx264", n=30, g="8")
    with av.open(str(path)) as container:
        packets = sorted((packet.pos, packet.size) for packet in container.demux(video=0) if packet.size)
    data, (start, size) = bytearray(path.read_bytes()), packets[16]
    data[start : start + size] = bytes(byte ^ 0x5A for byte in data[start : start + size])
    path.write_bytes(data)
    folder = VideoFolder(tmp_path, frames=30, height=16, width=16)
    assert folder.clip(0, 0, range(0, 8))["x"].shape == (3, 8, 16, 16)  # before the damage
    with pytest.raises(VideoError, match=r"bad.mp4 broke while it was decoded .*: remove it, or let verify=True"):
        folder.clip(0, 0, range(14, 30))
    write(tmp_path / "good.mp4", "libx264", n=30)
    folder = VideoFolder(tmp_path, frames=30, height=16, width=16, verify=True)
    assert [video.path.name for video in folder.videos] == ["good.mp4"]
    assert [(path.name, reason.split(":")[0]) for path, reason in folder.skipped] == [("bad.mp4", "broken")]


def test_a_file_that_changes_after_the_scan_is_named(tmp_path):
    path = write(tmp_path / "a.mp4", "libx264", n=12)
    data = VideoFolder(tmp_path, frames=8, height=16, width=16)
    write(path, "libx264", n=2)
    with pytest.raises(VideoError, match=r"a.mp4 broke while it was decoded \(it ends \d+ frames early\): remove it"):
        data.clip(0, 0)
    path.unlink()
    refused(r"a.mp4 broke while it was decoded", data.clip, 0, 0, error=VideoError)


def test_split_holds_videos_out_by_name(videos, tmp_path, caplog):
    data = VideoFolder(videos, frames=6, height=24, width=24)
    train, validation = data.split(0.25)
    assert (len(train), len(validation), len(data)) == (7, 2, 9)
    assert not {v.path for v in train.videos} & {v.path for v in validation.videos}
    assert validation.crop == "center"
    assert [v.path for v in data.split(0.25)[1].videos] == [v.path for v in validation.videos]
    one = VideoFolder(alone(videos, "gif.gif", tmp_path), frames=6, height=24, width=24)
    assert [len(part) for part in one.split()] == [1, 1]
    assert "single video" in caplog.text
    refused("between 0 and 1", data.split, 1.0, error=VideoError)


def test_without_pyav_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    refused("pip install av", VideoFolder, tmp_path, error=VideoError)


def test_files_are_closed(videos, tmp_path):
    data = VideoFolder(videos, frames=6, height=24, width=24, stride=2)
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    for epoch in range(5):
        for index in range(len(data)):
            data.clip(index, epoch, range(2, 4))
    after = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    assert after <= before


def test_unusable_frames_are_reported_by_the_scan(tmp_path, monkeypatch):
    """Sides that differ too much, more pixels than fit, a time stamp far behind the one before it."""
    save_gif(tmp_path / "narrow.gif", torch.rand(1, 3, 3, 2, 100) * 2 - 1)
    save_gif(tmp_path / "sound.gif", torch.rand(1, 3, 3, 8, 8) * 2 - 1)
    narrow = video_file.probe(tmp_path / "narrow.gif")
    assert "its sides differ by more than a factor of 20" in narrow
    assert not isinstance(video_file.probe(tmp_path / "sound.gif"), str)
    with monkeypatch.context() as patch:
        patch.setattr(video_file, "MOST_PIXELS", 50)
        assert "pixels, and 50 is the most" in video_file.probe(tmp_path / "sound.gif")
    with monkeypatch.context() as patch:
        patch.setattr(video_file, "LONGEST_FRAME", 0.01)
        assert "a broken time stamp" in video_file.probe(tmp_path / "sound.gif")
    with pytest.raises(video_file.VideoError, match="too narrow for 4096 x 4096"):
        video_file.read_frames(tmp_path / "narrow.gif", 4096, 4096)


# Frames by their times, kept in ticks of the file: each once at its own rate, the nearest at others

CODECS = {"mp4": "libx264", "mkv": "libx264", "webm": "libvpx-vp9", "avi": "mpeg4"}


def film(folder: Path, suffix: str, times: list[Fraction], rate: Fraction) -> Path:
    return write(folder / f"film.{suffix}", CODECS[suffix], rate=rate, times=times)


@pytest.mark.parametrize("suffix", CODECS)
@pytest.mark.parametrize("rate", ["24", "25", "30", "60", "30000/1001"])
def test_each_frame_once_at_its_own_rate(tmp_path, suffix, rate):
    fps = Fraction(rate)
    path = film(tmp_path, suffix, [i / fps for i in range(30)], fps)
    (clip,) = cut("film", probe(path), "", Bucket(30, 32, 40, float(fps)))
    assert [*clip.chosen] == [*range(30)]
    folder = VideoFolder(tmp_path, frames=30, height=32, width=40, fps=float(fps))
    assert len(folder) == 1  # it is long enough
    assert [folder._source_frame(folder.videos[0], 0, i) for i in range(30)] == [*range(30)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_clips_from_every_start_frame(tmp_path, suffix):
    """Times are rounded up or down, those of the first frame of a clip as well."""
    video = probe(film(tmp_path, suffix, [Fraction(i, 30) for i in range(24)], Fraction(30)))
    for start in range(20):
        assert [source_frame(video, video.times[start], i / 30) for i in range(4)] == [*range(start, start + 4)]


@pytest.mark.parametrize("suffix", ["mp4", "mkv", "webm"])
def test_the_nearest_frame_at_other_rates_and_of_changing_ones(tmp_path, suffix):
    steps = [1, 1, 5, 1, 9, 2, 2, 3, 1, 4]
    times = [Fraction(sum(steps[:i]), 30) for i in range(len(steps))]
    video = probe(film(tmp_path, suffix, times, Fraction(30)))
    for fps in (8, 12.5, 48):
        for i in range(int(times[-1] * fps)):
            off = [abs(float(at) - i / fps) for at in times]
            chosen = source_frame(video, video.times[0], i / fps)
            assert off[chosen] <= min(off) + 1.1 * video.tick
