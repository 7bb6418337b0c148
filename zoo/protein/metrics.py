"""How good predicted contacts, distances and letters are.

Letters: s rows of the alignment, r residues, i j the residues of a pair. Distances in Å.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zoo.protein.distogram import CONTACT, distances

__all__ = [
    "RANGES",
    "average",
    "contact_precision",
    "distance_lddt",
    "masked_accuracy",
    "range_of_pairs",
    "rmsd",
    "superposed",
]

RANGES = {"short": (6, 12), "medium": (12, 24), "long": (24, 10**9)}  # residues apart in a chain: from, to below


def range_of_pairs(residue_index: Tensor, asym_id: Tensor) -> dict[str, Tensor]:
    """For each range, and for pairs of two chains ("inter"), the pairs i < j that belong to it: [r, r] bool."""
    apart = (residue_index[:, None] - residue_index).abs()
    same, upper = asym_id[:, None] == asym_id, torch.ones_like(apart, dtype=torch.bool).triu(1)
    ranges = {name: same & upper & (apart >= low) & (apart < high) for name, (low, high) in RANGES.items()}
    return ranges | {"inter": ~same & upper}


def contact_precision(
    score: Tensor, position: Tensor, seen: Tensor, residue_index: Tensor, asym_id: Tensor
) -> dict[str, float]:
    """The share of contacts among the L, L/2 and L/5 pairs of highest score, in each range: {"long P@L/5": 0.8, ...}.

    `score` [r, r] (its upper triangle counts), `position` [r, 3] of the contact atoms, `seen` [r]; L counts the
    residues that were seen. Pairs that were not are left out, as are ranges without a contact; where fewer pairs are
    left than asked for, all of them are taken.
    """
    contact, there = distances(position, position) < CONTACT, seen[:, None] & seen
    length, precision = int(seen.sum()), {}
    for name, pairs in range_of_pairs(residue_index, asym_id).items():
        pairs = pairs & there
        if not (contact & pairs).any():
            continue
        ranked = contact[pairs][score[pairs].argsort(descending=True, stable=True)].double()
        for part, count in (("L", length), ("L/2", length // 2), ("L/5", length // 5)):
            precision[f"{name} P@{part}"] = ranked[: max(1, count)].mean().item()
    return precision


def distance_lddt(predicted: Tensor, position: Tensor, seen: Tensor) -> float | None:
    """lDDT of predicted distances [r, r] between atoms at `position` [r, 3]: Mariani et al. 2013, one atom a residue.

    Of the pairs that are closer than 15 Å, the share whose distance is right to within 0.5, 1, 2 and 4 Å, averaged over
    these; a residue's score is that of its pairs, and the result the mean over residues. None if there is no such pair.
    For lDDT-Cα both are of Cα atoms; a distogram speaks of the contact atoms.
    """
    true = distances(position, position)
    pairs = (true < 15) & seen[:, None] & seen & ~torch.eye(len(seen), dtype=torch.bool, device=seen.device)
    off, counts = (predicted - true).abs(), pairs.sum(1)
    right = torch.stack([off < within for within in (0.5, 1.0, 2.0, 4.0)]).double().mean(0)
    scores = ((right * pairs).sum(1) / counts)[counts > 0]
    return scores.mean().item() if len(scores) else None


def superposed(predicted: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    """Atoms [r, 3], turned and moved so that those that were seen [r] lie on `position` [r, 3] best (Kabsch 1976)."""
    middles = [p[seen].mean(0) for p in (predicted, position)]
    x, y = predicted - middles[0], position - middles[1]
    u, s, v = torch.linalg.svd(x[seen].T @ y[seen])
    mirror = torch.ones_like(s)
    mirror[-1] = torch.linalg.det(u @ v).sign()  # no mirror image
    return x @ (u * mirror) @ v + middles[1]


def rmsd(predicted: Tensor, position: Tensor, seen: Tensor) -> float | None:
    """Root mean square distance of the atoms [r, 3] that were seen [r] from `position`, where they lie on it best.

    None for fewer than three, and where some are no numbers.
    """
    if int(seen.sum()) < 3 or not predicted[seen].isfinite().all():
        return None
    off = superposed(predicted.double(), position.double(), seen) - position
    return off[seen].square().sum(-1).mean().sqrt().item()


def masked_accuracy(letters: Tensor, target: Tensor, chosen: Tensor) -> float:
    """The share of the chosen letters that were told, [...] each."""
    return (letters == target)[chosen.bool()].double().mean().item()


def average(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every number over those that have it."""
    names = dict.fromkeys(name for values in measured for name in values)
    found = {name: [values[name] for values in measured if name in values] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
