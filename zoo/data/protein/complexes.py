"""Alignments joined to their protein: one for each entity, with rows of the same species paired."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from zoo.data.protein.alignment import Alignment, describe_difference
from zoo.data.protein.record import GAP, LETTERS, UNKNOWN, Protein

__all__ = ["as_a3m", "join", "refuse_stranger"]


def join(protein: Protein, alignments: Sequence[Alignment]) -> Protein:
    """The protein with its alignment: its own sequence first, then the rows of `alignments` for its entities.

    An alignment belongs to the entity whose sequence is its query; that of a complex is assigned chain by chain. A row
    that a file has over several chains stays one row, and the i-th rows of a species in each entity that has the
    species become one (AlphaFold-Multimer, supplement, 1.1): both are `paired`, those over most entities first. A row
    has gaps in the entities that it lacks. Rows that are equal over the whole protein are kept once. All copies of an
    entity have the same rows.

    ValueError: an alignment belongs to no entity; the message describes the difference from the nearest one.
    """
    places = _places(protein)
    entities = range(len(places))
    belonging: dict[int, list[Alignment]] = {entity: [] for entity in entities}
    for alignment in (chain for several in alignments for chain in several.chains()):
        belonging[_entity(alignment, protein, places)].append(alignment)
    rows = {e: _stack(belonging[e], protein.msa[0, places[e][0]]) for e in entities}

    groups = _groups([mates for _, _, mates in rows.values()])
    msa = np.full((len(groups), len(protein)), GAP, np.uint8)
    deletions = np.zeros(msa.shape, np.uint16)
    for e in entities:
        letters, left_out, _ = rows[e]
        targets = np.array([i for i, group in enumerate(groups) if e in group])
        sources = np.array([group[e] for group in groups if e in group])
        for copy in places[e]:
            msa[targets[:, None], copy] = letters[sources]
            deletions[targets[:, None], copy] = left_out[sources]
    msa[0] = protein.msa[0]
    # the first of equal rows; the sequence of an entity alone says nothing that row 0 does not
    first = {np.where(protein.entity_id == e, msa[0], GAP).astype(np.uint8).tobytes(): 0 for e in entities}
    for i, row in enumerate(msa):
        first.setdefault(row.tobytes(), i)
    order = sorted({0, *first.values()})
    paired = np.array([len(group) > 1 or len(entities) == 1 for group in groups])
    return replace(protein, msa=msa[order], deletions=deletions[order], paired=paired[order])


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
        lengths, copies = zip(*((str(residues.shape[1]), str(residues.shape[0])) for residues in places.values()))
        lines.append(f"#{','.join(lengths)}\t{','.join(copies)}")
    queries = "\t".join(str(101 + entity) for entity in places)
    for i in [0, *(1 + np.argsort(~protein.paired[1:], kind="stable"))]:
        letters, left_out = protein.msa[i, columns], protein.deletions[i, columns]
        row = "".join("x" * n + LETTERS[letter] for letter, n in zip(letters, left_out))
        lines += [f">{queries if i == 0 else f'row_{i}'}", row.replace("#", "X")]
    return "\n".join(lines) + "\n"


def _places(protein: Protein) -> dict[int, np.ndarray]:
    """The residues of each entity [copies, residues]."""
    residues = {}
    for entity in range(int(protein.entity_id.max()) + 1):
        copies = np.unique(protein.asym_id[protein.entity_id == entity])
        residues[entity] = np.stack([np.flatnonzero(protein.asym_id == copy) for copy in copies])
    return residues


def _entity(alignment: Alignment, protein: Protein, places: dict[int, np.ndarray]) -> int:
    """The entity of a chain's alignment."""
    entities = [e for e, copies in places.items() if _same(alignment.msa[0], protein.msa[0, copies[0]])]
    if not entities:
        raise ValueError(_stranger(alignment, protein, places))
    return entities[0]


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
    """The rows of one entity, its own sequence first: letters [s, r], deletions [s, r], mates.

    Of rows with the same letters and the same mate, the first counts.
    """
    letters = np.concatenate([query[None], *(a.msa[1:] for a in alignments)])
    deletions = np.concatenate([np.zeros((1, len(query)), np.uint16), *(a.deletions[1:] for a in alignments)])
    mates = [None, *(a.mate(i) for a in alignments for i in range(1, len(a.names)))]
    first: dict[tuple[bytes, str | None], int] = {}
    for i, row in enumerate(letters):
        first.setdefault((row.tobytes(), mates[i]), i)
    order = [*first.values()]
    return letters[order], deletions[order], [mates[i] for i in order]


def _groups(mates: list[list[str | None]]) -> list[dict[int, int]]:
    """The rows of the protein, each as the row that it takes from each entity: the sequences, the paired, the others.

    Mates are matched by their rank among those of the same name in their entity, as far as every entity that has the
    name has one of this rank.
    """
    ranks: dict[str, dict[int, list[int]]] = {}  # by name and entity
    for entity, names in enumerate(mates):
        for i, name in enumerate(names):
            if name is not None:
                ranks.setdefault(name, {}).setdefault(entity, []).append(i)
    pairs = [dict(zip(rows, pair)) for rows in ranks.values() if len(rows) > 1 for pair in zip(*rows.values())]
    pairs.sort(key=lambda pair: (-len(pair), [*pair.items()]))
    partners = {row for pair in pairs for row in pair.items()}
    singles = [{e: i} for e, names in enumerate(mates) for i in range(1, len(names)) if (e, i) not in partners]
    return [dict.fromkeys(range(len(mates)), 0), *pairs, *singles]
