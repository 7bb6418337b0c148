"""mmCIF files as other programs write them: the chains, residues, ids and positions of the file that they read."""

import gzip
import io
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.support.paths import STRUCTURES
from tests.support.refusals import refused
from zoo.data.protein.structure import read_structure


def biopython(path):
    from Bio.PDB import MMCIFIO, MMCIFParser, PDBParser

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = MMCIFParser if ".cif" in path.name else PDBParser
        writer, out = MMCIFIO(), io.StringIO()
        writer.set_structure(kind(QUIET=True).get_structure("x", text(path)))
        writer.save(out)
    return out.getvalue()


def biotite(path, in_place=False):
    """By biotite's own writer; `in_place`: into the file that was read, whose other tables stay."""
    pdb, pdbx = (pytest.importorskip(f"biotite.structure.io.{name}") for name in ("pdb", "pdbx"))
    options = {"model": 1, "altloc": "occupancy"}
    if ".cif" in path.name:
        file = pdbx.CIFFile.read(text(path))
        atoms = pdbx.get_structure(file, extra_fields=["occupancy"], **options)
    else:
        atoms, file = pdb.PDBFile.read(text(path)).get_structure(extra_fields=["occupancy"], **options), None
    file, out = file if in_place and file is not None else pdbx.CIFFile(), io.StringIO()
    pdbx.set_structure(file, atoms, **({} if len(file) else {"data_block": "x"}))
    file.write(out)
    return out.getvalue()


def gemmi(path, *steps):
    package = pytest.importorskip("gemmi")
    structure = package.read_structure(str(path))
    for step in steps:
        getattr(structure, step)()
    return structure.make_mmcif_document().as_string()


WRITERS = {
    "Biopython": biopython,
    "biotite": biotite,
    "biotite in place": lambda path: biotite(path, in_place=True),
    "gemmi": gemmi,
    "gemmi with entities": lambda path: gemmi(path, "setup_entities"),
    "gemmi with labels": lambda path: gemmi(path, "setup_entities", "assign_label_seq_id"),
}


def text(path):
    return io.StringIO(gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text())


def residues(protein):
    """(chain, id, letter) of the residues that have a Cα, and the positions of their atoms."""
    places = np.flatnonzero(protein.resolved[:, 1])
    names = [(protein.chains[protein.asym_id[i]], protein.residue_ids[i], protein.sequence[i]) for i in places]
    return names, protein.positions[places]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("entry", sorted(path.name for path in STRUCTURES.glob("*.gz")))
def test_an_entry_that_another_program_wrote_reads_as_the_entry(entry, writer, tmp_path):
    (tmp_path / "written.cif").write_text(WRITERS[writer](STRUCTURES / entry))
    entry, written = read_structure(STRUCTURES / entry), read_structure(tmp_path / "written.cif")
    (names, positions), (names_written, positions_written) = residues(entry), residues(written)
    assert names == names_written
    np.testing.assert_allclose(positions_written, positions, atol=2e-3)
    if writer.startswith("gemmi"):  # which writes the sequence, too
        assert (written.sequence, written.chains) == (entry.sequence, entry.chains)
        np.testing.assert_array_equal(written.residue_index, entry.residue_index)
        np.testing.assert_array_equal(written.entity_id, entry.entity_id)


ATOM, HETATM = "ATOM", "HETATM"
CASES = {
    "plain": ("ASG", "ALA 1 ATOM, SER 2 ATOM, GLY 3 ATOM"),
    "modified inside": ("AMG", "ALA 1 ATOM, MSE 2 HETATM, GLY 3 ATOM"),
    "modified first": ("MSG", "MSE 1 HETATM, SER 2 ATOM, GLY 3 ATOM"),
    "modified last": ("ASMM", "ALA 1 ATOM, SER 2 ATOM, MSE 3 HETATM, MSE 4 HETATM"),
    "all modified": ("MMA", "MSE 1 HETATM, MSE 2 HETATM, DAL 3 HETATM"),
    "insertion codes": ("ASTG", "ALA 52 ATOM, SER 52A ATOM, THR 52B ATOM, GLY 53 ATOM"),
    "a modified insertion": ("ASMG", "ALA 52 ATOM, SER 52A ATOM, MSE 52B HETATM, GLY 53 ATOM"),
    "two residues in one place": ("ASG", "ALA 1 ATOM, SER 2 ATOM A, THR 2 ATOM B, GLY 3 ATOM"),
    "a modified one in one place": ("AMG", "ALA 1 ATOM, MET 2 ATOM A, MSE 2 HETATM B, GLY 3 ATOM"),
    "water and a ligand": ("ASG", "ALA 1 ATOM, SER 2 ATOM, GLY 3 ATOM, TER, GLY 301 HETATM, HOH 401 HETATM"),
    "negative numbers": ("ASG", "ALA -1 ATOM, SER 0 ATOM, GLY 1 ATOM"),
}


def pdb(rows):
    """A chain A as PDB text: Cα 3.8 Å from one residue to the next, ligands and water 20 Å further."""
    lines, place, last = [], 0, ""
    for row in rows.split(", "):
        if row == "TER":
            lines.append(f"TER   {len(lines) + 1:5d}")
            place += 6
            continue
        name, number, record, alternative = f"{row} ".split(" ")[:4]
        place += number != last
        last, code = number, number[-1] if number[-1].isalpha() else " "
        for k, atom in enumerate(("O",) if name == "HOH" else ("N", "CA", "C")):
            x = 3.8 * place + 1.2 * k
            lines.append(
                f"{record:6}{len(lines) + 1:5d}  {atom:<3}{alternative or ' '}{name} A{number.rstrip('AB'):>4}{code}   "
                f"{x:8.3f}{k:8.3f}{0:8.3f}{0.5 if alternative else 1:6.2f}{20:6.2f}          {atom[0]:>2}"
            )
    return "\n".join([*lines, "END", ""])


@pytest.mark.parametrize("writer", [name for name in WRITERS if "in place" not in name])
@pytest.mark.parametrize("case", CASES)
def test_rare_residues_that_another_program_wrote(case, writer, tmp_path):
    sequence, rows = CASES[case]
    (tmp_path / "read.pdb").write_text(pdb(rows))
    (tmp_path / "written.cif").write_text(WRITERS[writer](tmp_path / "read.pdb"))
    if writer == "biotite" and "ligand" in case:
        return  # it numbers ligands as it does the chain: no file says that they are none
    ids = list(dict.fromkeys(row.split(" ")[1] for row in rows.split(", TER")[0].split(", ")))
    for name in ("read.pdb", "written.cif"):
        protein = read_structure(tmp_path / name)
        assert (protein.chains, protein.sequence) == (("A",), sequence), name
        assert list(protein.residue_ids) == ids
        assert protein.resolved[:, :3].all()


# Layouts, of programs that are not at hand: (columns, row), tables before the atoms, end


SEQUENCE = [("ALA", "1", ""), ("MSE", "2", ""), ("GLY", "2", "A")]
BEGINNING, MIDDLE = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id", "Cartn_x Cartn_y Cartn_z"
ENTITIES = """_entity.id 1
_entity.type polymer
#
_entity_poly.entity_id 1
_entity_poly.type polypeptide(L)
#
"""
NUMBERED = """loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 ALA
1 2 MSE
1 3 GLY
1 4 SER
#
loop_
_struct_asym.id
_struct_asym.entity_id
X 1
Y 2
#
"""
SCHEME = """loop_
_pdbx_poly_seq_scheme.asym_id
_pdbx_poly_seq_scheme.seq_id
_pdbx_poly_seq_scheme.mon_id
_pdbx_poly_seq_scheme.pdb_seq_num
_pdbx_poly_seq_scheme.pdb_ins_code
_pdbx_poly_seq_scheme.pdb_strand_id
X 1 ALA 1 . A
X 2 MSE 2 . A
X 3 GLY 2 A A
X 4 SER 3 . A
#
"""
LAYOUTS = {
    "OpenMM": (
        f"{BEGINNING} label_asym_id label_entity_id label_seq_id pdbx_PDB_ins_code {MIDDLE} occupancy B_iso_or_equiv "
        "auth_seq_id auth_comp_id auth_asym_id auth_atom_id pdbx_PDB_model_num",
        "{record} {i} C {atom} . {name} A ? {number} {code} {x} {y} 0.0 0.0 0.0 {number} {name} A {atom} 1",
        "", "",
    ),
    "PyMOL": (
        f"{BEGINNING} label_asym_id label_entity_id label_seq_id pdbx_PDB_ins_code {MIDDLE} occupancy B_iso_or_equiv "
        "pdbx_formal_charge auth_asym_id pdbx_PDB_model_num",
        "{record} {i} C {atom} . {name} . . {number} {code} {x} {y} 0.0 1.00 20.0 0 A 1", "_entry.id x\n#\n", "",
    ),
    "sequences of entities, as of ChimeraX": (
        f"{BEGINNING} label_entity_id label_asym_id auth_asym_id pdbx_PDB_ins_code label_seq_id auth_seq_id {MIDDLE} "
        "occupancy pdbx_PDB_model_num",
        "{record} {i} C {atom} . {name} 1 X A {code} {place} {number} {x} {y} 0.0 1.00 1", ENTITIES + NUMBERED, "#\n",
    ),
    "a scheme without seen residues, as of AlphaFold": (
        f"{BEGINNING} label_asym_id label_entity_id label_seq_id pdbx_PDB_ins_code {MIDDLE} occupancy B_iso_or_equiv "
        "auth_seq_id auth_asym_id pdbx_PDB_model_num",
        "{record} {i} C {atom} . {name} X 1 {place} {code} {x} {y} 0.0 1.00 90.0 {number} A 1",
        ENTITIES + SCHEME, "#\n",
    ),
    "a scheme, and labels only of what is not modified": (
        f"{BEGINNING} label_asym_id label_seq_id pdbx_PDB_ins_code {MIDDLE} auth_seq_id auth_asym_id",
        "{record} {i} C {atom} . {name} Q {label} {code} {x} {y} 0.0 {number} A", SCHEME, "#\n",
    ),
    "authors' ids alone": (
        f"group_PDB id auth_atom_id auth_comp_id auth_asym_id auth_seq_id pdbx_PDB_ins_code {MIDDLE} occupancy",
        "{record} {i} {atom} {name} A {number} {code} {x} {y} 0.0 ?", "", "",
    ),
    "labels that say nothing": (
        f"{BEGINNING} label_asym_id label_seq_id auth_asym_id auth_seq_id pdbx_PDB_ins_code {MIDDLE}",
        "{record} {i} C {atom} . {name} ? ? A {number} {code} {x} {y} 0.0", "", "#\n",
    ),
}  # fmt: skip


def layout(name):
    columns, row, tables, end = LAYOUTS[name]
    lines = []
    for place, (residue, number, code) in enumerate(SEQUENCE, 1):
        for k, atom in enumerate(("N", "CA", "C")):
            record = HETATM if residue == "MSE" else ATOM
            lines.append(row.format(
                record=record, i=len(lines) + 1, atom=atom, name=residue, number=number, code=code or "?", place=place,
                label=place if record == ATOM else ".", x=3.8 * place + 1.2 * k, y=float(k),
            ))  # fmt: skip
    heads = "".join(f"_atom_site.{column}\n" for column in columns.split())
    return "data_x\n" + tables + "loop_\n" + heads + "\n".join(lines) + "\n" + end


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, tmp_path):
    (tmp_path / "x.cif").write_text(layout(name))
    protein = read_structure(tmp_path / "x.cif")
    count = len(protein)
    assert (protein.chains, protein.sequence) == (("A",), "AMGS"[:count])
    assert protein.residue_ids[:3] == ("1", "2", "2A")
    assert protein.resolved[:, :3].all(1).tolist() == [True, True, True, False][:count]
    assert (count == 4) == ("sequence" in name or "scheme" in name)
    np.testing.assert_allclose(protein.positions[:3, 1, 0], [3.8 * place + 1.2 for place in (1, 2, 3)], atol=1e-4)


def test_a_file_whose_tables_end_by_a_mark_is_cut_off_without(tmp_path):
    path = Path(tmp_path / "x.cif")
    whole = layout("sequences of entities, as of ChimeraX").removesuffix("#\n")
    for end in (len(whole), whole.rindex("ATOM")):
        path.write_text(whole[:end])
        refused("it ends in its _atom_site table: is the file cut off", read_structure, path)
    path.write_text(layout("OpenMM").replace("Cartn_x", "x"))
    refused("_atom_site has no Cartn_x", read_structure, path)
