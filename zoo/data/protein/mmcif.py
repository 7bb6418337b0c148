"""Chains and atoms of mmCIF files."""

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from Bio.PDB.MMCIF2Dict import MMCIF2Dict

from zoo.data.protein.residues import Atoms, Chain, Residue, chains_of_atoms, is_protein, place_in_sequence, says

__all__ = ["parse_mmcif"]

# columns of _atom_site, _pdbx_poly_seq_scheme, _entity_poly_seq, _entity_poly, _entity and _struct_asym
_READ = set(
    "label_asym_id label_entity_id label_seq_id label_comp_id label_atom_id label_alt_id Cartn_x Cartn_y Cartn_z "
    "pdbx_PDB_model_num occupancy auth_seq_id pdbx_PDB_ins_code auth_asym_id auth_comp_id auth_atom_id asym_id "
    "entity_id seq_id mon_id auth_mon_id pdb_seq_num pdb_ins_code pdb_strand_id type "
    "_entity.id _struct_asym.id _entity_poly_seq.num".split()
)
MOST_NAMES = 20_000  # most data names of an mmCIF file: the dictionary of the PDB has a third of it
MOST_RESIDUES = 100_000  # most rows of a table of sequences, of all its polymers


class _Column(list[str]):
    """A column that is read; equal values, of which there are many, share one string."""

    def append(self, value: str) -> None:
        super().append(sys.intern(value))


class _Sequence(_Column):
    """A column of a table of sequences."""

    def append(self, value: str) -> None:
        if len(self) >= MOST_RESIDUES:
            raise ValueError(f"more than {MOST_RESIDUES} residues in its sequences")
        super().append(value)


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
            kind = _Sequence if key.startswith(("_entity_poly_seq.", "_pdbx_poly_seq_scheme.")) else _Column
            value = kind() if key in _READ or key.partition(".")[2] in _READ else _Unread()
        super().__setitem__(key, value)


def _columns(table: Mapping[str, list[str]], category: str, *names: str) -> list[list[str]]:
    columns = [table.get(f"_{category}.{name}", []) for name in names]
    for name, column in zip(names, columns):
        if len(column) != len(columns[0]):
            raise ValueError(
                f"_{category}: {len(columns[0])} values of {names[0]} and {len(column)} of {name}: is the file cut off?"
            )
    return columns


def parse_mmcif(text: str) -> tuple[list[Chain], Atoms]:
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
        and (says(kinds.get(chain.entity, "?")) or is_protein([residue.name for residue in chain.residues]))
    ], atoms


def _atoms(table: Mapping[str, list[str]]) -> tuple[Atoms, Atoms, list[str]]:
    """The atoms of the first model by label ids, the same by the authors' ids, and the entity of each."""
    n = max(len(column) for key, column in table.items() if key.startswith("_atom_site."))

    def column(*names: str, default: str = "?") -> list[str]:
        """The values of the atoms, each from the first of the columns that says something."""
        columns = [table[key] for key in (f"_atom_site.{name}" for name in names) if key in table]
        return [next(filter(says, values), default) for values in zip(*columns)] if columns else [default] * n

    if absent := [axis for axis in "xyz" if f"_atom_site.Cartn_{axis}" not in table]:
        raise ValueError(f"_atom_site has no Cartn_{absent[0]}: it has no coordinates that are read")
    model = column("pdbx_PDB_model_num", default="1")
    rows = [i for i in range(n) if model[i] == model[0]]
    number, insertion = column("auth_seq_id", "label_seq_id"), column("pdbx_PDB_ins_code")
    columns = (
        column("label_asym_id", "auth_asym_id"), column("label_seq_id"), column("label_entity_id"),
        column("auth_asym_id", "label_asym_id"), [joined(*values) for values in zip(number, insertion)],
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
    labelled = [says(place) for place in labels.residue]
    if not any(labelled):  # then the first label of a chain is that of its polymer
        first = dict(zip(reversed(authors.chain), reversed(labels.chain)))
        labelled = [first[strand] == asym for strand, asym in zip(authors.chain, labels.chain)]
    return chains_of_atoms(authors, labelled), authors


def _scheme(table: Mapping[str, list[str]]) -> list[Chain]:
    """The chains by _pdbx_poly_seq_scheme; a column that a writer leaves out says nothing."""
    names = "asym_id", "seq_id", "mon_id", "entity_id", "auth_mon_id", "pdb_seq_num", "pdb_ins_code", "pdb_strand_id"
    category = "_pdbx_poly_seq_scheme"
    n = len(table[f"{category}.asym_id"])
    chains: dict[str, Chain] = {}
    for asym, place, monomer, entity, seen, number, insertion, strand in zip(
        *(table.get(f"{category}.{name}", ["?"] * n) for name in names)
    ):
        strand, number = (value if says(value) else label for value, label in ((strand, asym), (number, place)))
        residues = chains.setdefault(asym, Chain(strand, asym, entity if says(entity) else asym)).residues
        if residues and residues[-1].key == place:
            continue  # another residue in the same place: the first belongs to the sequence
        if place != str(len(residues) + 1):
            raise ValueError(f"{category}: residue {place} of chain {strand} follows {len(residues)}")
        residues.append(Residue(place, joined(number, insertion), monomer, says(seen)))
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
            chain.residues = place_in_sequence(strand, list(names.values()), list(resolved.values()), [])
        chains.append(chain)
    return chains, replace(labels, residue=places)


def joined(number: str, insertion: str) -> str:
    return number + insertion.strip("?. ")
