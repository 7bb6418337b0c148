"""Several data sets as one, in given shares: which sample of which set each place of an epoch takes.

An epoch of the mix has as many places as the sets have samples, dealt to the sets by their shares. A set goes through
its own epochs at its own rate: every sample once in each, whatever its share. Nothing keeps state.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zoo.data.file_records import FileRecords
from zoo.data.sampling import Clip, VideoDataset, batch_indices, hash_seed

__all__ = ["Mix", "MixedClips", "dealt", "shares_of"]


@dataclass(frozen=True)
class Mix:
    """Sets of `counts` samples, of which each has so many `places` in an epoch of the mix."""

    counts: Sequence[int]
    places: Sequence[int]

    def __len__(self) -> int:
        return sum(self.places)

    def at(self, index: int, epoch: int) -> tuple[int, int, int]:
        """The set, its index and its epoch of place `index` in epoch `epoch` of the mix; a pure function."""
        ends = list(accumulate(self.places))
        chosen = next(i for i, end in enumerate(ends) if index < end)
        if self.places[chosen] == self.counts[chosen]:  # every sample once an epoch: the mix's own order will do
            return chosen, index - ends[chosen] + self.places[chosen], epoch
        turn = epoch * self.places[chosen] + index - ends[chosen] + self.places[chosen]
        (turn_of_set,), (place,) = batch_indices(hash_seed("mix", chosen), turn, 1, self.counts[chosen])
        return chosen, place, turn_of_set


def dealt(counts: Sequence[int], shares: Sequence[float], total: int) -> list[int]:
    """The places, of `total`, of sets with these samples and shares; at least one for a set that has samples."""
    whole = sum(share for share, count in zip(shares, counts) if count)
    return [max(1, round(total * share / whole)) if count else 0 for share, count in zip(shares, counts)]


def shares_of(path: str | None, mix: Mapping[str, float]) -> dict[str, float]:
    """The folders of a data set with their shares, from its options `path` and `mix`; {} if neither is set.

    ValueError: both are set, or a share that is not above 0.
    """
    if path is not None and mix:
        raise ValueError(f"path={path} and mix={dict(mix)}: set one of them")
    for folder, share in mix.items():
        if not 0 < share < math.inf:
            raise ValueError(f"mix: the share of {folder} is {share}, and has to be above 0")
    return dict(mix) if mix or path is None else {path: 1.0}


class MixedClips:
    """Data sets of clips of one size as one data set; `shares` None: every clip once an epoch."""

    def __init__(self, sets: Sequence[VideoDataset], shares: Sequence[float] | None = None):
        self.sets, first = sets, sets[0]
        self.frames, self.shape, self.num_classes = first.frames, first.shape, first.num_classes
        counts = [len(each) for each in sets]
        self.mix = Mix(counts, counts if shares is None else dealt(counts, shares, sum(counts)))
        self.files = FileRecords(path for each in sets for path in getattr(each, "files", FileRecords([])).paths)

    def __len__(self) -> int:
        return len(self.mix)

    def clip(self, index: int, epoch: int, frames: range | slice | None = None) -> Clip:
        chosen, place, turn = self.mix.at(index, epoch)
        return self.sets[chosen].clip(place, turn, frames)
