"""Training clips from a folder of latents (zoo/data/latents.py), in buckets of one shape each.

Letters: c channels, t frames, h w height and width in latent cells, l tokens, e channels of the text.
"""

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from zoo.data.buckets import Bucket
from zoo.data.latent_manifest import LatentError
from zoo.data.latents import Entry, Latents
from zoo.data.mix import Mix, dealt
from zoo.data.sampling import hash_seed

__all__ = ["LatentFolder", "largest_first", "padded"]

log = logging.getLogger(__name__)


class LatentFolder:
    """The clips of a folder that fit into `buckets`; without `buckets` all clips, one bucket for each shape.

    root: a folder, or several with the share of the samples that each gives (`zoo.data.mix`).

    The attribute `buckets` is sorted from most cells to fewest; `clips` has the clips of each bucket, sorted by name. A
    clip that fits a bucket of its frame rate and one of any rate is in the former. LatentError: the folder cannot be
    used, a bucket fits no clip, or a clip contradicts the manifest.
    """

    def __init__(self, root: str | os.PathLike[str] | Mapping[str, float], buckets: Sequence[Bucket] = ()):
        self.shares = dict(root) if isinstance(root, Mapping) else {str(root): 1.0}
        self.latents = Latents(*self.shares)
        self.manifest, self.files = self.latents.manifest, self.latents.files
        self.refuse_contradictions()
        self.caption(None)  # finds a damaged file now
        self.fill(buckets)

    def refuse_contradictions(self) -> None:
        """Raise LatentError for a folder without clips, or with one that contradicts the manifest."""
        if not self.latents.entries:
            raise LatentError(
                f"no clips in {', '.join(self.shares)}: it holds a manifest and no shard; encode some videos into it"
            )
        most, channels = self.manifest.text_length, self.manifest.channels
        for entry in self.latents.entries:
            if entry.shape[0] != channels or entry.tokens > most:
                raise LatentError(
                    f"{self.latents.folder}: {entry.name} in {entry.shard} has {entry.shape[0]} channels and "
                    f"{entry.tokens} tokens, where the manifest says {channels} and at most {most}"
                )

    def fill(self, buckets: Sequence[Bucket]) -> None:
        """Sort the clips into buckets."""
        entries = self.latents.entries
        if repeated := sorted({str(bucket) for bucket in buckets if list(buckets).count(bucket) > 1}):
            raise LatentError(f"{', '.join(repeated)}: named twice among the buckets")
        shapes = sorted({Bucket(*entry.shape[1:]) for entry in entries}, key=largest_first)
        self.buckets = sorted(buckets, key=largest_first) if buckets else shapes
        self.clips: list[list[Entry]] = [[] for _ in self.buckets]
        for entry in entries:
            if places := [i for i, bucket in enumerate(self.buckets) if bucket.holds(*entry.shape[1:], entry.fps)]:
                self.clips[places[0]].append(entry)
        for bucket, clips in zip(self.buckets, self.clips):
            if not clips:
                rates = {Bucket(*e.shape[1:], e.fps) for e in entries if bucket.fps and e.shape[1:] == bucket.shape}
                sizes = ", ".join(map(str, sorted(rates, key=largest_first) or shapes))
                raise LatentError(f"no clip of {', '.join(self.shares)} fits the bucket {bucket}; there are {sizes}")
        if misfits := len(entries) - len(self):
            log.info(
                "%d of %d clips in %s fit none of the buckets and are left out",
                misfits,
                len(entries),
                list(self.shares),
            )

    def __len__(self) -> int:
        return sum(map(len, self.clips))

    @cached_property
    def mixes(self) -> list[Mix]:
        """For each bucket, the clips of each folder and the places that they take in an epoch."""
        by_folder = [Counter(Path(entry.shard).parent for entry in clips) for clips in self.clips]
        counts = [[clips[root] for root in self.roots] for clips in by_folder]
        totals = [sum(of) for of in zip(*counts)]  # of each folder
        places = dealt(totals, list(self.shares.values()), len(self))
        return [
            Mix(of, [max(1, round(place * n / total)) if n else 0 for n, total, place in zip(of, totals, places)])
            for of in counts
        ]

    @property
    def roots(self) -> list[Path]:
        """The folders as the clips name them: of one alone, clips have only the name of their shard."""
        return self.latents.folders if len(self.shares) > 1 else [Path()]

    @property
    def places(self) -> list[int]:
        """The number of samples of each bucket in an epoch."""
        return [len(mix) for mix in self.mixes]

    def at(self, bucket: int, index: int, epoch: int) -> tuple[Entry, int]:
        """The clip at place `index` of a bucket in epoch `epoch`, and the clip's own epoch."""
        folder, place, turn = self.mixes[bucket].at(index, epoch)
        return self.clips[bucket][sum(self.mixes[bucket].counts[:folder]) + place], turn

    def split(self, validation: float) -> tuple["LatentFolder", "LatentFolder"]:
        """Split the folder into `(train, validation)`: whole videos with about that share of the clips are held out.

        No video has clips on both sides, which would be a leak. The choice depends only on names and leaves every
        bucket at least one clip of each folder to train on. If no video can be held out, validation uses the training
        clips.
        """
        if not 0 < validation < 1:
            raise LatentError(f"the share of clips held out for validation must be between 0 and 1, got {validation}")
        videos: dict[str, list[Entry]] = {}
        kinds = {entry.name: (i, Path(entry.shard).parent) for i, clips in enumerate(self.clips) for entry in clips}
        for clips in self.clips:
            for entry in clips:
                videos.setdefault(video_of(entry), []).append(entry)
        wanted, room = max(1, round(validation * len(self))), Counter(kinds.values())
        chosen: set[str] = set()
        for name in sorted(videos, key=hash_seed):
            counts = Counter(kinds[entry.name] for entry in videos[name])
            fits = all(room[kind] > count for kind, count in counts.items())
            # the first in any case, then those that keep within the share
            if fits and (not chosen or len(chosen) + len(videos[name]) <= wanted):
                chosen |= {entry.name for entry in videos[name]}
                room -= counts
        if not chosen:
            said = "%s: no whole video can be held out, so validation uses the clips of training"
            log.warning(said, ", ".join(self.shares))
            return copy(self), copy(self)
        held_out = [[e for e in clips if e.name in chosen] for clips in self.clips]
        return self._of([[e for e in clips if e.name not in chosen] for clips in self.clips]), self._of(held_out)

    def _of(self, clips: list[list[Entry]]) -> "LatentFolder":
        """The same folder with these of its clips."""
        other = copy(self)
        other.clips = clips
        other.__dict__.pop("mixes", None)
        return other

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
        vectors = self.latents.unconditional(name) if entry is None else self.latents.text(entry, name)
        if not torch.isfinite(vectors).all():
            raise LatentError(f"{self.latents.folder}: {name} of {entry and entry.name} holds NaN or infinite numbers")
        return vectors


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
