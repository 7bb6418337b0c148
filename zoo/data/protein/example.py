"""A training example: a crop of a protein and some rows of its alignment, with some of their letters hidden.

All random numbers come from one `torch.Generator`, so that an example is a pure function of its seed. Letters: s rows
of the alignment, t rows of the extra alignment, r residues, i j the residues of a pair.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zoo.data.protein.record import ATOMS, GAP, MASK, UNKNOWN, Protein
from zoo.data.sampling import generator
from zoo.protein.distogram import distances, distogram_bins

__all__ = ["Example", "crop_contiguous", "crop_spatial", "draw", "hide", "sample_rows"]

_NEAR = 12  # residues of a chain nearer than that along it are neighbours: short-range contacts
_INTERFACE = 15.0  # Å between the contact atoms of two chains that touch


def crop_contiguous(protein: Protein, residues: int, random: torch.Generator) -> Protein:
    """At most `residues` residues, one stretch of every chain: AlphaFold-Multimer's supplement, algorithm 1."""
    if len(protein) <= residues:
        return protein
    _, starts, lengths = np.unique(protein.asym_id, return_index=True, return_counts=True)
    parts, added, remainder = [], 0, len(protein)
    for chain in torch.randperm(len(lengths), generator=random).tolist():
        n = int(lengths[chain])
        remainder -= n
        most, least = min(residues - added, n), min(n, max(0, residues - added - remainder))
        size = least + _integer(most - least + 1, random)
        start = int(starts[chain]) + _integer(n - size + 1, random)
        parts.append(np.arange(start, start + size))
        added += size
    return protein.take(np.sort(np.concatenate(parts)))


def crop_spatial(protein: Protein, residues: int, random: torch.Generator) -> Protein:
    """The residues nearest to a random one (close to another chain if possible): the same supplement, algorithm 2.

    Distances are computed from one residue at a time, so that no array has the size of all pairs.
    """
    if len(protein) <= residues:
        return protein
    position, seen = protein.contact_atoms()

    def distance(centre: int) -> np.ndarray:
        return np.where(seen, np.linalg.norm(position - position[centre], axis=1), np.inf)

    candidates = np.flatnonzero(seen)[torch.randperm(int(seen.sum()), generator=random).numpy()]
    centre = candidates[0]
    if len(np.unique(protein.asym_id[candidates])) > 1:
        touching = (i for i in candidates if distance(i)[protein.asym_id != protein.asym_id[i]].min() < _INTERFACE)
        centre = next(touching, centre)
    return protein.take(np.sort(np.argsort(distance(centre), kind="stable")[:residues]))


def sample_rows(protein: Protein, rows: int, random: torch.Generator) -> Protein:
    """At most `rows` rows of the alignment: the first, the protein's own sequence, and others in random order."""
    if len(protein.msa) <= 1 or rows <= 1:
        order = np.zeros(1, np.int64)
    else:
        order = torch.randperm(len(protein.msa) - 1, generator=random)[: rows - 1].numpy()
        order = np.concatenate([[0], order + 1])
    return replace(protein, msa=protein.msa[order], deletions=protein.deletions[order], paired=protein.paired[order])


def hide(msa: Tensor, random: torch.Generator, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """The alignment [s, r] with a share of its letters, at least one, hidden; and the mask of these letters [s, r].

    As in AlphaFold 2 (supplement, 1.2.7): 70% of the chosen letters become MASK, 10% a random amino acid, 10% a letter
    of the same column, and 10% are unchanged. The letter of the column comes from a random row of `msa`, the rows
    sampled for the model; AlphaFold draws it from the profile of the whole alignment.
    """
    s, r = msa.shape
    u = torch.rand(s, r, generator=random)
    chosen = (u < share) | (u == u.min())
    lots = torch.rand(s, r, generator=random)
    anything = torch.randint(20, (s, r), generator=random, dtype=msa.dtype)
    column = msa.gather(0, torch.randint(s, (s, r), generator=random))
    hidden = torch.where(lots < 0.7, MASK, torch.where(lots < 0.8, anything, torch.where(lots < 0.9, column, msa)))
    return torch.where(chosen, hidden, msa), chosen


@dataclass(frozen=True, eq=False)
class Example:
    """A protein with at most `residues` residues, `rows` rows, `extra` further rows of its alignment and `templates`
    templates (its first ones).

    The features are padded to these sizes. A rank passes its range of rows and gets the corresponding part of the
    complete features; nothing else is computed.
    """

    protein: Protein
    residues: int
    rows: int
    extra: int
    hidden: Tensor  # [s, r] the first rows of the alignment as the model sees them
    chosen: Tensor  # [s, r] True for the letters to predict
    templates: int = 0

    def alignment(self, rows: range | None = None) -> dict[str, Tensor]:
        """Rows s of the alignment, each [s, r].

        `msa` (int64), `deletions`, `msa_mask` (bool: no padding), `msa_target` (int64), `msa_weight` (1: to predict).
        """
        rows = range(self.rows) if rows is None else rows
        main = slice(0, self.rows)
        return {
            "msa": self._padded(self.hidden, rows, GAP),
            "deletions": self._padded(self.protein.deletions[main].astype(np.float32), rows),
            "msa_mask": self._padded(np.ones(self.hidden.shape, bool), rows),
            "msa_target": self._padded(self.protein.msa[main].astype(np.int64), rows, GAP),
            "msa_weight": self._padded(self.chosen.float(), rows),
        }

    def extra_alignment(self, rows: range | None = None) -> dict[str, Tensor]:
        """Rows t of the rest of the alignment: `extra_msa` (int64), `extra_deletions`, `extra_mask` (bool), [t, r]."""
        rows = range(self.extra) if rows is None else rows
        msa, deletions = self.protein.msa[self.rows :], self.protein.deletions[self.rows :]
        return {
            "extra_msa": self._padded(msa.astype(np.int64), rows, GAP),
            "extra_deletions": self._padded(deletions.astype(np.float32), rows),
            "extra_mask": self._padded(np.ones(msa.shape, bool), rows),
        }

    def single(self) -> dict[str, Tensor]:
        """The features of each residue: `sequence`, `residue_index`, `asym_id` [r] int64 and `mask` [r] bool."""
        protein, missing = self.protein, self.residues - len(self.protein)
        values = {
            "sequence": (torch.from_numpy(protein.msa[0].astype(np.int64)), UNKNOWN),
            "residue_index": (torch.from_numpy(protein.residue_index), 0),
            "asym_id": (torch.from_numpy(protein.asym_id), 0),
            "mask": (torch.ones(len(protein), dtype=torch.bool), False),
        }
        return {name: F.pad(value, (0, missing), value=fill) for name, (value, fill) in values.items()}

    def entities(self) -> dict[str, Tensor]:
        """The entity of each residue, and which copy of it the chain is: `entity_id` and `sym_id` [r] int64."""
        missing, protein = self.residues - len(self.protein), self.protein
        values = {"entity_id": protein.entity_id, "sym_id": protein.copies()}
        return {name: F.pad(torch.from_numpy(value), (0, missing)) for name, value in values.items()}

    def pairs(self, rows: range | None = None) -> dict[str, Tensor]:
        """Rows i of all pairs [i, j]: `bins` of distance (int64), `pair_weight` (0 if either residue was not seen).

        `contact_weight` is the same, but 0.001 for neighbours along a chain, whose contacts say little about the fold;
        it is not 0, so that in the shortest crop some pairs count.
        """
        position, seen = self.protein.contact_atoms()
        missing = self.residues - len(self.protein)
        xyz, mask = F.pad(torch.from_numpy(position), (0, 0, 0, missing)), F.pad(torch.from_numpy(seen), (0, missing))
        part = slice(None) if rows is None else slice(rows.start, rows.stop)
        place, chain = (
            F.pad(torch.from_numpy(x), (0, missing)) for x in (self.protein.residue_index, self.protein.asym_id)
        )
        far = ((place[part, None] - place).abs() >= _NEAR) | (chain[part, None] != chain)
        weight = (mask[part, None] & mask).float()
        return {
            "bins": distogram_bins(distances(xyz[part], xyz)),
            "pair_weight": weight,
            "contact_weight": weight * torch.where(far, 1.0, 0.001),
        }

    def frames(self) -> dict[str, Tensor]:
        """The atoms of a backbone frame, N, CA and C: `backbone` [r, 3, 3] Å; `seen` [r]: 1 if all three were seen."""
        missing, of = self.residues - len(self.protein), [self.protein.atoms(name) for name in ("N", "CA", "C")]
        atoms = torch.stack([torch.from_numpy(position) for position, _ in of], 1)
        seen = torch.stack([torch.from_numpy(resolved) for _, resolved in of]).all(0).float()
        return {"backbone": F.pad(atoms, (0, 0, 0, 0, 0, missing)), "seen": F.pad(seen, (0, missing))}

    def relatives(self) -> dict[str, Tensor]:
        """The features of n templates; a missing template has no seen atoms. Types: int64, float32, bool.

        `template_sequence` [n, r], `template_backbone` [n, r, 3, 3] Å (N, CA, C), `template_beta` [n, r, 3] Å (the
        contact atom) and `template_seen` [n, r, 2]: the complete backbone was seen, the contact atom was seen.
        """
        n, r = self.templates, self.residues
        inputs = {
            "template_sequence": torch.full((n, r), GAP), "template_backbone": torch.zeros(n, r, 3, 3),
            "template_beta": torch.zeros(n, r, 3), "template_seen": torch.zeros(n, r, 2, dtype=torch.bool),
        }  # fmt: skip
        frame = [ATOMS.index(name) for name in ("N", "CA", "C")]
        for i, template in enumerate(self.protein.templates[:n]):
            beta, seen = template.contact_atoms()
            seen = np.stack([template.resolved[:, frame].all(1), seen], 1)
            for name, x in zip(inputs, (template.letters.astype(np.int64), template.positions[:, frame], beta, seen)):
                inputs[name][i, : len(x)] = torch.from_numpy(x)
        return inputs

    def couplings(self, rows: range | None = None, *, around: int = 0) -> dict[str, Tensor]:
        """Rows i of the coupling scores of pairs: `couplings` [i, j, k], zero for padding.

        The k = (2 `around` + 1)² scores are those of the pairs (i + a, j + b), for a and b from -`around` to `around`
        along the chain; zero beyond the ends of a chain.
        """
        assert self.protein.couplings is not None
        rows = range(self.residues) if rows is None else rows
        part = slice(rows.start, rows.stop)
        score = torch.from_numpy(self.protein.couplings)
        score = F.pad(score, (0, 1, 0, 1))  # the last residue stands for missing ones, with score zero
        steps = torch.from_numpy(self._along(around))  # [r, 2 around + 1]
        feature = score[steps[part, None, :, None], steps[None, :, None, :]].flatten(2)
        return {"couplings": F.pad(feature, (0, 0, 0, self.residues - feature.shape[1], 0, len(rows) - len(feature)))}

    def _along(self, around: int) -> np.ndarray:
        """The places of the residues from -`around` to `around` along the chain of each residue [r, 2 around + 1].

        A missing residue has the number r.
        """
        protein, offsets = self.protein, np.arange(-around, around + 1)
        indices = np.arange(len(protein))[:, None] + offsets
        inside = indices.clip(0, len(protein) - 1)
        place, chain = protein.residue_index, protein.asym_id
        near = (place[inside] - place[:, None] == offsets) & (chain[inside] == chain[:, None]) & (inside == indices)
        return np.where(near, inside, len(protein))

    def _padded(self, values: Any, rows: range, fill: float = 0) -> Tensor:
        part = torch.as_tensor(values[rows.start : rows.stop])
        out = torch.full((len(rows), self.residues), fill, dtype=part.dtype)
        out[: part.shape[0], : part.shape[1]] = part
        return out


def draw(
    protein: Protein,
    *seed: int | str,
    residues: int,
    rows: int,
    extra: int = 0,
    templates: int = 0,
    share: float = 0.15,
    spatial: bool = False,
) -> Example:
    """Draw the example of `seed`: a pure function of the arguments.

    If any residue of the protein was seen, the crop has one that was seen. With `share` 0 no letter is hidden.
    """
    random = generator("protein", *seed)
    crop = crop_spatial if spatial else crop_contiguous
    cropped = crop(protein, residues, random)
    while protein.contact_atoms()[1].any() and not cropped.contact_atoms()[1].any():
        cropped = crop(protein, residues, random)
    cropped = sample_rows(cropped, rows + extra, random)
    msa = torch.from_numpy(cropped.msa[:rows].astype(np.int64))
    hidden, chosen = hide(msa, random, share) if share else (msa, torch.zeros_like(msa, dtype=torch.bool))
    return Example(cropped, residues, rows, extra, hidden, chosen, templates)


def _integer(n: int, random: torch.Generator) -> int:
    return int(torch.randint(n, (), generator=random))
