"""Training clips from a folder of latents (zoo/data/latents.py), in buckets of one shape each.

Letters: c channels, t frames, h w height and width in latent cells, l tokens, e channels of the text.
"""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor
from torch.nn.functional import pad

from zoo.data.buckets import Bucket
from zoo.data.latents import Entry, LatentError, Latents
from zoo.data.sampling import hash_seed

__all__ = ["LatentFolder", "largest_first", "padded"]

log = logging.getLogger(__name__)


class LatentFolder:
    """The clips of a folder that fit into `buckets`; without `buckets` all clips, one bucket for each shape.

    The attribute `buckets` is sorted from most cells to fewest; `clips` has the clips of each bucket, sorted by name. A
    clip that fits a bucket of its frame rate and one of any rate is in the former. LatentError: the folder cannot be
    used, a bucket fits no clip, or a clip contradicts the manifest.
    """

    def __init__(self, root: str | os.PathLike[str], buckets: Sequence[Bucket] = ()):
        self.latents = Latents(root)
        self.manifest, entries = self.latents.manifest, self.latents.entries
        if not entries:
            raise LatentError(f"no clips in {root}: it holds a manifest and no shard; encode some videos into it")
        for entry in entries:
            if entry.shape[0] != self.manifest.channels or entry.tokens > self.manifest.text_length:
                raise LatentError(
                    f"{root}: {entry.name} in {entry.shard} has {entry.shape[0]} channels and {entry.tokens} tokens, "
                    f"where the manifest says {self.manifest.channels} and at most {self.manifest.text_length}"
                )
        self.files = self.latents.files
        self.caption(None)  # finds a damaged file now
        if repeated := sorted({str(bucket) for bucket in buckets if list(buckets).count(bucket) > 1}):
            raise LatentError(f"{', '.join(repeated)}: named twice among the buckets")
        found = sorted({Bucket(*entry.shape[1:]) for entry in entries}, key=largest_first)
        self.buckets = sorted(buckets, key=largest_first) if buckets else found
        self.clips: list[list[Entry]] = [[] for _ in self.buckets]
        for entry in entries:
            if places := [i for i, bucket in enumerate(self.buckets) if bucket.holds(*entry.shape[1:], entry.fps)]:
                self.clips[places[0]].append(entry)
        for bucket, clips in zip(self.buckets, self.clips):
            if not clips:
                rates = {Bucket(*e.shape[1:], e.fps) for e in entries if bucket.fps and e.shape[1:] == bucket.shape}
                there = ", ".join(map(str, sorted(rates, key=largest_first) or found))
                raise LatentError(f"no clip of {root} fits the bucket {bucket}; there are {there}")
        if left := len(entries) - len(self):
            log.info("%d of %d clips in %s fit none of the buckets and are left out", left, len(entries), root)

    def __len__(self) -> int:
        return sum(map(len, self.clips))

    def split(self, validation: float) -> tuple["LatentFolder", "LatentFolder"]:
        """Split the folder into `(train, validation)`: whole videos with about that share of the clips are held out.

        No video has clips on both sides, which would be a leak. The choice depends only on names and leaves every
        bucket at least one clip to train on. If no video can be held out, validation uses the training clips.
        """
        if not 0 < validation < 1:
            raise LatentError(f"the share of clips held out for validation must be between 0 and 1, got {validation}")
        videos: dict[str, list[tuple[int, Entry]]] = {}
        for i, clips in enumerate(self.clips):
            for entry in clips:
                videos.setdefault(video_of(entry), []).append((i, entry))
        wanted, room = max(1, round(validation * len(self))), [len(clips) - 1 for clips in self.clips]
        chosen: set[str] = set()
        for name in sorted(videos, key=hash_seed):
            taken = Counter(i for i, _ in videos[name])
            fits = all(room[i] >= count for i, count in taken.items())
            # the first in any case, then those that keep within the share
            if fits and (not chosen or len(chosen) + len(videos[name]) <= wanted):
                chosen |= {entry.name for _, entry in videos[name]}
                room = [left - taken[i] for i, left in enumerate(room)]
        train, held_out = copy(self), copy(self)
        if not chosen:
            said = "%s: no whole video can be held out, so validation uses the clips of training"
            log.warning(said, self.latents.folder)
            return train, held_out
        train.clips = [[e for e in clips if e.name not in chosen] for clips in self.clips]
        held_out.clips = [[e for e in clips if e.name in chosen] for clips in self.clips]
        return train, held_out

    def latent(self, entry: Entry, frames: range | None = None, name: str = "latent") -> Tensor:
        """The latent [c, number of `frames`, h, w], float32, or the `start`; no other frames are read."""
        x, (channels, length, *size) = self.latents.latent(entry, frames, name), entry.shape
        if x.shape != (channels, length if frames is None else len(frames), *size):
            raise LatentError(f"{self.latents.folder / entry.shard}: {entry.name} is not what the header says of it")
        if not torch.isfinite(x).all():
            raise LatentError(f"{self.latents.folder / entry.shard}: {entry.name} holds NaN or infinite numbers")
        return x

    def caption(self, entry: Entry | None) -> tuple[Tensor, Tensor]:
        """The caption's embedding [text_length, e] float32, padded with zeros, and the mask of tokens [text_length].

        Without an entry: that of the empty caption. All captions have the same length, and therefore the same plan.
        """
        text = self.latents.unconditional() if entry is None else self.latents.text(entry)
        length, channels = self.manifest.text_length, self.manifest.text_channels
        expected = len(text) if entry is None else entry.tokens
        if tuple(text.shape) != (expected, channels) or expected > length:
            whose = "the empty caption" if entry is None else f"{entry.name} in {entry.shard}"
            raise LatentError(
                f"{self.latents.folder}: the text of {whose} has the shape {list(text.shape)}, where "
                f"[{expected if expected <= length else f'up to {length}'}, {channels}] is expected"
            )
        return padded(text, length)

    def vectors(self, entry: Entry | None, name: str) -> Tensor:
        """The `pooled` [e] of a caption (None: of the empty one) or the tokens `image` [j, e], float32."""
        found = self.latents.unconditional(name) if entry is None else self.latents.text(entry, name)
        if not torch.isfinite(found).all():
            raise LatentError(f"{self.latents.folder}: {name} of {entry and entry.name} holds NaN or infinite numbers")
        return found


def video_of(entry: Entry) -> str:
    """The video file of a clip: encoding names clips FILE#PLACE."""
    return entry.name.rpartition("#")[0] or entry.name


def padded(text: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """An embedding [l, e] padded with zeros to [length, e], and the mask of its tokens [length]."""
    return pad(text, (0, 0, 0, length - len(text))), torch.arange(length) < len(text)


def largest_first(bucket: Bucket) -> tuple[int, int, int, int, float]:
    """The sort key of buckets: most cells first; for one shape, a bucket of one rate before that of any rate."""
    rate = float("inf") if bucket.fps is None else bucket.fps
    return -bucket.cells, bucket.frames, bucket.height, bucket.width, rate
