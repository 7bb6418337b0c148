"""Alignments as their makers write them: ColabFold's complexes, MMseqs2's blocks, byte order marks, masked queries."""

from __future__ import annotations

import gzip
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.complexes import as_a3m
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.inputs import find_proteins, from_alignments
from zoo.data.protein.record import GAP, LETTERS, Protein

A, B = "MDIRQGPKEPFRDYVDRFYK", "TLRAEQASQEVK"
HIT = ">UniRef100_A0A1\t95\nMDIRQacGPKEPFRDYVDRFYK\n"


def written(folder: Path, text: str | bytes, name: str = "q.a3m") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def protein(folder: Path, text: str, name: str = "q.a3m") -> Protein:
    """The one protein of a file."""
    (given,) = find_proteins([written(folder, text, name)])
    return given.read()


@pytest.mark.parametrize(
    "text",
    [
        f">101\n{A}\n{HIT}\0",
        f">101\n{A}\n{HIT}\0>101\n{A}\n\0",
        f"\ufeff>101\n{A}\n{HIT}",
        f">101\n{A}\n{HIT}".encode("utf-16"),
        f">101\n{A.lower()}\n{HIT}",
        f">101\n{A[:5].lower()}{A[5:]}\n{HIT}",
        gzip.compress(f">101\n{A}\n{HIT}".encode()),
        f"#{len(A)}\t1\n>101\n{A}\n{HIT}",
    ],
    ids="null twice mark utf-16 lower masked gzip head".split(),
)
def test_formats_of_alignment_makers(tmp_path, text: str | bytes) -> None:
    found = read_alignment(written(tmp_path, text))
    assert found.query == A
    assert found.msa.shape == (2, len(A))
    assert found.deletions[1].tolist() == [2 if i == 5 else 0 for i in range(len(A))]


def test_lower_case_insertions_of_a_query_are_not_a_mask(tmp_path) -> None:
    found = read_alignment(written(tmp_path, f">q\n{A[:4]}gg{A[4:]}\n>h\n{A}\n"))
    assert found.query == A


COMPLEX = f"""#{len(A)},{len(B)}\t1,1
>101\t102
{A}{B}
>a\tb
{A[:-1]}-{B}
>101
{A}{"-" * len(B)}
>c
-{A[1:]}{"-" * len(B)}
>102
{"-" * len(A)}{B}
>d
{"-" * len(A)}-{B[1:]}
"""


def test_a_complex_of_colabfold(tmp_path) -> None:
    found = protein(tmp_path, COMPLEX)
    assert found.chains == ("A", "B")
    assert found.sequence == A + B
    assert found.asym_id.tolist() == [0] * len(A) + [1] * len(B)
    assert found.entity_id.tolist() == found.asym_id.tolist()
    assert found.residue_index.tolist() == [*range(len(A)), *range(len(B))]
    assert found.paired.tolist() == [True, True, False, False]
    first, second = found.msa[:, : len(A)] != GAP, found.msa[:, len(A) :] != GAP
    assert first.any(1).tolist() == [True, True, True, False]
    assert second.any(1).tolist() == [True, True, False, True]


def test_copies_of_a_chain(tmp_path) -> None:
    found = protein(tmp_path, COMPLEX.replace("1,1", "2,1"))
    assert found.chains == ("A", "B", "C")
    assert found.sequence == A + A + B
    assert found.entity_id.tolist() == [0] * 2 * len(A) + [1] * len(B)
    np.testing.assert_array_equal(found.msa[:, : len(A)], found.msa[:, len(A) : 2 * len(A)])
    assert found.paired.tolist() == [True, True, False, False]
    assert protein(tmp_path, f"#{len(A)}\t2\n>101\n{A}\n{HIT}", "two.a3m").sequence == A + A


def test_rows_of_chains_that_are_alike_stay_pairs(tmp_path) -> None:
    """Also where one of two partners is there twice."""
    two = f">a\tb\n{A}{B[:-1]}-\n>e\tf\n{A}-{B[1:]}\n"
    found = protein(tmp_path, f"#{len(A)},{len(B)}\t1,1\n>101\t102\n{A}{B}\n{two}")
    assert found.paired.tolist() == [True] * 3


CHAINS = (A, B, "GSHMLEDPVDAF", "WWYYWKTAYIAK")


@pytest.mark.parametrize("n", [2, 3, 4])
def test_rows_over_some_of_the_chains_stay_as_the_file_has_them(tmp_path, n: int) -> None:
    """Random rows over random chains, some of them twice: each is there once, with gaps where it has no residue."""
    random, chains = np.random.default_rng(n), CHAINS[:n]

    def row() -> str:
        hit = [np.where(random.random(len(c)) < 0.8, list(c), random.choice(list("ACDEF"), len(c))) for c in chains]
        return "".join("".join(part) if random.random() < 0.6 else "-" * len(part) for part in hit)

    rows = [text for text in (row() for _ in range(40)) if text.strip("-")]
    parts = [*pairwise([0, *np.cumsum([len(chain) for chain in chains])])]
    torn = ["-" * a + rows[0][a:b] + "-" * (len("".join(chains)) - b) for a, b in parts]  # as rows of single chains
    alone = ["-" * a + "".join(chains)[a:b] + "-" * (len("".join(chains)) - b) for a, b in parts]
    rows += [rows[3], *(text for text in torn if text.strip("-")), *alone]
    head = f"#{','.join(str(len(chain)) for chain in chains)}\t{','.join('1' * n)}\n>query\n{''.join(chains)}\n"
    found = protein(tmp_path, head + "".join(f">{i}\n{text}\n" for i, text in enumerate(rows)))
    letters = ["".join(LETTERS[letter] for letter in row) for row in found.msa]
    assert letters[0] == "".join(chains)
    assert sorted(letters[1:]) == sorted({*rows} - {*alone})  # which repeat the first row
    counts = [sum(bool(text[a:b].strip("-")) for a, b in parts) for text in letters]
    assert found.paired.tolist() == [count > 1 for count in counts]
    assert counts[: sum(found.paired)] == sorted(counts[: sum(found.paired)], reverse=True)
    again = protein(tmp_path, as_a3m(found), "again.a3m")
    np.testing.assert_array_equal(again.msa, found.msa)


def test_blocks_of_two_queries_are_two_chains(tmp_path) -> None:
    found = protein(tmp_path, f">101\n{A}\n>x TaxID=9 \n{A}\n\0>102\n{B}\n>y TaxID=9 \n-{B[1:]}\n\0")
    assert found.sequence == A + B
    assert found.chains == ("A", "B")


ALONE = f">101\n{A}\n{HIT}"


@pytest.mark.parametrize(
    ("text", "head"),
    [
        *((COMPLEX.replace("1,1", n), f"#{len(A)},{len(B)}\t{n}\n>101\t102\n") for n in ("1,1", "2,1", "1,3")),
        (ALONE, ">"),
    ],
)
def test_written_and_read_again(tmp_path, text: str, head: str) -> None:
    one = from_alignments("q", [read_alignment(written(tmp_path, text))])
    again = as_a3m(one)
    assert again.startswith(head)
    two = from_alignments("q", [read_alignment(written(tmp_path, again, "again.a3m"))])
    for name in ("msa", "deletions", "paired", "asym_id", "entity_id", "residue_index"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"#{len(A)},9\t1,1\n>101\t102\n{A}{B}\n", "its first line says chains of 20,9 residues, but its query has 32"),
        (f"#{len(A)},{len(B)}\t1\n>101\t102\n{A}{B}\n", "expected a length and a number of copies for each chain"),
        ("", "it is empty: was it downloaded to its end"),
    ],
)
def test_invalid_alignments_are_refused(tmp_path, text: str, said: str) -> None:
    refused(said, read_alignment, written(tmp_path, text))


@pytest.mark.parametrize(
    "text", [">x\n1234\n", "", f">x\n{A}\n", b"\x1f\x8bno gzip"], ids="letters empty other packed".split()
)
def test_a_bad_alignment_is_skipped_and_its_structure_kept(tmp_path, text: str | bytes, caplog) -> None:
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path)
    bad = written(tmp_path, text, "1A8O.a3m")
    found = ProteinFolder(tmp_path)
    assert found.names == ["1A8O"]
    assert len(found.protein(0).msa) == 1
    assert [path for path, _ in found.skipped] == [bad]
    assert f"skipped {bad}" in caplog.text
