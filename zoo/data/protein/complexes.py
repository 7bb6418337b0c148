"""Alignments joined to their protein: one for each entity, with rows of the same species paired."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from zoo.data.protein.alignment import Alignment, describe_difference
from zoo.data.protein.record import GAP, LETTERS, UNKNOWN, Protein

__all__ = ["as_a3m", "join", "refuse_stranger"]


def join(protein: Protein, alignments: Sequence[Alignment]) -> Protein:
    """The protein with its alignment: its own sequence first, then the rows of `alignments` for its entities.

    An alignment belongs to the entity whose sequence is its query; that of a complex is assigned chain by chain.
    Several alignments of one entity are concatenated, and repeated rows are dropped. With more than one entity, the
    i-th rows of a species in each entity become one `paired` row (AlphaFold-Multimer, supplement, 1.1); so do rows of a
    complex that its file has in one row. Any other row has gaps outside its entity. All copies of an entity have the
    same rows.

    ValueError: an alignment belongs to no entity; the message describes the difference from the nearest one.
    """
    places = _places(protein)
    entities = range(len(places))
    belonging: dict[int, list[Alignment]] = {entity: [] for entity in entities}
    for alignment in (chain for given in alignments for chain in given.chains()):
        belonging[_entity(alignment, protein, places)].append(alignment)
    rows = {e: _stack(belonging[e], protein.msa[0, places[e][0]]) for e in entities}

    partners = _pairs([species for _, _, species in rows.values()]) if len(entities) > 1 else []
    used = [{group[e] for group in partners} for e in entities]
    single = [(e, i) for e in entities for i in range(1, len(rows[e][0])) if i not in used[e]]
    total = 1 + len(partners) + len(single)
    msa = np.full((total, len(protein)), GAP, np.uint8)
    deletions = np.zeros((total, len(protein)), np.uint16)
    msa[0] = protein.msa[0]
    for e in entities:
        letters, left_out, _ = rows[e]
        ours = [1 + len(partners) + k for k, (entity, _) in enumerate(single) if entity == e]
        targets = np.array([*range(1, 1 + len(partners)), *ours], dtype=np.int64)
        sources = np.array(
            [*(group[e] for group in partners), *(i for entity, i in single if entity == e)], dtype=np.int64
        )
        for copy in places[e]:
            msa[targets[:, None], copy] = letters[sources]
            deletions[targets[:, None], copy] = left_out[sources]
    paired = np.arange(total) <= len(partners) if len(entities) > 1 else np.ones(total, bool)
    return replace(protein, msa=msa, deletions=deletions, paired=paired)


def refuse_stranger(protein: Protein, alignment: Alignment) -> None:
    """Raise ValueError for an alignment that belongs to no chain of the protein."""
    for chain in alignment.chains():
        _entity(chain, protein, _places(protein))


def as_a3m(protein: Protein) -> str:
    """The alignment of a protein as A3M text, for a complex in ColabFold's format: paired rows, then the others.

    The letters of residues that were left out are unknown and written as x.
    """
    places = _places(protein)
    columns = np.concatenate([copies[0] for copies in places.values()])
    lines = []
    if len(columns) < len(protein) or len(places) > 1:
        lengths, copies = zip(*((str(own.shape[1]), str(own.shape[0])) for own in places.values()))
        lines.append(f"#{','.join(lengths)}\t{','.join(copies)}")
    queries = "\t".join(str(101 + entity) for entity in places)
    for i in [0, *(1 + np.argsort(~protein.paired[1:], kind="stable"))]:
        letters, left_out = protein.msa[i, columns], protein.deletions[i, columns]
        row = "".join("x" * n + LETTERS[letter] for letter, n in zip(letters, left_out))
        lines += [f">{queries if i == 0 else f'row_{i}'}", row.replace("#", "X")]
    return "\n".join(lines) + "\n"


def _places(protein: Protein) -> dict[int, np.ndarray]:
    """The residues of each entity [copies, residues]."""
    found = {}
    for entity in range(int(protein.entity_id.max()) + 1):
        copies = np.unique(protein.asym_id[protein.entity_id == entity])
        found[entity] = np.stack([np.flatnonzero(protein.asym_id == copy) for copy in copies])
    return found


def _entity(alignment: Alignment, protein: Protein, places: dict[int, np.ndarray]) -> int:
    """The entity of a chain's alignment."""
    found = [e for e, copies in places.items() if _same(alignment.msa[0], protein.msa[0, copies[0]])]
    if not found:
        raise ValueError(_stranger(alignment, protein, places))
    return found[0]


def _same(query: np.ndarray, sequence: np.ndarray) -> bool:
    """Return True if two sequences are equal; X, on either side, matches any letter."""
    if query.shape != sequence.shape:
        return False
    return bool(((query == sequence) | (query == UNKNOWN) | (sequence == UNKNOWN)).all())


def _stranger(alignment: Alignment, protein: Protein, places: dict[int, np.ndarray]) -> str:
    sequences = {e: "".join(protein.sequence[i] for i in copies[0]) for e, copies in places.items()}
    nearest = max(sequences, key=lambda e: _shared_words(alignment.query, sequences[e]))
    chain = protein.chains[protein.asym_id[places[nearest][0, 0]]]
    return (
        f"{alignment.source} is of another protein than {protein.name}, chain {chain}: "
        f"{describe_difference(alignment.query, sequences[nearest])}. Rename or move it, if it is not meant for this "
        "structure"
    )


def _shared_words(a: str, b: str, n: int = 3) -> int:
    return len({a[i : i + n] for i in range(len(a))} & {b[i : i + n] for i in range(len(b))})


def _stack(alignments: Sequence[Alignment], query: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str | None]]:
    """The distinct rows of one entity, its own sequence first: letters [s, r], deletions [s, r], species."""
    letters = np.concatenate([query[None], *(a.msa[1:] for a in alignments)])
    deletions = np.concatenate([np.zeros((1, len(query)), np.uint16), *(a.deletions[1:] for a in alignments)])
    mates = [None, *(a.mate(i) for a in alignments for i in range(1, len(a.names)))]
    told = [None, *(mate if a.mates else None for a in alignments for mate in (a.mates or a.names)[1:])]
    first: dict[Any, int] = {}  # the first of equal rows; rows that a file pairs differently are not equal
    for i, row in enumerate(letters):
        first.setdefault((row.tobytes(), told[i]), i)
    kept = [*first.values()]
    return letters[kept], deletions[kept], [mates[i] for i in kept]


def _pairs(species: list[list[str | None]]) -> list[tuple[int, ...]]:
    """Groups of rows of the same species, one row from each entity, matched by their rank within the species."""
    ranked: list[dict[str, list[int]]] = []
    for names in species:
        found: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            if name is not None:
                found.setdefault(name, []).append(i)
        ranked.append(found)
    shared = [name for name in ranked[0] if all(name in other for other in ranked)]
    return sorted(group for name in shared for group in zip(*(found[name] for found in ranked)))
