"""Multiple sequence alignments from A3M, FASTA and Stockholm files, plain or gzipped.

The first sequence is the query. Columns without a residue of the query are removed; the number of a row's residues in
them is kept at the next column (`deletions`, as in AlphaFold's features). In A3M such residues are lowercase.

An A3M file may describe a complex. ColabFold's begins with the lengths of the chains and the number of copies of each,
as `#70,30<tab>1,2`; its rows span all chains in sequence, and a row with residues in several chains is paired. Servers
of MMseqs2 end the rows of a chain with a null byte.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from Bio import AlignIO
from Bio.Align import PairwiseAligner
from Bio.SeqIO.FastaIO import SimpleFastaParser

from zoo.data.protein.record import GAP, LETTERS, encode
from zoo.files import MAX_BYTES, read_text, refuse_page

__all__ = ["SUFFIXES", "Alignment", "describe_difference", "parse_fasta", "read_alignment", "species_of"]

MOST_PARTS = 10_000  # most parts of a row in a Stockholm file
SUFFIXES = (".a3m", ".fasta", ".fa", ".afa", ".fas", ".sto", ".stockholm", ".sth")


@dataclass(frozen=True, eq=False)
class Alignment:
    """Rows over the residues of a query, which is row 0. Letters: s rows, r residues of the query.

    The query of a complex is the sequence of all its different chains in a row. `mates`: rows of different chains with
    the same mate belong together; None: rows of the same species do, by their names.
    """

    names: tuple[str, ...]  # with their descriptions
    msa: np.ndarray  # [s, r] uint8, indices into LETTERS
    deletions: np.ndarray  # [s, r] number of residues left out just before this one, uint16
    source: str
    lengths: tuple[int, ...] = ()  # of the chains; () for a single chain
    copies: tuple[int, ...] = (1,)  # of each chain
    mates: tuple[str | None, ...] | None = None

    @property
    def query(self) -> str:
        return "".join(LETTERS[i] for i in self.msa[0])

    def mate(self, row: int) -> str | None:
        return species_of(self.names[row]) if self.mates is None else self.mates[row]

    def chains(self) -> list["Alignment"]:
        """One alignment for each chain, with the rows that have a residue in the chain."""
        if len(self.lengths) < 2:
            return [self]
        alignments, start = [], 0
        for length, copies in zip(self.lengths, self.copies):
            part = slice(start, start + length)
            rows = np.flatnonzero((self.msa[:, part] != GAP).any(1))
            names = tuple(self.names[i] for i in rows)
            mates = None if self.mates is None else tuple(self.mates[i] for i in rows)
            msa, deletions = (np.ascontiguousarray(x[rows, part]) for x in (self.msa, self.deletions))
            alignments.append(Alignment(names, msa, deletions, self.source, copies=(copies,), mates=mates))
            start += length
        return alignments


def read_alignment(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, max_rows: int = 1_000_000) -> Alignment:
    """The alignment in a file, with the format by suffix: .a3m, .fasta (.fa, .afa, .fas) or .sto (.stockholm, .sth).

    A ValueError names the file and the row at fault: no rows, rows of unequal length, invalid letters.
    """
    suffix = Path(str(path).removesuffix(".gz")).suffix.lower()
    text = read_text(path, max_bytes=max_bytes, nulls=suffix == ".a3m")
    try:
        if suffix not in SUFFIXES:
            raise ValueError(f"not an alignment by its name; expected one of {', '.join(SUFFIXES)}")
        refuse_page(text)
        blocks = [_block(block, suffix, max_rows) for block in text.split("\0") if block.strip() or block == text]
        same: dict[bytes, list[Block]] = {}  # by query
        for block in blocks or [_block("", suffix, max_rows)]:
            same.setdefault(block.msa[0].tobytes(), []).append(block)
        return _complex([_joined(group) for group in same.values()], _head(text), str(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class Block(NamedTuple):
    """Rows of one query: their names, letters [s, r] and the number of residues left out before each [s, r]."""

    names: tuple[str, ...]
    msa: np.ndarray
    deletions: np.ndarray


def _block(text: str, suffix: str, max_rows: int) -> Block:
    names, rows = _stockholm(text) if suffix.startswith(".st") else parse_fasta(text)
    if not rows:
        raise ValueError("it has no rows")
    if len(rows) > max_rows:
        raise ValueError(f"{len(rows)} rows, and the limit is {max_rows}")
    columns, left_out = _a3m(names, _unmasked(rows)) if suffix == ".a3m" else _aligned(names, rows)
    return Block(tuple(names), *_of_query(names, columns, left_out))


def _unmasked(rows: list[str]) -> list[str]:
    """Rows with the query in capitals, if its lowercase letters are masked residues rather than insertions."""
    query = rows[0]
    if not re.search("[a-z]", query):
        return rows
    if not any(re.search("[A-Z]", row) for row in rows):
        return [row.upper() for row in rows]
    columns = {len(re.sub("[a-z.*]", "", row)) for row in rows[1:]}
    return [query.upper(), *rows[1:]] if columns <= {len(re.sub("[.*]", "", query))} else rows


def _joined(blocks: Sequence[Block]) -> Block:
    """One block of several with the same query, which is kept once."""
    first, *tail = blocks
    names = (*first.names, *(name for block in tail for name in block.names[1:]))
    msa, deletions = (
        np.concatenate([getattr(first, field), *(getattr(block, field)[1:] for block in tail)])
        for field in ("msa", "deletions")
    )
    return Block(names, msa, deletions)


def _head(text: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The lengths of a complex's chains and the number of copies of each, if the file begins with them."""
    head = re.match(r"#(\d+(?:,\d+)*)[ \t]+(\d+(?:,\d+)*)\s*\n", text)
    if head is None:
        return None
    lengths, copies = (tuple(map(int, group.split(","))) for group in head.groups())
    if len(lengths) != len(copies) or not all(lengths + copies):
        raise ValueError(
            f"its first line is {head[0].strip()!r}: expected a length and a number of copies for each chain"
        )
    return lengths, copies


def _complex(blocks: Sequence[Block], head: tuple[tuple[int, ...], tuple[int, ...]] | None, source: str) -> Alignment:
    """The alignment over all chains of a file in sequence."""
    if len(blocks) == 1:
        block = blocks[0]
        if head is None:
            return Alignment(*block, source)
        lengths, copies = head
        if sum(lengths) != block.msa.shape[1]:
            said = ",".join(map(str, lengths))
            raise ValueError(f"its first line says chains of {said} residues, but its query has {block.msa.shape[1]}")
        parts = np.split(block.msa != GAP, np.cumsum(lengths)[:-1], axis=1)
        several = np.sum([part.any(1) for part in parts], axis=0) > 1
        mates = tuple(f"{source}: row {i}" if spans else None for i, spans in enumerate(several))
        return Alignment(*block, source, lengths, copies, mates)
    lengths = tuple(block.msa.shape[1] for block in blocks)
    starts = [0, *np.cumsum(lengths)]
    query = " ".join("".join(block.names[0].split()[:1]) for block in blocks)
    names = (query, *(name for block in blocks for name in block.names[1:]))
    msa = np.full((len(names), sum(lengths)), GAP, np.uint8)
    deletions, row = np.zeros(msa.shape, np.uint16), 1
    for block, start, end in zip(blocks, starts, starts[1:]):
        rows = slice(row, row := row + len(block.names) - 1)
        msa[0, start:end], msa[rows, start:end] = block.msa[0], block.msa[1:]
        deletions[rows, start:end] = block.deletions[1:]
    copies = head[1] if head is not None and head[0] == lengths else (1,) * len(lengths)
    return Alignment(names, msa, deletions, source, lengths, copies)


def parse_fasta(text: str) -> tuple[list[str], list[str]]:
    """The names and the rows of a FASTA text. A ValueError if it is none."""
    try:
        records = list(SimpleFastaParser(StringIO(text)))
    except ValueError as error:
        raise ValueError(f"not a FASTA file: {error}") from error
    return [name for name, _ in records], [row for _, row in records]


def _stockholm(text: str) -> tuple[list[str], list[str]]:
    if not text.rstrip().endswith("//"):
        raise ValueError("not a Stockholm file, or cut off: no // at its end")
    parts = Counter(line[1] for line in re.finditer(r"^([^#/\s]\S*)", text, re.MULTILINE))
    if parts and (most := max(parts.values())) > MOST_PARTS:  # the time to join them grows with their square
        raise ValueError(f"one row is in {most} parts, and the limit is {MOST_PARTS}")
    try:
        records = list(AlignIO.read(StringIO(text), "stockholm"))
    except Exception as error:  # the parser may raise any kind
        raise ValueError(f"not a readable Stockholm file: {error}") from error
    return [f"{r.id} {r.description}" if r.description != r.id else r.id for r in records], [
        str(r.seq) for r in records
    ]


_LOWER, _SKIP = 254, 253


def _classes(rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The class of each character of all rows, in sequence, and the row of each character."""
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
        raise ValueError(
            f"row {i + 1} ({_short(names[i])}) has {rows[i][column]!r} in column {column + 1}, which stands "
            "for no residue"
        )


def _a3m(names: Sequence[str], rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    classes, row = _classes(rows)
    _refuse_strange(names, rows, classes, row)
    matches = classes < _SKIP
    lengths = np.bincount(row[matches], minlength=len(rows))
    _refuse_unequal(names, lengths)
    inserted = np.cumsum(classes == _LOWER)[matches].reshape(len(rows), -1)
    before = np.concatenate([[0], np.cumsum(np.bincount(row[classes == _LOWER], minlength=len(rows)))[:-1]])
    return classes[matches].reshape(len(rows), -1), np.diff(inserted, axis=1, prepend=before[:, None])


def _aligned(names: Sequence[str], rows: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of equal length, insertions included, as in FASTA and Stockholm; `.` is a gap like `-`."""
    lengths = np.array([len(row) for row in rows])
    _refuse_unequal(names, lengths)
    rows = [row.upper().replace(".", "-") for row in rows]
    classes, row = _classes(rows)
    _refuse_strange(names, rows, classes, row)
    classes = np.where(classes == _SKIP, GAP, classes).reshape(len(rows), -1)
    return classes, np.zeros(classes.shape, np.int64)


def _of_query(names: Sequence[str], classes: np.ndarray, left_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns [s, r] with a residue of the query; residues of rows in other columns count as left out."""
    columns = classes[0] != GAP
    if not columns.any():
        raise ValueError(f"its first row ({_short(names[0])}) is nothing but gaps, and it is the query")
    inserted = np.cumsum(left_out + ((classes != GAP) & ~columns), axis=1)[:, columns]
    counts = np.minimum(np.diff(inserted, axis=1, prepend=0), np.iinfo(np.uint16).max)
    return np.ascontiguousarray(classes[:, columns]), counts.astype(np.uint16)


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
    """The species in the description of a row: UniRef's TaxID=, UniProt's OX= or the end of its entry name."""
    if match := re.search(r"(?:\bTaxID=|\bOX=)(\d+)", name):
        return match[1]
    match = re.match(r"(?:sp|tr)\|[^|\s]+\|[A-Z0-9]+_([A-Z0-9]+)", name)
    return match[1] if match else None


def describe_difference(query: str, sequence: str) -> str:
    """The similarity of two sequences that should be equal, and the place where they begin to differ."""
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
