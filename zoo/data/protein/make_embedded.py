"""Make `embedded.npz` from wwPDB entries in the tests of packages on PyPI.

    pip download --no-deps --no-binary :all: biopython==1.88 MDAnalysisTests==2.11.0
    pip download --no-deps openfold3==0.5.0          (and unpack all three into one folder)
    python -m zoo.data.protein.make_embedded FOLDER

Entries of the wwPDB are in the public domain (CC0 1.0), from any source: https://www.wwpdb.org/about/usage-policies.
Only facts are kept of each entry: its sequence and the coordinates of four atoms a residue.
"""

import sys
from pathlib import Path

import numpy as np
from Bio.Align import PairwiseAligner, substitution_matrices

from zoo.data.protein.embedded import STEP, STORED
from zoo.data.protein.record import ATOMS, Protein, encode
from zoo.data.protein.structure import read_structure

SOURCES = {
    "openfold3 0.5.0": "openfold3/tests/test_data/mmcifs/*.cif",
    "biopython 1.88": "biopython-1.88/Tests/PDB/*.cif",
    "MDAnalysisTests 2.11.0": "mdanalysistests-2.11.0/MDAnalysisTests/data/dssp/?????.pdb.gz",
}
SHORTEST, LONGEST = 40, 420  # residues seen, of all chains together
CENTRE = [ATOMS.index("CA"), ATOMS.index("CB")]  # the atoms whose mean is the origin
ALIKE = 0.3  # identical residues, as a share of the shorter chain


def main(folder: Path) -> None:
    chosen: list[tuple[Protein, str]] = []
    for package, pattern in SOURCES.items():
        for path in sorted(folder.glob(pattern)):
            try:
                protein = read_structure(path)
            except ValueError as error:
                print(f"left out: {error}")
                continue
            seen = int(protein.contact_atoms()[1].sum())
            relative = next((other.name for other, _ in chosen if alike(protein, other)), None)
            if not SHORTEST <= seen <= LONGEST or max(map(len, protein.chains)) > 1:
                print(f"left out: {path.name}: {seen} residues")
            elif relative:
                print(f"left out: {path.name}: like {relative}")
            else:
                chosen.append((protein, f"{package}: {path.relative_to(folder)}"))
    save(chosen, Path(__file__).with_name("embedded.npz"))


def alike(a: Protein, b: Protein) -> bool:
    """Return True if a chain of one protein is a relative of a chain of the other."""
    aligner = PairwiseAligner(mode="local", open_gap_score=-11, extend_gap_score=-1)
    aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    for x in sequences(a):
        for y in sequences(b):
            if aligner.score(x, y) > 40:  # a cheap filter: relatives score higher
                identical = aligner.align(x, y)[0].counts().identities
                if identical > ALIKE * min(len(x), len(y)):
                    return True
    return False


def sequences(protein: Protein) -> set[str]:
    return {
        "".join(protein.sequence[i] for i in np.flatnonzero(protein.asym_id == chain))
        for chain in range(len(protein.chains))
    }


def save(chosen: list[tuple[Protein, str]], path: Path) -> None:
    proteins = [protein for protein, _ in chosen]
    positions = []
    for protein in proteins:
        resolved, middle = protein.resolved[:, STORED], protein.positions[:, CENTRE][protein.resolved[:, CENTRE]]
        centred = protein.positions[:, STORED] - middle.mean(0)
        steps = np.round(np.where(resolved[..., None], centred, 0) / STEP)
        assert abs(steps).max() < 2**15, protein.name
        positions.append(steps.astype(np.int16))
    np.savez_compressed(
        path,
        name=np.array([protein.name for protein in proteins]),
        source=np.array([source for _, source in chosen]),
        chains=np.array(["".join(protein.chains) for protein in proteins]),
        first=np.cumsum([0, *map(len, proteins)]).astype(np.int32),
        letters=np.concatenate([encode(protein.sequence) for protein in proteins]),
        asym_id=np.concatenate([protein.asym_id for protein in proteins]).astype(np.uint8),
        entity_id=np.concatenate([protein.entity_id for protein in proteins]).astype(np.uint8),
        residue_index=np.concatenate([protein.residue_index for protein in proteins]).astype(np.int16),
        resolved=np.concatenate([protein.resolved[:, STORED] for protein in proteins]),
        positions=np.concatenate(positions),
    )
    print(f"{len(proteins)} structures, {sum(map(len, proteins))} residues, {path.stat().st_size} bytes in {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
