"""Evoformer, the trunk of AlphaFold 2 (Jumper et al. 2021), trained to restore masked tokens and predict distances.

    size   blocks  c_m  c_z  c_s   extra blocks  c_e   parameters
    af2        48  256  128  384              4   64    90,785,111

An alignment m (b s r c) and its pairs z (b i j c) update each other in turn. Before, a narrower stack reads an extra,
deeper alignment; only its pairs are kept. ``opm_first`` moves the outer product mean to the start of each block, as in
AF-Multimer. Each recycled pass (``recycles``) starts from the pairs and the alignment's first row as the previous pass
left them; only the last pass has gradients. With ``monomer`` it is AlphaFold 2 as it was published for single chains:
rows of the alignment are centres of clusters, and the structure that a pass predicts is an input of the next.

Letters: `zoo/protein/__init__.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers import expect
from zoo.protein.alignment_layers import OUTER, ColumnAttention, GlobalColumnAttention, OuterProductMean, RowAttention
from zoo.protein.atoms import CONTACT_ATOMS, ContactAtoms
from zoo.protein.embedding import (
    CLASSES,
    ChainOffset,
    MSAEmbed,
    Prediction,
    Recycle,
    RecycleDistance,
    RecycleTarget,
    Structure,
    check_widths,
    protein_inputs,
)
from zoo.protein.layers import Linear, PairBias, SharedDropout, Transition, prefixed
from zoo.protein.pair_layers import PAIR, PairBlock
from zoo.protein.trunk import Trunk, TrunkConfig

SIZES: dict[str, dict[str, Any]] = {
    "af2": {},
    "test": {
        "c_m": 24, "c_z": 16, "c_s": 20, "depth": 2, "msa_heads": 4, "msa_head_dim": 6, "pair_heads": 4,
        "pair_head_dim": 4, "triangle": 12, "outer": 4, "transition": 2, "extra_depth": 1, "c_e": 8,
        "extra_heads": 2, "extra_head_dim": 4, "bins": 8, "template_channels": 8, "msa_dropout": 0.0,
        "pair_dropout": 0.0, "structure_dropout": 0.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Config(TrunkConfig):  # depth=0: the heads read the embeddings, and the model is linear
    msa_head_dim: int = 32
    opm_first: bool = False
    extra_depth: int = 4  # blocks of the extra alignment; 0: a model without one
    c_e: int = 64  # its channels
    extra_heads: int = 8
    extra_head_dim: int = 8
    monomer: bool = False  # AlphaFold 2's inputs for one chain: profiles of clusters, recycled positions; no chains

    def __post_init__(self) -> None:
        check_widths(c_m=self.c_m, c_z=self.c_z, c_s=self.c_s, c_e=self.c_e, chunk=self.chunk)
        super().__post_init__()
        if self.depth < 0:
            raise ValueError(f"depth={self.depth}: expected at least 0 (a model without blocks)")
        if self.extra_depth < 0:
            raise ValueError(
                f"extra_depth={self.extra_depth}: expected at least 0 (a model without an extra alignment)"
            )
        if self.monomer and not self.structure:
            raise ValueError("monomer recycles the positions of residues: it needs structure, iterations of its module")


class Block(nn.Module):
    """AF2 algorithm 6, lines 2 to 10; with ``extra`` algorithm 18: narrower, and global column attention."""

    def __init__(self, config: Config, extra: bool = False):
        super().__init__()
        c_z, chunk = config.c_z, config.chunk
        c_m = config.c_e if extra else config.c_m
        heads = (config.extra_heads, config.extra_head_dim) if extra else (config.msa_heads, config.msa_head_dim)
        self.opm_first = config.opm_first
        self.rowwise = SharedDropout(config.msa_dropout, 1)
        self.row_bias = PairBias(c_z, heads[0], 2)
        self.row = RowAttention(c_m, *heads, 2, chunk)
        self.column = (GlobalColumnAttention if extra else ColumnAttention)(c_m, *heads, 2, chunk)
        self.transition = Transition(c_m, config.transition, 2)
        self.outer = OuterProductMean(c_m, c_z, config.outer, 2, chunk)
        self.pair = PairBlock(
            c_z, config.triangle, config.pair_heads, config.pair_head_dim, config.transition, config.pair_dropout, 2,
            chunk,
        )  # fmt: skip

    def forward(
        self, m: Tensor, z: Tensor, msa_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.opm_first:
            z = self.outer(z, m, msa_mask)
        m = self.row(m, self.row_bias(z), msa_mask, self.rowwise(m))
        m = self.column(m, msa_mask)
        m = self.transition(m)
        if not self.opm_first:
            z = self.outer(z, m, msa_mask)
        return m, self.pair(z, pair_mask)


BLOCK = {
    "row_bias": "b i j [c] -> b i j [h]",
    "row": "b s [r c], bias=b [q k h], mask=b s [r], keep=b 1 [r c]",
    "column": "b [s] r [c], mask=b [s] r",
    "transition": "b s r [c]",
    **prefixed("outer", OUTER),
    **prefixed("pair", PAIR),
}


class Evoformer(Trunk):
    """``forward(msa, deletions, sequence, residue_index, asym_id, ..., recycles=0)`` -> ``Prediction``

    With config.structure -> ``Structure``.

    msa and deletions (b s r), with extra_depth > 0 also extra_msa and extra_deletions (b s r, another s): tokens and
    counts; sequence, residue_index, asym_id (b r): tokens of the target, places in their chain, chains. Masks are False
    for padding: msa_mask and extra_mask shaped like their alignments, mask (b r); all of them or none. With
    config.monomer: profile (b s r 24), as for ``MSAEmbed``. With config.couplings: couplings (b i j k), features of
    pairs. With config.templates: template_sequence (b n r), template_backbone (b n r 3 3), template_beta (b n r 3) and
    template_seen (b n r 2), as for ``TemplateEmbedder``.
    """

    def __init__(self, config: Config):
        extra = {"extra_embed": "b s r, deletions=b s r -> b s r [c]", **prefixed("extra_blocks.*", BLOCK)}
        recycled = {"contact_atoms": CONTACT_ATOMS, "recycle_distance": "b i j [c], i=b i [x], j=b j [x] -> b i j [c]"}
        super().__init__(
            config,
            "msa=b s r, deletions=b s r, profile=b s r k, extra_msa=b t r, extra_deletions=b t r, msa_mask=b s r, "
            "extra_mask=b t r",
            {
                "recycle_target": "b s r [c], row=s, previous=b r [c]",
                "single": "b r [c] -> b r [e]",
                **(prefixed("blocks.*", BLOCK) if config.depth else {}),
                **(extra if config.extra_depth else {}),
                **(recycled if config.monomer else {}),
            },
            ["blocks.*.pair"] * (config.depth > 0) + ["extra_blocks.*.pair"] * (config.extra_depth > 0),
            partial(ChainOffset, chains=not config.monomer),
            clusters=config.monomer,
        )
        self.recycle_pair = Recycle(config.c_z, 2)
        self.recycle_target = RecycleTarget(config.c_m, 2)
        self.recycle_distance = RecycleDistance(config.c_z) if config.monomer else None
        self.contact_atoms = ContactAtoms()
        self.extra_embed = MSAEmbed(config.c_e, target=False) if config.extra_depth else None
        self.extra_blocks = nn.ModuleList(Block(config, extra=True) for _ in range(config.extra_depth))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.single = Linear(config.c_m, config.c_s)
        self.add_heads()

    def forward(
        self,
        msa: Tensor,
        deletions: Tensor,
        sequence: Tensor,
        residue_index: Tensor,
        asym_id: Tensor,
        extra_msa: Tensor | None = None,
        extra_deletions: Tensor | None = None,
        msa_mask: Tensor | None = None,
        extra_mask: Tensor | None = None,
        mask: Tensor | None = None,
        couplings: Tensor | None = None,
        template_sequence: Tensor | None = None,
        template_backbone: Tensor | None = None,
        template_beta: Tensor | None = None,
        template_seen: Tensor | None = None,
        profile: Tensor | None = None,
        recycles: int = 0,
    ) -> Prediction | Structure:
        built = f"extra_depth={self.config.extra_depth}"
        expect("extra_msa", extra_msa, self.extra_embed is not None, built)
        expect("extra_deletions", extra_deletions, self.extra_embed is not None, built)
        expect("profile", profile, self.config.monomer, f"monomer={self.config.monomer}")
        templates, pair_mask = self.check_inputs(
            msa_mask, mask, couplings, template_sequence, template_backbone, template_beta, template_seen
        )

        residues = torch.stack([sequence, residue_index, asym_id], -1)
        row = torch.arange(msa.shape[1], device=msa.device)
        target = z = positions = None
        for cycle in range(recycles + 1):
            with torch.set_grad_enabled(torch.is_grad_enabled() and cycle == recycles):
                m = self.recycle_target(self.msa_embed(msa, deletions, sequence, profile), row, target)
                z = self.pairs(residues, z, couplings, asym_id, templates, pair_mask)
                if self.recycle_distance is not None:
                    z = self.recycle_distance(z, positions, positions)
                if self.extra_embed is not None:
                    e = self.extra_embed(extra_msa, extra_deletions)
                    for block in self.extra_blocks:
                        e, z = block(e, z, extra_mask, pair_mask)
                for block in self.blocks:
                    m, z = block(m, z, msa_mask, pair_mask)
                target = m[:, 0]
                if self.recycle_distance is not None and self.structure is not None and cycle < recycles:
                    rotations, translations, _ = self.structure(self.single(target), z, mask)
                    positions = self.contact_atoms(rotations[:, -1], translations[:, -1], sequence)
        assert target is not None
        assert z is not None
        logits = self.heads(m, z, couplings)
        return self.predict(logits, self.single(target), z, mask)

    def example_inputs(
        self, batch: int = 1, *, rows: int = 5, residues: int = 7, extra_rows: int = 6
    ) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device."""
        inputs = super().example_inputs(batch, rows=rows, residues=residues)
        if self.config.monomer:
            inputs["profile"] = torch.rand(batch, rows, residues, CLASSES + 1)
        if self.config.extra_depth:
            extra = protein_inputs(batch, extra_rows, residues)
            inputs |= {
                "extra_msa": extra["msa"], "extra_deletions": extra["deletions"], "extra_mask": extra["msa_mask"]
            }  # fmt: skip
        return inputs
