"""Clips of several sizes: the clips of each batch, and the order of the buckets.

A bucket has the clips of one shape. Every step takes one bucket, which all ranks draw from the same integers, without
communication. Letters: n clips of a bucket, b its samples a step.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from zoo.data.sampling import batch_indices, hash_seed, order

__all__ = ["Bucket", "bucket_batches", "bucket_step"]

_SAME_RATE = 0.01  # 23.976 and 24 frames a second are one rate, 24 and 25 are two


@dataclass(frozen=True)
class Bucket:
    """Clips of `frames` x `height` x `width` latent cells (pixels before encoding), at one frame rate or at any."""

    frames: int
    height: int
    width: int
    fps: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        """The bucket of a text "TxHxW" or "TxHxW@fps"; a ValueError for any other text.

        >>> Bucket.parse("16x32x32@24")
        Bucket(frames=16, height=32, width=32, fps=24.0)
        """
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?:@(\d+(?:\.\d+)?))?", str(text))
        if match is None or not all(float(n) for n in match.groups() if n):
            raise ValueError(
                f"invalid bucket {text!r}: expected FRAMESxHEIGHTxWIDTH[@FPS], such as 16x32x32 or 16x32x32@24"
            )
        frames, height, width = (int(n) for n in match.groups()[:3])
        return cls(frames, height, width, float(match[4]) if match[4] else None)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.frames, self.height, self.width

    @property
    def cells(self) -> int:
        return self.frames * self.height * self.width

    def holds(self, frames: int, height: int, width: int, fps: float) -> bool:
        """Return True if a clip belongs here: it has exactly the bucket's shape, and its rate if the bucket has one."""
        rate = self.fps is None or abs(fps - self.fps) <= _SAME_RATE * self.fps
        return rate and (frames, height, width) == self.shape

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}" + ("" if self.fps is None else f"@{self.fps:g}")


def bucket_batches(batch: int, buckets: Sequence[Bucket], balance: bool) -> list[int]:
    """The samples in a batch of each bucket: `batch`; with `balance` at least one, and as many as have no more cells
    than `batch` samples of the largest bucket."""
    if not balance:
        return [batch] * len(buckets)
    most = max(bucket.cells for bucket in buckets)
    return [max(1, batch * most // bucket.cells) for bucket in buckets]


def bucket_step(
    seed: int, step: int, counts: Sequence[int], batches: Sequence[int]
) -> tuple[int, list[int], list[int]]:
    """The bucket and the samples of step `step`, as `(bucket, epochs, indices)`.

    A pure function. `counts`: the clips n of every bucket; `batches`: the samples b of every bucket in a step, of all
    data-parallel groups together. The samples of a bucket are one endless stream through its epochs, each of which
    visits each clip once (`batch_indices`); a step that begins with the rest of one epoch ends in the next. In epoch e
    of all clips, a bucket has floor(n (e + 1) / b) - floor(n e / b) steps; the steps of all buckets are shuffled. Less
    than one batch of a bucket therefore waits for the next epoch, and a bucket with fewer clips than a batch has a step
    only every few epochs.
    """
    if step < 0 or not counts or min(*counts, *batches) < 1 or len(counts) != len(batches):
        raise ValueError(f"bucket_step: expected step >= 0, counts and batches >= 1, got {step=} {counts=} {batches=}")
    counts, batches = tuple(counts), tuple(batches)

    def begins(epoch: int) -> int:
        return sum(epoch * n // b for n, b in zip(counts, batches))

    end = 1
    while begins(end) <= step:
        end *= 2
    epoch = bisect_right(range(end), step, key=begins) - 1
    bucket, turn = _turns(seed, epoch, counts, batches)[step - begins(epoch)]
    return bucket, *batch_indices(hash_seed("bucket", seed, bucket), turn, batches[bucket], counts[bucket])


@lru_cache(maxsize=2)
def _turns(seed: int, epoch: int, counts: tuple[int, ...], batches: tuple[int, ...]) -> list[tuple[int, int]]:
    """The steps of an epoch, each as (bucket, number of the step among the bucket's steps of all epochs)."""
    steps = [k for k, (n, b) in enumerate(zip(counts, batches)) for _ in range((epoch + 1) * n // b - epoch * n // b)]
    following = [epoch * n // b for n, b in zip(counts, batches)]
    turns = []
    for place in order(hash_seed("buckets", seed), epoch, len(steps)).tolist():
        bucket = steps[place]
        turns.append((bucket, following[bucket]))
        following[bucket] += 1
    return turns
