"""Embeddings of an alignment (b s r c) and its pairs (b i j c), recycling, and the heads that predict.

Tokens are 0 to 22: the twenty amino acids, unknown, gap, masked. Except for couplings, no input has r² elements: pairs
are embedded from two copies of the residues (b r k), as i and as j.

Letters: `zoo/protein/__init__.py`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.protein.distogram import distances
from zoo.protein.layers import Linear, OneHot

CLASSES = 23


class Prediction(NamedTuple):
    """The output of a model of proteins."""

    msa_logits: Tensor  # (b s r 23): the token at each place of the alignment
    distogram_logits: Tensor  # (b i j bins): the distance of each pair, the same for i j and j i
    single: Tensor  # (b r c_s): one vector for each residue, for further modules


class Structure(NamedTuple):
    """The output of a model of proteins with a structure module."""

    msa_logits: Tensor
    distogram_logits: Tensor
    single: Tensor
    rotation: Tensor  # (b l r 3 3): the frame of each residue after each of l iterations
    translation: Tensor  # (b l r 3) Å
    lddt_logits: Tensor  # (b r 50): the lDDT expected for each residue


class MSAEmbed(nn.Module):
    """Tokens (b s r), deletions before each (b s r) and, with ``target``, the target sequence (b r) -> (b s r c).

    A deletion count d is embedded as min(d, 1) and (2/π) arctan(d/3) (AF2 supplement, table 1). With ``clusters`` each
    row is the centre of a cluster, whose ``profile`` (b s r 24) is the share of each token, then the mean count of
    deletions, embedded by the arctangent alone.
    """

    def __init__(self, dim: int, target: bool = True, clusters: bool = False):
        super().__init__()
        self.token = OneHot(CLASSES, dim)
        self.deletion = Linear(2, dim)
        self.target = OneHot(CLASSES, dim) if target else None
        self.profile = Linear(CLASSES + 1, dim, bias=False) if clusters else None

    def forward(
        self, msa: Tensor, deletions: Tensor, sequence: Tensor | None = None, profile: Tensor | None = None
    ) -> Tensor:
        d = deletions.to(self.deletion.weight.dtype)
        m = self.token(msa) + self.deletion(torch.stack([d.clamp(max=1), compressed(d)], -1))
        if self.profile is not None and profile is not None:
            share, mean = profile.to(d.dtype).split([CLASSES, 1], -1)
            m = m + self.profile(torch.cat([share, compressed(mean)], -1))
        return m if self.target is None else m + self.target(sequence)[:, None]


def compressed(count: Tensor) -> Tensor:
    """A count from 0 on, as a number from 0 to 1."""
    return (count / 3).atan() * (2 / math.pi)


def clipped_offset(i: Tensor, j: Tensor, reach: int, counts: Tensor) -> Tensor:
    """The class of i (b i) - j (b j), clipped to ±reach; 2 reach + 1 where it does not count (b i j)."""
    offset = (i[:, :, None] - j[:, None]).clamp(-reach, reach) + reach
    return offset.masked_fill(~counts, 2 * reach + 1)


class ChainOffset(OneHot):
    """The offset along the chain of residues (b i k) and (b j k), k = place, chain, ... -> (b i j c).

    Clipped to ±``reach``, with one more class for two different chains (AF-Multimer, 7.1). Without ``chains`` it reads
    places alone (AF2 algorithms 4 and 5).
    """

    def __init__(self, dim: int, reach: int, chains: bool = True):
        super().__init__(2 * reach + 1 + chains, dim)
        self.reach, self.chains = reach, chains

    def forward(self, i: Tensor, j: Tensor) -> Tensor:  # type: ignore[override]
        same_chain = i[:, :, None, 1] == j[:, None, :, 1]
        counts = same_chain if self.chains else torch.ones_like(same_chain)
        return super().forward(clipped_offset(i[..., 0], j[..., 0], self.reach, counts))


class RelativeEncoding(OneHot):
    """AF3 algorithm 3 of residues (b i k) and (b j k), k = place, chain, entity, copy of the entity -> (b i j c).

    One linear layer on four features, a table here: the offset along the chain; that of tokens within one residue,
    where a residue is one token; the same entity or not; the offset between copies of an entity.
    """

    COPIES = 2  # largest offset between copies that is distinguished

    def __init__(self, dim: int, reach: int):
        super().__init__(2 * (2 * reach + 2) + 1 + 2 * self.COPIES + 2, dim)
        self.reach = reach

    def forward(self, i: Tensor, j: Tensor) -> Tensor:  # type: ignore[override]
        (place_i, chain_i, entity_i, copy_i), (place_j, chain_j, entity_j, copy_j) = i.unbind(-1), j.unbind(-1)
        same_chain, same_entity = chain_i[:, :, None] == chain_j[:, None], entity_i[:, :, None] == entity_j[:, None]
        same_residue = same_chain & (place_i[:, :, None] == place_j[:, None])
        offsets = 2 * self.reach + 2
        residue = clipped_offset(place_i, place_j, self.reach, same_chain)
        token = offsets + clipped_offset(place_i, place_j, self.reach, same_residue)
        copy = 2 * offsets + 1 + clipped_offset(copy_i, copy_j, self.COPIES, same_entity)
        entity = same_entity[..., None] * self.weight[2 * offsets]
        return super().forward(residue) + super().forward(token) + super().forward(copy) + entity


class PairEmbed(nn.Module):
    """Residues i (b i k) and j (b j k), k = token, then what ``relative`` reads of a residue -> (b i j c).

    Embeds both tokens, and where i is as seen from j (AF2 algorithm 3; AF3 algorithm 1, lines 3 and 4).
    """

    def __init__(self, dim: int, relative: nn.Module):
        super().__init__()
        self.left, self.right = OneHot(CLASSES, dim), OneHot(CLASSES, dim)
        self.relative = relative

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        tokens = self.left(i[..., 0])[:, :, None] + self.right(j[..., 0])[:, None]
        return tokens + self.relative(i[..., 1:], j[..., 1:])


class PairFeature(nn.Module):
    """Add a linear map of pair features (b i j k) to z (b i j c)."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.project = Linear(count, dim)

    def forward(self, z: Tensor, feature: Tensor) -> Tensor:
        return z + self.project(feature.to(z.dtype))


class PairMask(nn.Module):
    """The mask of pairs (b i j): True where both residues are, from masks (b i) and (b j)."""

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return i[:, :, None] & j[:, None]


class Recycle(nn.Module):
    """Add the previous pass's x, normed and, in AlphaFold 3, projected; in the first pass the previous x is zero.

    AF2 algorithm 32, of which ``RecycleDistance`` is the rest; AF3 algorithm 1, lines 8 and 11.
    """

    def __init__(self, dim: int, version: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.project = Linear(dim, dim, bias=False) if version == 3 else nn.Identity()

    def forward(self, x: Tensor, previous: Tensor | None = None) -> Tensor:
        return x + self.project(self.norm(x.new_zeros(x.shape[-1]) if previous is None else previous))


class RecycleTarget(Recycle):
    """Recycling of an alignment's first row: adds its previous state (b r c) to (b s r c); ``row`` (s) numbers rows."""

    def forward(self, x: Tensor, row: Tensor, previous: Tensor | None = None) -> Tensor:  # type: ignore[override]
        update = self.norm(x.new_zeros(x.shape[-1]) if previous is None else previous[:, None])
        return x + update * (row == 0)[:, None, None]


class RecycleDistance(OneHot):
    """Add to z (b i j c) a row for the distance of the previous pass's positions (b i x) and (b j x), in Å.

    AF2 algorithm 32: the first row is for distances below 3.25 Å, and for the first pass, which has no positions; then
    15 bins of 1.25 Å, the last without an end.
    """

    BINS, FIRST, LAST = 15, 3.25, 20.75

    def __init__(self, dim: int):
        super().__init__(1 + self.BINS, dim)

    def forward(self, z: Tensor, i: Tensor | None = None, j: Tensor | None = None) -> Tensor:
        if i is None or j is None:
            return z + self.weight[0]
        edges = torch.linspace(self.FIRST, self.LAST, self.BINS, dtype=i.dtype, device=i.device)
        return z + super().forward(torch.bucketize(distances(i, j), edges))


class Sum(nn.Module):
    """x + y, as a stage: it keeps logits sharded along residues, not along the classes that a loss computes over."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class CouplingHead(nn.Module):
    """Features of pairs (b i j k) -> logits of distances (b i j v): a linear map plus one with a hidden layer.

    The hidden layer reads a pair's surroundings: an isolated strong coupling, a weak coupling in a line of others.
    """

    def __init__(self, features: int, bins: int):
        super().__init__()
        self.linear = Linear(features, bins, bias=False, start="zero")
        self.up = Linear(features, bins, start="he")
        self.down = Linear(bins, bins, bias=False, start="zero")

    def forward(self, feature: Tensor) -> Tensor:
        return self.linear(feature) + self.down(self.up(feature).relu())


class Heads(nn.Module):
    """Masked MSA (AF2 supplement, 1.9.9) and distogram (1.9.8): one linear layer each; the distogram is symmetric.

    With ``features`` of pairs (b i j k), their direct prediction is added to the distogram: it learns from the first
    step on, and the trunk's prediction is a correction.
    """

    def __init__(self, c_m: int, c_z: int, bins: int, features: int = 0):
        super().__init__()
        self.token = Linear(c_m, CLASSES, start="zero")
        self.distance = Linear(c_z, bins, start="zero")
        self.couplings = CouplingHead(features, bins) if features else None
        self.both = Sum()

    def forward(self, m: Tensor, z: Tensor, feature: Tensor | None = None) -> tuple[Tensor, Tensor]:
        half = self.distance(z)
        if self.couplings is not None and feature is not None:
            half = half + self.couplings(feature.to(half.dtype))
        mirrored = half.transpose(1, 2).contiguous()  # a separate tensor, which may be sharded differently than half
        return self.token(m), self.both(half, mirrored)


EMBEDDING = {
    "msa_embed": "b s r, deletions=b s r, sequence=b r, profile=b s r [k] -> b s r [c]",
    "pair_embed": "b i [k], b j [k] -> b i j [c]",
    "pair_mask": "b i, b j -> b i j",
    "recycle_pair": "b i j [c], previous=b i j [c]",
    "heads.token": "b s r [c] -> b s r [v]",
    "heads.distance": "b i j [c] -> b i j [v]",
    "heads.both": "b i j [v], b i j [v]",
}


PAIR_FEATURE = {"pair_feature": "b i j [c], feature=b i j [k]", "heads.couplings": "b i j [k] -> b i j [v]"}  # optional


def check_masks(msa_mask: Tensor | None, mask: Tensor | None) -> None:
    if (msa_mask is None) != (mask is None):
        argument, missing = ("msa_mask", "mask") if mask is None else ("mask", "msa_mask")
        raise ValueError(f"{argument} is given without {missing}: give both masks, or neither if there is no padding")


def check_widths(**widths: int) -> None:
    """Refuse sizes below one."""
    for name, width in widths.items():
        if width < 1:
            raise ValueError(f"{name}={width}: it has to be at least 1")


def protein_inputs(batch: int, rows: int, residues: int, couplings: int = 0) -> dict[str, Tensor]:
    """Random forward arguments on the default device: two chains; sample i has i padded residues (modulo r)."""
    sequence = torch.randint(20, (batch, residues))
    msa = torch.randint(CLASSES - 1, (batch, rows, residues))
    first = (residues + 1) // 2  # residues of the first chain
    place = torch.arange(residues)
    mask = place < residues - torch.arange(batch)[:, None] % residues
    feature = torch.randn(batch, residues, residues, couplings)
    return ({"couplings": feature + feature.transpose(1, 2)} if couplings else {}) | {
        "msa": torch.cat([sequence[:, None], msa[:, 1:]], 1),
        "deletions": torch.randint(4, (batch, rows, residues)),
        "sequence": sequence,
        "residue_index": (place % first).expand(batch, -1),
        "asym_id": (place // first).expand(batch, -1),
        "msa_mask": mask[:, None] & (msa < CLASSES - 2),
        "mask": mask,
    }
