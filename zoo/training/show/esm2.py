"""Contacts from published ESM-2: `infer.py FOLDER x.fasta`, on one process or all ranks, without an alignment."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dsp
from zoo.data.protein.record import Protein
from zoo.data.protein.sequences import read_chains
from zoo.protein import esm2, esm2_weights
from zoo.protein.metrics import contact_precision
from zoo.protein.picture import write_probabilities
from zoo.training import UserError, ranks, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.show.options import checked
from zoo.training.show.predicted import contact_map, say_mean, table, truth, write_files
from zoo.training.tracking import number_of
from zoo.training.use import progress, say_written, wire_option

TRAINED = 1024  # residues of the longest crops in training


def command(given: Sequence[str], folder: Path, parser: ArgumentParser) -> int:
    """`infer.py FOLDER files [options]`: rank 0 writes to `contacts/` in the current folder, or to `--out`."""
    parser.add_argument(
        "files", type=Path, nargs="+", help="sequences (.fasta), alignments (their queries), structures"
    )
    parser.add_argument("--least", type=float, default=0.1, help="least probability of contacts in the table")
    parser.add_argument("--out", type=Path, default=Path("contacts") / folder.resolve().name, help="folder for results")
    wire_option(parser)
    options = checked(parser.parse_args(given))
    with ranks.process_group() as device:
        proteins = on_first_rank(partial(user_error, read_chains, options.files))
        model = user_error(esm2_weights.read, folder).to(device).eval()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("sp",))
        user_error(dsp.parallelize, model, mesh["sp"], wire=options.wire)
        before, began = set(options.out.glob("*")), time.perf_counter()
        written = predict(model, proteins, options, device, progress())
        ranks.say(f"took {time.perf_counter() - began:.2f} s on {number_of(dist.get_world_size(), 'rank')}")
        say_written(written, before)
    return 0


@torch.no_grad()
def predict(
    model: nn.Module, proteins: Sequence[Protein], options: Namespace, device: torch.device,
    on_step: Callable[[int, int], None],
) -> list[Path]:  # fmt: skip
    """Write three files and print a table for each protein; return the files."""
    written, measured = list[Path](), list[dict[str, float]]()
    if long := [protein.name for protein in proteins if len(protein) > TRAINED]:
        ranks.say(f"{', '.join(long)}: longer than the {TRAINED} residues that ESM-2 was trained with")
    for i, protein in enumerate(proteins):
        try:
            contact = model(esm2.encode(protein.sequence, device))[0].float().cpu()
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(f"{protein.name}: {len(protein)} residues do not fit: use more ranks") from error
        files, precision = on_first_rank(partial(write, options.out / protein.name, protein, contact, options.least))
        written += files
        measured.append(precision)
        ranks.say(table(f"{protein.name}: {len(protein)} residues", precision))
        on_step(i + 1, len(proteins))
    if len(measured) > 1:
        say_mean(measured)
    return written


def write(stem: Path, protein: Protein, contact: torch.Tensor, least: float) -> tuple[list[Path], dict[str, float]]:
    """Write NAME.csv, NAME.npz and NAME.png; return them, and the precision if the structure is known."""
    precision = contact_precision(contact, *truth(protein))
    files = write_files(
        stem, protein, {"contact": contact.numpy()}, lambda path: write_probabilities(path, protein, contact, least),
        contact_map(protein, contact, precision, ", ESM-2"),
    )  # fmt: skip
    return files, precision
