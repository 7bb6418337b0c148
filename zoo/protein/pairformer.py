"""MSA module and Pairformer, the trunk of AlphaFold 3 (Abramson et al. 2024), trained as the Evoformer is.

    size   MSA blocks  blocks  c_m  c_z  c_s   parameters
    af3             4      48   64  128  384   150,644,055

The alignment m (b s r c) is used in the first few blocks only; single residues s (b r c) and pairs z (b i j c) continue
(algorithms 8 and 17). Masked tokens are predicted from the last alignment; for that, the last block of the MSA module
updates the alignment, which AlphaFold 3 does not need. Each recycled pass (``recycles``) starts from the previous
pass's pairs and residues; only the last pass has gradients.

Letters: `zoo/protein/__init__.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.protein.alignment_layers import OUTER, OuterProductMean, PairWeightedAveraging
from zoo.protein.embedding import CLASSES, Prediction, Recycle, RelativeEncoding, Structure, check_widths
from zoo.protein.layers import OneHot, PairBias, SharedDropout, Transition, prefixed
from zoo.protein.pair_layers import PAIR, PairBlock, SingleAttention
from zoo.protein.trunk import Trunk, TrunkConfig

SIZES: dict[str, dict[str, Any]] = {
    "af3": {},
    "test": {
        "c_m": 12, "c_z": 16, "c_s": 20, "msa_depth": 2, "depth": 2, "msa_heads": 4, "msa_head_dim": 6,
        "pair_heads": 4, "pair_head_dim": 4, "single_heads": 2, "single_head_dim": 6, "triangle": 12, "outer": 4,
        "transition": 2, "bins": 8, "template_channels": 8, "msa_dropout": 0.0,
        "pair_dropout": 0.0, "structure_dropout": 0.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrunkConfig):
    c_m: int = 64
    msa_head_dim: int = 8
    msa_depth: int = 4  # blocks of the MSA module; `depth` are those of the Pairformer
    single_heads: int = 16
    single_head_dim: int = 24

    def __post_init__(self) -> None:
        check_widths(
            c_m=self.c_m, c_z=self.c_z, c_s=self.c_s, msa_depth=self.msa_depth, depth=self.depth, chunk=self.chunk
        )
        super().__post_init__()


def pair_block(config: Config) -> PairBlock:
    return PairBlock(
        config.c_z, config.triangle, config.pair_heads, config.pair_head_dim, config.transition, config.pair_dropout, 3,
        config.chunk,
    )  # fmt: skip


class MSABlock(nn.Module):
    """AF3 algorithm 8, lines 6 to 13."""

    def __init__(self, config: Config):
        super().__init__()
        self.rowwise = SharedDropout(config.msa_dropout, 1)
        self.outer = OuterProductMean(config.c_m, config.c_z, config.outer, 3, config.chunk)
        self.row_bias = PairBias(config.c_z, config.msa_heads, 3)
        self.average = PairWeightedAveraging(config.c_m, config.msa_heads, config.msa_head_dim)
        self.transition = Transition(config.c_m, config.transition, 3)
        self.pair = pair_block(config)

    def forward(
        self, m: Tensor, z: Tensor, msa_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        z = self.outer(z, m, msa_mask)
        m = self.average(m, self.row_bias(z, pair_mask), self.rowwise(m))
        return self.transition(m), self.pair(z, pair_mask)


MSA_BLOCK = {
    **prefixed("outer", OUTER),
    "row_bias": "b i j [c], mask=b i j -> b i j [h]",
    "average": "b s [r c], bias=b [q k h], keep=b 1 [r c]",
    "transition": "b s r [c]",
    **prefixed("pair", PAIR),
}


class PairformerBlock(nn.Module):
    """AF3 algorithm 17, lines 2 to 8."""

    def __init__(self, config: Config):
        super().__init__()
        self.pair = pair_block(config)
        self.single_bias = PairBias(config.c_z, config.single_heads, 3)
        self.single = SingleAttention(config.c_s, config.single_heads, config.single_head_dim, config.chunk)
        self.single_transition = Transition(config.c_s, config.transition, 3)

    def forward(
        self, s: Tensor, z: Tensor, mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        z = self.pair(z, pair_mask)
        s = self.single(s, s, self.single_bias(z), mask)
        return self.single_transition(s), z


PAIRFORMER_BLOCK = {
    **prefixed("pair", PAIR),
    "single_bias": "b i j [c] -> b i j [h]",
    "single": "b i [c], context=b [j c], bias=b i [j h], mask=b [j]",
    "single_transition": "b i [c]",
}


class Pairformer(Trunk):
    """``forward(msa, deletions, sequence, residue_index, asym_id, ..., recycles=0)`` -> ``Prediction``

    With config.structure -> ``Structure``.

    msa and deletions (b s r): tokens and counts; sequence, residue_index, asym_id (b r): tokens of the target, places
    in their chain, chains; entity_id and sym_id (b r): entities, and which copy of its entity a chain is (without them
    no chain is a copy). Masks are False for padding: msa_mask (b s r) and mask (b r), both or neither.
    With config.couplings: couplings (b i j k), features of pairs. With config.templates: template_sequence (b n r),
    template_backbone (b n r 3 3), template_beta (b n r 3) and template_seen (b n r 2), as for ``TemplateEmbedder``.
    """

    def __init__(self, config: Config):
        super().__init__(
            config,
            "msa=b s r, deletions=b s r, msa_mask=b s r",
            {
                "single_embed": "b r -> b r [c]",
                "recycle_single": "b r [c], previous=b r [c]",
                **prefixed("msa_blocks.*", MSA_BLOCK),
                **prefixed("blocks.*", PAIRFORMER_BLOCK),
            },
            ["msa_blocks.*.pair", "blocks.*.pair"],
            RelativeEncoding,
        )
        self.single_embed = OneHot(CLASSES, config.c_s)
        self.recycle_pair = Recycle(config.c_z, 3)
        self.recycle_single = Recycle(config.c_s, 3)
        self.msa_blocks = nn.ModuleList(MSABlock(config) for _ in range(config.msa_depth))
        self.blocks = nn.ModuleList(PairformerBlock(config) for _ in range(config.depth))
        self.add_heads()

    def forward(
        self,
        msa: Tensor,
        deletions: Tensor,
        sequence: Tensor,
        residue_index: Tensor,
        asym_id: Tensor,
        msa_mask: Tensor | None = None,
        mask: Tensor | None = None,
        couplings: Tensor | None = None,
        template_sequence: Tensor | None = None,
        template_backbone: Tensor | None = None,
        template_beta: Tensor | None = None,
        template_seen: Tensor | None = None,
        entity_id: Tensor | None = None,
        sym_id: Tensor | None = None,
        recycles: int = 0,
    ) -> Prediction | Structure:
        templates, pair_mask = self.check_inputs(
            msa_mask, mask, couplings, template_sequence, template_backbone, template_beta, template_seen
        )
        entity_id = asym_id if entity_id is None else entity_id
        sym_id = torch.zeros_like(asym_id) if sym_id is None else sym_id
        residues = torch.stack([sequence, residue_index, asym_id, entity_id, sym_id], -1)
        s = z = None
        for cycle in range(recycles + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == recycles):
                m = self.msa_embed(msa, deletions, sequence)
                s = self.recycle_single(self.single_embed(sequence), s)
                z = self.pairs(residues, z, couplings, asym_id, templates, pair_mask)
                for msa_block in self.msa_blocks:
                    m, z = msa_block(m, z, msa_mask, pair_mask)
                for block in self.blocks:
                    s, z = block(s, z, mask, pair_mask)
        assert s is not None
        assert z is not None
        return self.predict(self.heads(m, z, couplings), s, z, mask)

    def example_inputs(self, batch: int = 1, *, rows: int = 5, residues: int = 7) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device: the second chain is a copy of the first."""
        inputs = super().example_inputs(batch, rows=rows, residues=residues)
        return inputs | {"entity_id": torch.zeros_like(inputs["asym_id"]), "sym_id": inputs["asym_id"].clone()}
