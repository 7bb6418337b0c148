"""Histograms as models of images: the baselines, in bits, that a trained model has to beat.

Each histogram is fitted by counting, with `smoothing` added to every count so that no probability is zero. The
smoothing is the best of a few on the evaluated images themselves, so that the baselines are, if anything, too good.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SMOOTHING = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


def pixel_bits(train: Tensor, judged: Tensor, levels: int) -> float:
    """Mean bits of the values of `judged` (n c h w) under an independent histogram for each pixel."""
    places = torch.arange(train[0].numel()).expand(len(train), -1)
    return _bits(places, train.flatten(1), places[:1].expand(len(judged), -1), judged.flatten(1), levels)


def neighbour_bits(train: Tensor, judged: Tensor, levels: int) -> float:
    """Mean bits given the values to the left and above (0 outside the image): one histogram for each pair of them."""

    def pairs(images: Tensor) -> Tensor:
        left, above = F.pad(images, (1, -1)), F.pad(images, (0, 0, 1, -1))
        return (left * levels + above).flatten(1)

    return _bits(pairs(train), train.flatten(1), pairs(judged), judged.flatten(1), levels)


def _bits(train_cases: Tensor, train: Tensor, cases: Tensor, values: Tensor, levels: int) -> float:
    """Mean bits of `values`, each under the histogram of `train` in the same case (`cases`, `train_cases`)."""
    size = int(torch.cat([train_cases.flatten(), cases.flatten()]).max()) + 1
    counts = torch.zeros(size, levels, dtype=torch.float64)
    counts.view(-1).index_add_(0, (train_cases * levels + train).flatten(), counts.new_ones(train.numel()))
    losses = []
    for smoothing in SMOOTHING:
        chance = (counts + smoothing) / (counts + smoothing).sum(1, keepdim=True)
        losses.append(-chance[cases.flatten(), values.flatten()].log2().mean().item())
    return min(losses)
