"""Clean frames in training: the model learns to continue from given frames and to fill in between them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.data.sampling import generator
from zoo.video.noise import seeded_uniform

__all__ = ["noised_frames"]


def noised_frames(seed: int, step: int, sample_ids: Sequence[int], frames: int, *, first: float, some: float) -> Tensor:
    """The `x_mask` [b, frames] of an objective: True for frames that get noise. A pure function of (seed, step, id).

    A share `first` of the samples has a clean first frame; a share `some` has a random set of clean frames, whose size
    is uniform in 1..frames-1. At least one frame is noised: that of a one-frame clip always.
    """
    mask = torch.ones(len(sample_ids), frames, dtype=torch.bool)
    if frames == 1:
        return mask
    for i, draw in enumerate(seeded_uniform(seed, step, sample_ids, name="clean").tolist()):
        if draw < first:
            mask[i, 0] = False
        elif draw < first + some:
            random = generator("clean frames", seed, step, sample_ids[i])
            count = int(torch.randint(1, frames, (), generator=random))
            mask[i, torch.randperm(frames, generator=random)[:count]] = False
    return mask
