"""Predicted contacts and structures of one protein: their measures, in a table, and the files that are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zoo.data.protein.record import Protein
from zoo.data.protein.write import write_structure
from zoo.files import whole_file
from zoo.protein.backbone_picture import save_backbones
from zoo.protein.distogram import CONTACT, distances, edges
from zoo.protein.metrics import average, contact_precision, distance_lddt, range_of_pairs, rmsd
from zoo.protein.picture import ContactMap, save_contact_maps, write_contacts
from zoo.training.ranks import log0
from zoo.training.tracking import number_of

SPACING = (2.8, 4.8)  # Å between the Cα of neighbours, at the median; real ones are 3.8 apart
PARTS = ("L", "L/2", "L/5")


@dataclass
class Predicted:
    """A protein, and a model's prediction of it."""

    protein: Protein
    contact: Tensor  # [r, r] probability
    distance: Tensor  # [r, r] Å
    accuracy: float | None = None  # of hidden letters without the first row's, which are in the sequence
    distogram: Tensor | None = None  # [r, r, 64] float16, the probability of every bin
    atoms: Tensor | None = None  # [r, 5, 3] Å, of a model that predicts a structure
    plddt: Tensor | None = None  # [r] the lDDT to be expected, 0 to 100

    def measure(self) -> dict[str, float]:
        """The measures of the prediction; those that need the true structure only where it is known.

        Predicted distances are of contact atoms. lDDT-Cβ compares them with true distances of contact atoms, lDDT-Cα of
        Cα atoms, as the field reports it: 1 by the first is 0.68 by the second. Those of a structure are of Cα atoms.
        """
        known = truth(self.protein)
        measures: dict[str, float | None] = {**contact_precision(self.contact, *known)}
        ca, mask = map(torch.from_numpy, self.protein.atoms("CA"))
        measures["lDDT-Cβ"] = distance_lddt(self.distance, *known[:2])
        measures["lDDT-Cα"] = distance_lddt(self.distance, ca, mask)
        if self.atoms is not None and self.plddt is not None:
            alphas = self.atoms[:, 1]
            measures["structure lDDT"] = distance_lddt(distances(alphas, alphas), ca, mask)
            measures["structure RMSD"] = rmsd(alphas, ca, mask)
            measures["pLDDT"] = self.plddt.mean().item()
        measures["masked accuracy"] = self.accuracy
        return {name: value for name, value in measures.items() if value is not None}

    def contacts(self) -> int:
        """The number of measured pairs that are in contact in the true structure."""
        position, seen, *places = truth(self.protein)
        counted = torch.stack(list(range_of_pairs(*places).values())).any(0) & seen[:, None] & seen
        return int((counted & (distances(position, position) < CONTACT)).sum())

    def map(self, measured: Mapping[str, float]) -> ContactMap:
        return contact_map(self.protein, self.contact, measured)

    def unusable(self) -> str:
        """The reason that a predicted backbone is of no use, in words; "" for a usable one, or none."""
        neighbours = bonded(self.protein)[:-1]
        if self.atoms is None or not neighbours.any():
            return ""
        spacing = float((self.atoms[1:, 1] - self.atoms[:-1, 1]).norm(dim=-1)[neighbours].median())
        if SPACING[0] <= spacing <= SPACING[1]:
            return ""
        return f"unusable backbone: neighbouring Cα are {spacing:.2f} Å apart, where 3.8 Å are expected"


def bonded(protein: Protein) -> Tensor:
    """The residues [r] that are followed by the next one along their chain."""
    place, chain = torch.from_numpy(protein.residue_index), torch.from_numpy(protein.asym_id)
    following = (place[1:] == place[:-1] + 1) & (chain[1:] == chain[:-1])
    return torch.cat([following, following.new_zeros(1)])


def truth(protein: Protein) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Position [r, 3] and `seen` [r] of the contact atoms, residue_index [r], asym_id [r]."""
    arrays = (*protein.contact_atoms(), protein.residue_index, protein.asym_id)
    position, seen, residue_index, asym_id = (torch.from_numpy(array) for array in arrays)
    return position, seen, residue_index, asym_id


# ------------------------------------------------------------------------------------------------------------- in words


def described(protein: Protein, rows: int) -> str:
    """The size of a protein, of which `rows` rows are read, in words."""
    of = f"{rows} of {len(protein.msa)} rows"
    if len(protein.chains) > 1:
        paired = f", {int(protein.paired[1:].sum())} paired" if len(set(protein.entity_id.tolist())) > 1 else ""
        return f"{len(protein)} residues in {len(protein.chains)} chains, {of}{paired}"
    return f"{len(protein)} residues, {of}"


def table(title: str, measured: Mapping[str, float]) -> str:
    """A title, and below it the measures: the precision of contacts with a line for each range, then the others."""
    if not any(" P@" in name or "lDDT-C" in name for name in measured):
        title += "; its structure is not known"
    lines, measures = [title], dict(measured)
    ranges = dict.fromkeys(name.partition(" P@")[0] for name in measured if " P@" in name)
    if ranges:
        lines.append(" " * 10 + "".join(f"{f'P@{part}':>8}" for part in PARTS))
    for name in ranges:
        lines.append(f"  {name:<8}" + "".join(f"{measures.pop(f'{name} P@{part}'):8.3f}" for part in PARTS))
    if measures:
        lines.append("  " + "  ".join(f"{name} {value:.3f}" for name, value in measures.items()))
    return "\n".join(lines)


def log_mean(measured: list[dict[str, float]], origin: str = "") -> None:
    """Print the mean of the measures of several proteins, those without a known structure not counted."""
    if known := [measures for measures in measured if any(" P@" in name for name in measures)]:
        without = len(measured) - len(known)
        more = f"; {number_of(without, 'protein')} without a known structure" if without else ""
        log0(table(f"mean of {len(known)}{origin and f' {origin}'}{more}", average(known)))


# ---------------------------------------------------------------------------------------------------------------- files


def contact_map(protein: Protein, score: Tensor, measured: Mapping[str, float], suffix: str = "") -> ContactMap:
    """The picture of contacts [r, r], titled by the protein and the precisions at L/2."""
    title = ", ".join(f"{name} {value:.2f}" for name, value in measured.items() if name.endswith("P@L/2"))
    return ContactMap(f"{protein.name}{suffix}: {title}".removesuffix(": "), score, *truth(protein))


def write_files(
    stem: Path, protein: Protein, arrays: Mapping[str, np.ndarray], write_table: Callable[[Path], None],
    picture: ContactMap,
) -> list[Path]:  # fmt: skip
    """Write STEM.csv, STEM.npz with the arrays and the residues, and STEM.png; return them."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    pairs, stored, image = (stem.parent / f"{stem.name}.{suffix}" for suffix in ("csv", "npz", "png"))
    write_table(pairs)
    residues = {
        "sequence": np.array(protein.sequence), "chain": np.array(protein.chains)[protein.asym_id],
        "residue_index": protein.residue_index, "residue_id": np.array(protein.residue_ids),
    }  # fmt: skip
    with whole_file(stored) as file:
        np.savez_compressed(file, allow_pickle=False, **arrays, **residues)
    save_contact_maps(image, [picture])
    return [pairs, stored, image]


def write(stem: Path, predicted: Predicted, least: float) -> tuple[list[Path], dict[str, float]]:
    """Write the files of a prediction, and those of its structure if it has one; return these and the measures."""
    protein, measured = predicted.protein, predicted.measure()
    arrays = {"contact": predicted.contact.numpy(), "distance": predicted.distance.numpy()}
    if predicted.distogram is not None:
        arrays |= {"distogram": predicted.distogram.numpy(), "edges": edges().numpy()}

    def write_table(path: Path) -> None:
        write_contacts(path, protein, predicted.contact, predicted.distance, least)

    files = write_files(stem, protein, arrays, write_table, predicted.map(measured))
    if predicted.atoms is None or predicted.plddt is None:
        return files, measured
    structure, image = (stem.parent / f"{stem.name}-predicted.{suffix}" for suffix in ("cif", "png"))  # not NAME.cif
    write_structure(structure, protein, predicted.atoms.numpy(), predicted.plddt.numpy())
    ca, seen = map(torch.from_numpy, protein.atoms("CA"))
    title = f"{protein.name}, pLDDT {measured['pLDDT']:.0f}"
    save_backbones(image, title, predicted.atoms[:, 1], ca, seen, bonded(protein))
    return [*files, structure, image], measured
