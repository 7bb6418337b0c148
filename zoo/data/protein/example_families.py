"""Structures with alignments, to try the way from files to contacts without alignments of one's own.

    python -m zoo.data.protein.example_families DIR [--families 40]

writes `DIR/NAME.cif` and `DIR/NAME.a3m`: 56 residues of a structure that comes with the package, each of another one,
and 512 sequences that evolved on it by the law of `zoo.data.protein.synthetic`. Natural alignments are harder. Needs
the extra `protein`.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from zoo.data.protein.record import ATOMS
from zoo.data.protein.synthetic import PottsFamilies
from zoo.data.protein.write import write_alignment, write_structure
from zoo.training import user_error
from zoo.training.console import command

__all__ = ["write_families"]

RESIDUES, ROWS = 56, 512
STORED = [ATOMS.index(name) for name in ("N", "CA", "C", "CB")]  # without O, which is not in the package


def write_families(
    folder: Path, families: int, *, residues: int = RESIDUES, rows: int = ROWS,
    on_family: Callable[[int], None] = lambda count: None,
) -> None:  # fmt: skip
    """Write structures of one chain, of which every residue was seen, and their alignments.

    on_family: called with the number of families written so far. ValueError: there are not so many structures.
    """
    source, written = PottsFamilies(families=1 << 20, residues=residues, rows=rows), set[str]()
    if families > (most := sum(len(p.chains) == 1 and bool(p.contact_atoms()[1].all()) for p in source.structures)):
        raise ValueError(f"--families {families}: the package has {most} structures of one chain, each residue seen")
    folder.mkdir(parents=True, exist_ok=True)
    for protein in map(source.protein, range(source.families)):
        if len(written) == families:
            return
        name = protein.name.partition(" ")[0]
        if name in written or len(protein.chains) > 1 or not protein.resolved[:, STORED].all():
            continue
        protein = replace(protein, name=name, residue_index=np.arange(residues))
        atoms = protein.positions[:, STORED]
        write_structure(folder / f"{name}.cif", protein, atoms, np.zeros(residues), [ATOMS[i] for i in STORED])
        write_alignment(folder / f"{name}.a3m", protein)
        written.add(name)
        on_family(len(written))


def main(arguments: Sequence[str]) -> int:
    shape = argparse.RawDescriptionHelpFormatter
    program = "python -m zoo.data.protein.example_families"
    parser = argparse.ArgumentParser(program, description=__doc__, formatter_class=shape)
    parser.add_argument("dir", type=Path, help="the folder to write")
    parser.add_argument("--families", type=int, default=40, help="how many (default 40)")
    options = parser.parse_args(arguments)

    def say(count: int) -> None:
        if count % 10 == 0:
            print(f"{count} of {options.families} families", flush=True)

    def work() -> Iterator[str]:
        notes, zoo = logging.StreamHandler(sys.stdout), logging.getLogger("zoo")
        zoo.addHandler(notes)
        zoo.setLevel(logging.INFO)
        print(f"drawing {ROWS} sequences for each family, 64 families at a time: a minute or two", flush=True)
        try:
            user_error(write_families, options.dir, options.families, on_family=say)
        finally:
            zoo.removeHandler(notes)
        yield f"{options.families} structures, and the alignment of each, to {options.dir}"

    return command(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
