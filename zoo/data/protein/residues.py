"""Residues, chains and tables of atoms as files list them, and the place of resolved residues in a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from Bio.Align import PairwiseAligner
from Bio.Data.PDBData import protein_letters_3to1_extended

__all__ = ["Atoms", "Chain", "Residue", "chains_of_atoms", "is_protein", "one_letter", "place_in_sequence", "to_number"]

# missing in Biopython's table: amino acids beyond the twenty, ambiguous ones, and D-amino acids
LETTERS_OF = protein_letters_3to1_extended | {
    "SEC": "U", "PYL": "O", "ASX": "B", "GLX": "Z", "DAL": "A", "DAR": "R", "DSG": "N", "DAS": "D", "DCY": "C",
    "DGN": "Q", "DGL": "E", "DHI": "H", "DIL": "I", "DLE": "L", "DLY": "K", "MED": "M", "DPN": "F", "DPR": "P",
    "DSN": "S", "DTH": "T", "DTR": "W", "DTY": "Y", "DVA": "V",
}  # fmt: skip
BONDED = 4.5  # largest distance in Å of the Cα of residues that are bonded to one another


@dataclass
class Residue:
    key: str  # its name in atom records
    id: str  # the authors' name
    name: str  # three letters
    seen: bool = False  # the file says that it has atoms


@dataclass
class Chain:
    id: str  # the authors' name
    key: str  # its name in atom records
    entity: str
    residues: list[Residue] = field(default_factory=list)
    index: list[int] | None = None  # places in the sequence, if not 0, 1, 2, ...


@dataclass
class Atoms:
    """The columns of a table of atoms."""

    chain: Sequence[str]
    residue: Sequence[str]
    component: Sequence[str]
    name: Sequence[str]
    alternative: Sequence[str]
    occupancy: Sequence[str]
    x: Sequence[str]
    y: Sequence[str]
    z: Sequence[str]


def one_letter(name: str) -> str:
    """The letter of a residue's three-letter name, modified residues included; X if it has none."""
    return LETTERS_OF.get(name, "X")


def is_protein(names: Sequence[str]) -> bool:
    known = sum(name in LETTERS_OF or name == "UNK" for name in names)
    return 2 * known > len(names)


def to_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def chains_of_atoms(atoms: Atoms, labelled: Sequence[bool]) -> list[Chain]:
    """The chains of a file without sequences: the amino acids that have a Cα.

    labelled [atoms]: the file places the atom in a sequence. A residue that is not labelled is modified or a ligand: it
    is in the chain if a labelled one follows there, or if it is bonded.

    Authors' numbers, if they ascend, are the places of residues in their chain.
    """
    alphas: dict[str, dict[str, int]] = {}  # the first Cα of each residue of each chain
    for i, name in enumerate(atoms.name):
        if name == "CA" and says(atoms.residue[i]) and is_protein([atoms.component[i]]):
            alphas.setdefault(atoms.chain[i], {}).setdefault(atoms.residue[i], i)
    chains = []
    for key, places in alphas.items():
        rows = list(places.values())
        last = max((k for k, i in enumerate(rows) if labelled[i]), default=-1)
        position = np.array([[to_number(axis[i]) for axis in (atoms.x, atoms.y, atoms.z)] for i in rows])
        bonds = np.linalg.norm(np.diff(position, axis=0), axis=1) < BONDED
        rows = [i for k, i in enumerate(rows) if k <= last or bonds[max(k - 1, 0) : k + 1].any()]
        residues = [Residue(atoms.residue[i], atoms.residue[i], atoms.component[i]) for i in rows]
        chain = Chain(key, key, " ".join(residue.name for residue in residues), residues)
        try:
            index = [int(residue.id) for residue in residues]
        except ValueError:  # an insertion code
            index = []
        if index == sorted(set(index)):
            chain.index = [number - index[0] for number in index]
        chains += [chain] if residues else []
    return chains


def says(value: str) -> bool:
    """False for a value of mmCIF that stands for none."""
    return value not in ("", ".", "?")


def place_in_sequence(chain: str, names: list[str], seen: list[Residue], missing: list[Residue]) -> list[Residue]:
    """The residues of SEQRES, with the seen ones placed by REMARK 465, or if that does not fit, by alignment."""
    merged, queue = [], list(missing)
    for residue in seen:
        while queue and _order(queue[0]) < _order(residue):
            merged.append(queue.pop(0))
        merged.append(residue)
    merged += queue
    if [residue.name for residue in merged] == names:
        return merged
    placed = [Residue(f"missing {i}", "?", name) for i, name in enumerate(names)]
    if not seen:
        return placed
    aligner = PairwiseAligner(scoring="blastp")
    aligner.substitution_matrix = None
    aligner.match_score, aligner.mismatch_score = 1, -1000
    aligner.open_gap_score, aligner.extend_gap_score = -10, 0
    aligner.open_end_gap_score = aligner.extend_end_gap_score = 0
    ours, theirs = ("".join(one_letter(name) for name in all_) for all_ in (names, [r.name for r in seen]))
    alignment = aligner.align(ours, theirs)[0]
    count = 0
    for (start, end), (first, _) in zip(*alignment.aligned):
        for i in range(start, end):
            residue = seen[first + i - start]
            if residue.name != names[i]:
                raise ValueError(f"residue {residue.name} {residue.id} of chain {chain} is {names[i]} in SEQRES")
            placed[i], count = residue, count + 1
    if count < len(seen):
        raise ValueError(f"chain {chain}: {len(seen) - count} of {len(seen)} residues have no place in its SEQRES")
    return placed


def _order(residue: Residue) -> tuple[int, str]:
    number = residue.key.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(number), residue.key[len(number) :]
