"""Alignments as their makers write them: ColabFold's complexes, MMseqs2's blocks, byte order marks, masked queries."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.paths import STRUCTURES
from zoo.data.protein.alignment import read_alignment
from zoo.data.protein.complexes import as_a3m
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.given import find, from_alignments
from zoo.data.protein.record import GAP

A, B = "MDIRQGPKEPFRDYVDRFYK", "TLRAEQASQEVK"
HIT = ">UniRef100_A0A1\t95\nMDIRQacGPKEPFRDYVDRFYK\n"


def written(folder: Path, text: str | bytes, name: str = "q.a3m") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


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
def test_read_as_it_is_meant(tmp_path, text: str | bytes) -> None:
    found = read_alignment(written(tmp_path, text))
    assert found.query == A
    assert found.msa.shape == (2, len(A))
    assert found.deletions[1].tolist() == [2 if i == 5 else 0 for i in range(len(A))]


def test_insertions_of_a_query_are_no_mask(tmp_path) -> None:
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
    path = written(tmp_path, COMPLEX)
    (given,) = find([path])
    protein = given.read()
    assert protein.chains == ("A", "B")
    assert protein.sequence == A + B
    assert protein.asym_id.tolist() == [0] * len(A) + [1] * len(B)
    assert protein.entity_id.tolist() == protein.asym_id.tolist()
    assert protein.residue_index.tolist() == [*range(len(A)), *range(len(B))]
    assert protein.paired.tolist() == [True, True, False, False]
    first, second = protein.msa[:, : len(A)] != GAP, protein.msa[:, len(A) :] != GAP
    assert first.any(1).tolist() == [True, True, True, False]
    assert second.any(1).tolist() == [True, True, False, True]


def test_several_copies(tmp_path) -> None:
    protein = find([written(tmp_path, COMPLEX.replace("1,1", "2,1"))])[0].read()
    assert protein.chains == ("A", "B", "C")
    assert protein.sequence == A + A + B
    assert protein.entity_id.tolist() == [0] * 2 * len(A) + [1] * len(B)
    np.testing.assert_array_equal(protein.msa[:, : len(A)], protein.msa[:, len(A) : 2 * len(A)])
    assert protein.paired.tolist() == [True, True, False, False]
    (alone,) = find([written(tmp_path, f"#{len(A)}\t2\n>101\n{A}\n{HIT}", "two.a3m")])
    assert alone.read().sequence == A + A


def test_rows_of_chains_that_are_alike_stay_pairs(tmp_path) -> None:
    """Also where one of two partners is there twice."""
    two = f">a\tb\n{A}{B[:-1]}-\n>e\tf\n{A}-{B[1:]}\n"
    protein = find([written(tmp_path, f"#{len(A)},{len(B)}\t1,1\n>101\t102\n{A}{B}\n{two}")])[0].read()
    assert protein.paired.tolist() == [True] * 3


def test_blocks_of_two_queries_are_two_chains(tmp_path) -> None:
    protein = find([written(tmp_path, f">101\n{A}\n>x TaxID=9 \n{A}\n\0>102\n{B}\n>y TaxID=9 \n-{B[1:]}\n\0")])[
        0
    ].read()
    assert protein.sequence == A + B
    assert protein.chains == ("A", "B")


@pytest.mark.parametrize("copies", ["1,1", "2,1", "1,3"])
def test_written_and_read_again(tmp_path, copies: str) -> None:
    one = from_alignments("q", [read_alignment(written(tmp_path, COMPLEX.replace("1,1", copies)))])
    text = as_a3m(one)
    assert text.startswith(f"#{len(A)},{len(B)}\t{copies}\n>101\t102\n")
    two = from_alignments("q", [read_alignment(written(tmp_path, text, "again.a3m"))])
    for name in ("msa", "deletions", "paired", "asym_id", "entity_id", "residue_index"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name), name)


def test_a_single_chain_written_and_read_again(tmp_path) -> None:
    one = from_alignments("q", [read_alignment(written(tmp_path, f">101\n{A}\n{HIT}"))])
    two = from_alignments("q", [read_alignment(written(tmp_path, as_a3m(one), "again.a3m"))])
    assert "#" not in as_a3m(one)
    np.testing.assert_array_equal(one.msa, two.msa)
    np.testing.assert_array_equal(one.deletions, two.deletions)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"#{len(A)},9\t1,1\n>101\t102\n{A}{B}\n", "its chains have 20,9 residues by its first line, and its query 32"),
        (f"#{len(A)},{len(B)}\t1\n>101\t102\n{A}{B}\n", "expected a length and a number of copies a chain"),
        ("", "it has no rows"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_alignment(written(tmp_path, text))


@pytest.mark.parametrize(
    "text", [">x\n1234\n", "", f">x\n{A}\n", b"\x1f\x8bno gzip"], ids="letters empty other packed".split()
)
def test_a_bad_alignment_costs_no_structure(tmp_path, text: str | bytes, caplog) -> None:
    shutil.copy(STRUCTURES / "1A8O.cif.gz", tmp_path)
    bad = written(tmp_path, text, "1A8O.a3m")
    found = ProteinFolder(tmp_path)
    assert found.names == ["1A8O"]
    assert len(found.protein(0).msa) == 1
    assert [path for path, _ in found.skipped] == [bad]
    assert f"skipped {bad}" in caplog.text
