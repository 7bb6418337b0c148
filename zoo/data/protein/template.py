"""Templates: structures of relatives, aligned to the residues of a protein.

1abc.cif                                     a protein
1abc.template1.cif  1abc.template_2xyz.pdb.gz   its templates, which are not proteins of their own
"""

import os
from collections.abc import Iterable

import numpy as np
from Bio.Align import PairwiseAligner, substitution_matrices

from zoo.data.protein.record import ATOMS, GAP, LETTERS, Protein, Template, encode
from zoo.data.protein.structure import read_structure

__all__ = ["align", "read_template", "template_owner"]

_MARK = ".template"
_SHORT = 15  # residues; for shorter chains, half of their own score is too little evidence
_ALIKE = 40.0  # least score of a relative: 3 of 1,431 unrelated pairs of real structures reach it


def template_owner(stem: str) -> str | None:
    """The name of the protein of a template, from the template's name; None for a structure that is not a template."""
    name, mark, _ = stem.partition(_MARK)
    return name if name and mark else None


def read_template(protein: Protein, path: str | os.PathLike[str]) -> Template:
    """The template of a protein in a file; a ValueError names the file and the fault."""
    try:
        return align(protein, read_structure(path))
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def align(protein: Protein, other: Protein) -> Template:
    """Align another protein to a protein as its template: each chain gets the best-fitting chain of the other.

    Global alignment by BLOSUM62: a gap costs 11, each further residue of it 1, gaps at the ends nothing. A chain has a
    template if the best score is at least 40, or half of the chain's score with itself if that is less (four fifths for
    chains shorter than 15). ValueError: no chain has a template.
    """
    aligner = PairwiseAligner(mode="global", open_gap_score=-11, extend_gap_score=-1, end_gap_score=0)
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    r, best = len(protein), 0.0
    source = np.full(r, -1)
    theirs: dict[str, np.ndarray] = {}
    for text, at in _chains(other):
        theirs.setdefault(text, at)  # the first of several copies
    for ours, at in _chains(protein):
        scores = {text: float(aligner.score(ours, text)) for text in theirs}
        chosen = max(scores, key=scores.__getitem__)
        best = max(best, scores[chosen])
        ideal = aligner.score(ours, ours)
        if scores[chosen] >= min(_ALIKE, ideal * (0.8 if len(ours) < _SHORT else 0.5)):
            for (start, end), (first, _) in zip(*aligner.align(ours, chosen)[0].aligned):
                source[at[start:end]] = theirs[chosen][first : first + end - start]
    if (source < 0).all():
        raise ValueError(f"none of its chains resembles one of {protein.name}: the best alignment scores {best:.0f}")
    matches = source >= 0
    letters = np.full(r, GAP, np.uint8)
    letters[matches] = encode(other.sequence)[source[matches]]
    positions, resolved = np.zeros((r, len(ATOMS), 3), np.float32), np.zeros((r, len(ATOMS)), bool)
    positions[matches], resolved[matches] = other.positions[source[matches]], other.resolved[source[matches]]
    return Template(other.name, letters, positions, resolved)


def _chains(protein: Protein) -> Iterable[tuple[str, np.ndarray]]:
    """Each chain in letters of LETTERS, and the places of its residues."""
    letters = encode(protein.sequence)
    for chain in np.unique(protein.asym_id):
        at = np.flatnonzero(protein.asym_id == chain)
        yield "".join(LETTERS[letter] for letter in letters[at]), at
