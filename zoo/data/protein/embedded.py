"""Real structures included in the package, made by `make_embedded.py` from wwPDB entries (CC0).

Sequences, and the positions of N, Cα, C and Cβ to 0.01 Å; no alignments. `sources()` gives the origin of each.
"""

from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from zoo.data.protein.record import ATOMS, LETTERS, Protein
from zoo.data.sampling import hash_seed

__all__ = ["EmbeddedProteins", "sources"]

STEP = 0.01  # Å
STORED = [ATOMS.index(name) for name in ("N", "CA", "C", "CB")]
_HELD_OUT = 0.2  # share of the structures kept for validation


class EmbeddedProteins:
    """The structures of one split, "train" or "validation"; the split depends only on names.

    No chain is more than 30% identical to one in the other split (`make_embedded.py` leaves relatives out).
    """

    def __init__(self, split: str = "train"):
        if split not in ("train", "validation"):
            raise ValueError(f"EmbeddedProteins: split must be 'train' or 'validation', got {split!r}")
        names, chains = _arrays()["name"].tolist(), _arrays()["chains"].tolist()
        self.places: list[int] = []
        self.names: list[str] = []
        for several in (False, True):  # the share holds for single chains and for complexes
            places = [i for i in range(len(names)) if (len(chains[i]) > 1) == several]
            ranked = sorted(places, key=lambda i: hash_seed(names[i]))
            held_out = round(_HELD_OUT * len(ranked))
            self.places += sorted(ranked[held_out:] if split == "train" else ranked[:held_out])
        self.names += [names[place] for place in self.places]

    def __len__(self) -> int:
        return len(self.places)

    def protein(self, index: int) -> Protein:
        """Structure `index`; its alignment has only its own sequence."""
        return _protein(self.places[index])

    def chains(self) -> list[str]:
        """The sequences of all chains."""
        return [sequence for i in range(len(self)) for sequence in self.protein(i).chain_sequences()]


def sources() -> dict[str, str]:
    """The source of each structure: its package and file."""
    return dict(zip(_arrays()["name"].tolist(), _arrays()["source"].tolist()))


@lru_cache(maxsize=1)
def _arrays() -> dict[str, Any]:
    with (files("zoo.data.protein") / "embedded.npz").open("rb") as file, np.load(file, allow_pickle=False) as stored:
        return dict(stored)


@lru_cache
def _protein(place: int) -> Protein:
    stored = _arrays()
    first, last = stored["first"][place], stored["first"][place + 1]
    letters = stored["letters"][first:last]
    resolved = np.zeros((len(letters), len(ATOMS)), bool)
    positions = np.zeros((len(letters), len(ATOMS), 3), np.float32)
    resolved[:, STORED] = stored["resolved"][first:last]
    positions[:, STORED] = stored["positions"][first:last] * np.float32(STEP)
    index = stored["residue_index"][first:last].astype(np.int64)
    return Protein(
        name=str(stored["name"][place]),
        sequence="".join(LETTERS[i] for i in letters),
        chains=tuple(str(stored["chains"][place])),
        asym_id=stored["asym_id"][first:last].astype(np.int64),
        entity_id=stored["entity_id"][first:last].astype(np.int64),
        residue_index=index,
        residue_ids=tuple(str(i + 1) for i in index),
        positions=positions,
        resolved=resolved,
        msa=letters[None],
        deletions=np.zeros((1, len(letters)), np.uint16),
        paired=np.ones(1, bool),
    )
