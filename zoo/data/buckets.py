"""Clips of several sizes: which go together in a batch, and whose turn it is.

A bucket holds the clips of one shape. Every step is of one bucket, drawn by all ranks from the same integers, so that
there is nothing to agree on. Letters: n clips of a bucket, b its samples a step.
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
    """Clips of `frames` x `height` x `width` latent cells, or pixels before they are encoded; of any rate or of one."""

    frames: int
    height: int
    width: int
    fps: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Bucket":
        """The bucket that "TxHxW" or "TxHxW@fps" names; a ValueError if it names none.

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
        """Tell whether a clip belongs here. Nothing is cut or resized: the shape is the bucket's own."""
        rate = self.fps is None or abs(fps - self.fps) <= _SAME_RATE * self.fps
        return rate and (frames, height, width) == self.shape

    def __str__(self) -> str:
        return f"{self.frames}x{self.height}x{self.width}" + ("" if self.fps is None else f"@{self.fps:g}")


def bucket_batches(batch: int, buckets: Sequence[Bucket], balance: bool) -> list[int]:
    """Samples a batch of each bucket: `batch`, or with `balance` as many as have no more cells than `batch` of the
    largest bucket, at least one."""
    if not balance:
        return [batch] * len(buckets)
    most = max(bucket.cells for bucket in buckets)
    return [max(1, batch * most // bucket.cells) for bucket in buckets]


def bucket_step(
    seed: int, step: int, counts: Sequence[int], batches: Sequence[int]
) -> tuple[int, list[int], list[int]]:
    """The bucket of step `step` and its samples there, as `(bucket, epochs, indices)`.

    A pure function, where `counts` are the clips n of every bucket and `batches` its samples b a step, of all
    data-parallel groups together. The samples of a bucket are one endless stream through its epochs, each of which
    visits each of its clips once (`batch_indices`); a step that begins in what is left of one epoch ends in the next.
    In an epoch of the whole, bucket k has the steps that its stream is due, floor(n (e + 1) / b) - floor(n e / b), and
    the steps of all buckets come in shuffled order. So less than one batch of a bucket waits for the next epoch, and a
    bucket of fewer clips than a batch has a turn only every few epochs.
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
    """The steps of an epoch, each as a bucket and which of that bucket's steps it is, counted over all epochs."""
    steps = [k for k, (n, b) in enumerate(zip(counts, batches)) for _ in range((epoch + 1) * n // b - epoch * n // b)]
    following = [epoch * n // b for n, b in zip(counts, batches)]
    turns = []
    for place in order(hash_seed("buckets", seed), epoch, len(steps)).tolist():
        bucket = steps[place]
        turns.append((bucket, following[bucket]))
        following[bucket] += 1
    return turns
