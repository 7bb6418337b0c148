"""Predicted contacts as a table: CSV files."""

import csv
from pathlib import Path

import torch
from torch import Tensor

from zoo.data.protein.record import Protein
from zoo.protein.metrics import range_of_pairs

__all__ = ["COLUMNS", "write_contacts"]

COLUMNS = (
    "i", "j", "chain_i", "chain_j", "residue_i", "residue_j", "number_i", "number_j", "range", "probability", "distance"
)  # fmt: skip


def write_contacts(path: Path, protein: Protein, probability: Tensor, distance: Tensor, least: float) -> None:
    """The pairs of at least that probability of contact, the likeliest first; neighbours in a chain (below 6) left out.

    i and j count the residues of all chains from 0, numbers are those of the authors; distances are means, in Å.
    """
    residues = [
        (protein.chains[chain], letter, number)
        for chain, letter, number in zip(protein.asym_id, protein.sequence, protein.residue_ids)
    ]
    ranges = range_of_pairs(*(torch.from_numpy(x) for x in (protein.residue_index, protein.asym_id)))
    rows = []
    for name, pairs in ranges.items():
        for i, j in (pairs & (probability >= least)).nonzero().tolist():
            rows.append((probability[i, j].item(), i, j, name, distance[i, j].item()))
    rows.sort(key=lambda row: (-row[0], row[1:3]))
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for p, i, j, name, d in rows:
            both = [value for pair in zip(residues[i], residues[j]) for value in pair]
            table.writerow([i, j, *both, name, f"{p:.4f}", f"{d:.2f}"])
