"""Forty domains of Pfam with a structure each, as files for contacts.py.

    git clone https://github.com/Kortemme-Lab/covariation
    python benchmarks/models/pfam_domains.py covariation domains
    python benchmarks/models/contacts.py domains runs/seed0 ...

The data of Ollikainen and Kortemme (PLoS Comput Biol 2013, 9:e1003313), MIT: `analysis/natural_alignments`, alignments
of Pfam in which no two rows share 80%; `analysis/domain_sequences.txt`, a chain of the PDB in the columns of each;
`input/domains`, that chain. Of it the residues that stand in a column are written, `NAME.pdb` and `NAME.a3m`.
"""

import argparse
import sys
from difflib import SequenceMatcher
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from Bio.Data.PDBData import protein_letters_3to1_extended as LETTER


def chain(path: Path) -> dict[str, list[str]]:
    """Lines of a PDB file by residue, one letter and its number: {"M 12A": [...], ...}."""
    residues: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith(("ATOM", "HETATM")) and line[17:20] in LETTER:
            residues.setdefault(f"{LETTER[line[17:20]]} {line[22:27]}", []).append(line)
    return residues


def rows_of(path: Path) -> list[str]:
    parts = path.read_text().split(">")[1:]
    return ["".join(part.split("\n")[1:]).upper().replace(".", "-") for part in parts]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkout", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for line in (options.checkout / "analysis/domain_sequences.txt").read_text().splitlines():
        name, pdb, query = line.split()
        alignment = options.checkout / f"analysis/natural_alignments/{name}.align.80"
        structures = list((options.checkout / f"input/domains/{name}").glob("*.pdb"))
        if not alignment.exists() or not structures:
            continue
        residues = chain(structures[0])
        columns = [i for i, letter in enumerate(query) if letter != "-"]
        own = "".join(query[i] for i in columns)
        blocks = SequenceMatcher(None, own, "".join(key[0] for key in residues), autojunk=False).get_matching_blocks()
        pairs = [(columns[block.a + k], list(residues)[block.b + k]) for block in blocks for k in range(block.size)]
        lines = [line for _, residue in pairs for line in residues[residue]]
        (options.out / f"{name}.pdb").write_text("\n".join([*lines, "END", ""]))
        texts = ["".join(row[i] for i, _ in pairs) for row in [query, *rows_of(alignment)]]
        (options.out / f"{name}.a3m").write_text("".join(f">{i}\n{text}\n" for i, text in enumerate(texts)))
        print(f"{name} {pdb}: {len(pairs)} residues, {len(texts)} rows")


if __name__ == "__main__":
    main()
