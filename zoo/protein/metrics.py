"""Metrics of predicted contacts, distances and letters.

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

RANGES = {"short": (6, 12), "medium": (12, 24), "long": (24, 10**9)}  # separation in a chain: lowest, end (excluded)


def range_of_pairs(residue_index: Tensor, asym_id: Tensor) -> dict[str, Tensor]:
    """The pairs i < j of each range, and those of two chains ("inter"): [r, r] bool."""
    separation = (residue_index[:, None] - residue_index).abs()
    same, upper = asym_id[:, None] == asym_id, torch.ones_like(separation, dtype=torch.bool).triu(1)
    ranges = {name: same & upper & (separation >= low) & (separation < high) for name, (low, high) in RANGES.items()}
    return ranges | {"inter": ~same & upper}


def contact_precision(
    score: Tensor, position: Tensor, seen: Tensor, residue_index: Tensor, asym_id: Tensor
) -> dict[str, float]:
    """The share of contacts among the L, L/2 and L/5 pairs of highest score, in each range: {"long P@L/5": 0.8, ...}.

    `score` [r, r] (only its upper triangle counts), `position` [r, 3] of the contact atoms, `seen` [r]; L is the number
    of seen residues. Pairs with an unseen residue and ranges without a contact are left out; a range with fewer pairs
    than L, L/2 or L/5 counts all its pairs.
    """
    contact, mask = distances(position, position) < CONTACT, seen[:, None] & seen
    length, precision = int(seen.sum()), {}
    for name, pairs in range_of_pairs(residue_index, asym_id).items():
        pairs = pairs & mask
        if not (contact & pairs).any():
            continue
        ranked = contact[pairs][score[pairs].argsort(descending=True, stable=True)].double()
        for part, count in (("L", length), ("L/2", length // 2), ("L/5", length // 5)):
            precision[f"{name} P@{part}"] = ranked[: max(1, count)].mean().item()
    return precision


def distance_lddt(predicted: Tensor, position: Tensor, seen: Tensor) -> float | None:
    """lDDT of predicted distances [r, r] between atoms at `position` [r, 3]: Mariani et al. 2013, one atom a residue.

    A residue's score is the share of its pairs closer than 15 Å whose predicted distance is off by less than 0.5, 1, 2
    and 4 Å, averaged over these four. The result is the mean over residues; None if there is no such pair. For lDDT-Cα
    both arguments are of Cα atoms; a distogram is of the contact atoms.
    """
    true = distances(position, position)
    pairs = (true < 15) & seen[:, None] & seen & ~torch.eye(len(seen), dtype=torch.bool, device=seen.device)
    off, counts = (predicted - true).abs(), pairs.sum(1)
    right = torch.stack([off < within for within in (0.5, 1.0, 2.0, 4.0)]).double().mean(0)
    scores = ((right * pairs).sum(1) / counts)[counts > 0]
    return scores.mean().item() if len(scores) else None


def superposed(predicted: Tensor, position: Tensor, seen: Tensor) -> Tensor:
    """Atoms [r, 3], rotated and translated so that the seen ones [r] fit `position` [r, 3] best (Kabsch 1976)."""
    middles = [p[seen].mean(0) for p in (predicted, position)]
    x, y = predicted - middles[0], position - middles[1]
    u, s, v = torch.linalg.svd(x[seen].T @ y[seen])
    mirror = torch.ones_like(s)
    mirror[-1] = torch.linalg.det(u @ v).sign()  # no mirror image
    return x @ (u * mirror) @ v + middles[1]


def rmsd(predicted: Tensor, position: Tensor, seen: Tensor) -> float | None:
    """The root mean square distance of the seen [r] atoms [r, 3] from `position`, after superposition.

    None if fewer than three were seen, or if a prediction is NaN or infinite.
    """
    if int(seen.sum()) < 3 or not predicted[seen].isfinite().all():
        return None
    off = superposed(predicted.double(), position.double(), seen) - position
    return off[seen].square().sum(-1).mean().sqrt().item()


def masked_accuracy(letters: Tensor, target: Tensor, chosen: Tensor) -> float:
    """The share of the chosen letters that are equal to the target; all arguments [...]."""
    return (letters == target)[chosen.bool()].double().mean().item()


def average(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of every number over the measurements that have it."""
    names = dict.fromkeys(name for values in measured for name in values)
    columns = {name: [values[name] for values in measured if name in values] for name in names}
    return {name: sum(values) / len(values) for name, values in columns.items()}
