"""Proteins from a folder of structures and alignments.

    1abc.cif.gz                             a structure: .cif, .mmcif, .pdb or .ent, gzipped or not
    1abc.a3m  1abc_A.a3m  1abc.uniref.sto   its alignments: .a3m, .fasta, .sto ... that begin with its name
    1abc/...  1abc_A/...                    and those in sub-folders with such names
    1abc.template1.cif  1abc.template_2xyz.pdb   its templates: structures of relatives, in the order of their names

The first sequence of an alignment determines its chain. Without an alignment, a structure has only its own sequence.
"""

import itertools
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zoo.data.file_records import FileRecords
from zoo.data.progress import counted
from zoo.data.protein import alignment, structure
from zoo.data.protein.alignment import Alignment, read_alignment
from zoo.data.protein.complexes import join, refuse_stranger
from zoo.data.protein.record import Protein, Template
from zoo.data.protein.structure import read_structure
from zoo.data.protein.template import read_template, template_owner
from zoo.data.sampling import hash_seed

__all__ = ["ProteinFolder", "kind", "owner", "read_protein", "stem"]

log = logging.getLogger(__name__)

_KEPT_PROTEINS = 16  # proteins kept in memory
_KEPT_TEMPLATES = 4096  # proteins whose aligned templates are kept: 76 bytes a residue


def kind(path: Path) -> str:
    """The kind of a file by its name: "structure", "alignment" or ""."""
    suffix = _suffix(path)
    return "structure" if suffix in structure.SUFFIXES else "alignment" if suffix in alignment.SUFFIXES else ""


def stem(path: Path) -> str:
    """The name of a file without its suffixes."""
    return path.name.removesuffix(".gz")[: -len(_suffix(path))]


def owner(parts: Iterable[str], names: Iterable[str]) -> str | None:
    """The structure, among `names`, of an alignment file: the longest name that begins a part of the file's path."""
    pairs = itertools.product(names, parts)
    fit = [name for name, part in pairs if part.startswith(name) and part[len(name) :][:1] in ("", ".", "_")]
    return max(fit, key=len, default=None)


def read_protein(
    structure: Path,
    alignments: Iterable[Path],
    skip: Callable[[Path, str], None] | None = None,
    templates: Iterable[Path] = (),
    most: int | None = None,
) -> Protein:
    """A structure with its alignments and templates; a ValueError names the file and the fault.

    most: the number of templates to read, the first that can be used; None: all.
    skip: called with the path and the reason for an alignment or a template that cannot be used, instead of an error.
    """
    protein, usable = read_structure(structure), list[Alignment]()
    if not protein.contact_atoms()[1].any():
        raise ValueError(f"{structure}: no residue has a resolved Cβ (for glycine: Cα)")
    for path in alignments:
        try:
            read = read_alignment(path)
            refuse_stranger(protein, read)
            usable.append(read)
        except Exception as error:
            if skip is None:
                raise
            skip(path, reason(error))
    return with_templates(join(protein, usable), templates, skip, most)


def with_templates(
    protein: Protein,
    paths: Iterable[Path],
    skip: Callable[[Path, str], None] | None = None,
    most: int | None = None,
) -> Protein:
    """The protein with the first usable templates in the files, as in `read_protein`."""
    usable = list[Template]()
    for path in paths:
        if len(usable) == most:
            break
        try:
            usable.append(read_template(protein, path))
        except Exception as error:
            if skip is None:
                raise
            skip(path, reason(error))
    return replace(protein, templates=tuple(usable))


def reason(error: Exception) -> str:
    """The message of a reader's error, or of an exception in a parser."""
    return str(error) if isinstance(error, ValueError | OSError) else f"damaged: {type(error).__name__}: {error}"


@dataclass
class Files:
    structure: Path
    alignments: list[Path] = field(default_factory=list)
    templates: list[Path] = field(default_factory=list)
    chains: list[str] = field(default_factory=list)  # their sequences, once the structure was read

    def paths(self) -> list[Path]:
        return [self.structure, *self.alignments, *self.templates]


class ProteinFolder:
    """The proteins under `root`, sorted by name, each with its first `templates` templates.

    All files are read once when the folder is opened. Files that cannot be used are skipped: one log line names each,
    `skipped` lists them. A structure whose alignment is skipped is kept.
    """

    def __init__(self, root: str | os.PathLike[str], templates: int = 0):
        self.root, self.templates = Path(root), templates
        if not self.root.is_dir():
            raise ValueError(f"no such folder: {self.root}")
        self.proteins: dict[str, Files] = {}
        self.skipped: list[tuple[Path, str]] = []
        self._read: OrderedDict[str, Protein] = OrderedDict()
        self._aligned: OrderedDict[str, tuple[Template, ...]] = OrderedDict()
        self._scan()
        self.names = list(self.proteins)
        self.files = FileRecords(path for one in self.proteins.values() for path in one.paths())

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_read": OrderedDict(), "_aligned": OrderedDict()}  # other processes read by themselves

    def protein(self, index: int) -> Protein:
        """Protein `index`, read again unless it was used recently."""
        name = self.names[index]
        if name not in self._read:
            of = self.proteins[name]
            for path in of.paths():
                self.files.check(path)
            protein = read_protein(of.structure, of.alignments)
            if name not in self._aligned:  # reading and aligning templates takes longer than the rest
                aligned = with_templates(protein, of.templates, None, self.templates)
                self._aligned[name] = aligned.templates
                if len(self._aligned) > _KEPT_TEMPLATES:
                    self._aligned.popitem(last=False)
            self._read[name] = replace(protein, templates=self._aligned[name])
            if len(self._read) > _KEPT_PROTEINS:
                self._read.popitem(last=False)
        self._read.move_to_end(name)
        return self._read[name]

    def chains(self) -> list[str]:
        """The sequences of all chains."""
        return [sequence for name in self.names for sequence in self.proteins[name].chains]

    def split(self, validation: float = 0.1) -> tuple["ProteinFolder", "ProteinFolder"]:
        """Split the folder into `(train, validation)`: a share `validation` of the proteins, at least one, is held out.

        Proteins with a chain in common are on the same side, whatever their files are called. Beyond that the choice
        depends only on the names. A folder of one protein, or of proteins that are all linked so, is used for both.
        """
        train, held_out = copy(self), copy(self)
        groups = self._linked()
        if len(groups) == 1:
            several = f"{len(self)} proteins that share chains" if len(self) > 1 else "a single protein"
            log.warning("%s holds %s: validation uses it too", self.root, several)
            return train, held_out
        count = min(max(1, round(validation * len(self))), len(self) - 1)
        chosen: set[str] = set()
        for group in sorted(groups, key=lambda group: hash_seed(group[0])):
            if len(chosen) + len(group) <= count:
                chosen.update(group)
        chosen = chosen or set(sorted(groups, key=len)[0])
        train.names = [name for name in self.names if name not in chosen]
        held_out.names = [name for name in self.names if name in chosen]
        return train, held_out

    def _linked(self) -> list[list[str]]:
        """The names of the proteins in groups: those with a chain in common, directly or by others between them."""
        group_of: dict[str, list[str]] = {}  # by sequence
        groups: dict[str, list[str]] = {}  # by name
        for name in self.names:
            chains = self.proteins[name].chains
            joined = list({id(group_of[c]): group_of[c] for c in chains if c in group_of}.values())
            group = sorted([name, *(other for each in joined for other in each)])
            groups |= dict.fromkeys(group, group)
            group_of |= {chain: group for other in group for chain in self.proteins[other].chains}
        return list({id(group): group for group in groups.values()}.values())

    def _scan(self) -> None:
        files = self._files()
        for name, of in counted(files.items(), len(files), "reading structures", log):
            bad: dict[Path, str] = {}
            try:
                protein = read_protein(of.structure, of.alignments, bad.__setitem__, of.templates, self.templates)
            except Exception as error:  # parsers may raise any kind: one bad file must not end a run
                self._skip(of.structure, reason(error))
                continue
            for path, why in bad.items():
                self._skip(path, why)
            alignments, templates = (
                [path for path in paths if path not in bad] for paths in (of.alignments, of.templates)
            )
            self.proteins[name] = Files(of.structure, alignments, templates, protein.chain_sequences())
            if len(self._read) < _KEPT_PROTEINS:
                self._read[name] = protein
        alone = sum(not of.alignments for of in self.proteins.values())
        log.info(
            "%d proteins in %s, %d without an alignment, %d skipped", len(self.proteins), self.root, alone,
            len(self.skipped),
        )  # fmt: skip
        if not self.proteins:
            raise ValueError(
                f"none of the {len(files)} structures in {self.root} can be used; the first: {self.skipped[0][1]}"
            )

    def _files(self) -> dict[str, Files]:
        """The files of each protein, by its name; those that belong to none are skipped."""
        paths = sorted(path for path in self.root.iterdir() if path.is_file() and not path.name.startswith("."))
        every = [path for path in paths if kind(path) == "structure"]
        structures = [path for path in every if template_owner(stem(path)) is None]
        if not structures:
            raise ValueError(f"no structures in {self.root} (looked for {', '.join(structure.SUFFIXES)}, plain or .gz)")
        files: dict[str, Files] = {}
        for path in structures:
            if (same := files.setdefault(stem(path), Files(path)).structure) != path:
                self._skip(path, f"{same.name}, of the same name, is used instead")
        for path in every:
            if (whose := template_owner(stem(path))) in files:
                files[whose].templates.append(path)
            elif whose is not None:
                self._skip(path, f"there is no structure {whose} that it is a template of")
        for path in sorted(self.root.rglob("*")):
            if path.is_file() and kind(path) == "alignment":
                whose = owner(path.relative_to(self.root).parts[:1], files)
                if whose is not None:
                    files[whose].alignments.append(path)
                else:
                    self._skip(path, "its name begins with the name of no structure")
        return files

    def _skip(self, path: Path, reason: str) -> None:
        reason = " ".join(reason.split())[:500]
        self.skipped.append((path, reason))
        log.warning("skipped %s: %s", path, reason)


def _suffix(path: Path) -> str:
    return Path(path.name.lower().removesuffix(".gz")).suffix
