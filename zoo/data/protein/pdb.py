"""Chains and atoms of PDB files."""

import io
from collections.abc import Sequence

from Bio.PDB.parse_pdb_header import parse_pdb_header

from zoo.data.protein.residues import Atoms, Chain, Residue, chains_of_atoms, is_protein, place_in_sequence

__all__ = ["parse_pdb"]


def parse_pdb(text: str, max_residues: int) -> tuple[list[Chain], Atoms]:
    """The chains of a text, and the atoms of its first model. A ValueError names the record at fault."""
    lines = text.splitlines()
    sequences, atoms = _sequences(lines, max_residues), _atoms(lines)
    if not sequences:
        return chains_of_atoms(atoms, [True] * len(atoms.chain)), atoms
    missing: dict[str, list[Residue]] = {}
    for gap in parse_pdb_header(io.StringIO(text))["missing_residues"]:
        if gap["model"] in (None, 1):
            key = f"{gap['ssseq']}{gap['insertion'] or ''}"
            missing.setdefault(gap["chain"], []).append(Residue(key, key, gap["res_name"]))
    seen: dict[str, dict[str, Residue]] = {}
    for chain, key, component in zip(atoms.chain, atoms.residue, atoms.component):
        if component in sequences.get(chain, ()):
            seen.setdefault(chain, {}).setdefault(key, Residue(key, key, component, seen=True))
    chains = []
    for chain, names in sequences.items():
        if is_protein(names):
            placed = place_in_sequence(chain, names, list(seen.get(chain, {}).values()), missing.get(chain, []))
            chains.append(Chain(chain, chain, " ".join(names), placed))
    return chains, atoms


def _sequences(lines: Sequence[str], max_residues: int) -> dict[str, list[str]]:
    """The names of the residues of each chain by SEQRES."""
    sequences: dict[str, list[str]] = {}
    residues = 0
    for number, line in enumerate(lines, 1):
        if line.startswith("ENDMDL"):
            break
        if line.startswith("SEQRES"):
            if len(line) < 20:
                raise ValueError(f"line {number}: a SEQRES record cut off after {len(line)} columns")
            names = line[19:70].split()
            sequences.setdefault(line[11], []).extend(names)
            residues += len(names)
            if residues > max_residues:
                raise ValueError(f"more than {max_residues} residues in SEQRES, which is the limit")
    return sequences


def _atoms(lines: Sequence[str]) -> Atoms:
    """The atoms of the first model, without the ligands and the water after the end of a chain."""
    rows: list[tuple[str, ...]] = []
    ended: set[str] = set()
    for number, line in enumerate(lines, 1):
        if line.startswith(("ATOM  ", "HETATM")):
            if len(line) < 54:
                raise ValueError(f"line {number}: an atom record cut off after {len(line)} columns")
            if line[21] not in ended:
                rows.append((
                    line[21], line[22:27].replace(" ", ""), line[17:20].strip(), line[12:16].strip(), line[16],
                    line[54:60].strip() or "1", line[30:38], line[38:46], line[46:54],
                ))  # fmt: skip
        elif line.startswith("TER") and rows:
            ended.add(rows[-1][0])
        elif line.startswith("ENDMDL") and rows:
            break
    return Atoms(*(list(column) for column in zip(*rows)))
