"""Structures from mmCIF and PDB files, plain or gzipped, as a `Protein` without an alignment.

The reader keeps the protein chains of the first model (no nucleic acids, ligands or water), every residue that was in
the experiment, and its backbone and Cβ atoms if they were seen. Numbering is that of the sequence
(_pdbx_poly_seq_scheme or _entity_poly_seq in mmCIF, SEQRES and REMARK 465 in PDB), never the authors'. A file without a
sequence has the residues that have atoms, by the authors' ids: chain, number and insertion code. A modified residue has
the letter of its parent (selenomethionine is M), a D-amino acid that of its mirror image; selenocysteine is U and
pyrrolysine O (models see C and X). The alternative atom of highest occupancy counts, among equal ones the first in the
alphabet; an atom of zero occupancy was not seen, unless all atoms of the file have zero, as some programs write it. B
factors, which may be confidences, are ignored.

Biopython's tables are used, but not its parsers of atoms: they drop repeated atoms and accept nan as a number.
"""

import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from Bio.Align import PairwiseAligner
from Bio.Data.PDBData import protein_letters_3to1_extended
from Bio.PDB.MMCIF2Dict import MMCIF2Dict
from Bio.PDB.parse_pdb_header import parse_pdb_header

from zoo.data.protein.record import ATOMS, Protein, encode
from zoo.files import MAX_BYTES, read_text

__all__ = ["SUFFIXES", "read_structure"]

SUFFIXES = (".cif", ".mmcif", ".pdb", ".ent")

# missing in Biopython's table: amino acids beyond the twenty, ambiguous ones, and D-amino acids
_LETTERS = protein_letters_3to1_extended | {
    "SEC": "U", "PYL": "O", "ASX": "B", "GLX": "Z", "DAL": "A", "DAR": "R", "DSG": "N", "DAS": "D", "DCY": "C",
    "DGN": "Q", "DGL": "E", "DHI": "H", "DIL": "I", "DLE": "L", "DLY": "K", "MED": "M", "DPN": "F", "DPR": "P",
    "DSN": "S", "DTH": "T", "DTR": "W", "DTY": "Y", "DVA": "V",
}  # fmt: skip

# columns of _atom_site, _pdbx_poly_seq_scheme, _entity_poly_seq, _entity_poly, _entity and _struct_asym
_READ = set(
    "label_asym_id label_entity_id label_seq_id label_comp_id label_atom_id label_alt_id Cartn_x Cartn_y Cartn_z "
    "pdbx_PDB_model_num occupancy auth_seq_id pdbx_PDB_ins_code auth_asym_id auth_comp_id auth_atom_id asym_id "
    "entity_id seq_id mon_id auth_mon_id pdb_seq_num pdb_ins_code pdb_strand_id type "
    "_entity.id _struct_asym.id _entity_poly_seq.num".split()
)
MOST_NAMES = 20_000  # most data names of an mmCIF file: the dictionary of the PDB has a third of it
FARTHEST = 1e5  # largest coordinate in Å: beyond, single precision is too coarse
BONDED = 4.5  # largest distance in Å of the Cα of residues that are bonded to one another


@dataclass
class Residue:
    key: str  # its name in atom records
    id: str  # the authors' name
    name: str  # three letters
    seen: bool = False  # the file says that it has atoms


@dataclass
class Chain:
    id: str  # the authors' name
    key: str  # its name in atom records
    entity: str
    residues: list[Residue] = field(default_factory=list)
    index: list[int] | None = None  # places in the sequence, if not 0, 1, 2, ...


@dataclass
class Atoms:
    """The columns of a table of atoms."""

    chain: Sequence[str]
    residue: Sequence[str]
    component: Sequence[str]
    name: Sequence[str]
    alternative: Sequence[str]
    occupancy: Sequence[str]
    x: Sequence[str]
    y: Sequence[str]
    z: Sequence[str]


def read_structure(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_BYTES,
    max_atoms: int = 1_000_000,
    max_residues: int = 20_000,
) -> Protein:
    """The protein in an mmCIF or a PDB file; the text determines the format, not the name.

    A ValueError names the file and the record at fault: the file is damaged, too large or in another format, or no
    residue was seen. `max_atoms` counts all models.
    """
    text = read_text(path, max_bytes=max_bytes)
    try:
        count = sum(1 for _ in re.finditer(r"^(?:ATOM|HETATM)\s", text, re.MULTILINE))
        if count > max_atoms:
            raise ValueError(f"{count} atoms, and the limit is {max_atoms}")
        if re.search(r"^\s*data_\S*\s*$", text, re.MULTILINE):
            chains, atoms = _parse_mmcif(text)
        elif count:
            chains, atoms = _parse_pdb(text, max_residues)
        else:
            raise ValueError("neither an mmCIF file (no data_ block) nor a PDB file (no ATOM records)")
        if not chains:
            raise ValueError("it has no protein chain")
        if (total := sum(len(chain.residues) for chain in chains)) > max_residues:
            raise ValueError(f"{total} residues, and the limit is {max_residues}")
        name = Path(path).name.removesuffix(".gz")
        return _build(name.removesuffix(Path(name).suffix), chains, atoms)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (LookupError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path}: damaged: {type(error).__name__}: {error}") from error


def _build(name: str, chains: list[Chain], atoms: Atoms) -> Protein:
    residues = [(chain, residue) for chain in chains for residue in chain.residues]
    sequence = "".join(one_letter(residue.name) for _, residue in residues)
    places = {(chain.key, residue.key): i for i, (chain, residue) in enumerate(residues)}
    place = np.array([places.get(key, -1) for key in zip(atoms.chain, atoms.residue)], dtype=np.int64)
    for i in sorted({i for i, (_, residue) in enumerate(residues) if residue.seen} - set(place.tolist()))[:1]:
        chain, residue = residues[i]
        raise ValueError(
            f"residue {residue.name} {residue.id} of chain {chain.id} is listed as resolved, but has no atoms: is the "
            "file cut off?"
        )
    components = np.array([residue.name for _, residue in residues])
    atom = np.array([ATOMS.index(name) if name in ATOMS else -1 for name in atoms.name], dtype=np.int64)
    wanted = np.flatnonzero((place >= 0) & (atom >= 0))
    wanted = wanted[np.array(atoms.component)[wanted] == components[place[wanted]]]  # no other residue in this place
    place, atom, alternative = place[wanted], atom[wanted], np.array(atoms.alternative)[wanted]

    def numbers(column: Sequence[str], what: str) -> np.ndarray:
        chosen = [column[i] for i in wanted]
        try:
            values = np.array(chosen, dtype=np.float64)
        except ValueError:
            values = np.array([_number(text) for text in chosen])
        for i in np.flatnonzero(~(np.abs(values) < FARTHEST))[:1]:
            chain, residue = residues[place[i]]
            wrong = "is not a number" if not np.isfinite(values[i]) else "is too large"
            raise ValueError(
                f"atom {ATOMS[atom[i]]} of residue {residue.name} {residue.id} of chain {chain.id}: "
                f"{what} {chosen[i]!r} {wrong}"
            )
        return values

    position = np.stack([numbers(getattr(atoms, axis), f"coordinate {axis}") for axis in "xyz"], 1)
    occupancy = numbers(atoms.occupancy, "occupancy")
    if all(_number(text) == 0 for text in atoms.occupancy):  # it says nothing
        occupancy += 1
    best = np.lexsort((alternative, -occupancy, atom, place))  # the last key counts most
    key = np.stack([place, atom], 1)[best]
    repeated = (key[1:] == key[:-1]).all(1)
    for i in np.flatnonzero(repeated & (alternative[best][1:] == alternative[best][:-1]))[:1]:
        chain, residue = residues[key[i, 0]]
        raise ValueError(
            f"atom {ATOMS[key[i, 1]]} of residue {residue.name} {residue.id} of chain {chain.id} is listed twice"
        )
    best = best[np.concatenate([np.ones(min(len(best), 1), bool), ~repeated])]
    best = best[occupancy[best] > 0]
    if not len(best):
        raise ValueError("no atom of a protein backbone is resolved (with an occupancy above 0)")
    positions = np.zeros((len(residues), len(ATOMS), 3), np.float32)
    resolved = np.zeros((len(residues), len(ATOMS)), bool)
    positions[place[best], atom[best]] = position[best]
    resolved[place[best], atom[best]] = True

    lengths = [len(chain.residues) for chain in chains]
    entities = list(dict.fromkeys(chain.entity for chain in chains))
    return Protein(
        name=name,
        sequence=sequence,
        chains=tuple(chain.id for chain in chains),
        asym_id=np.repeat(np.arange(len(chains)), lengths),
        entity_id=np.repeat([entities.index(chain.entity) for chain in chains], lengths),
        residue_index=np.concatenate([chain.index or range(len(chain.residues)) for chain in chains]).astype(np.int64),
        residue_ids=tuple(residue.id for _, residue in residues),
        positions=positions,
        resolved=resolved,
        msa=encode(sequence)[None],
        deletions=np.zeros((1, len(sequence)), np.uint16),
        paired=np.ones(1, bool),
    )


def one_letter(name: str) -> str:
    """The letter of a residue's three-letter name, modified residues included; X if it has none."""
    return _LETTERS.get(name, "X")


def _is_protein(names: Sequence[str]) -> bool:
    known = sum(name in _LETTERS or name == "UNK" for name in names)
    return 2 * known > len(names)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _chains_of_atoms(atoms: Atoms, labelled: Sequence[bool]) -> list[Chain]:
    """The chains of a file without sequences: the amino acids that have a Cα.

    labelled [atoms]: the file places the atom in a sequence. A residue that is not labelled is modified or a ligand: it
    is in the chain if a labelled one follows there, or if it is bonded.

    Authors' numbers, if they ascend, are the places of residues in their chain.
    """
    alphas: dict[str, dict[str, int]] = {}  # the first Cα of each residue of each chain
    for i, name in enumerate(atoms.name):
        if name == "CA" and _says(atoms.residue[i]) and _is_protein([atoms.component[i]]):
            alphas.setdefault(atoms.chain[i], {}).setdefault(atoms.residue[i], i)
    chains = []
    for key, places in alphas.items():
        rows = list(places.values())
        last = max((k for k, i in enumerate(rows) if labelled[i]), default=-1)
        position = np.array([[_number(axis[i]) for axis in (atoms.x, atoms.y, atoms.z)] for i in rows])
        bonds = np.linalg.norm(np.diff(position, axis=0), axis=1) < BONDED
        rows = [i for k, i in enumerate(rows) if k <= last or bonds[max(k - 1, 0) : k + 1].any()]
        residues = [Residue(atoms.residue[i], atoms.residue[i], atoms.component[i]) for i in rows]
        chain = Chain(key, key, " ".join(residue.name for residue in residues), residues)
        try:
            index = [int(residue.id) for residue in residues]
        except ValueError:  # an insertion code
            index = []
        if index == sorted(set(index)):
            chain.index = [number - index[0] for number in index]
        chains += [chain] if residues else []
    return chains


# ---------------------------------------------------------------------------------------------------------------- mmCIF


class _Column(list[str]):
    """A column that is read; equal values, of which there are many, share one string."""

    def append(self, value: str) -> None:
        super().append(sys.intern(value))


class _Unread(list[str]):
    """A column that is not read: only its length is kept."""

    length = 0

    def append(self, value: str) -> None:
        self.length += 1

    def __len__(self) -> int:
        return self.length


class _Table(MMCIF2Dict):
    """The columns of an mmCIF file that are read; other tables may be large or have many columns."""

    def __setitem__(self, key: str, value: list[str]) -> None:
        if len(self) > MOST_NAMES:
            raise ValueError(f"more than {MOST_NAMES} data names")
        if value == []:
            value = _Column() if key in _READ or key.partition(".")[2] in _READ else _Unread()
        super().__setitem__(key, value)


def _columns(table: Mapping[str, list[str]], category: str, *names: str) -> list[list[str]]:
    columns = [table.get(f"_{category}.{name}", []) for name in names]
    for name, column in zip(names, columns):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"_{category}: {len(columns[0])} values of {names[0]} and {len(column)} of {name}: is the file cut off?"
            )
    return columns


def _parse_mmcif(text: str) -> tuple[list[Chain], Atoms]:
    if len(blocks := re.findall(r"^\s*data_\S*\s*$", text, re.MULTILINE)) > 1:
        raise ValueError(f"{len(blocks)} data blocks; expected one")
    try:
        table: Mapping[str, list[str]] = _Table(match[0] for match in re.finditer(r".*\n|.+", text))
    except Exception as error:  # the parser may raise any kind
        raise ValueError(f"not a readable mmCIF file, or cut off: {error}") from error
    if not any(key.startswith("_atom_site.") for key in table):
        raise ValueError("it has no _atom_site table: is the file cut off?")
    for category in ("atom_site", "pdbx_poly_seq_scheme", "entity_poly_seq", "entity_poly", "struct_asym"):
        _columns(table, category, *(key.split(".")[1] for key in table if key.startswith(f"_{category}.")))
    labels, authors, entities = _atoms(table)
    if "_pdbx_poly_seq_scheme.asym_id" in table:
        chains, atoms = _fitted(_scheme(table), labels, authors)
    elif "_entity_poly_seq.mon_id" in table:
        # a writer that ends its tables by # ends that of atoms, too
        if re.search(r"^#", text, re.MULTILINE) and re.search(r"^(ATOM|HETATM)\s.*\n?\Z", text, re.MULTILINE):
            raise ValueError("it ends in its _atom_site table: is the file cut off?")
        chains, atoms = _sequences(table, labels, authors, entities)
    else:
        return _without_sequence(table, labels, authors, entities)
    kinds = dict(zip(*_columns(table, "entity_poly", "entity_id", "type")))
    return [
        chain
        for chain in chains
        if kinds.get(chain.entity, "polypeptide").startswith(("polypeptide", "?", "."))
        and (_says(kinds.get(chain.entity, "?")) or _is_protein([residue.name for residue in chain.residues]))
    ], atoms


def _atoms(table: Mapping[str, list[str]]) -> tuple[Atoms, Atoms, list[str]]:
    """The atoms of the first model by label ids, the same by the authors' ids, and the entity of each."""
    n = max(len(column) for key, column in table.items() if key.startswith("_atom_site."))

    def column(*names: str, default: str = "?") -> list[str]:
        """The values of the atoms, each from the first of the columns that says something."""
        columns = [table[key] for key in (f"_atom_site.{name}" for name in names) if key in table]
        return [next(filter(_says, values), default) for values in zip(*columns)] if columns else [default] * n

    if absent := [axis for axis in "xyz" if f"_atom_site.Cartn_{axis}" not in table]:
        raise ValueError(f"_atom_site has no Cartn_{absent[0]}: it has no coordinates that are read")
    model = column("pdbx_PDB_model_num", default="1")
    rows = [i for i in range(n) if model[i] == model[0]]
    number, insertion = column("auth_seq_id", "label_seq_id"), column("pdbx_PDB_ins_code")
    columns = (
        column("label_asym_id", "auth_asym_id"), column("label_seq_id"), column("label_entity_id"),
        column("auth_asym_id", "label_asym_id"), [_joined(*values) for values in zip(number, insertion)],
        column("label_comp_id", "auth_comp_id"), column("label_atom_id", "auth_atom_id"),
        column("label_alt_id", default="."), column("occupancy", default="1"),
        *(table[f"_atom_site.Cartn_{axis}"] for axis in "xyz"),
    )  # fmt: skip
    asym, place, entity, *values = ([column[i] for i in rows] for column in columns)
    authors = Atoms(*values)
    return replace(authors, chain=asym, residue=place), authors, entity


def _fitted(chains: list[Chain], labels: Atoms, authors: Atoms) -> tuple[list[Chain], Atoms]:
    """The chains of a scheme, and the atoms by those ids that fit more of them.

    Labels may be those of another program, which wrote the atoms and left the scheme.
    """

    def fit(names: Mapping[tuple[str, str], str], atoms: Atoms) -> int:
        return sum(
            names.get((chain, key)) == name for chain, key, name in zip(atoms.chain, atoms.residue, atoms.component)
        )

    residues = [(chain, residue) for chain in chains for residue in chain.residues]
    by_label = {(chain.key, residue.key): residue.name for chain, residue in residues}
    by_author = {(chain.id, residue.id): residue.name for chain, residue in residues}
    if fit(by_label, labels) > fit(by_author, authors):
        return chains, labels
    return [
        replace(chain, key=chain.id, residues=[replace(residue, key=residue.id) for residue in chain.residues])
        for chain in chains
    ], authors


def _without_sequence(
    table: Mapping[str, list[str]], labels: Atoms, authors: Atoms, entities: Sequence[str]
) -> tuple[list[Chain], Atoms]:
    """The chains of a file that has no sequence, by the authors' ids."""
    types = dict(zip(*_columns(table, "entity", "id", "type")))
    polymer = [types.get(entity, "polymer") == "polymer" for entity in entities]
    authors.residue = [residue if within else "?" for residue, within in zip(authors.residue, polymer)]
    labelled = [_says(place) for place in labels.residue]
    if not any(labelled):  # then the first label of a chain is that of its polymer
        first = dict(zip(reversed(authors.chain), reversed(labels.chain)))
        labelled = [first[strand] == asym for strand, asym in zip(authors.chain, labels.chain)]
    return _chains_of_atoms(authors, labelled), authors


def _scheme(table: Mapping[str, list[str]]) -> list[Chain]:
    """The chains by _pdbx_poly_seq_scheme; a column that a writer leaves out says nothing."""
    names = "asym_id", "seq_id", "mon_id", "entity_id", "auth_mon_id", "pdb_seq_num", "pdb_ins_code", "pdb_strand_id"
    category = "_pdbx_poly_seq_scheme"
    n = len(table[f"{category}.asym_id"])
    chains: dict[str, Chain] = {}
    for asym, place, monomer, entity, seen, number, insertion, strand in zip(
        *(table.get(f"{category}.{name}", ["?"] * n) for name in names)
    ):
        strand, number = (value if _says(value) else label for value, label in ((strand, asym), (number, place)))
        residues = chains.setdefault(asym, Chain(strand, asym, entity if _says(entity) else asym)).residues
        if residues and residues[-1].key == place:
            continue  # another residue in the same place: the first belongs to the sequence
        if place != str(len(residues) + 1):
            raise ValueError(f"{category}: residue {place} of chain {strand} follows {len(residues)}")
        residues.append(Residue(place, _joined(number, insertion), monomer, _says(seen)))
    return list(chains.values())


def _sequences(
    table: Mapping[str, list[str]], labels: Atoms, authors: Atoms, entities: Sequence[str]
) -> tuple[list[Chain], Atoms]:
    """The chains by _entity_poly_seq, and the atoms by label ids, or by alignment where the labels do not fit."""
    sequences: dict[str, dict[str, str]] = {}  # names by entity and place; of several in one place the first belongs
    for entity, place, monomer in zip(*_columns(table, "entity_poly_seq", "entity_id", "num", "mon_id")):
        sequences.setdefault(entity, {}).setdefault(place, monomer)
    same: dict[tuple[str, ...], str] = {}  # the first entity with a sequence: a writer may number copies of a chain
    rows: dict[str, list[int]] = {}
    for i, asym in enumerate(labels.chain):
        rows.setdefault(asym, []).append(i)
    chains, places = [], list(labels.residue)
    for asym, entity in (
        dict(zip(labels.chain, entities)) | dict(zip(*_columns(table, "struct_asym", "id", "entity_id")))
    ).items():
        if entity not in sequences:
            continue
        names, atoms = sequences[entity], rows.get(asym, [])
        strand = authors.chain[atoms[0]] if atoms else asym
        chain = Chain(strand, asym, same.setdefault(tuple(names.values()), entity))
        components = set(names.values())
        atoms = [i for i in atoms if labels.component[i] in components]
        if 2 * sum(names.get(places[i]) == labels.component[i] for i in atoms) >= len(atoms):
            ids = {places[i]: authors.residue[i] for i in atoms}
            chain.residues = [Residue(place, ids.get(place, "?"), name) for place, name in names.items()]
        else:
            resolved: dict[str, Residue] = {}
            for i in atoms:
                places[i] = key = authors.residue[i]
                resolved.setdefault(key, Residue(key, key, labels.component[i], seen=True))
            chain.residues = _in_sequence(strand, list(names.values()), list(resolved.values()), [])
        chains.append(chain)
    return chains, replace(labels, residue=places)


def _says(value: str) -> bool:
    """False for a value of mmCIF that stands for none."""
    return value not in ("", ".", "?")


def _joined(number: str, insertion: str) -> str:
    return number + insertion.strip("?. ")


# ------------------------------------------------------------------------------------------------------------------ PDB


def _parse_pdb(text: str, max_residues: int) -> tuple[list[Chain], Atoms]:
    lines = text.splitlines()
    rows: list[tuple[str, ...]] = []
    ended: set[str] = set()  # chains after whose end only ligands and water come
    sequences: dict[str, list[str]] = {}
    residues = 0
    for number, line in enumerate(lines, 1):
        kind = line[:6]
        if kind == "SEQRES":
            if len(line) < 20:
                raise ValueError(f"line {number}: a SEQRES record cut off after {len(line)} columns")
            names = line[19:70].split()
            sequences.setdefault(line[11], []).extend(names)
            residues += len(names)
            if residues > max_residues:
                raise ValueError(f"more than {max_residues} residues in SEQRES, which is the limit")
        elif kind in ("ATOM  ", "HETATM"):
            if len(line) < 54:
                raise ValueError(f"line {number}: an atom record cut off after {len(line)} columns")
            if line[21] not in ended:
                rows.append((
                    line[21], line[22:27].replace(" ", ""), line[17:20].strip(), line[12:16].strip(), line[16],
                    line[54:60].strip() or "1", line[30:38], line[38:46], line[46:54],
                ))  # fmt: skip
        elif kind.startswith("TER") and rows:
            ended.add(rows[-1][0])
        elif kind == "ENDMDL" and rows:
            break
    columns = [list(column) for column in zip(*rows)]
    atoms = Atoms(*columns)
    if not sequences:
        return _chains_of_atoms(atoms, [True] * len(rows)), atoms

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
        if _is_protein(names):
            placed = _in_sequence(chain, names, list(seen.get(chain, {}).values()), missing.get(chain, []))
            chains.append(Chain(chain, chain, " ".join(names), placed))
    return chains, atoms


def _in_sequence(chain: str, names: list[str], seen: list[Residue], missing: list[Residue]) -> list[Residue]:
    """The residues of SEQRES, with the seen ones placed by REMARK 465, or if that does not fit, by alignment."""
    merged, rest = [], list(missing)
    for residue in seen:
        while rest and _order(rest[0]) < _order(residue):
            merged.append(rest.pop(0))
        merged.append(residue)
    merged += rest
    if [residue.name for residue in merged] == names:
        return merged
    placed = [Residue(f"missing {i}", "?", name) for i, name in enumerate(names)]
    if not seen:
        return placed
    aligner = PairwiseAligner(scoring="blastp")
    aligner.substitution_matrix = None
    aligner.match_score, aligner.mismatch_score = 1, -1000
    aligner.open_gap_score, aligner.extend_gap_score = -10, 0
    aligner.open_end_gap_score = aligner.extend_end_gap_score = 0
    ours, theirs = ("".join(one_letter(name) for name in all_) for all_ in (names, [r.name for r in seen]))
    alignment = aligner.align(ours, theirs)[0]
    found = 0
    for (start, end), (first, _) in zip(*alignment.aligned):
        for i in range(start, end):
            residue = seen[first + i - start]
            if residue.name != names[i]:
                raise ValueError(f"residue {residue.name} {residue.id} of chain {chain} is {names[i]} in SEQRES")
            placed[i], found = residue, found + 1
    if found < len(seen):
        raise ValueError(f"chain {chain}: {len(seen) - found} of {len(seen)} residues have no place in its SEQRES")
    return placed


def _order(residue: Residue) -> tuple[int, str]:
    number = residue.key.rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return int(number), residue.key[len(number) :]
