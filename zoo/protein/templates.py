"""Templates: known structures of relatives, whose geometry is an input of each pair of residues.

Each template passes separately through a narrow stack of pair blocks; the mean over templates is added to the pairs
z (b i j c): the TemplateEmbedder of AlphaFold 3 (Abramson et al. 2024, supplement, algorithm 16). Templates are
processed one after another, so that no tensor is larger than the pairs.

Letters: `zoo/protein/__init__.py`; m numbers of a residue.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.layers import expect
from zoo.protein.atoms import frames_of
from zoo.protein.distogram import distances
from zoo.protein.layers import CHUNK, Linear, OneHot, prefixed
from zoo.protein.pair_layers import PAIR, PairBlock

__all__ = ["TEMPLATES", "TemplateEmbedder", "check_given", "check_templates", "template_inputs"]

BINS, FIRST, LAST = 39, 3.25, 50.75  # of distance, Å; the last bin has no end, distances below the first have no bin
HEADS = 4


class PairsToTemplate(nn.Module):
    """The pairs z (b i j c), normed and projected to the channels of templates (b i j d)."""

    def __init__(self, c_z: int, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(c_z)
        self.project = Linear(c_z, channels, bias=False, start="he")

    def forward(self, z: Tensor) -> Tensor:
        return self.project(self.norm(z))


class TemplateFeatures(nn.Module):
    """Add to v (b i j c) the features of each pair in one template: algorithm 16, lines 1 to 5 and 8.

    i and j (b i k): token of the template, chain of the target; atoms (b i 4 3) Å: N, CA, C and the contact atom; seen
    (b i 2): True where the first three, and where the last, are known. A pair of two chains has only both tokens as
    features: templates of single chains do not determine how chains lie relative to each other.
    """

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.distance = OneHot(BINS, channels)
        self.left, self.right = OneHot(classes, channels), OneHot(classes, channels)
        self.numbers = Linear(5, channels, bias=False)  # both masks and the unit vector

    def forward(
        self, v: Tensor, i: Tensor, j: Tensor, atoms_i: Tensor, atoms_j: Tensor, seen_i: Tensor, seen_j: Tensor
    ) -> Tensor:
        (token_i, chain_i), (token_j, chain_j) = i.unbind(-1), j.unbind(-1)
        both = seen_i[:, :, None] & seen_j[:, None] & (chain_i[:, :, None] == chain_j[:, None])[..., None]
        framed, placed = both.unbind(-1)

        distance = distances(atoms_i[:, :, 3], atoms_j[:, :, 3])
        edges = torch.linspace(FIRST, LAST, BINS, device=distance.device, dtype=distance.dtype)
        bin_ = torch.bucketize(distance, edges) - 1
        known = (placed & (bin_ >= 0)).to(v.dtype)

        rotation, origin = frames_of(*atoms_i[:, :, :3].unbind(2))
        towards = torch.einsum("biyx,bijy->bijx", rotation, atoms_j[:, None, :, 1] - origin[:, :, None])
        unit = F.normalize(towards, dim=-1) * framed[..., None]
        numbers = torch.cat([placed[..., None], framed[..., None], unit], -1).to(v.dtype)

        v = v + self.distance(bin_.clamp(min=0)) * known[..., None] + self.numbers(numbers)
        return v + self.left(token_i)[:, :, None] + self.right(token_j)[:, None]


class TemplateMean(nn.Module):
    """Add one of ``count`` templates, normed and divided by ``count``, to ``total`` (b i j d)."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, v: Tensor, count: int, total: Tensor | None = None) -> Tensor:
        share = self.norm(v) / count
        return share if total is None else total + share


class TemplateUpdate(nn.Module):
    """Add the mean of templates (b i j d), after a ReLU and a projection, to z (b i j c)."""

    def __init__(self, channels: int, c_z: int):
        super().__init__()
        self.out = Linear(channels, c_z, bias=False)

    def forward(self, z: Tensor, mean: Tensor) -> Tensor:
        return z + self.out(mean.relu())


class TemplateEmbedder(nn.Module):
    """``forward(z, asym_id, sequence, backbone, beta, seen, pair_mask)`` -> z (b i j c)

    asym_id (b r): chains of the target. For each template, aligned to the residues of the target: sequence (b n r),
    tokens; backbone (b n r 3 3) Å, N, CA, C; beta (b n r 3) Å, the contact atom; seen (b n r 2), True where the
    backbone, and where the contact atom, is known. Templates without any seen atom are processed like others: the
    computation does not depend on the data.
    """

    def __init__(
        self, c_z: int, channels: int = 64, blocks: int = 2, classes: int = 23, factor: int = 2, dropout: float = 0.25,
        chunk: int = CHUNK,
    ):  # fmt: skip
        super().__init__()
        self.pairs = PairsToTemplate(c_z, channels)
        self.features = TemplateFeatures(channels, classes)
        self.blocks = nn.ModuleList(
            PairBlock(channels, channels, HEADS, channels // HEADS, factor, dropout, 3, chunk) for _ in range(blocks)
        )
        self.mean = TemplateMean(channels)
        self.update = TemplateUpdate(channels, c_z)

    def forward(
        self, z: Tensor, asym_id: Tensor, sequence: Tensor, backbone: Tensor, beta: Tensor, seen: Tensor,
        pair_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not sequence.shape[1]:
            raise ValueError(
                "template_sequence has no template: if there is none, give one with template_seen all False"
            )
        start, total = self.pairs(z), None
        atoms = torch.cat([backbone, beta[..., None, :]], -2)
        for tokens, positions, known in zip(sequence.unbind(1), atoms.unbind(1), seen.unbind(1)):
            residues = torch.stack([tokens, asym_id], -1)
            v = self.features(start, residues, residues, positions, positions, known, known)
            for block in self.blocks:
                v = block(v, pair_mask)
            total = self.mean(v, sequence.shape[1], total)
        assert total is not None
        return self.update(z, total)


TEMPLATES = {
    "pairs": "b i j [c] -> b i j [d]",
    "features": "b i j [c], i=b i [k], j=b j [k], atoms_i=b i [a x], atoms_j=b j [a x], seen_i=b i [m], seen_j=b j [m] "
    "-> b i j [c]",
    **prefixed("blocks.*", PAIR),
    "mean": "b i j [c], total=b i j [c]",
    "update": "b i j [c], mean=b i j [d]",
}


def check_templates(blocks: int, channels: int) -> None:
    """Refuse an embedder that cannot be built."""
    if blocks < 0:
        raise ValueError(f"templates={blocks}: expected at least 0 (a model that reads none)")
    if blocks and (channels < HEADS or channels % HEADS):
        raise ValueError(f"template_channels={channels}: it has to be a multiple of {HEADS}")


def check_given(
    blocks: int, sequence: Tensor | None, backbone: Tensor | None, beta: Tensor | None, seen: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The four template inputs; an error if one is missing, or given to a model that reads no templates."""
    inputs = {"sequence": sequence, "backbone": backbone, "beta": beta, "seen": seen}
    for name, x in inputs.items():
        expect(f"template_{name}", x, blocks > 0, f"templates={blocks}")
    return tuple(inputs.values())


def template_inputs(batch: int, residues: int, count: int = 2) -> dict[str, Tensor]:
    """Random templates as inputs of the models, on the default device; some of their residues are not seen."""
    ca = 8 * torch.randn(batch, count, residues, 1, 3)
    near = 1.5 * F.normalize(torch.randn(batch, count, residues, 3, 3), dim=-1)
    backbone = torch.cat([ca + near[..., :1, :], ca, ca + near[..., 1:2, :]], -2)
    return {
        "template_sequence": torch.randint(20, (batch, count, residues)),
        "template_backbone": backbone,
        "template_beta": (ca + near[..., 2:, :]).squeeze(-2),
        "template_seen": torch.rand(batch, count, residues, 2) < 0.8,
    }
