"""Proteins given by a user as files: structures, alignments, folders of both."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zoo.data.protein import alignment, structure
from zoo.data.protein.alignment import Alignment, read_alignment
from zoo.data.protein.complexes import join
from zoo.data.protein.folder import kind, owner, read_protein, stem, with_templates
from zoo.data.protein.record import ATOMS, Protein, encode
from zoo.data.protein.template import template_owner

__all__ = ["ProteinFiles", "find_proteins", "from_alignments", "from_sequences", "list_files", "refuse_same_names"]


@dataclass
class ProteinFiles:
    """The files of one protein: a structure with its alignments, or only alignments, one for each chain; templates."""

    name: str
    structure: Path | None
    alignments: list[Path] = field(default_factory=list)
    templates: list[Path] = field(default_factory=list)

    def read(self, templates: int = 0, skip: Callable[[Path, str], None] | None = None) -> Protein:
        """The protein with its first `templates` usable templates.

        A ValueError or an OSError names the file and the fault. skip: called with the path and the reason for a
        template that cannot be used, instead of an error.
        """
        if self.structure:
            protein = read_protein(self.structure, self.alignments)
        else:
            protein = from_alignments(self.name, [read_alignment(path) for path in self.alignments])
        return with_templates(protein, self.templates, skip, templates)


def find_proteins(paths: Sequence[str | os.PathLike[str]], chains: bool = False) -> list[ProteinFiles]:
    """The proteins in files and folders.

    A structure takes the alignments whose names begin with its own, among `paths` and in its folder (as in folder.py).
    Every other alignment is a separate protein, or with `chains` one chain of a single complex; the same file twice is
    two copies. Templates of structures and of alignments without one are found by name in the same places; a template
    of none of these is a separate protein. ValueError: a path does not exist, or its name fits neither kind of file.
    """
    files = list_files(paths)
    names = {stem(path) for path in files}
    templates = {p for p in files if kind(p) == "structure" and template_owner(stem(p)) in names}
    files = [path for path in files if path not in templates]
    proteins = [ProteinFiles(stem(path), path) for path in dict.fromkeys(files) if kind(path) == "structure"]
    alone = _share_alignments(proteins, [path for path in files if kind(path) == "alignment"])
    if chains and alone:
        proteins.append(ProteinFiles("-".join(dict.fromkeys(map(stem, alone))), None, alone))
    else:
        proteins += [ProteinFiles(stem(path), None, [path]) for path in dict.fromkeys(alone)]
    _share_templates(proteins, templates)
    refuse_same_names({str(one.structure or one.alignments[0]): one.name for one in proteins})
    return proteins


def list_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The structures and alignments among `paths`, and in those of them that are folders, in order.

    ValueError: a path does not exist or is of neither kind, or a folder has no such file.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and kind(p) and not p.name.startswith(".")]
            if not inside:
                raise ValueError(f"no structures or alignments in {path}")
            files += inside
        elif not path.exists():
            raise ValueError(f"{path}: no such file")
        elif not kind(path):
            known = ", ".join(structure.SUFFIXES + alignment.SUFFIXES)
            raise ValueError(f"{path}: no structure or alignment by its name; expected {known}, plain or .gz")
        else:
            files.append(path)
    return files


def refuse_same_names(names: Mapping[str, str]) -> None:
    """Raise ValueError for two proteins of one name, whose results would have one name too. `names`: by source."""
    first: dict[str, str] = {}
    for source, name in names.items():
        if (other := first.setdefault(name, source)) != source:
            raise ValueError(
                f"two proteins are called {name}, {other} and {source}: predict them in two calls, with different --out"
            )


def _share_alignments(proteins: Sequence[ProteinFiles], alignments: Iterable[Path]) -> list[Path]:
    """Give each structure its alignments, those beside it too; return the others."""
    structures, alone = {one.name: one for one in proteins}, []
    for path in alignments:
        name = owner(path.parts[-2:], structures)
        if name is None:
            alone.append(path)
        elif path not in structures[name].alignments:
            structures[name].alignments.append(path)
    for one in proteins:
        one.alignments += [path for path in _beside(one) if path not in one.alignments]
    return alone


def _share_templates(proteins: Iterable[ProteinFiles], templates: Iterable[Path]) -> None:
    """Give each protein the templates of its name among `templates`, and those in the folders of its files."""
    named, folders = _by_owner(templates), dict[Path, dict[str, list[Path]]]()
    for one in proteins:
        parents = {path.parent for path in (*([one.structure] if one.structure else ()), *one.alignments)}
        for folder in parents - folders.keys():
            folders[folder] = _by_owner(path for path in folder.iterdir() if kind(path) and path.is_file())
        owners = {one.name, *map(stem, one.alignments)}
        places = *(folders[folder] for folder in parents), named
        candidates = [path for place in places for name in owners for path in place.get(name, [])]
        one.templates = sorted({p.resolve(): p for p in candidates}.values(), key=lambda p: (p.name, p))


def from_alignments(name: str, alignments: Sequence[Alignment]) -> Protein:
    """A protein whose chains are known only by their alignments; the first row of each is the chain's sequence.

    The alignment of a complex describes several chains.
    """
    queries = [chain.query for a in alignments for chain in a.chains() for _ in range(chain.copies[0])]
    return join(from_sequences(name, queries), alignments)


def from_sequences(name: str, sequences: Sequence[str]) -> Protein:
    """A protein of which only the sequences of its chains are known."""
    lengths = [len(sequence) for sequence in sequences]
    entities = list(dict.fromkeys(sequences))
    r = sum(lengths)
    return Protein(
        name=name,
        sequence="".join(sequences),
        chains=tuple(_letters(i) for i in range(len(sequences))),
        asym_id=np.repeat(np.arange(len(sequences)), lengths),
        entity_id=np.repeat([entities.index(sequence) for sequence in sequences], lengths),
        residue_index=np.concatenate([np.arange(n) for n in lengths]),
        residue_ids=tuple(str(i + 1) for n in lengths for i in range(n)),
        positions=np.zeros((r, len(ATOMS), 3), np.float32),
        resolved=np.zeros((r, len(ATOMS)), bool),
        msa=encode("".join(sequences).encode())[None],
        deletions=np.zeros((1, r), np.uint16),
        paired=np.ones(1, bool),
    )


def _letters(i: int) -> str:
    """A to Z, AA, AB ..."""
    return (_letters(i // 26 - 1) if i >= 26 else "") + chr(ord("A") + i % 26)


def _by_owner(files: Iterable[Path]) -> dict[str, list[Path]]:
    """The templates among the files, by the name of their protein or chain."""
    templates: dict[str, list[Path]] = {}
    for path in files:
        if kind(path) == "structure" and (whose := template_owner(stem(path))):
            templates.setdefault(whose, []).append(path)
    return templates


def _beside(protein: ProteinFiles) -> Iterable[Path]:
    assert protein.structure
    for path in sorted(protein.structure.parent.iterdir()):
        if path.name.startswith(protein.name):
            for file in [path] if path.is_file() else sorted(path.iterdir()):
                if file.is_file() and kind(file) == "alignment" and owner(file.parts[-2:], [protein.name]):
                    yield file
