"""Structures and alignments from files: every field against what the file says, and files that cannot be trusted."""

import gzip
import importlib.util
import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from Bio.Data.PDBData import protein_letters_3to1
from Bio.PDB.MMCIF2Dict import MMCIF2Dict

from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein import folder, mmcif
from zoo.data.protein.alignment import read_alignment, species_of
from zoo.data.protein.record import ATOMS, LETTERS, encode
from zoo.data.protein.structure import read_structure


def openfold(name):
    spec = importlib.util.find_spec("openfold3")
    if spec is None or spec.origin is None:
        pytest.skip("openfold3, whose test data this reads, is not installed")
    return Path(spec.origin).parent / "tests" / "test_data" / name


def table(path, category):
    """One table of an mmCIF file as a list of dicts."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        columns = {
            key.split(".")[1]: values for key, values in MMCIF2Dict(file).items() if key.startswith(f"_{category}.")
        }
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def residue_of(protein, chain, number):
    (place,) = (i for i in np.flatnonzero(protein.asym_id == chain) if protein.residue_ids[i] == number)
    return place


def check_mmcif(path, altlocs=None):
    """Everything that is read of an mmCIF file, against its tables, row by row."""
    protein = read_structure(path)
    canonical = {
        row["entity_id"]: row["pdbx_seq_one_letter_code_can"].replace("\n", "")
        for row in table(path, "entity_poly")
        if row["type"] == "polypeptide(L)"
    }
    first_of_place = {}  # one row a place
    for row in table(path, "pdbx_poly_seq_scheme"):
        if row["entity_id"] in canonical:
            first_of_place.setdefault((row["asym_id"], row["seq_id"]), row)
    scheme = list(first_of_place.values())
    assert len(protein) == len(scheme)
    asyms = list(dict.fromkeys(row["asym_id"] for row in scheme))
    entities = list(dict.fromkeys(row["entity_id"] for row in scheme))
    strands = {row["asym_id"]: row["pdb_strand_id"] for row in scheme}
    assert protein.chains == tuple(strands[asym] for asym in asyms)
    assert protein.asym_id.tolist() == [asyms.index(row["asym_id"]) for row in scheme]
    assert protein.entity_id.tolist() == [entities.index(row["entity_id"]) for row in scheme]
    assert protein.residue_index.tolist() == [int(row["seq_id"]) - 1 for row in scheme]
    ids = tuple(row["pdb_seq_num"] + row["pdb_ins_code"].strip(".?") for row in scheme)
    assert protein.residue_ids == ids
    for i, asym in enumerate(asyms):
        sequence = "".join(np.array(list(protein.sequence))[protein.asym_id == i])
        assert sequence == canonical[next(row["entity_id"] for row in scheme if row["asym_id"] == asym)]

    expected = {}  # (place, atom) -> (occupancy, first letter wins, coordinates)
    places = {key: i for i, key in enumerate(first_of_place)}
    atoms = table(path, "atom_site")
    for row in atoms:
        key = (row["label_asym_id"], row["label_seq_id"])
        if row["pdbx_PDB_model_num"] != atoms[0]["pdbx_PDB_model_num"] or key not in places:
            continue
        if row["label_atom_id"] not in ATOMS or row["label_comp_id"] != first_of_place[key]["mon_id"]:
            continue
        if float(row["occupancy"]) == 0:
            continue
        place = (places[key], ATOMS.index(row["label_atom_id"]))
        rank = (-float(row["occupancy"]), row["label_alt_id"])
        if place not in expected or rank < expected[place][0]:
            expected[place] = (rank, [float(row[f"Cartn_{axis}"]) for axis in "xyz"])
    assert protein.resolved.sum() == len(expected)
    for place, (_, xyz) in expected.items():
        assert protein.resolved[place]
        assert protein.positions[place].tolist() == np.float32(xyz).tolist()
    assert (protein.positions[~protein.resolved] == 0).all()

    unseen = {
        (row["auth_asym_id"], row["auth_seq_id"] + row["PDB_ins_code"].strip(".?"))
        for row in table(path, "pdbx_unobs_or_zero_occ_residues")
        if row["polymer_flag"] == "Y" and row["PDB_model_num"] == "1" and row["auth_asym_id"] in protein.chains
    }
    missing = np.flatnonzero(~protein.resolved.any(1))
    assert {(protein.chains[protein.asym_id[i]], protein.residue_ids[i]) for i in missing} == unseen
    assert (protein.msa[0] == encode(protein.sequence)).all()
    return protein


@pytest.mark.parametrize("entry", ["1A8O", "1GBT", "3JQH"])
def test_mmcif(entry):
    check_mmcif(STRUCTURES / f"{entry}.cif.gz")


def test_pdb_says_what_mmcif_says():
    a, b = read_structure(STRUCTURES / "1A8O.cif.gz"), read_structure(STRUCTURES / "1A8O.pdb.gz")
    assert (a.name, a.sequence, a.chains, a.residue_ids) == (b.name, b.sequence, b.chains, b.residue_ids)
    for name in ("asym_id", "entity_id", "residue_index", "positions", "resolved", "msa"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_pdb_with_missing_residues_and_models():
    """2BEG: residues 1 to 16 of every chain are in SEQRES and REMARK 465 alone; of two models the first counts."""
    text = read("2BEG.pdb.gz")
    protein = read_structure(STRUCTURES / "2BEG.pdb.gz")
    assert protein.chains == tuple("ABCDE")
    assert protein.sequence == 5 * "DAEFRHDSGYEVHHQKLVFFAEDVGSNKGAIIGLMVGGVVIA"
    assert protein.entity_id.tolist() == [0] * 210
    assert protein.asym_id.tolist() == [chain for chain in range(5) for _ in range(42)]
    missing = re.findall(r"^REMARK 465     \w{3} (\w) +(\d+)", text, re.MULTILINE)
    assert len(missing) == 5 * 16
    places = [residue_of(protein, "ABCDE".index(chain), number) for chain, number in missing]
    assert sorted(places) == np.flatnonzero(~protein.resolved.any(1)).tolist()
    first = text[text.index("MODEL ") : text.index("ENDMDL")]
    seen = 0
    for line in first.splitlines():
        if line.startswith("ATOM") and line[12:16].strip() in ATOMS:
            place = residue_of(protein, "ABCDE".index(line[21]), line[22:26].strip())
            xyz = [float(line[i : i + 8]) for i in (30, 38, 46)]
            assert protein.sequence[place] == protein_letters_3to1[line[17:20].capitalize().upper()]
            assert protein.positions[place, ATOMS.index(line[12:16].strip())].tolist() == np.float32(xyz).tolist()
            seen += 1
    assert seen == protein.resolved.sum()


def test_only_protein_is_read_of_a_complex_with_dna():
    protein = read_structure(STRUCTURES / "1LCD.pdb.gz")
    assert protein.chains == ("A",)
    assert protein.sequence == "MKPVTLYDVAEYAGVSYQTVSRVVNQASHVSAKTREKVEAAMAELNYIPNR"


def read(name):
    return gzip.decompress((STRUCTURES / name).read_bytes()).decode()


def without(text, *kinds):
    return "\n".join(line for line in text.splitlines() if not line.startswith(kinds))


def unpacked(name, tmp_path, change=lambda text: text, as_name=None):
    path = tmp_path / (as_name or name)
    path.write_text(change(read(f"{name}.gz")))
    return path


def test_pdb_without_remarks_is_placed_by_alignment(tmp_path):
    whole = read_structure(STRUCTURES / "2BEG.pdb.gz")
    path = unpacked("2BEG.pdb", tmp_path, lambda text: without(text, "REMARK"))
    np.testing.assert_array_equal(read_structure(path).resolved, whole.resolved)

    def with_a_hole(text):  # and nothing that says so
        lines = [line for line in text.splitlines() if not (line[:4] == "ATOM" and 165 <= int(line[22:26]) <= 170)]
        return without("\n".join(lines), "REMARK")

    protein = read_structure(unpacked("1A8O.pdb", tmp_path, with_a_hole))
    assert np.flatnonzero(~protein.resolved.any(1)).tolist() == list(range(14, 20))
    wrong = unpacked("1A8O.pdb", tmp_path, lambda text: re.sub(r"(SEQRES   3 A   70 ) \w{3}", r"\1 TRP", text))
    refused(r"1A8O\.pdb: .*SEQRES", read_structure, wrong)


def test_structures_without_sequence_records(tmp_path):
    """As programs write them: the residues there are, and the authors' numbers to tell gaps."""
    whole = read_structure(STRUCTURES / "1A8O.pdb.gz")

    def bare(text):
        lines = [line for line in text.splitlines() if line[:6] in ("ATOM  ", "HETATM", "TER   ")]
        return "\n".join(line for line in lines if line[:3] == "TER" or not 165 <= int(line[22:26]) <= 170)

    protein = read_structure(unpacked("1A8O.pdb", tmp_path, bare))
    kept = [*range(14), *range(20, 70)]
    assert protein.sequence == "".join(whole.sequence[i] for i in kept)
    assert protein.residue_index.tolist() == kept
    np.testing.assert_array_equal(protein.positions, whole.positions[kept])
    cif = read("1A8O.cif.gz")
    atoms = cif[cif.index("loop_\n_atom_site.group_PDB") :]
    (tmp_path / "bare.cif").write_text("data_bare\n" + atoms[: atoms.index("\n#")] + "\n#\n")
    protein = read_structure(tmp_path / "bare.cif")
    assert (protein.sequence, protein.residue_ids) == (whole.sequence, whole.residue_ids)
    np.testing.assert_array_equal(protein.positions, whole.positions)


RARE = [("SEC", "U"), ("PYL", "O"), ("DAL", "A"), ("DTR", "W"), ("MED", "M"), ("MSE", "M"), ("XYZ", "X")]


@pytest.mark.parametrize(("name", "letter"), RARE)
def test_rare_residues_have_their_letters(name, letter, tmp_path):
    """In mmCIF, in PDB with and without SEQRES; an unknown one is X, and without SEQRES nobody knows that it is one."""
    sequence = read_structure(STRUCTURES / "1A8O.pdb.gz").sequence
    expected = sequence[0] + letter + sequence[2:]
    assert sequence[1] == "D"

    def seen(text):
        return re.sub(r"(?m)^(ATOM.{13})ASP( A 152)", rf"\1{name}\2", text)

    def named(text):
        return re.sub(r"(?m)^(SEQRES   1 A   70  \w\w\w) ASP", rf"\1 {name}", seen(text))

    def tables(text):
        text = re.sub(r"(?m)^((?:ATOM|HETATM) .* )ASP( A 1 2 .*)$", rf"\1{name}\2", text)
        return re.sub(r"(?m)^(A 1 2 +)ASP( .*)$", rf"\1{name}\2", text)

    protein = read_structure(unpacked("1A8O.pdb", tmp_path, named))
    assert protein.sequence == expected
    assert protein.resolved[1, :3].all()
    if letter != "X":
        bare = unpacked("1A8O.pdb", tmp_path, lambda text: without(seen(text), "SEQRES"))
        assert read_structure(bare).sequence == expected
    assert read_structure(unpacked("1A8O.cif", tmp_path, tables)).sequence == expected


def test_content_decides_the_format_and_b_factors_are_ignored(tmp_path):
    def confident(text):
        return re.sub(r"(?m)^((?:ATOM  |HETATM).{54}).{6}", r"\1  0.00", text)

    sound = read_structure(STRUCTURES / "1A8O.cif.gz")
    for name, other, change in (("1A8O.cif", "1A8O.pdb", str), ("1A8O.pdb", "1A8O.cif", confident)):
        protein = read_structure(unpacked(name, tmp_path, change, as_name=other))
        np.testing.assert_array_equal(protein.positions, sound.positions)
        np.testing.assert_array_equal(protein.resolved, sound.resolved)


# Files that cannot be trusted


def row(number, change):
    """Change the words of a row of the atoms of an mmCIF file."""

    def changed(text):
        lines = text.splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith("ATOM")) + number
        lines[at : at + 1] = change(lines[at].split())
        return "\n".join(lines)

    return changed


def infinite(text):
    return re.sub(r"(?m)^(ATOM.{9}CA  ASP A 152.{12}).{8}", r"\1     inf", text)


def unseen(text):
    return re.sub(r"(?m)^((?:ATOM  |HETATM).{6} (?:N|C|O|CA|CB) .{38,39}) *1\.00", r"\1  0.00", text)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("1A8O.cif", row(1, lambda words: [" ".join([*words[:10], "nan", *words[11:]])]),
            "atom CA of residue MSE 151 of chain A: coordinate x 'nan' is not a number"),
        ("1A8O.cif", row(3, lambda words: [" ".join(words[:-1])]), r"_atom_site: .* values of .*: is the file cut"),
        ("1A8O.cif", row(1, lambda words: [" ".join(words)] * 3), "CA of residue MSE 151 of chain A is listed twice"),
        ("1A8O.cif", lambda text: text + text, "2 data blocks; expected one"),
        ("1A8O.cif", lambda text: text[:2000], "no _atom_site table: is the file cut off|cut off"),
        ("1A8O.pdb", lambda text: text[: text.index("CA  GLY A 156") + 27], r"line \d+: an atom record cut off"),
        ("1A8O.pdb", infinite, "atom CA of residue ASP 152 of chain A: coordinate y '     inf' is not a number"),
        ("1A8O.pdb", unseen, r"no atom of a protein backbone is resolved \(with an occupancy above 0\)"),
        ("1A8O.pdb", lambda text: without(text, "ATOM", "HETATM"), "neither an mmCIF file .* nor a PDB file"),
        ("1LCD.pdb", lambda text: re.sub(r"(?m)^(SEQRES.{5}A|ATOM.{17}A).*\n", "", text), "no protein chain"),
    ],
)  # fmt: skip
def test_damaged_structures_are_one_clear_error(name, change, message, tmp_path):
    path = unpacked(name, tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        read_structure(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


def test_mmcif_cut_off_anywhere(tmp_path):
    """Also between two rows of its atoms; wherever it is cut, no other exception escapes."""
    text = read("1A8O.cif.gz")
    atoms, end = text.index("\nATOM"), text.rindex("\nATOM")  # what follows is water
    places = [*range(500, end, 1499), *(text.index("\n", i) + 1 for i in range(atoms, end, 7001))]
    for place in places:
        path = unpacked("1A8O.cif", tmp_path, lambda text: text[:place])  # noqa: B023
        refused(r"1A8O\.cif: ", read_structure, path)

    def without_rows(text):  # as if the table of atoms were not the last one
        rows = text.index("\n", (atoms + end) // 2) + 1
        return text[:rows] + text[text.index("\n#", end) + 1 :]

    path = unpacked("1A8O.cif", tmp_path, without_rows)
    refused(r"of chain A is listed as resolved, but has no atoms: is the file cut off\?", read_structure, path)


def test_limits(tmp_path):
    path = tmp_path / "large.cif"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    refused(r"large.cif: more than 100 MiB, which is the limit", read_structure, path)
    bomb = tmp_path / "bomb.a3m.gz"
    bomb.write_bytes(gzip.compress(b"A" * (3 << 20)))
    refused(r"bomb.a3m.gz: more than 1 MiB unpacked", read_alignment, bomb, max_bytes=1 << 20)
    refused(r"\d+ atoms, and the limit is 100", read_structure, STRUCTURES / "1A8O.cif.gz", max_atoms=100)
    with pytest.raises(ValueError, match=r"more than 50 residues in SEQRES, which is the limit"):
        read_structure(STRUCTURES / "1A8O.pdb.gz", max_residues=50)
    chain = tmp_path / "chain.cif"
    chain.write_text("data_x\nloop_\n_entity_poly_seq.entity_id\n_entity_poly_seq.mon_id\n" + "1 ALA\n" * 100_001)
    refused("chain.cif: .*more than 100000 residues in its sequences", read_structure, chain)
    cut = tmp_path / "cut.cif.gz"
    cut.write_bytes((STRUCTURES / "1A8O.cif.gz").read_bytes()[:9000])
    refused(r"cut.cif.gz: damaged", read_structure, cut)
    (tmp_path / "zeros.pdb").write_bytes(bytes(1000))
    refused(r"zeros.pdb: not a text file", read_structure, tmp_path / "zeros.pdb")


# Real entries


ENTRIES = ["1ubq", "1kd8", "2q2k", "3u8v", "4zey", "7l39", "1psm", "1pzp"]


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_of_another_package(entry):
    protein = check_mmcif(openfold("mmcifs") / f"{entry}.cif")
    gemmi = pytest.importorskip("gemmi")
    theirs = gemmi.read_structure(str(openfold("mmcifs") / f"{entry}.cif"))
    theirs.setup_entities()
    chains = [chain.get_polymer() for chain in theirs[0] if chain.get_polymer().check_polymer_type().name == "PeptideL"]
    assert [residues[0].subchain for residues in chains] == [residues.subchain_id() for residues in chains]
    count = 0
    for i, residues in enumerate(chains):
        ours = np.flatnonzero(protein.asym_id == i)
        for residue in residues.first_conformer():
            place = ours[residue.label_seq - 1]
            assert protein.residue_ids[place] == str(residue.seqid)
            for atom in residue:
                if atom.name in ATOMS and atom.altloc in ("\0", "A") and atom.occ > 0.5:
                    np.testing.assert_allclose(
                        protein.positions[place, ATOMS.index(atom.name)], atom.pos.tolist(), atol=1e-4
                    )
                    count += 1
    assert count > 0.8 * protein.resolved.sum()


# Alignments


def write(path, rows):
    path.write_text("".join(f">{name}\n{row}\n" for name, row in rows))
    return path


def letters(alignment):
    return ["".join(LETTERS[a] for a in row) for row in alignment.msa]


def test_a3m(tmp_path):
    rows = [
        ("query of it", "MKVBLA"), ("one", "M.kkK-Z.ULaaaa"), ("two", "aa-KVXL-*"), ("three", "MK\nVDJ\nOccc"),
    ]  # fmt: skip
    alignment = read_alignment(write(tmp_path / "a.a3m", rows))
    assert letters(alignment) == ["MKVDLA", "MK-ECL", "-KVXL-", "MKVDXX"]
    assert alignment.deletions.tolist() == [[0] * 6, [0, 2, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0], [0] * 6]
    assert alignment.names == ("query of it", "one", "two", "three")
    (tmp_path / "b.a3m.gz").write_bytes(gzip.compress((tmp_path / "a.a3m").read_bytes()))
    np.testing.assert_array_equal(read_alignment(tmp_path / "b.a3m.gz").msa, alignment.msa)


def test_a_name_may_be_blank(tmp_path):
    path = tmp_path / "two.a3m"
    path.write_text(">q\nAC\n\0> \t\nDEF\n")
    found = read_alignment(path)
    assert (found.names, found.lengths) == (("q ",), (2, 3))


def test_a_gap_in_the_query_of_an_a3m_is_no_column(tmp_path):
    """As in FASTA: what a row has there is left out, with its insertions before and after."""
    alignment = read_alignment(write(tmp_path / "a.a3m", [("q", "-MK--V"), ("r", "CMaKDccEgV"), ("s", "-M---V")]))
    assert alignment.query == "MKV"
    assert letters(alignment) == ["MKV", "MKV", "M-V"]
    assert alignment.deletions.tolist() == [[0, 0, 0], [1, 1, 5], [0, 0, 0]]


STOCKHOLM = """# STOCKHOLM 1.0
#=GS one/1-5 DE a protein TaxID=83333 of it
query        MK..VL
one/1-5      MKacV-
#=GC RF      xx..xx

query        .A
one/1-5      gA
#=GC RF      .x
//
"""


def test_fasta_and_stockholm_leave_out_what_the_query_has_not(tmp_path):
    (tmp_path / "a.sto").write_text(STOCKHOLM)
    write(tmp_path / "a.fasta", [("query", "MK..VL.A"), ("one/1-5", "MKacV-gA")])
    for name in ("a.sto", "a.fasta"):
        alignment = read_alignment(tmp_path / name)
        assert alignment.query == "MKVLA"
        assert letters(alignment)[1] == "MKV-A"
        assert alignment.deletions[1].tolist() == [0, 0, 2, 0, 1]
    assert species_of(read_alignment(tmp_path / "a.sto").names[1]) == "83333"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.a3m", "", "it is empty"),
        ("a.a3m", "\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n", "it is an HTML page"),
        ("a.a3m", ">query\n\n", r"its first row \(query\) is empty"),
        ("a.a3m", "MKV\nMKV\n", "it has no rows|not a FASTA file"),
        ("a.a3m", ">q\nMKV\n>r\nMK\n", r"row 2 \(r\) has 2 columns, the first row 3: not an alignment"),
        ("a.fa", ">q\nMKV\n>r\nMKVL\n", r"row 2 \(r\) has 4 columns, the first row 3"),
        ("a.fa", ">q\n---\n>r\nMKV\n", r"first row \(q\) is nothing but gaps"),
        ("a.a3m", ">q\n---\n>r\nMKV\n", r"first row \(q\) is nothing but gaps"),
        ("a.a3m", ">q\nMKV\n>r\nM1V\n", r"row 2 \(r\) has '1' in column 2"),
        ("a.sto", STOCKHOLM.replace("//", ""), "no // at its end"),
        ("a.sto", STOCKHOLM.replace("gA", "gAA"), "a.sto: not a readable Stockholm file"),
        ("a.sto", "# STOCKHOLM 1.0\n" + "q M\n" * 10_001 + "//", "one row is in 10001 parts, and the limit is 10000"),
        ("a.sto", "nothing\n//", "not a readable Stockholm file"),
        ("a.txt", ">q\nMKV\n", r"not an alignment by its name; expected one of .a3m"),
    ],
)
def test_damaged_alignments_are_one_clear_error(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_alignment(tmp_path / name)
    assert str(error.value).startswith(f"{tmp_path / name}: ")


def test_alignments_of_another_package():
    a3m = read_alignment(openfold("alignments") / "2q2k_A" / "bfd_uniclust_hits.a3m")
    sto = read_alignment(openfold("alignments") / "2q2k_A" / "uniref90_hits.sto")
    assert a3m.query == sto.query
    assert a3m.deletions[3].nonzero()[0].tolist() == [69]  # "...DTpP"
    assert sum(species_of(name) is not None for name in sto.names) == len(sto.names) - 1
    assert species_of(a3m.names[1]) == "1280"
    assert (sto.msa[1] != sto.msa[0]).sum() > 0


def test_a_bad_file_is_skipped_with_one_line_whatever_it_raises(tmp_path, monkeypatch, caplog):
    """Also where a parser stumbles over what nobody thought of."""
    for name in ("1A8O", "2BEG"):
        shutil.copy(STRUCTURES / f"{name}.pdb.gz", tmp_path)
    text = read("1A8O.pdb.gz")
    (tmp_path / "short.pdb").write_text("SEQRES\n" + text)
    (tmp_path / "far.pdb").write_text(re.sub(r"(?m)^(ATOM.{26}) .{7}", r"\1 1e30000", text, count=1))
    plain = folder.read_protein

    def stumbles(path, *more):
        if path.name.startswith("2BEG"):
            raise IndexError("what\nnobody thought of")
        return plain(path, *more)

    monkeypatch.setattr(folder, "read_protein", stumbles)
    found = folder.ProteinFolder(tmp_path)
    assert found.names == ["1A8O"]
    said = {path.name: reason for path, reason in found.skipped}
    assert "line 1: a SEQRES record cut off after 6 columns" in said["short.pdb"]
    assert "is not a number" in said["far.pdb"]
    assert said["2BEG.pdb.gz"] == "damaged: IndexError: what nobody thought of"


def test_unread_tables_take_no_memory(tmp_path):
    """Unread tables of an mmCIF take no memory, and repeated ones are held once."""
    text = read("1A8O.cif.gz")
    (tmp_path / "large.cif").write_text(text + "loop_\n_x.a\n_x.b\n" + "123456 abcdefgh\n" * 20_000)
    table = mmcif._Table(io.StringIO((tmp_path / "large.cif").read_text()))
    assert (len(table["_x.a"]), list(table["_x.a"])) == (20_000, [])
    types = table["_atom_site.label_comp_id"]
    assert len({id(value) for value in types}) == len(set(types))
    assert read_structure(tmp_path / "large.cif").sequence == read_structure(STRUCTURES / "1A8O.cif.gz").sequence
