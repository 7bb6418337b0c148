"""A protein as data: the residues of one or several chains, their alignment and the positions of their atoms.

Letters: r residues of all chains together, s rows of the alignment, a atoms of a residue (ATOMS).
"""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["ATOMS", "GAP", "LETTERS", "MASK", "UNKNOWN", "Protein", "Template", "digest", "encode"]

LETTERS = "ARNDCQEGHILKMFPSTWYVX-#"  # the 23 classes of AlphaFold 2: amino acids, unknown, gap, masked
UNKNOWN, GAP, MASK = 20, 21, 22
ATOMS = ("N", "CA", "C", "O", "CB")

# B and Z are read as in AlphaFold's tables, selenocysteine (U) as cysteine, any other capital letter as unknown
_CODES = np.full(256, 255, np.uint8)
for _letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
    _CODES[ord(_letter)] = LETTERS.find({"B": "D", "Z": "E", "U": "C"}.get(_letter, _letter)) % 21
_CODES[[ord(letter) for letter in "JO"]] = UNKNOWN
_CODES[ord("-")] = GAP


def encode(sequence: str | bytes) -> np.ndarray:
    """The class of every character [n], uint8; 255 if it is neither a capital letter nor a gap."""
    raw = sequence if isinstance(sequence, bytes) else sequence.encode("latin-1", "replace")
    return _CODES[np.frombuffer(raw, np.uint8)]


def digest(sequence: str) -> str:
    """A short name of a sequence; different ones have different names but for one pair in 2^64."""
    return hashlib.sha256(sequence.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Template:
    """A known structure of a relative, aligned to the residues of a protein."""

    name: str
    letters: np.ndarray  # [r] uint8; GAP where the relative has no residue
    positions: np.ndarray  # [r, a, 3] Å, zero where unresolved
    resolved: np.ndarray  # [r, a] bool

    def take(self, residues: np.ndarray) -> "Template":
        return replace(
            self, letters=self.letters[residues], positions=self.positions[residues], resolved=self.resolved[residues]
        )

    def contact_atoms(self) -> tuple[np.ndarray, np.ndarray]:
        """The contact atoms, as of `Protein`."""
        return _contact_atoms(self.letters, self.positions, self.resolved)


@dataclass(frozen=True, eq=False)
class Protein:
    """The residues of all chains in sequence, with an alignment whose first row is their own sequence."""

    name: str
    sequence: str  # one letter for each residue in the experiment, seen or not; X if it has no letter
    chains: tuple[str, ...]  # the authors' names, in the order of asym_id
    asym_id: np.ndarray  # [r] the chain, from 0
    entity_id: np.ndarray  # [r] chains of the same entity are copies of each other
    residue_index: np.ndarray  # [r] place in the complete sequence of the chain, from 0
    residue_ids: tuple[str, ...]  # the authors' number and insertion code of a residue
    positions: np.ndarray  # [r, a, 3] Å, zero where unresolved
    resolved: np.ndarray  # [r, a] bool
    msa: np.ndarray  # [s, r] uint8
    deletions: np.ndarray  # [s, r] number of the row's residues left out just before this one, uint16
    paired: np.ndarray  # [s] bool: the row spans two entities or more, in one species; else it has gaps in all but one
    couplings: np.ndarray | None = None  # [r, r] float32: coupling scores from the whole alignment, if computed
    templates: tuple[Template, ...] = ()

    def __len__(self) -> int:
        return len(self.sequence)

    def chain_sequences(self) -> list[str]:
        """The sequence of each chain."""
        letters = np.array(list(self.sequence))
        return ["".join(letters[self.asym_id == chain]) for chain in range(len(self.chains))]

    def copies(self) -> np.ndarray:
        """Which copy of its entity the chain of each residue is [r], from 0 in the order of chains."""
        copies = np.zeros(len(self), np.int64)
        for entity in np.unique(self.entity_id):
            residues = self.entity_id == entity
            copies[residues] = np.unique(self.asym_id[residues], return_inverse=True)[1]
        return copies

    def take(self, residues: np.ndarray) -> "Protein":
        """Only the given residues, in their order; `asym_id` and `residue_index` are unchanged."""
        return replace(
            self,
            sequence="".join(self.sequence[i] for i in residues),
            residue_ids=tuple(self.residue_ids[i] for i in residues),
            **{
                name: getattr(self, name)[residues]
                for name in ("asym_id", "entity_id", "residue_index", "positions", "resolved")
            },
            msa=self.msa[:, residues],
            deletions=self.deletions[:, residues],
            couplings=None if self.couplings is None else self.couplings[np.ix_(residues, residues)],
            templates=tuple(template.take(residues) for template in self.templates),
        )

    def atoms(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The positions [r, 3] Å of the atom `name` of ATOMS, and the mask of those that were seen [r]."""
        return self.positions[:, ATOMS.index(name)], self.resolved[:, ATOMS.index(name)]

    def contact_atoms(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions [r, 3] Å of contact atoms, Cβ or Cα of glycine, and the mask of those that were seen [r]."""
        return _contact_atoms(encode(self.sequence), self.positions, self.resolved)


def _contact_atoms(letters: np.ndarray, positions: np.ndarray, resolved: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ca, cb = ATOMS.index("CA"), ATOMS.index("CB")
    atom = np.where((letters == LETTERS.index("G")) & ~resolved[:, cb], ca, cb)
    every = np.arange(len(letters))
    return positions[every, atom], resolved[every, atom]
