"""Multiple sequence alignments from A3M, FASTA and Stockholm files, plain or gzipped.

What counts is the first sequence, the query: columns in which it has no residue are taken out, and what a row has there
is counted before the next column (`deletions`, as AlphaFold's features have it). In A3M such residues are lowercase.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np
from Bio import AlignIO
from Bio.Align import PairwiseAligner
from Bio.SeqIO.FastaIO import SimpleFastaParser

from zoo.data.protein.files import MAX_BYTES, read_text
from zoo.data.protein.record import GAP, LETTERS, encode

__all__ = ["SUFFIXES", "Alignment", "describe_difference", "read_alignment", "species_of"]

MOST_PARTS = 10_000  # of a row in a Stockholm file
SUFFIXES = (".a3m", ".fasta", ".fa", ".afa", ".fas", ".sto", ".stockholm", ".sth")


@dataclass(frozen=True, eq=False)
class Alignment:
    """Rows over the residues of a query, which is row 0. Letters: s rows, r residues of the query."""

    names: tuple[str, ...]  # with their descriptions
    msa: np.ndarray  # [s, r] uint8, indices into LETTERS
    deletions: np.ndarray  # [s, r] residues left out just before this one, uint16
    source: str

    @property
    def query(self) -> str:
        return "".join(LETTERS[i] for i in self.msa[0])


def read_alignment(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, max_rows: int = 1_000_000) -> Alignment:
    """The alignment in a file, whose suffix says the format: .a3m, .fasta (.fa, .afa, .fas) or .sto (.stockholm, .sth).

    Raises ValueError with the file's name and the row that is wrong: no rows, rows of unequal length, strange letters.
    """
    suffix = Path(str(path).removesuffix(".gz")).suffix.lower()
    text = read_text(path, max_bytes=max_bytes)
    try:
        if suffix not in SUFFIXES:
            raise ValueError(f"not an alignment by its name; expected one of {', '.join(SUFFIXES)}")
        names, rows = _stockholm(text) if suffix.startswith(".st") else _fasta(text)
        if not rows:
            raise ValueError("it has no rows")
        if len(rows) > max_rows:
            raise ValueError(f"{len(rows)} rows, and the limit is {max_rows}")
        columns, left_out = _a3m(names, rows) if suffix == ".a3m" else _aligned(names, rows)
        return Alignment(tuple(names), *_of_query(names, columns, left_out), str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _fasta(text: str) -> tuple[list[str], list[str]]:
    try:
        records = list(SimpleFastaParser(StringIO(text)))
    except ValueError as error:
        raise ValueError(f"not a FASTA file: {error}") from error
    return [name for name, _ in records], [row for _, row in records]


def _stockholm(text: str) -> tuple[list[str], list[str]]:
    if not text.rstrip().endswith("//"):
        raise ValueError("not a Stockholm file, or cut off: no // at its end")
    parts = Counter(found[1] for found in re.finditer(r"^([^#/\s]\S*)", text, re.MULTILINE))
    if parts and (most := max(parts.values())) > MOST_PARTS:  # the time to join them grows with their square
        raise ValueError(f"one row is in {most} parts, and the limit is {MOST_PARTS}")
    try:
        records = list(AlignIO.read(StringIO(text), "stockholm"))
    except Exception as error:  # whatever it stumbles over
        raise ValueError(f"not a readable Stockholm file: {error}") from error
    return [f"{r.id} {r.description}" if r.description != r.id else r.id for r in records], [
        str(r.seq) for r in records
    ]


_LOWER, _SKIP = 254, 253


def _classes(rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Of all characters of all rows, one after another, what they are; and the row that each belongs to."""
    raw = "".join(rows).encode("latin-1", "replace")
    letters = np.frombuffer(raw, np.uint8)
    classes = encode(raw)
    classes[(letters >= ord("a")) & (letters <= ord("z"))] = _LOWER
    classes[(letters == ord(".")) | (letters == ord("*"))] = _SKIP
    return classes, np.repeat(np.arange(len(rows)), [len(row) for row in rows])


def _refuse_strange(names: Sequence[str], rows: Sequence[str], classes: np.ndarray, row: np.ndarray) -> None:
    for place in np.flatnonzero(classes == 255)[:1]:
        i = row[place]
        column = place - np.searchsorted(row, i)
        raise ValueError(f"row {i + 1} ({_short(names[i])}) has {rows[i][column]!r} in column {column + 1}")


def _a3m(names: Sequence[str], rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    classes, row = _classes(rows)
    _refuse_strange(names, rows, classes, row)
    kept = classes < _SKIP
    lengths = np.bincount(row[kept], minlength=len(rows))
    _refuse_unequal(names, lengths)
    inserted = np.cumsum(classes == _LOWER)[kept].reshape(len(rows), -1)
    before = np.concatenate([[0], np.cumsum(np.bincount(row[classes == _LOWER], minlength=len(rows)))[:-1]])
    return classes[kept].reshape(len(rows), -1), np.diff(inserted, axis=1, prepend=before[:, None])


def _aligned(names: Sequence[str], rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of equal length, insertions included, as in FASTA and Stockholm; `.` is a gap as `-` is."""
    lengths = np.array([len(row) for row in rows])
    _refuse_unequal(names, lengths)
    rows = [row.upper().replace(".", "-") for row in rows]
    classes, row = _classes(rows)
    _refuse_strange(names, rows, classes, row)
    classes = np.where(classes == _SKIP, GAP, classes).reshape(len(rows), -1)
    return classes, np.zeros(classes.shape, np.int64)


def _of_query(names: Sequence[str], classes: np.ndarray, left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns [s, r] in which the query has a residue; what rows have in the others counts as left out."""
    kept = classes[0] != GAP
    if not kept.any():
        raise ValueError(f"its first row ({_short(names[0])}) is nothing but gaps, and it is the query")
    inserted = np.cumsum(left_out + ((classes != GAP) & ~kept), axis=1)[:, kept]
    counts = np.minimum(np.diff(inserted, axis=1, prepend=0), np.iinfo(np.uint16).max)
    return np.ascontiguousarray(classes[:, kept]), counts.astype(np.uint16)


def _refuse_unequal(names: Sequence[str], lengths: np.ndarray) -> None:
    if not lengths[0]:
        raise ValueError(f"its first row ({_short(names[0])}) is empty, and it is the query")
    for i in np.flatnonzero(lengths != lengths[0])[:1]:
        raise ValueError(
            f"row {i + 1} ({_short(names[i])}) has {lengths[i]} columns, the first row {lengths[0]}: not an alignment"
        )


def _short(name: str) -> str:
    return name.split()[0][:40] if name.split() else "without a name"


def species_of(name: str) -> str | None:
    """The species that the description of a row names: UniRef's TaxID=, UniProt's OX= or the end of its entry name."""
    if found := re.search(r"(?:\bTaxID=|\bOX=)(\d+)", name):
        return found[1]
    found = re.match(r"(?:sp|tr)\|[^|\s]+\|[A-Z0-9]+_([A-Z0-9]+)", name)
    return found[1] if found else None


def describe_difference(query: str, sequence: str) -> str:
    """How like two sequences are that should be one, and where they begin to differ."""
    aligner = PairwiseAligner(scoring="blastp")
    alignment = aligner.align(*(re.sub("[-JOU]", "X", text) for text in (sequence, query)))[0]  # no letters of BLOSUM
    pairs = [
        (i, j)
        for (a, b), (c, d) in zip(*alignment.aligned)
        for i, j in zip(range(a, b), range(c, d))
        if sequence[i] == query[j]
    ]
    share = len(pairs) / max(len(query), len(sequence))
    first = next((i for i, (a, b) in enumerate(zip(query, sequence)) if a != b), min(len(query), len(sequence)))
    ours, theirs = (text[first] if first < len(text) else "the end" for text in (sequence, query))
    return (
        f"{len(query)} and {len(sequence)} residues, {share:.0%} identical when aligned; "
        f"they differ from residue {first + 1} on: {theirs} in the alignment, {ours} in the structure"
    )
