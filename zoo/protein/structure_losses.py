"""Losses of the structure module: errors in the frames of residues, and the lDDT that it expects.

Jumper et al. 2021, supplement, algorithms 28 and 29. Letters: `zoo/protein/__init__.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.protein.distogram import distances
from zoo.protein.structure import LDDT_BINS, UNIT


def lddt_of_residues(points: Tensor, all_points: Tensor, true: Tensor, all_true: Tensor, seen: Tensor) -> Tensor:
    """The lDDT (b i), 0 to 1, of points (b i 3) among all (b j 3): Mariani et al. 2013, one atom a residue.

    seen (b j): the points that count. A residue without neighbours has lDDT 0.
    """
    counts = neighbours(true, all_true, seen)
    off = (distances(points, all_points) - distances(true, all_true)).abs()
    right = torch.stack([off < within for within in (0.5, 1.0, 2.0, 4.0)]).to(counts.dtype).mean(0)
    return (right * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def neighbours(true: Tensor, all_true: Tensor, seen: Tensor) -> Tensor:
    """1 for each other point j that was seen and is closer than 15 Å to i, else 0: (b i j)."""
    distance = distances(true, all_true)
    return ((distance < 15) & (distance > 0) & seen.bool()[:, None]).to(distance.dtype)


class FrameAlignedPointError(nn.Module):
    """The error of points (b l j 3) in the coordinates of each frame (b l i), in units of 10 Å: algorithm 28.

    The error (b i) is the mean over the points that count, ``seen`` (b j): half of it is the last iteration's, half the
    mean of all iterations (AF2 supplement, equation 7). Errors are weighted sums, 0.9 clamped at 10 Å and 0.1 not;
    AlphaFold clamps in nine samples of ten. The weight (b i) is returned unchanged.
    """

    def forward(
        self, rotation: Tensor, translation: Tensor, points: Tensor, true_rotation: Tensor, true_translation: Tensor,
        true_points: Tensor, seen: Tensor, weight: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        count = seen.sum(-1)[:, None].clamp(min=1)
        aim = to_local(true_rotation, true_translation, true_points)
        errors = []
        for r, t, p in zip(rotation.unbind(1), translation.unbind(1), points.unbind(1)):
            off = ((to_local(r, t, p) - aim).square().sum(-1) + 1e-4).sqrt()
            off = 0.9 * off.clamp(max=10) + 0.1 * off
            errors.append((off * seen[:, None]).sum(-1) / (UNIT * count))
        return 0.5 * errors[-1] + 0.5 * torch.stack(errors).mean(0), weight


def to_local(rotation: Tensor, translation: Tensor, points: Tensor) -> Tensor:
    """Points (b j 3) in the coordinates of frames (b i 3 3), (b i 3): (b i j 3)."""
    return torch.einsum("biyx,bijy->bijx", rotation, points[:, None] - translation[:, :, None])


class ConfidenceEntropy(nn.Module):
    """scale × cross entropy (b i) of each residue's true lDDT, from logits (b i 50); the weight (b i) is unchanged."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale = scale

    def forward(
        self, logits: Tensor, points: Tensor, all_points: Tensor, true: Tensor, all_true: Tensor, seen: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.no_grad():
            lddt = lddt_of_residues(points, all_points, true, all_true, seen)
            target = (lddt * LDDT_BINS).long().clamp(max=LDDT_BINS - 1)
            defined = neighbours(true, all_true, seen).any(-1)  # lDDT is undefined without neighbours
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return self.scale * loss.view(target.shape) * defined, weight


class ExpectedLddt(nn.Module):
    """Logits (b r 50) -> the expected lDDT (b r), 0 to 100: pLDDT."""

    def forward(self, logits: Tensor) -> Tensor:
        middles = (torch.arange(LDDT_BINS, device=logits.device) + 0.5) * (100 / LDDT_BINS)
        return logits.float().softmax(-1) @ middles


STRUCTURE_LOSSES = {
    "fape": "b [l] i [x y], translation=b [l] i [x], points=b [l j x], true_rotation=b i [x y], "
    "true_translation=b i [x], true_points=b [j x], seen=b [j], weight=b i -> b i, b i",
    "confidence": "b i [v], points=b i [x], all_points=b [j x], true=b i [x], all_true=b [j x], seen=b [j], weight=b i "
    "-> b i, b i",
}
