"""Encoding a folder of clips: what is written, on how many ranks, after what kind of stop; and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.clips import gif
from tests.support.paths import ROOT
from tests.support.refusals import refused
from tests.support.slow import long, slow
from zoo.data.latents import Latents
from zoo.data.shapes import MovingShapes
from zoo.data.video_file import Video, VideoError, probe, read
from zoo.data.video_folder import VideoFolder
from zoo.pictures import to_pixels
from zoo.training.outputs import clips as show
from zoo.training.shared_codec import shared_codec
from zoo.video import encode, example_clips, tiny_encoders
from zoo.video.clips import Bucket, ClipError, captions, choose, cut, enlarged
from zoo.video.codec import Autoencoder
from zoo.video.encoders import TextEncoder

CAPTIONS = {"wide.gif": "a wide one", "deep/tall.gif": "ein hohes Bild: größer", "short.gif": "short"}
SIZES = {"wide.gif": (23, 24, 40), "deep/tall.gif": (12, 40, 24), "short.gif": (4, 24, 24)}  # frames, rows, columns
BUCKETS = ["5x16x24", "5x24x16@5"]


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("encoders")
    tiny_encoders.save_autoencoder(root / "vae")
    tiny_encoders.save_text_encoder(root, channels=16)
    tiny_encoders.save_autoencoder(root / "other", seed=1)
    tiny_encoders.save_autoencoder(root / "wan", "AutoencoderKLWan")
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    for name, size in SIZES.items():
        gif(root / name, *size)
        (root / name).with_suffix(".txt").write_text(CAPTIONS[name] + "\n")
    return root


@pytest.fixture
def clips(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "clips"))


def run(clips: Path, out: Path, encoders: Path, *more, buckets=BUCKETS) -> int:
    arguments = [clips, "--out", out, "--vae", encoders, "--text", encoders, "--bucket", *buckets, *more]
    return encode.main([str(a) for a in arguments])


def run_here(mesh, *arguments, **keywords) -> None:
    assert run(*arguments, **keywords) == 0


@pytest.fixture(scope="module")
def quiet(whole, encoders, tmp_path_factory) -> Latents:
    """The folder as it is written without any accident."""
    out = tmp_path_factory.mktemp("quiet") / "latents"
    assert run(whole, out, encoders) == 0
    return Latents(out)


def same(out: Path, quiet: Latents) -> None:
    found = Latents(out)
    assert found.manifest == quiet.manifest
    assert found.entries == quiet.entries
    for here, there in zip(found.entries, quiet.entries):
        assert torch.equal(found.latent(here), quiet.latent(there))
        assert torch.equal(found.text(here), quiet.text(there))
    assert torch.equal(found.unconditional(), quiet.unconditional())


def test_names_sizes_latents_and_embeddings_of_an_encoded_folder(whole, encoders, quiet):
    """Names, sizes, rates; latents and embeddings are those of the encoders, called here by hand on the clips."""
    expected = {f"wide.gif#{i}": ((5, 16, 24), 10.0, range(i, i + 5)) for i in (0, 5, 10, 15)}
    expected["deep/tall.gif#0"] = ((5, 24, 16), 5.0, range(0, 10, 2))  # 12 frames at 10 are 6 at 5 a second
    assert {e.name: ((e.frames, e.height, e.width), e.fps) for e in quiet.entries} == {
        name: value[:2] for name, value in expected.items()
    }
    vae, text = Autoencoder.load(encoders), TextEncoder.load(encoders)
    for entry in quiet.entries:
        file = entry.name.partition("#")[0]
        assert entry.caption == CAPTIONS[file]
        video = probe(whole / file)
        assert isinstance(video, Video)
        latent = vae.encode(read(video, expected[entry.name][2], entry.height, entry.width))
        assert tuple(latent.shape) == entry.shape == (4, 5, entry.height // 4, entry.width // 4)
        assert torch.equal(quiet.latent(entry), latent)
        assert torch.equal(quiet.text(entry), text.encode([entry.caption])[0])
        assert entry.tokens == len(entry.caption.encode()) + 1
    assert torch.equal(quiet.unconditional(), text.encode([""])[0])
    manifest = quiet.manifest
    assert (manifest.vae, manifest.factor, manifest.causal) == ("AutoencoderKL", (1, 4, 4), False)
    assert (manifest.vae_hash, manifest.text_hash) == (vae.fingerprint, text.fingerprint)
    assert (manifest.text_channels, manifest.text_length) == (16, 300)


def test_a_video_autoencoder_with_values_a_channel(clips, encoders, tmp_path):
    out = tmp_path / "out"
    assert run(clips, out, encoders, "--vae", encoders / "wan", "--clips-per-video", 1, buckets=["9x16x24"]) == 0
    found = Latents(out)
    assert found.manifest.shift == (0.1, -0.2, 0.3, -0.4)
    assert found.manifest.scale == pytest.approx((1 / 0.5, 1 / 0.6, 1 / 0.7, 1 / 0.8))
    assert [(e.name, e.shape) for e in found.entries] == [
        ("deep/tall.gif#0", (4, 3, 2, 3)),
        ("wide.gif#0", (4, 3, 2, 3)),
    ]


@pytest.mark.slow
def test_ranks_share_the_clips(whole, encoders, quiet, tmp_path, ranks):
    ranks(run_here, 4, whole, tmp_path / "out", encoders, "--shard-mib", 0.001)
    same(tmp_path / "out", quiet)
    assert len({entry.shard for entry in Latents(tmp_path / "out").entries}) == 5


def clipped(mesh, path: Path, latent: torch.Tensor, expect: torch.Tensor, tile: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(show, "TILE", tile)
        codec = Autoencoder.load(path)
        pixels = show.decode(latent[None], codec, mesh.get_group())
    assert (pixels is None) == bool(mesh.get_local_rank())
    if pixels is not None:
        assert (pixels[0].int() - to_pixels(expect).int()).abs().max() <= 1  # a level of 256
    assert shared_codec(codec, mesh.get_group()) is shared_codec(codec, mesh.get_group())  # planned once


@pytest.mark.parametrize("n", [long(2), slow(3)])
def test_ranks_encode_and_decode_a_clip_together(clips, encoders, tmp_path, whole_world, n):
    """Clips that one rank cannot hold: the clips and latents of one process, to rounding."""
    options = ["--vae", encoders / "wan", "--clips-per-video", 1]
    alone, out = tmp_path / "alone", tmp_path / "out"
    assert run(clips, alone, encoders, *options, buckets=["9x16x24"]) == 0
    whole_world(partial(run_here, buckets=["9x16x24"]), n, clips, out, encoders, *options, "--together")
    found = Latents(out)
    assert found.entries == Latents(alone).entries
    for here, there in zip(found.entries, Latents(alone).entries):
        torch.testing.assert_close(found.latent(here), Latents(alone).latent(there), rtol=1e-4, atol=1e-4)
    vae, latent = (
        Autoencoder.load(encoders / "wan"),
        torch.randn(4, 2, 4, 6, generator=torch.Generator().manual_seed(0)),
    )
    whole_world(clipped, n, encoders / "wan", latent, vae.decode(latent, tile=None), 40)


def test_encoding_in_half_precision(whole, encoders, quiet, tmp_path):
    assert run(whole, tmp_path / "out", encoders, "--dtype", "bfloat16") == 0
    found = Latents(tmp_path / "out")
    for entry in found.entries:
        assert found._shard(entry).get_tensor(f"{entry.place}.latent").dtype == torch.bfloat16
    a, b = (torch.cat([data.latent(entry).flatten() for entry in data.entries]) for data in (found, quiet))
    assert 0 < (a - b).abs().mean() < 0.05 * b.std()


# Stops

KILLED = """
import os, sys
from zoo.video import codec, encode
encode_clip, count = codec.Autoencoder.encode, [0]
def deadly(*args, **kwargs):
    count[0] += 1
    if count[0] == 4:
        os.kill(os.getpid(), 9)
    return encode_clip(*args, **kwargs)
codec.Autoencoder.encode = deadly
encode.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_encoding_resumes_after_a_kill(whole, encoders, quiet, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [whole, "--out", out, "--vae", encoders, "--text", encoders, "--bucket", *BUCKETS, "--shard-mib", 0.005]
    died = subprocess.run(
        [sys.executable, "-c", KILLED, *map(str, arguments)], cwd=ROOT, capture_output=True, timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    left = Latents(out).entries
    assert len(left) == 2  # a shard of two is whole; the third clip was not in one yet
    assert run(whole, out, encoders) == 0
    assert "3 clips to encode, 2 are in" in capsys.readouterr().out
    same(out, quiet)
    before = sorted(out.iterdir())
    assert run(whole, out, encoders) == 0
    assert "0 clips to encode, 5 are in" in capsys.readouterr().out
    assert sorted(out.iterdir()) == before


def test_encoding_resumes_after_an_interrupt(whole, encoders, quiet, tmp_path, monkeypatch, capsys):
    def interrupt(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return original(self, *args, **kwargs)

    original, before = Autoencoder.encode, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    with monkeypatch.context() as patch:
        patch.setattr(Autoencoder, "encode", interrupt)
        assert run(whole, tmp_path / "out", encoders) == 130
    signal.signal(signal.SIGINT, before)
    assert "stopped by SIGINT; the same command goes on" in capsys.readouterr().out
    assert len(Latents(tmp_path / "out").entries) == 1
    assert run(whole, tmp_path / "out", encoders) == 0
    same(tmp_path / "out", quiet)


def test_encoding_resumes_after_a_full_disk(whole, encoders, quiet, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("zoo.data.latents.shutil.disk_usage", lambda _: SimpleNamespace(free=2**20))
        assert run(whole, tmp_path / "out", encoders) == 2
    assert "free some space and run the same command again" in capsys.readouterr().err
    assert run(whole, tmp_path / "out", encoders) == 0
    same(tmp_path / "out", quiet)


# Refusals


@pytest.fixture
def ends(clips, encoders, tmp_path, capsys):
    """Sees an encoding of `clips` into `out` end in one error that has this message."""

    def call(message: str, *options, source=clips, buckets=BUCKETS) -> None:
        capsys.readouterr()
        assert run(source, tmp_path / "out", encoders, *options, buckets=buckets) == 2
        told = capsys.readouterr()
        assert message in told.err, told.err
        assert told.err.count("error") == 1
        assert "Traceback" not in told.err

    return call


def test_changed_captions_sizes_and_encoders_are_refused(clips, encoders, tmp_path, ends):
    out = tmp_path / "out"
    assert run(clips, out, encoders) == 0
    (clips / "wide.txt").write_text("another one")
    ends(f"4 clips are in {out} with other captions or sizes than now; the first is wide.gif#0: caption 'a wide one'")
    (shard,) = out.glob("shard-*")
    shard.unlink()  # what the message says to do
    assert run(clips, out, encoders) == 0
    assert {e.caption for e in Latents(out).entries} == {"another one", CAPTIONS["deep/tall.gif"]}
    ends("the first is wide.gif#0: 5x16x24 at 10 a second there, 5x8x12 at 10 now", buckets=["5x8x12", "5x24x16@5"])
    ends("was begun with the AutoencoderKL at ", "--vae", encoders / "other")
    ends("at most 300 tokens, not 200: go on with --text-length 300", "--text-length", 200)


def test_invalid_encoding_options_are_refused(encoders, tmp_path, ends):
    ends("--bucket 5x18x24: AutoencoderKL at", buckets=["5x16x24", "5x18x24"])
    ends("18 rows (take 16 or 20)", buckets=["5x18x24"])
    ends("4 frames (take 1 or 5)", "--vae", encoders / "wan", buckets=["4x16x24"])
    ends("invalid bucket '16x24': expected FRAMESxHEIGHTxWIDTH", buckets=["16x24"])
    ends("--tile 0: it must be more than 0", "--tile", 0)
    ends("no such folder", source=tmp_path / "none")
    ends("is not the folder of a model", "--vae", tmp_path)
    assert not (tmp_path / "out").exists()


def test_captions_that_are_missing_or_too_long(clips, encoders, tmp_path, capsys, ends):
    out = tmp_path / "out"
    ends("2 captions are longer than --text-length 8 tokens: deep/tall.gif has 25; wide.gif has 11", "--text-length", 8)
    (clips / "wide.txt").unlink()
    (clips / "deep/nothing.txt").write_text("of no video")
    ends("--strict: 3 files or captions cannot be used", "--strict")
    assert not out.exists()
    assert run(clips, out, encoders) == 0
    told = capsys.readouterr().out
    for line in ("skipped wide.gif: no caption", "skipped deep/nothing.txt: a caption without a video",
                 "skipped short.gif: too short: 4 frames in 0.30 s, for 5x16x24 or 5x24x16@5",
                 "1 clips encoded, 3 skipped"):  # fmt: skip
        assert line in told
    for path in clips.rglob("*.txt"):
        path.unlink()
    ends(f"none of the 3 videos under {clips} has a caption (looked in NAME.txt beside each video)")


def test_broken_videos_are_named_and_the_others_encoded(clips, encoders, tmp_path, capsys, monkeypatch, ends):
    (clips / "broken.gif").write_bytes(b"GIF89a, not")
    (clips / "broken.txt").write_text("nothing")
    assert run(clips, tmp_path / "out", encoders) == 0
    assert "skipped broken.gif: broken: " in capsys.readouterr().out
    assert len(Latents(tmp_path / "out").entries) == 5

    def breaks(video, chosen, height, width):
        if video.path.name == "wide.gif" and chosen[0] == 5:
            raise VideoError("wide.gif broke while it was decoded")
        return read(video, chosen, height, width)

    def overflows(self, frames, **options):
        return plain(self, frames, **options) / (frames.shape[-1] == 24)  # but for wide clips no number

    plain = Autoencoder.encode
    with monkeypatch.context() as patch:
        patch.setattr(encode, "read", breaks)
        patch.setattr(Autoencoder, "encode", overflows)
        assert run(clips, tmp_path / "again", encoders) == 0
    told = capsys.readouterr().out
    assert "skipped wide.gif#5: wide.gif broke while it was decoded" in told
    assert "skipped deep/tall.gif#0: its latent in torch.float32 holds NaN or infinite numbers" in told
    assert "3 clips encoded, 4 skipped" in told
    monkeypatch.setattr(encode, "read", breaks)
    for name in ("broken.gif", "short.gif", "broken.txt", "short.txt"):
        (clips / name).unlink()
    shutil.rmtree(tmp_path / "out")
    ends("wide.gif#5: wide.gif broke", "--strict")


# Captions, buckets


def test_tables_of_captions(tmp_path):
    paths = {name: tmp_path / name for name in ("a.mp4", "b/c.mp4", "d.mp4")}
    table = tmp_path / "captions.csv"
    table.write_text('\ufeffcaption,id,file\n"one, two",1,a.mp4\nthree,2,./b/c.mp4\nfour,3,e.mp4\n', "utf-8")
    found, skipped = captions(tmp_path, table, paths)
    assert found == {"a.mp4": "one, two", "b/c.mp4": "three"}
    assert skipped == [f"e.mp4: a caption without a video under {tmp_path}", "d.mp4: no caption"]
    lines = tmp_path / "captions.jsonl"
    rows = [{"path": "a.mp4", "text": "one"}, {"video": str(tmp_path / "d.mp4"), "prompt": "two"}]
    lines.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert captions(tmp_path, lines, paths) == ({"a.mp4": "one", "d.mp4": "two"}, ["b/c.mp4: no caption"])

    for name, text, message in (
        (
            "x.csv",
            "name,caption\na.mp4,one\n",
            "line 2: expected one of path, file, file_name, video and .* got name",
        ),
        ("x.csv", "path,text\na.mp4,one\na.mp4,two\n", "line 3: a.mp4 has another caption already"),
        ("x.jsonl", '{"path": "a.mp4", "text": "one"\n', "is not JSON"),
        ("x.jsonl", "[1]\n", "line 1: expected one of path"),
        ("x.xlsx", "", r"from .csv and .jsonl files, not from .xlsx"),
        (
            "x.csv",
            "path,text\ne.mp4,one\n",
            r"none of the 3 videos .* has a caption \(looked in .*x.csv\). Write NAME.txt beside",
        ),
    ):
        (tmp_path / name).write_text(text)
        refused(message, captions, tmp_path, tmp_path / name, paths, error=ClipError)
    refused("No such file", captions, tmp_path, tmp_path / "none.csv", paths, error=ClipError)


def video(frames: int, height: int, width: int, fps: float = 10.0) -> Video:
    return Video(Path("v.mp4"), list(range(frames)), [0], 1 / fps, height, width)


def test_a_video_goes_to_the_bucket_of_its_shape_and_length():
    square, wide, longer, tall = (Bucket.parse(text) for text in ("5x32x32", "5x32x64", "9x32x64", "5x64x32@20"))
    all_of_them = [square, wide, longer, tall]
    assert choose(video(20, 240, 250), all_of_them) == square
    assert choose(video(20, 240, 470), all_of_them) == longer
    assert choose(video(8, 240, 470), all_of_them) == wide
    assert choose(video(3, 470, 240), all_of_them) == tall  # three at 10 a second are five at 20
    assert choose(video(2, 470, 240), all_of_them) is None
    small, large = Bucket.parse("5x32x32"), Bucket.parse("5x64x64")
    assert [choose(video(5, side, side), [small, large]) for side in (40, 64)] == [small, large]
    assert str(tall) == "5x64x32@20"
    assert [enlarged(video(5, 40, 64), bucket) for bucket in (small, large, longer)] == [1, 1.6, 1]
    for wrong in ("5x32", "0x32x32", "5x32x32@0", "5x32x32@", "5×32×32"):
        refused("invalid bucket", Bucket.parse, wrong)


def test_clips_follow_each_other_without_gaps():
    own = list(cut("v", video(17, 8, 8), "", Bucket(5, 8, 8)))
    assert [(c.name, c.chosen[0], c.fps) for c in own] == [("v#0", 0, 10), ("v#5", 5, 10), ("v#10", 10, 10)]
    assert [i for c in own for i in c.chosen] == list(range(15))
    slow = list(cut("v", video(40, 8, 8), "", Bucket(3, 8, 8, 4.0)))  # every 2.5th frame
    assert [i for c in slow for i in c.chosen] == [int(2.5 * i) for i in range(15)]
    assert [c.name for c in slow] == ["v#0", "v#3", "v#6", "v#9", "v#12"]


def test_example_clips_have_captions_and_are_read(tmp_path):
    example_clips.write_clips(tmp_path, 2, frames=5, size=(24, 40))
    data = VideoFolder(tmp_path, frames=5, height=24, width=40)
    assert [path.read_text() for path in sorted(tmp_path.glob("*.txt"))] == ["a red disc\n", "a green disc\n"]
    assert [data.clip(i, 0)["x"].shape for i in range(2)] == [(3, 5, 24, 40)] * 2
    drawn = MovingShapes(frames=5, size=(24, 40), radius=(4, 6), speed=(1.0, 3.0)).clip(1, 0)
    assert (drawn["x"] - data.clip(1, 0)["x"]).abs().mean() < 0.1  # H.264 halves the resolution of colour


@pytest.mark.slow
def test_the_tiny_encoders_are_fitted(whole, tmp_path, capsys):
    """A few steps: the error falls, latents get variance 1, and the folder is one that loads."""
    assert tiny_encoders.main([str(tmp_path)]) == 0
    start = tiny_encoders.fit(tmp_path / "vae", whole, steps=4, side=16, batch=2)
    end = tiny_encoders.fit(tmp_path / "vae", whole, steps=60, side=16, batch=2, report=lambda line: None)
    assert end < 0.7 * start
    vae, found = Autoencoder.load(tmp_path), probe(whole / "wide.gif")
    assert isinstance(found, Video)
    latent = vae.encode(read(found, range(8), 16, 16))
    assert 0.5 < latent.std() < 2
    assert tiny_encoders.main([str(tmp_path / "b"), "--fit", str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert not list((tmp_path / "b").iterdir())  # a fit that did not end leaves no random weights
