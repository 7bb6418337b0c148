"""Buckets and folders of latents: whose turn it is, what fits, what a rank reads, and what cannot be used."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch

from tests.support.latent_folders import CHANNELS, LENGTH, SHAPES, TEXT, latent_folder, manifest
from tests.support.refusals import refused
from zoo.data.buckets import Bucket, bucket_batches, bucket_step
from zoo.data.latent_folder import LatentFolder
from zoo.data.latent_manifest import LatentError, write_manifest
from zoo.data.latents import Latents, Writer
from zoo.video.clean_frames import noised_frames

wrong = partial(refused, error=LatentError)

# The sampler


@pytest.mark.parametrize(
    ("counts", "batches"),
    [([10, 3, 7], [2, 4, 3]), ([1, 1], [4, 3]), ([12, 8], [4, 4]), ([5], [2]), ([1, 40], [7, 1])],
)
def test_every_clip_of_a_bucket_once_an_epoch(counts, batches):
    steps = [bucket_step(3, step, counts, batches) for step in range(300)]
    for bucket, n in enumerate(counts):
        stream = [pair for k, epochs, indices in steps if k == bucket for pair in zip(epochs, indices)]
        epochs = [epoch for epoch, _ in stream]
        assert epochs == sorted(epochs)
        assert epochs[-1] >= 3
        for epoch in range(epochs[-1]):  # the last one is not over
            assert sorted(i for e, i in stream if e == epoch) == list(range(n))
    assert all(len(e) == len(i) == batches[k] for k, e, i in steps)
    assert bucket_step(3, 217, counts, batches) == steps[217]  # from the step alone
    assert steps != [bucket_step(4, step, counts, batches) for step in range(300)] or sum(counts) == 1


def test_buckets_have_their_share_of_every_epoch_and_come_in_no_order():
    counts, batches = [12, 8, 6], [4, 4, 1]  # 3 + 2 + 6 steps an epoch, without remainder
    epochs = [[bucket_step(0, step, counts, batches)[0] for step in range(i, i + 11)] for i in range(0, 44, 11)]
    assert all(Counter(epoch) == {0: 3, 1: 2, 2: 6} for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4


def test_leftover_clips_wait_for_the_next_epoch():
    steps = [bucket_step(0, step, [5, 3], [2, 4]) for step in range(13)]  # four epochs: 20/2 and 12/4 steps
    assert Counter(k for k, _, _ in steps) == {0: 10, 1: 3}
    assert [k for k, _, _ in steps[:2]] == [0, 0]  # three clips are no batch of four yet
    assert [e for k, e, _ in steps if k == 1] == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]


@pytest.mark.parametrize("bad", [(-1, [1], [1]), (0, [], []), (0, [0], [1]), (0, [1], [0]), (0, [1, 2], [1])])
def test_invalid_bucket_steps_are_refused(bad):
    refused("bucket_step: expected", bucket_step, 0, *bad)


def test_names_of_buckets():
    assert Bucket.parse("16x32x24") == Bucket(16, 32, 24)
    assert Bucket.parse("16x32x24@23.976") == Bucket(16, 32, 24, 23.976)
    assert [str(Bucket.parse(text)) for text in ("4x8x6", "4x8x6@24.0")] == ["4x8x6", "4x8x6@24"]
    for text in ("16x32", "16x32x", "16 x 32 x 32", "0x3x3", "3x3x3@0", "3x3x3@", "-1x2x2", "axbxc", ""):
        refused("expected FRAMESxHEIGHTxWIDTH", Bucket.parse, text)


def test_balance_evens_out_the_cells_of_a_batch():
    buckets = [Bucket(8, 4, 4), Bucket(4, 4, 4), Bucket(3, 4, 4), Bucket(1, 4, 4)]
    assert bucket_batches(2, buckets, balance=False) == [2, 2, 2, 2]
    assert bucket_batches(2, buckets, balance=True) == [2, 4, 5, 16]


# The folder


def test_shapes_are_found_and_clips_fall_into_them(tmp_path):
    folder = LatentFolder(latent_folder(tmp_path / "clips", fps=(24.0, 23.976, 30.0)))
    assert {b.shape: len(clips) for b, clips in zip(folder.buckets, folder.clips)} == SHAPES
    assert [b.cells for b in folder.buckets] == sorted((b.cells for b in folder.buckets), reverse=True)
    assert len(list((tmp_path / "clips").glob("shard-*"))) > 3

    some = LatentFolder(tmp_path / "clips", [Bucket(3, 6, 4), Bucket(5, 4, 6), Bucket(5, 4, 6, 24.0)])
    assert list(map(str, some.buckets)) == ["5x4x6@24", "5x4x6", "3x6x4"]
    assert {round(e.fps) for e in some.clips[0]} == {24}  # 23.976 too
    assert {e.fps for e in some.clips[1]} == {30.0}
    assert sum(map(len, some.clips)) == len(some) == 12  # the images fit nowhere


def test_every_split_keeps_a_clip_of_every_shape_to_train_on(tmp_path):
    folder = LatentFolder(latent_folder(tmp_path / "clips"))
    for share in (0.01, 0.3, 0.99):
        train, held_out = folder.split(share)
        names = [sorted(e.name for clips in part.clips for e in clips) for part in (train, held_out)]
        assert sorted(names[0] + names[1]) == sorted(e.name for clips in folder.clips for e in clips)
        assert all(train.clips)
        assert len(held_out) == min(max(1, round(share * 14)), 14 - 3)
    wrong("between 0 and 1", folder.split, 1.0)
    single = LatentFolder(latent_folder(tmp_path / "single", {(2, 2, 2): 1}))
    train, held_out = single.split(0.5)
    assert train.clips == held_out.clips == single.clips


def test_an_epoch_goes_through_all_shards_in_no_order(tmp_path):
    """In place of a shuffle buffer: neighbours in a batch are seldom neighbours on the disk."""
    folder = LatentFolder(latent_folder(tmp_path / "data", {(5, 4, 6): 60}))
    clips = folder.clips[0]
    assert len({entry.shard for entry in clips}) >= 20
    for epoch in range(2):
        steps = [bucket_step(0, 15 * epoch + step, [60], [4]) for step in range(15)]
        assert sorted(i for _, _, indices in steps for i in indices) == list(range(60))
        assert sum(len({clips[i].shard for i in indices}) for _, _, indices in steps) > 15 * 3


def test_frames_and_captions(tmp_path):
    folder = LatentFolder(latent_folder(tmp_path / "clips"))
    entry = folder.clips[0][2]
    whole = folder.latent(entry)
    assert whole.shape == (CHANNELS, 5, 4, 6)
    parts = [folder.latent(entry, frames) for frames in (range(2), range(2, 5), range(5, 5))]
    assert torch.equal(torch.cat(parts, 1), whole)
    text, mask = folder.caption(entry)
    assert text.shape == (LENGTH, TEXT)
    assert mask.tolist() == [i < entry.tokens for i in range(LENGTH)]
    assert torch.equal(text[: entry.tokens], folder.latents.text(entry))
    assert not text[entry.tokens :].any()
    text, mask = folder.caption(None)
    assert torch.equal(text[:1], folder.latents.unconditional())
    assert mask.sum() == 1


def test_unusable_latent_folders_are_refused(tmp_path):
    write_manifest(tmp_path / "empty", manifest(), torch.zeros(1, TEXT))
    wrong(r"no clips in .*empty", LatentFolder, tmp_path / "empty")
    wrong(r"has no manifest.json", LatentFolder, tmp_path)

    good = latent_folder(tmp_path / "good", fps=(24.0, 30.0))
    message = "fits the bucket 9x9x9; there are 5x4x6, 3x6x4, 1x4x4"
    wrong(message, LatentFolder, good, [Bucket(5, 4, 6), Bucket(9, 9, 9)])
    wrong("fits the bucket 5x4x6@8; there are 5x4x6@24, 5x4x6@30", LatentFolder, good, [Bucket(5, 4, 6, 8.0)])
    wrong("5x4x6: named twice", LatentFolder, good, [Bucket(5, 4, 6)] * 2)
    open_folder = LatentFolder(good)
    shard = good / open_folder.clips[0][0].shard
    shard.write_bytes(shard.read_bytes()[:-9])
    wrong(f"{shard.name}: truncated or damaged", LatentFolder, good)
    wrong(f"{shard.name}: gone or damaged since", open_folder.latent, open_folder.clips[0][0])


def test_entries_that_the_manifest_or_the_tensors_contradict(tmp_path):
    for name, tokens, frames, said in (
        ("strange", 9, 2, "has 2 channels and 9 tokens, where the manifest says 2 and at most 5"),
        (
            "lying",
            1,
            3,
            r"'other': .* \[2, 2, 2, 2\] and 1 tokens, .* \[2, 3, 2, 2\] and a text of \[1, 6\]",
        ),
    ):
        folder = latent_folder(tmp_path / name, {(2, 2, 2): 1})
        entry = dataclasses.replace(LatentFolder(folder).clips[0][0], name="other", tokens=tokens)
        with Writer(folder) as writer:
            writer.add(entry, torch.zeros(2, frames, 2, 2), torch.zeros(tokens, TEXT))
        wrong(said, LatentFolder, folder)


def test_numbers_and_entries_that_cannot_be(tmp_path):
    """Found when the folder is opened, or with `verify`, and by name."""

    def changed(name, tensor=lambda x: x, **fields):
        folder = latent_folder(tmp_path / name, {(2, 2, 2): 1})
        entry = dataclasses.replace(Latents(folder).entries[0], name="other", **fields)
        with Writer(folder) as writer:
            writer.add(entry, tensor(torch.zeros(2, 2, 2, 2)), torch.zeros(1, TEXT))
        return folder

    for name, fields, said in (
        ("caption", {"caption": 7}, "the caption of clip 0 is '7'"),
        ("long", {"caption": "x" * 70_000}, "the caption of clip 0 is 'xxx"),
        ("frames", {"frames": 0}, "has 0 x 16 x 16 pixels"),
        ("huge", {"width": 2**40}, "16 x 1099511627776 pixels"),
        ("rate", {"fps": float("nan")}, "nan frames a second"),
    ):
        wrong(said, LatentFolder, changed(name, **fields))
    wrong("0.latent holds NaN or infinite numbers", LatentFolder, changed("infinite", lambda x: x / 0))

    sound = latent_folder(tmp_path / "sound", {(2, 2, 2): 2})
    LatentFolder(sound).latents.verify()
    shard = next(sound.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    wrong(f"{shard.name}: differs from the checksum", LatentFolder(sound).latents.verify)
    (sound / "unconditional.safetensors").write_bytes(b"damaged")
    wrong(r"unconditional.safetensors: missing or damaged", LatentFolder, sound)


# Clean frames


def test_clean_frames_are_drawn_by_sample_and_never_all():
    ids = list(range(2000))
    mask = noised_frames(0, 3, ids, 4, first=0.3, some=0.5)
    clean = ~mask
    assert mask.any(1).all()
    first = clean[:, 0] & (clean.sum(1) == 1)
    # 0.3, and of the others those with one clean frame of four that is the first
    assert first.float().mean().item() == pytest.approx(0.3 + 0.5 / 3 / 4, abs=0.03)
    assert (~clean.any(1)).float().mean().item() == pytest.approx(0.2, abs=0.03)
    for count in (2, 3):
        assert (clean.sum(1) == count).float().mean().item() == pytest.approx(0.5 / 3, abs=0.03)
    assert len({tuple(row) for row in clean.tolist()}) == 2**4 - 1
    assert torch.equal(noised_frames(0, 3, ids[7:9], 4, first=0.3, some=0.5), mask[7:9])
    assert not torch.equal(noised_frames(0, 4, ids, 4, first=0.3, some=0.5), mask)
    assert not noised_frames(0, 0, ids, 3, first=1.0, some=0.0)[:, 0].any()
    assert noised_frames(0, 0, ids, 3, first=1.0, some=0.0)[:, 1:].all()
    assert noised_frames(0, 0, ids, 1, first=0.5, some=0.5).all()
