"""Contacts from published ESM-2, which reads single sequences without an alignment."""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from zoo.data.protein.record import Protein
from zoo.data.protein.sequences import read_chains
from zoo.protein import esm2, esm2_weights
from zoo.protein.metrics import contact_precision
from zoo.protein.picture import write_probabilities
from zoo.training import ranks
from zoo.training.outputs import folder
from zoo.training.outputs.predicted import contact_map, table, truth, write_files
from zoo.training.ranks import on_first_rank

TRAINED = 1024  # residues of the longest crops in training


class Published(folder.Published):
    """ESM-2 as transformers saves it."""

    files = "sequences (.fasta), alignments (their queries), structures"

    def proteins(self, files: Sequence[Path]) -> list[Protein]:
        proteins = read_chains(files)
        if long := [protein.name for protein in proteins if len(protein) > TRAINED]:
            ranks.log0(f"{', '.join(long)}: longer than the {TRAINED} residues that ESM-2 was trained with")
        return proteins

    def read(self, folder: Path) -> nn.Module:
        return esm2_weights.read(folder)

    @torch.no_grad()
    def predict(
        self, model: nn.Module, protein: Protein, options: Namespace, device: torch.device
    ) -> tuple[list[Path], dict[str, float]]:
        contact = model(esm2.encode(protein.sequence, device))[0].float().cpu()
        files, precision = on_first_rank(partial(write, options.out / protein.name, protein, contact, options.least))
        ranks.log0(table(f"{protein.name}: {len(protein)} residues", precision))
        return files, precision


def write(stem: Path, protein: Protein, contact: torch.Tensor, least: float) -> tuple[list[Path], dict[str, float]]:
    """Write NAME.csv, NAME.npz and NAME.png; return them, and the precision if the structure is known."""
    precision = contact_precision(contact, *truth(protein))
    files = write_files(
        stem, protein, {"contact": contact.numpy()}, lambda path: write_probabilities(path, protein, contact, least),
        contact_map(protein, contact, precision, ", ESM-2"),
    )  # fmt: skip
    return files, precision
