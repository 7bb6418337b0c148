"""Distances between residues, in Å, and their bins (AlphaFold 2, supplement, 1.9.8)."""

import torch
from torch import Tensor

__all__ = ["BINS", "CONTACT", "contact_probability", "distances", "distogram_bins", "edges", "expected_distance"]

BINS = 64
CONTACT = 8.0  # Å between Cβ atoms (Cα of glycine): closer ones are in contact
_FIRST, _LAST = 2.3125, 21.6875
_WIDTH = (_LAST - _FIRST) / (BINS - 2)


def edges(device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """The edges between the bins [63]; the first bin begins at 0 and the last has no end."""
    return torch.linspace(_FIRST, _LAST, BINS - 1, device=device, dtype=dtype)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Distances [..., i, j] of points [..., i, 3] and [..., j, 3], from their differences: exact for near points."""
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1).sqrt()


def distogram_bins(distance: Tensor) -> Tensor:
    """The bin of every distance, int64; a distance on an edge belongs to the lower bin."""
    return torch.bucketize(distance, edges(distance.device, distance.dtype))


def contact_probability(logits: Tensor, below: float = CONTACT) -> Tensor:
    """The probability [...] that a distance is below `below`, from logits [..., 64]; a divided bin counts in part."""
    low = torch.cat([edges(logits.device)[:1] * 0, edges(logits.device)])
    high = torch.cat([edges(logits.device), edges(logits.device)[-1:] + _WIDTH])
    return logits.float().softmax(-1) @ ((below - low) / (high - low)).clamp(0, 1)


def expected_distance(logits: Tensor) -> Tensor:
    """The mean distance [...] under logits [..., 64], with every bin at its middle."""
    middle = _FIRST + _WIDTH * (torch.arange(BINS, device=logits.device) - 0.5)
    return logits.float().softmax(-1) @ middle
