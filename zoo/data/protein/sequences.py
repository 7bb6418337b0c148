"""Single chains in files, for models that read one sequence: FASTA, queries of alignments, chains of structures."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from zoo.data.protein.alignment import parse_fasta, read_alignment
from zoo.data.protein.folder import kind, stem
from zoo.data.protein.inputs import from_sequences, list_files, refuse_same_names
from zoo.data.protein.record import Protein, encode
from zoo.data.protein.structure import read_structure
from zoo.files import read_text, refuse_page

__all__ = ["read_chains"]

FASTA = (".fasta", ".fa", ".fas")


def read_chains(paths: Sequence[str | os.PathLike[str]]) -> list[Protein]:
    """One protein of one chain for each different sequence in files and folders, in order.

    A FASTA file without gaps has a sequence in each record, named by the record's first word, or by the file if there
    is only one; of every other alignment the query counts. Of a structure each chain counts once. A sequence that is
    the chain of a structure, too, has that chain's positions. ValueError: a file cannot be read, or two sequences have
    one name.
    """
    files = list_files(paths)
    true: dict[str, Protein] = {}
    for path in files:
        for chain in _chains(read_structure(path)) if kind(path) == "structure" else ():
            true.setdefault(chain.sequence, chain)
    proteins: dict[str, Protein] = {}
    for path in files:
        for name, sequence in _sequences(path) if kind(path) == "alignment" else ():
            known = true.get(sequence)
            protein = from_sequences(name, [sequence]) if known is None else replace(known, name=name)
            proteins.setdefault(sequence, protein)
    proteins = {**proteins, **{sequence: chain for sequence, chain in true.items() if sequence not in proteins}}
    refuse_same_names({f"{sequence[:20]}...": protein.name for sequence, protein in proteins.items()})
    return list(proteins.values())


def _sequences(path: Path) -> Iterator[tuple[str, str]]:
    """The names and the sequences of a file that may be an alignment."""
    if path.name.lower().removesuffix(".gz").endswith(FASTA):
        text = read_text(path)
        try:
            refuse_page(text)
            names, rows = parse_fasta(text)
            rows = [row.upper().removesuffix("*") for row in rows]
            if not any("-" in row or "." in row for row in rows):
                yield from zip(_file_names(names, path), map(_sound, names, rows))
                return
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    chains = read_alignment(path).chains()
    yield from ((f"{stem(path)}_{i}" if len(chains) > 1 else stem(path), c.query) for i, c in enumerate(chains, 1))


def _file_names(names: Sequence[str], path: Path) -> list[str]:
    """Names of results for the records of a file: the first word of each, without what no file's name may have."""
    if len(names) == 1:
        return [stem(path)]
    return [re.sub(r"[^\w.-]", "_", (name.split() or [str(i)])[0])[:80] for i, name in enumerate(names, 1)]


def _sound(name: str, sequence: str) -> str:
    """The sequence; a ValueError for one that is empty or has characters that stand for no residue."""
    strange = [letter for letter, code in zip(sequence, encode(sequence)) if code == 255]
    if strange or not sequence:
        raise ValueError(f"{name[:40]!r} has {f'{strange[0]!r}, which stands for' if strange else ''} no residue")
    return sequence


def _chains(protein: Protein) -> Iterator[Protein]:
    """Each chain of a structure as a protein of its own, named by file and chain if there are several."""
    for i, chain in enumerate(protein.chains):
        one = protein.take(np.flatnonzero(protein.asym_id == i))
        zeros = np.zeros_like(one.asym_id)
        name = f"{protein.name}_{chain}" if len(protein.chains) > 1 else protein.name
        yield replace(one, name=name, chains=(chain,), asym_id=zeros, entity_id=zeros)
