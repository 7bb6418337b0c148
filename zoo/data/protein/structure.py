"""Structures from mmCIF and PDB files, plain or gzipped, as a `Protein` without an alignment.

The reader keeps the protein chains of the first model (no nucleic acids, ligands or water), every residue that was in
the experiment, and its backbone and Cβ atoms if they were seen. Numbering is that of the sequence
(_pdbx_poly_seq_scheme or _entity_poly_seq in mmCIF, SEQRES and REMARK 465 in PDB), never the authors'. A file without a
sequence has the residues that have atoms, by the authors' ids: chain, number and insertion code. A modified residue has
the letter of its parent (selenomethionine is M), a D-amino acid that of its mirror image; selenocysteine is U and
pyrrolysine O (models see C and X). The alternative atom of highest occupancy counts, among equal ones the first in the
alphabet; an atom of zero occupancy was not seen, unless all atoms of the file have zero, as some programs write it. B
factors, which may be confidences, are ignored.

Biopython's tables are used, but not its parsers of atoms: they drop repeated atoms and accept nan as a number.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from zoo.data.protein.mmcif import parse_mmcif
from zoo.data.protein.pdb import parse_pdb
from zoo.data.protein.record import ATOMS, Protein, encode
from zoo.data.protein.residues import Atoms, Chain, Residue, one_letter, to_number
from zoo.files import MAX_BYTES, read_text, refuse_page

__all__ = ["SUFFIXES", "read_structure"]

SUFFIXES = (".cif", ".mmcif", ".pdb", ".ent")
FARTHEST = 1e5  # largest coordinate in Å: beyond, single precision is too coarse


def read_structure(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    max_atoms: int = 1_000_000,
    max_residues: int = 20_000,
) -> Protein:
    """The protein in an mmCIF or a PDB file; the text determines the format, not the name.

    A ValueError names the file and the record at fault: the file is damaged, too large or in another format, or no
    residue was seen. `max_atoms` counts all models.
    """
    text = read_text(path, max_bytes=max_bytes)
    try:
        refuse_page(text)
        count = sum(1 for _ in re.finditer(r"^(?:ATOM|HETATM)\s", text, re.MULTILINE))
        if count > max_atoms:
            raise ValueError(f"{count} atoms, and the limit is {max_atoms}")
        if re.search(r"^\s*data_\S*\s*$", text, re.MULTILINE):
            chains, atoms = parse_mmcif(text)
        elif count:
            chains, atoms = parse_pdb(text, max_residues)
        else:
            raise ValueError("neither an mmCIF file (no data_ block) nor a PDB file (no ATOM records)")
        if not chains:
            raise ValueError("it has no protein chain")
        if (total := sum(len(chain.residues) for chain in chains)) > max_residues:
            raise ValueError(f"{total} residues, and the limit is {max_residues}")
        name = Path(path).name.removesuffix(".gz")
        return _build(name.removesuffix(Path(name).suffix), chains, atoms)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _build(name: str, chains: list[Chain], atoms: Atoms) -> Protein:
    residues = [(chain, residue) for chain in chains for residue in chain.residues]
    sequence = "".join(one_letter(residue.name) for _, residue in residues)
    positions, resolved = _place_atoms(residues, atoms)
    lengths = [len(chain.residues) for chain in chains]
    entities = list(dict.fromkeys(chain.entity for chain in chains))
    return Protein(
        name=name,
        sequence=sequence,
        chains=tuple(chain.id for chain in chains),
        asym_id=np.repeat(np.arange(len(chains)), lengths),
        entity_id=np.repeat([entities.index(chain.entity) for chain in chains], lengths),
        residue_index=np.concatenate([chain.index or range(len(chain.residues)) for chain in chains]).astype(np.int64),
        residue_ids=tuple(residue.id for _, residue in residues),
        positions=positions,
        resolved=resolved,
        msa=encode(sequence)[None],
        deletions=np.zeros((1, len(sequence)), np.uint16),
        paired=np.ones(1, bool),
    )


Residues = Sequence[tuple[Chain, Residue]]


def _place_atoms(residues: Residues, atoms: Atoms) -> tuple[np.ndarray, np.ndarray]:
    """Positions [r, a, 3] Å and the mask of resolved atoms [r, a] of all residues."""
    rows, place, atom = _backbone(residues, atoms)

    def label(i: int) -> str:
        """The name of atom i of the backbone."""
        chain, residue = residues[place[i]]
        return f"atom {ATOMS[atom[i]]} of residue {residue.name} {residue.id} of chain {chain.id}"

    def numbers(column: Sequence[str], quantity: str) -> np.ndarray:
        values = np.array([to_number(column[i]) for i in rows])
        for i in np.flatnonzero(~(np.abs(values) < FARTHEST))[:1]:
            wrong = "is not a number" if not np.isfinite(values[i]) else "is too large"
            raise ValueError(f"{label(i)}: {quantity} {column[rows[i]]!r} {wrong}")
        return values

    position = np.stack([numbers(getattr(atoms, axis), f"coordinate {axis}") for axis in "xyz"], 1)
    occupancy = numbers(atoms.occupancy, "occupancy")
    if all(to_number(text) == 0 for text in atoms.occupancy):  # it says nothing
        occupancy += 1
    alternative = np.array(atoms.alternative)[rows]
    order = np.lexsort((alternative, -occupancy, atom, place))  # the last key counts most
    repeated = (np.diff(place[order]) == 0) & (np.diff(atom[order]) == 0)
    for i in np.flatnonzero(repeated & (alternative[order][1:] == alternative[order][:-1]))[:1]:
        raise ValueError(f"{label(order[i])} is listed twice")
    best = order[np.concatenate([np.ones(min(len(order), 1), bool), ~repeated])]
    best = best[occupancy[best] > 0]
    if not len(best):
        raise ValueError("no atom of a protein backbone is resolved (with an occupancy above 0)")
    positions = np.zeros((len(residues), len(ATOMS), 3), np.float32)
    resolved = np.zeros((len(residues), len(ATOMS)), bool)
    positions[place[best], atom[best]] = position[best]
    resolved[place[best], atom[best]] = True
    return positions, resolved


def _backbone(residues: Residues, atoms: Atoms) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows of the table of atoms that are of ATOMS and of these residues; the residue and the atom of each."""
    places = {(chain.key, residue.key): i for i, (chain, residue) in enumerate(residues)}
    place = np.array([places.get(key, -1) for key in zip(atoms.chain, atoms.residue)], dtype=np.int64)
    for i in sorted({i for i, (_, residue) in enumerate(residues) if residue.seen} - set(place.tolist()))[:1]:
        chain, residue = residues[i]
        raise ValueError(
            f"residue {residue.name} {residue.id} of chain {chain.id} is listed as resolved, but has no atoms: is the "
            "file cut off?"
        )
    components = np.array([residue.name for _, residue in residues])
    atom = np.array([ATOMS.index(name) if name in ATOMS else -1 for name in atoms.name], dtype=np.int64)
    rows = np.flatnonzero((place >= 0) & (atom >= 0))
    rows = rows[np.array(atoms.component)[rows] == components[place[rows]]]  # no other residue in this place
    return rows, place[rows], atom[rows]
