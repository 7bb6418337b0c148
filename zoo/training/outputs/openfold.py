"""Contacts and backbones from OpenFold's published weights of AlphaFold 2 for single chains."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.data.protein.clusters import cluster_profile
from zoo.data.protein.example import draw
from zoo.data.protein.inputs import find_proteins
from zoo.data.protein.record import Protein
from zoo.protein import monomer_weights
from zoo.protein.atoms import backbone
from zoo.protein.prediction import Predictor
from zoo.training.outputs import folder
from zoo.training.outputs.predicted import Predicted, bonded, described, table, write
from zoo.training.ranks import log0, on_first_rank

ROWS, EXTRA, RECYCLES = 512, 1024, 3  # as in OpenFold's own predictions


class Published(folder.Published):
    """OpenFold's ``AlphaFold`` as safetensors."""

    files = "alignments (.a3m), sequences (.fasta), structures with alignments beside them"

    def arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--rows", type=count, default=ROWS, help="rows of the alignment that are centres of clusters")
        add("--extra-rows", type=count, default=EXTRA, help="rows of the extra alignment, of those left")
        add("--recycles", type=int, default=RECYCLES, help="further passes, each from the structure of the one before")
        add("--distogram", action="store_true", help="store the probabilities of all bins of distance, too")
        add("--seed", type=int, default=0, help="another number takes other rows of a deep alignment")

    def proteins(self, files: Sequence[Path]) -> list[Protein]:
        proteins = [one.read() for one in find_proteins(files)]
        for protein in proteins:
            if len(protein.chains) > 1:
                raise ValueError(
                    f"{protein.name} has {len(protein.chains)} chains, and these weights are for single chains: pass "
                    "the alignment of one chain"
                )
        return proteins

    def read(self, folder: Path) -> nn.Module:
        return Predictor(monomer_weights.read(folder))

    @torch.no_grad()
    def predict(
        self, model: nn.Module, protein: Protein, options: Namespace, device: torch.device
    ) -> tuple[list[Path], dict[str, float]]:
        arrays = features(protein, options.rows, options.extra_rows, options.seed)
        inputs = {name: value[None].to(device) for name, value in arrays.items()}
        out = model(**inputs, recycles=options.recycles, distogram=options.distogram)
        probability, distance, rotation, translation, plddt = (
            x[0].cpu() for x in (out.probability, out.distance, out.rotation, out.translation, out.plddt)
        )
        bins = None if out.distogram is None else out.distogram[0].cpu()
        atoms = backbone(rotation, translation, arrays["sequence"], bonded(protein))
        predicted = Predicted(protein, probability, distance, None, bins, atoms, plddt)
        files, measured = on_first_rank(partial(write, options.out / protein.name, predicted, options.least))
        log0(table(f"{protein.name}: {described(protein, len(arrays['msa']))}", measured))
        if fault := predicted.unusable():
            log0(f"  {fault}")
        return files, measured


def count(text: str) -> int:
    """A number of rows; the parser names the option of one below 1."""
    if int(text) < 1:
        raise ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def features(protein: Protein, rows: int, extra: int, seed: int) -> dict[str, Tensor]:
    """The inputs of the model, without a batch dim: `rows` rows with their clusters, and `extra` of the others.

    The rows are drawn once, not anew in each pass, and no letter is hidden. An alignment without other rows has one
    that is masked, as AlphaFold's has.
    """
    rows = min(rows, len(protein.msa))
    surplus = len(protein.msa) - rows
    example = draw(protein, "inference", seed, residues=len(protein), rows=rows, extra=surplus, share=0)
    shown = replace(example, extra=max(1, min(extra, surplus)))
    arrays = example.alignment() | example.single() | shown.extra_alignment()
    msa, deletions = example.protein.msa, example.protein.deletions
    arrays["profile"] = cluster_profile(msa[:rows], deletions[:rows], msa[rows:], deletions[rows:])
    return {name: value for name, value in arrays.items() if name not in ("msa_target", "msa_weight")}
