"""Families of sequences that evolve on real structures by a known law: data to measure what a model learns.

A family is a crop of an embedded structure and an alignment drawn from a Potts model on it,

    p(x) ~ exp(sum_i h_i(x_i) + beta sum_{contacts i j} sum_k g_k u_k(x_i) u_k(x_j))

by Gibbs sampling, every row from its own start. Fields h are normal numbers, drawn for each family. Pairs in contact
(Cβ closer than 8 Å, at least 3 apart in a chain or in two chains) are coupled by simplified physics: hydrophobic
residues attract each other, charges of the same sign repel, and large residues pair with small ones. Contacts can
therefore be inferred from the alignment: better from more rows, and better still by a model that has learned the law.
The first row, also drawn, is the sequence of the family; only the coordinates of the structure are kept.

With ``kinds`` families differ as natural ones do: the law of a family is the above or a random one, couplings are
weaker or stronger, alignments shallower, rows are related by a tree, ends and stretches are missing, and residues are
inserted. Only the geometry of contacts is common to all.

Letters: f families, s rows, r residues, k properties.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from Bio.SeqUtils.ProtParamData import kd as HYDROPATHY
from torch import Tensor

from zoo.data.progress import counted
from zoo.data.protein.embedded import EmbeddedProteins, sources
from zoo.data.protein.example import crop_contiguous
from zoo.data.protein.record import ATOMS, GAP, LETTERS, Protein
from zoo.data.sampling import generator
from zoo.protein.distogram import CONTACT, distances

__all__ = ["PottsFamilies", "gibbs"]

log = logging.getLogger(__name__)

# volumes in Å³ (Zamyatnin 1972), in the order of LETTERS
VOLUME = [
    88.6, 173.4, 114.1, 111.1, 108.5, 143.8, 138.4, 60.1, 153.2, 166.7, 166.7, 168.6, 162.9, 189.9, 112.7, 89.0, 116.1,
    227.8, 193.6, 140.0,
]  # fmt: skip
CHARGE = {"K": 1.0, "R": 1.0, "D": -1.0, "E": -1.0}
SIGNS = (1.0, -1.0, -1.0)  # like attracts like in hydropathy; unlike attracts unlike in charge and volume
SEPARATION = 3  # least separation of coupled residues along a chain
FIELD = 0.8  # standard deviation of the fields


def properties() -> Tensor:
    """Hydropathy, charge and volume of the 20 amino acids [20, 3], each of mean 0 and variance 1."""
    letters = LETTERS[:20]
    columns = [[HYDROPATHY[a] for a in letters], [CHARGE.get(a, 0.0) for a in letters], VOLUME]
    u = torch.tensor(columns).T
    return (u - u.mean(0)) / u.std(0, correction=0)


def gibbs(fields: Tensor, couplings: Tensor, u: Tensor, uniform: Tensor, start: Tensor | None = None) -> Tensor:
    """Letters [f, s, r] after sweeps over all residues, from `start` [f, s, r], with random numbers `uniform`.

    `uniform` [f, sweeps, r, s]; a residue whose number is nan is unchanged.

    `fields` [f, r, 20], `couplings` [f, r, r] (symmetric, no diagonal), `u` [20, k] already scaled by its sign:
    the logit of letter a at residue i is h_i(a) + sum_j J_ij sum_k u_k(a) |u_k|(x_j).
    """
    f, sweeps, r, s = uniform.shape
    letters = torch.zeros(f, r, s, dtype=torch.long) if start is None else start.transpose(1, 2).contiguous()
    signs = torch.tensor(SIGNS)
    traits = torch.zeros(f, r, s * u.shape[1]) if start is None else u[letters].flatten(2)  # the letters' properties
    for sweep in counted(range(sweeps), sweeps, "drawing alignments, sweeps", log):
        for i in range(r):
            around = torch.bmm(couplings[:, i : i + 1], traits).view(f, s, -1)
            logits = fields[:, i, None] + (around * signs) @ u.T
            cumulated = logits.softmax(-1).cumsum(-1)
            threshold = uniform[:, sweep, i]
            chosen = (cumulated < threshold[..., None]).sum(-1).clamp(max=u.shape[0] - 1)
            chosen = torch.where(threshold.isnan(), letters[:, i], chosen)
            letters[:, i] = chosen
            traits[:, i] = u[chosen].flatten(1)
    return letters.transpose(1, 2)


class PottsFamilies:
    """`families` alignments of `residues` columns and `rows` rows, on the structures of one embedded split.

    Family i is a function of only (split, seed, i). `coupling` is beta. Shorter structures, structures named in
    `without` and crops of which less than half was seen are not used.
    """

    def __init__(
        self,
        split: str = "train",
        *,
        families: int = 256,
        residues: int = 48,
        rows: int = 64,
        coupling: float = 0.2,
        kinds: bool = False,
        without: Sequence[str] = (),
        sweeps: int = 12,
        seed: int = 0,
    ):
        structures = EmbeddedProteins(split)
        if strange := set(without) - set(sources()):
            raise ValueError(f"no embedded structure is called {', '.join(sorted(strange))}")
        every = [p for p in map(structures.protein, range(len(structures))) if p.name not in without]
        self.structures = [p for p in every if len(p) >= residues]
        if not self.structures:
            raise ValueError(f"no embedded structure has {residues} residues; the longest has {max(map(len, every))}")
        self.split, self.seed, self.families = split, seed, families
        self.residues, self.rows, self.coupling, self.sweeps, self.kinds = residues, rows, coupling, sweeps, kinds
        self._cache: dict[int, list[Protein]] = {}

    def __len__(self) -> int:
        return self.families

    def protein(self, index: int) -> Protein:
        """Family `index`. Families are drawn one batch at a time, at the first use of any of them."""
        batch, place = divmod(index, _BATCH)
        if batch not in self._cache:
            self._cache[batch] = self._sample(batch)
        return self._cache[batch][place]

    def _sample(self, batch: int) -> list[Protein]:
        indices = range(batch * _BATCH, min((batch + 1) * _BATCH, self.families))
        crops, fields, couplings, uniform, sources = [], [], [], [], []
        for i in indices:
            random = generator("potts", self.split, self.seed, i)
            crop = self._crop(random)
            while crop.contact_atoms()[1].mean() < 0.5:  # less than half was seen
                crop = self._crop(random)
            crops.append(crop)
            sources.append(random)
            fields.append(FIELD * torch.randn(self.residues, 20, generator=random))
            strength = self.coupling * (8 ** (torch.rand((), generator=random) - 0.5) if self.kinds else 1)
            couplings.append(strength * (uneven(crop, random) if self.kinds else coupled(crop).float()))
            uniform.append(torch.rand(self.sweeps, self.residues, self.rows, generator=random))
        u = properties()
        if self.kinds and batch % 2:
            u = drawn_properties(generator("law", self.split, self.seed, batch))
        potts = torch.stack(fields), torch.stack(couplings), u
        alignments = gibbs(*potts, torch.stack(uniform))
        if not self.kinds:
            drawn_rows = alignments.numpy().astype(np.uint8)
            none = np.zeros(drawn_rows.shape[1:], np.uint16)
            return [_family(crop, msa, none, i) for crop, msa, i in zip(crops, drawn_rows, indices)]
        alignments = related(alignments, potts, sources)
        return [_family(crop, *worn(msa, r), i) for crop, msa, r, i in zip(crops, alignments, sources, indices)]

    def _crop(self, random: torch.Generator) -> Protein:
        source = self.structures[int(torch.randint(len(self.structures), (), generator=random))]
        return crop_contiguous(source, self.residues, random)


_BATCH = 64


def coupled(protein: Protein, least: int = SEPARATION) -> Tensor:
    """The mask [r, r] of residues in contact, without those nearer than `least` along a chain."""
    position, seen = protein.contact_atoms()
    x, mask = torch.from_numpy(position), torch.from_numpy(seen)
    chain, place = torch.from_numpy(protein.asym_id), torch.from_numpy(protein.residue_index)
    far = (chain[:, None] != chain) | ((place[:, None] - place).abs() >= least)
    return (distances(x, x) < CONTACT) & mask[:, None] & mask & far


def uneven(protein: Protein, random: torch.Generator) -> Tensor:
    """Random strengths of couplings [r, r]: for contacts, chain neighbours included, and for a few other pairs.

    Natural contacts differ by more than their law: many are hardly visible in an alignment, and some visible couplings
    belong to another state or to a partner. Weak contacts have to be inferred from their surroundings.
    """
    r = len(protein)
    contacts = coupled(protein, least=1).float()
    strength = (1.2 * torch.randn(r, r, generator=random)).exp() / 2
    chance = torch.rand(r, r, generator=random) < 0.15 * contacts.sum() / r**2
    half = (strength * contacts.maximum(chance.float())).triu(1)
    return half + half.mT


def drawn_properties(random: torch.Generator) -> Tensor:
    """Three random properties of the 20 letters [20, 3], without chemistry, each of mean 0 and variance 1."""
    u = torch.randn(20, len(SIGNS), generator=random)
    return (u - u.mean(0)) / u.std(0, correction=0)


def related(letters: Tensor, potts: tuple[Tensor, Tensor, Tensor], sources: Sequence[torch.Generator]) -> Tensor:
    """Rows [f, s, r] as the leaves of a tree: the first eighth is unchanged, and is doubled three times by copies.

    In a copy, a share of the residues is drawn again, given the others; each family has its own share.
    """
    _, s, r = letters.shape

    def rand(*shape: int) -> Tensor:
        return torch.stack([torch.rand(*shape, generator=random) for random in sources])

    founders, share = -(-s // 8), 0.05 + 0.6 * rand(1, 1, 1)
    rows = letters[:, :founders]
    while rows.shape[1] < s:
        n = rows.shape[1]
        uniform = rand(1, r, n).masked_fill(rand(1, r, n) >= share, torch.nan)
        rows = torch.cat([rows, gibbs(*potts, uniform, rows)], 1)
    return rows[:, :s]


def worn(msa: Tensor, random: torch.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Some rows [s, r] of an alignment, without some ends and stretches; and numbers of inserted residues [s, r]."""
    s, r = msa.shape
    s = max(2, round(s * 8 ** -float(torch.rand((), generator=random))))
    msa = msa[torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.randperm(len(msa) - 1, generator=random)])[:s]]
    place = torch.arange(r)
    bare = torch.rand(4, s, 1, generator=random)  # lengths of both missing ends; place and length of a missing stretch
    rare = torch.rand(3, s, 1, generator=random) < 0.3
    gaps = (rare[0] & (place < bare[0] * r / 2)) | (rare[1] & (place >= r - bare[1] * r / 2))
    common = torch.randint(r, (4,), generator=random)  # where stretches begin, the same in many rows
    begin = common[(bare[2] * len(common)).long()]
    gaps |= rare[2] & (place >= begin) & (place < begin + bare[3] * r / 6)
    gaps[0] = False
    inserted = torch.randint(1, 6, (s, r), generator=random) * (torch.rand(s, r, generator=random) < 0.01) * ~gaps
    inserted[0] = 0
    return msa.masked_fill(gaps, GAP).numpy().astype(np.uint8), inserted.numpy().astype(np.uint16)


def _family(crop: Protein, msa: np.ndarray, deletions: np.ndarray, index: int) -> Protein:
    """The crop with another sequence: contact atoms keep their positions, also at former glycines."""
    position, seen = crop.contact_atoms()
    positions, resolved = crop.positions.copy(), crop.resolved.copy()
    positions[:, ATOMS.index("CB")], resolved[:, ATOMS.index("CB")] = position, seen
    return replace(
        crop,
        name=f"{crop.name} {index}",
        sequence="".join(LETTERS[a] for a in msa[0]),
        positions=positions,
        resolved=resolved,
        msa=msa,
        deletions=deletions,
        paired=np.ones(len(msa), bool),
    )
