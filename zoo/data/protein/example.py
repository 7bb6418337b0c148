"""What a model is trained on: a crop of a protein, some rows of its alignment, some of their letters hidden.

All that is drawn comes from one `torch.Generator`, so an example is a pure function of its seed. Letters: s rows,
r residues, i j the residues of a pair.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.data.protein.record import GAP, LETTERS, MASK, Protein
from zoo.data.sampling import generator
from zoo.protein.distogram import distances, distogram_bins

__all__ = ["Example", "crop_contiguous", "crop_spatial", "draw", "hide", "sample_rows"]

INTERFACE = 15.0  # Å between the contact atoms of two chains that touch


def crop_contiguous(protein: Protein, residues: int, random: torch.Generator) -> Protein:
    """At most so many residues, one stretch of every chain: algorithm 1 of AlphaFold-Multimer."""
    if len(protein) <= residues:
        return protein
    starts, lengths = np.unique(protein.asym_id, return_index=True, return_counts=True)[1:]
    taken, left, added = [], len(protein), 0
    for chain in torch.randperm(len(lengths), generator=random).tolist():
        n = int(lengths[chain])
        left -= n
        most, least = min(residues - added, n), min(n, max(0, residues - added - left))
        size = least + _draw(most - least + 1, random)
        start = int(starts[chain]) + _draw(n - size + 1, random)
        taken.append(np.arange(start, start + size))
        added += size
    return protein.take(np.sort(np.concatenate(taken)))


def crop_spatial(protein: Protein, residues: int, random: torch.Generator) -> Protein:
    """The residues nearest to one that was seen, if there is any in touch with another chain: as algorithm 2 of the same.

    Distances are taken from one residue at a time: nothing of the size of all pairs is made.
    """
    if len(protein) <= residues:
        return protein
    position, seen = protein.contact_atoms()
    candidates = np.flatnonzero(seen)
    candidates = candidates[torch.randperm(len(candidates), generator=random).numpy()]
    if not len(candidates):
        return crop_contiguous(protein, residues, random)

    def distance(centre: int) -> np.ndarray:
        return np.where(seen, np.linalg.norm(position - position[centre], axis=1), np.inf)

    centre = candidates[0]
    if len(protein.chains) > 1:
        touching = (i for i in candidates if distance(i)[protein.asym_id != protein.asym_id[i]].min() < INTERFACE)
        centre = next(touching, centre)
    return protein.take(np.sort(np.argsort(distance(centre), kind="stable")[:residues]))


def sample_rows(protein: Protein, rows: int, random: torch.Generator) -> Protein:
    """At most so many rows of the alignment: the first, which is the protein's own, and others in their order."""
    if len(protein.msa) <= rows:
        return protein
    others = torch.randperm(len(protein.msa) - 1, generator=random)[: rows - 1].sort().values.numpy() + 1
    chosen = np.concatenate([[0], others])
    paired = int((chosen < protein.paired).sum())
    return replace(protein, msa=protein.msa[chosen], deletions=protein.deletions[chosen], paired=paired)


def hide(msa: Tensor, random: torch.Generator, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """The alignment [s, r] with a share of its letters hidden, and which they are [s, r].

    As in AlphaFold 2 (supplement, 1.2.7): of what is chosen 70% become MASK, 10% a random amino acid, 10% a letter of
    the same column (that of a random row) and 10% stay as they are.
    """
    s, r = msa.shape
    chosen = torch.rand(s, r, generator=random) < share
    how = torch.rand(s, r, generator=random)
    anything = torch.randint(20, (s, r), generator=random, dtype=msa.dtype)
    column = msa.gather(0, torch.randint(s, (s, r), generator=random))
    hidden = torch.where(how < 0.7, MASK, torch.where(how < 0.8, anything, torch.where(how < 0.9, column, msa)))
    return torch.where(chosen, hidden, msa), chosen


@dataclass(frozen=True, eq=False)
class Example:
    """A protein of `residues` residues and `rows` alignment rows or fewer, padded to these when it is asked for parts."""

    protein: Protein
    residues: int
    rows: int
    hidden: Tensor  # [s, r] the alignment as the model sees it
    chosen: Tensor  # [s, r] the letters it has to guess

    def alignment(self, rows: range | None = None) -> dict[str, Tensor]:
        """Rows of the alignment: `msa` and `target` [s, r] int64, `deletions` and `mask` [s, r], `chosen` [s, r]."""
        rows = range(self.rows) if rows is None else rows
        part = slice(rows.start, rows.stop)
        shape = (len(rows), self.residues)
        protein = self.protein

        def padded(values: Any, fill: float = 0) -> Tensor:
            values = torch.as_tensor(values[part])
            out = torch.full(shape, fill, dtype=values.dtype)
            out[: values.shape[0], : values.shape[1]] = values
            return out

        return {
            "msa": padded(self.hidden, GAP),
            "deletions": padded(protein.deletions.astype(np.float32)),
            "mask": padded(np.ones(protein.msa.shape, np.float32)),
            "target": padded(protein.msa.astype(np.int64), GAP),
            "chosen": padded(self.chosen.float()),
        }

    def single(self) -> dict[str, Tensor]:
        """What is known of each residue: `sequence`, `residue_index`, `asym_id`, `entity_id` [r] int64 and `mask` [r]."""
        protein = self.protein
        values = {
            "sequence": torch.from_numpy(protein.msa[0].astype(np.int64)),
            "residue_index": torch.from_numpy(protein.residue_index),
            "asym_id": torch.from_numpy(protein.asym_id),
            "entity_id": torch.from_numpy(protein.entity_id),
            "mask": torch.ones(len(protein)),
        }
        fill = {"sequence": LETTERS.index("X"), "asym_id": -1, "entity_id": -1}
        missing = self.residues - len(protein)
        return {k: torch.nn.functional.pad(v, (0, missing), value=fill.get(k, 0)) for k, v in values.items()}

    def pairs(self, rows: range | None = None) -> dict[str, Tensor]:
        """Rows i of the targets of all pairs: `bins` [i, j] int64, and `weight` [i, j], zero where one was not seen.

        Only these rows are made: a rank never holds all pairs.
        """
        position, seen = self.protein.contact_atoms()
        missing = self.residues - len(self.protein)
        xyz = torch.nn.functional.pad(torch.from_numpy(position), (0, 0, 0, missing))
        there = torch.nn.functional.pad(torch.from_numpy(seen).float(), (0, missing))
        part = slice(rows.start, rows.stop) if rows is not None else slice(None)
        return {
            "bins": distogram_bins(distances(xyz[part], xyz)),
            "weight": there[part, None] * there,
        }


def draw(
    protein: Protein, residues: int, rows: int, *seed: int | str, share: float = 0.15, spatial: bool = False
) -> Example:
    """The example that the numbers of `seed` stand for."""
    random = generator("protein", *seed)
    crop = crop_spatial if spatial else crop_contiguous
    protein = sample_rows(crop(protein, residues, random), rows, random)
    hidden, chosen = hide(torch.from_numpy(protein.msa.astype(np.int64)), random, share)
    return Example(protein, residues, rows, hidden, chosen)


def _draw(n: int, random: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=random))
