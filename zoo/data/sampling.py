"""Randomness that is a pure function of integers: sample order, augmentation, noise levels, noise.

Nothing here keeps state or uses a global generator. A run resumes from one integer (its step), with any number of
data-parallel ranks or workers, and the ranks of one sequence-parallel group draw the same numbers because they hash the
same integers.
"""

import hashlib
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Protocol, SupportsIndex, TypedDict

import torch
from torch import Tensor

__all__ = ["Clip", "VideoDataset", "batch_indices", "frame_range", "generator", "hash_seed", "order"]


class Clip(TypedDict):
    """The result of `VideoDataset.clip`: `x` [c, number of `frames`, h, w] in [-1, 1], and a class or None."""

    x: Tensor
    label: int | None


class VideoDataset(Protocol):
    """A data set of clips, all of one size.

    `clip(index, epoch, frames)` is a pure function of (the data set's seed, `epoch`, `index`). `frames` (a range or a
    slice, possibly empty; None: all) selects frames of the clip, and only those are rendered or decoded: a rank with
    frames 4..8 passes `range(4, 8)` and gets exactly `clip(index, epoch)["x"][:, 4:8]`.
    """

    frames: Annotated[int, "frames of a clip"]
    shape: Annotated[tuple[int, int, int], "channels, height and width of a frame"]
    num_classes: Annotated[int | None, "how many classes there are; None for none"]

    def __len__(self) -> int:
        """The number of clips."""

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        """A method (index, epoch, frames=None) that returns {"x": [c, t, h, w] in [-1, 1], "label": int or None}."""


def hash_seed(*parts: SupportsIndex | str) -> int:
    """A 63-bit seed from integers and strings, well mixed: neighbouring steps or samples get unrelated seeds.

    >>> hash_seed("noise", 0, 17) == hash_seed("noise", 0, 17) != hash_seed("noise", 17, 0)
    True
    """
    key = repr([part if isinstance(part, str) else operator.index(part) for part in parts])
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def generator(*parts: SupportsIndex | str) -> torch.Generator:
    """A CPU generator seeded by `hash_seed(*parts)`."""
    return torch.Generator().manual_seed(hash_seed(*parts))


@lru_cache(maxsize=8)  # of two epochs, in a mix of a few data sets
def _order(seed: int, epoch: int, n: int) -> Tensor:
    return torch.randperm(n, generator=generator("order", seed, epoch))


def order(seed: int, epoch: int, n: int) -> Tensor:
    """The order of the `n` samples in epoch `epoch`: a permutation [n] of 0..n-1, int64."""
    if n < 1:
        raise ValueError(f"order: a data set needs at least one sample, got n={n}")
    return _order(seed, epoch, n).clone()


def batch_indices(seed: int, step: int, batch: int, n: int) -> tuple[list[int], list[int]]:
    """The samples of step `step`: `(epochs, indices)`, two lists of length `batch`, for `dataset.clip(index, epoch)`.

    Samples are one endless stream, numbered `step * batch + i`, through `order(seed, epoch, n)` of epoch after epoch. A
    batch may therefore cross into the next epoch (or contain several, if `batch > n`); every epoch visits every sample
    once and none is dropped. A data-parallel rank takes its slice of both lists.
    """
    if batch < 1 or step < 0 or n < 1:
        raise ValueError(f"batch_indices: expected step >= 0, batch >= 1 and n >= 1, got {step=} {batch=} {n=}")
    epochs, indices = [], []
    for position in range(step * batch, (step + 1) * batch):
        epoch, place = divmod(position, n)
        epochs.append(epoch)
        indices.append(int(_order(seed, epoch, n)[place]))
    return epochs, indices


def frame_range(frames: range | slice | Sequence[int] | None, total: int) -> range:
    """The frame numbers that `frames` selects in a clip of `total` frames; a ValueError if a range reaches outside."""
    if frames is None:
        return range(total)
    if isinstance(frames, slice):
        return range(total)[frames]
    if not isinstance(frames, range):
        raise ValueError(f"frames must be a range or a slice, got {frames!r}")
    if len(frames) and (min(frames) < 0 or max(frames) >= total):
        raise ValueError(f"frames {frames} reach outside a clip of {total} frames")
    return frames
