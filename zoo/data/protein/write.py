"""Structures as mmCIF files, and alignments as A3M."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from Bio.Data.PDBData import protein_letters_1to3
from Bio.PDB.mmcifio import MMCIFIO
from Bio.PDB.StructureBuilder import StructureBuilder

from zoo.data.protein.record import ATOMS, LETTERS, Protein
from zoo.files import whole_file

__all__ = ["write_alignment", "write_structure"]


def write_alignment(path: Path, protein: Protein) -> None:
    """Write the alignment of a protein, its own sequence first, without what was inserted into other rows."""
    names = [protein.name, *(f"row{i}" for i in range(1, len(protein.msa)))]
    text = "".join(f">{name}\n{''.join(LETTERS[a] for a in row)}\n" for name, row in zip(names, protein.msa))
    with whole_file(path) as file:
        file.write(text.encode())


def write_structure(
    path: Path, protein: Protein, atoms: np.ndarray, confidence: np.ndarray, names: Sequence[str] = ATOMS
) -> None:
    """Write the atoms `names` [r, a, 3] Å of a protein's residues; the B factors are the confidence [r], 0 to 100.

    Residues are numbered by their place in the chain, from 1, as `read_structure` expects.
    """
    builder = StructureBuilder()
    builder.init_structure(protein.name)
    builder.init_model(0)
    chain = -1
    for i, letter in enumerate(protein.sequence):
        if protein.asym_id[i] != chain:
            chain = int(protein.asym_id[i])
            builder.init_chain(protein.chains[chain])
            builder.init_seg("")
        name = protein_letters_1to3.get(letter, "UNK").upper()
        builder.init_residue(name, " ", int(protein.residue_index[i]) + 1, " ")
        for atom, position in zip(names, atoms[i]):
            if (letter, atom) != ("G", "CB"):
                place = position.astype(np.float32)
                builder.init_atom(atom, place, round(float(confidence[i]), 2), 1.0, " ", f" {atom:<3}", element=atom[0])
    text, writer = io.StringIO(), MMCIFIO()
    writer.set_structure(builder.get_structure())
    writer.save(text)
    with whole_file(path) as file:
        file.write(text.getvalue().encode())
