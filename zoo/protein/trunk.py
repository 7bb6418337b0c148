"""The steps that the trunks of AlphaFold 2 and 3 share: embeddings, templates, recycled pairs, and the heads.

Letters: `zoo/protein/__init__.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers import expect
from zoo.protein.embedding import (
    CLASSES,
    EMBEDDING,
    PAIR_FEATURE,
    Heads,
    MSAEmbed,
    PairEmbed,
    PairFeature,
    PairMask,
    Prediction,
    Recycle,
    Structure,
    check_masks,
    protein_inputs,
)
from zoo.protein.layers import CHUNK, prefixed
from zoo.protein.pair_layers import DAP
from zoo.protein.structure import STRUCTURE, InvariantPointAttention, StructureModule
from zoo.protein.templates import TEMPLATES, TemplateEmbedder, check_given, check_templates, template_inputs


@dataclass(frozen=True)
class TrunkConfig:
    c_m: int = 256  # channels of the alignment
    c_z: int = 128  # of pairs
    c_s: int = 384  # of single residues
    depth: int = 48  # blocks
    msa_heads: int = 8
    pair_heads: int = 4
    pair_head_dim: int = 32
    triangle: int = 128  # hidden channels of the triangle multiplications
    outer: int = 32  # hidden channels of the outer product mean
    transition: int = 4  # inner channels of a transition / its channels
    msa_dropout: float = 0.15
    pair_dropout: float = 0.25
    couplings: int = 0  # features of a pair as further input, as from direct coupling analysis; 0: none
    templates: int = 0  # pair blocks of the template embedder; 0: templates are not read
    template_channels: int = 64
    structure: int = 0  # iterations of the structure module; 0: no structure is predicted
    structure_heads: int = 12
    structure_dropout: float = 0.1
    reach: int = 32  # largest offset along the chain that positions distinguish
    bins: int = 64  # of distance
    chunk: int = CHUNK  # most attention logits (elements) at once; fewer take less memory and more time

    def __post_init__(self) -> None:
        check_templates(self.templates, self.template_channels)


class Trunk(nn.Module):
    """The base of both trunks: their inputs, what they do to pairs in each pass, their outputs.

    `inputs`: patterns of the model's inputs; `stages`: those of the modules that a trunk adds; `pair_stacks`: paths of
    its pair blocks, which have other layouts under dynamic axial parallelism (``dap``); `relative`: the encoding of
    where a residue is as seen from another, made from channels and reach; `clusters`: as for ``MSAEmbed``.
    """

    recycle_pair: Recycle  # each trunk makes it

    def __init__(
        self, config: Any, inputs: str, stages: dict[str, str], pair_stacks: list[str],
        relative: Callable[[int, int], nn.Module], clusters: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.config = config
        self.cores, self.tensor_parallel = dict[str, str](), dict[str, str]()
        outputs = "b s r v, b i j d, b r c" + (", b l r x y, b l r x, b r e" if config.structure else "")
        self.stages = {
            "": f"{inputs}, couplings=b i j k -> {outputs}",
            **EMBEDDING,
            **(PAIR_FEATURE if config.couplings else {}),
            **(prefixed("templates", TEMPLATES) if config.templates else {}),
            **(prefixed("structure", STRUCTURE) if config.structure else {}),
            **stages,
        }
        pair_stacks = [*pair_stacks, *(["templates.blocks.*"] if config.templates else [])]
        self.dap = self.stages | {k: v for stack in pair_stacks for k, v in prefixed(stack, DAP).items()}

        self.msa_embed = MSAEmbed(config.c_m, clusters=clusters)
        self.pair_embed = PairEmbed(config.c_z, relative(config.c_z, config.reach))
        self.pair_feature = PairFeature(config.couplings, config.c_z) if config.couplings else None
        self.templates = None
        if config.templates:
            self.templates = TemplateEmbedder(
                config.c_z, config.template_channels, config.templates, CLASSES, dropout=config.pair_dropout,
                chunk=config.chunk,
            )  # fmt: skip
        self.pair_mask = PairMask()

    def add_heads(self) -> None:
        """Make the last modules, which read what the blocks return."""
        config = self.config
        self.heads = Heads(config.c_m, config.c_z, config.bins, config.couplings)
        self.structure = StructureModule.of(config)

    def check_inputs(
        self, msa_mask: Tensor | None, mask: Tensor | None, couplings: Tensor | None, *templates: Tensor | None
    ) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
        """The inputs of templates, and the mask of pairs (b i j); a ValueError names what is missing or too much."""
        expect("couplings", couplings, self.pair_feature is not None, f"couplings={self.config.couplings}")
        template_values = check_given(self.config.templates, *templates)
        check_masks(msa_mask, mask)
        return template_values, None if mask is None else self.pair_mask(mask, mask)

    def pairs(
        self, residues: Tensor, previous: Tensor | None, couplings: Tensor | None, asym_id: Tensor,
        templates: tuple[Tensor | None, ...], pair_mask: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """The pairs (b i j c) with which a pass begins, from residues (b r k) and those of the previous pass."""
        z = self.recycle_pair(self.pair_embed(residues, residues), previous)
        if self.pair_feature is not None:
            z = self.pair_feature(z, couplings)
        if self.templates is not None:
            z = self.templates(z, asym_id, *templates, pair_mask)
        return z

    def predict(
        self, logits: tuple[Tensor, Tensor], s: Tensor, z: Tensor, mask: Tensor | None
    ) -> Prediction | Structure:
        """The output for the logits of ``heads``, single residues s (b r c) and pairs z (b i j c)."""
        if self.structure is None:
            return Prediction(*logits, s)
        return Structure(*logits, s, *self.structure(s, z, mask))

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialise every parameter in place, after ``to_empty`` too: AF2 supplement, 1.11.4; openfold3."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm | InvariantPointAttention):
                module.reset_parameters()

    def example_inputs(self, batch: int = 1, *, rows: int = 5, residues: int = 7) -> dict[str, Tensor]:
        """Random inputs of the forward, by name, on the default device."""
        inputs = protein_inputs(batch, rows, residues, self.config.couplings)
        return inputs | (template_inputs(batch, residues) if self.config.templates else {})
