"""Proteins predicted by published weights: `infer.py FOLDER files`, on one process or all ranks."""

import time
from abc import ABC, abstractmethod
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import dsp
from zoo.data.protein.record import Protein
from zoo.training import UserError, ranks, user_error
from zoo.training.outputs.options import checked
from zoo.training.outputs.predicted import log_mean
from zoo.training.ranks import on_first_rank
from zoo.training.tracking import number_of
from zoo.training.trained import log_written, progress, wire_option

__all__ = ["Published", "command"]


class Published(ABC):
    """A family of published models of proteins, as `infer.py FOLDER` uses it; `files` describes what it takes."""

    files: str

    def arguments(self, parser: ArgumentParser) -> None:  # noqa: B027
        """Add the options of this family."""

    @abstractmethod
    def proteins(self, files: Sequence[Path]) -> list[Protein]:
        """The proteins in files; ValueError for what cannot be read."""

    @abstractmethod
    def read(self, folder: Path) -> nn.Module:
        """The model of a folder, with stages; ValueError for weights of another model."""

    @abstractmethod
    def predict(
        self, model: nn.Module, protein: Protein, options: Namespace, device: torch.device
    ) -> tuple[list[Path], dict[str, float]]:
        """Predict one protein; on rank 0 write its files and print its measures. Return both."""


def command(family: Published, argv: Sequence[str], folder: Path, parser: ArgumentParser) -> int:
    """Rank 0 writes to `contacts/` in the current folder, or to `--out`."""
    parser.add_argument("files", type=Path, nargs="+", help=family.files)
    parser.add_argument("--least", type=float, default=0.1, help="least probability of contacts in the table")
    parser.add_argument("--out", type=Path, default=Path("contacts") / folder.resolve().name, help="folder for results")
    family.arguments(parser)
    wire_option(parser)
    options = checked(parser.parse_args(argv))
    with ranks.process_group() as device:
        proteins = on_first_rank(partial(user_error, family.proteins, options.files))
        model = user_error(family.read, folder).to(device).eval()
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("sp",))
        user_error(dsp.parallelize, model, mesh["sp"], wire=options.wire)
        before, began, on_step = set(options.out.glob("*")), time.perf_counter(), progress()
        written, measured = list[Path](), list[dict[str, float]]()
        for i, protein in enumerate(proteins):
            try:
                files, measures = family.predict(model, protein, options, device)
            except torch.cuda.OutOfMemoryError as error:
                raise UserError(f"{protein.name}: {len(protein)} residues do not fit: use more ranks") from error
            written += files
            measured.append(measures)
            on_step(i + 1, len(proteins))
        if len(measured) > 1:
            log_mean(measured)
        ranks.log0(f"took {time.perf_counter() - began:.2f} s on {number_of(dist.get_world_size(), 'rank')}")
        log_written(written, before)
    return 0
