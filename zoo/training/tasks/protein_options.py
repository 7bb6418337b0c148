"""The options of the protein task: its data sets, objective, validation and samples."""
# ruff: noqa: RUF009 (`option` makes a dataclasses.field)

from dataclasses import dataclass
from typing import Annotated, Protocol

from zoo.training import task
from zoo.training.sections import option


@dataclass
class Proteins:
    """The options that all sets of proteins have."""

    name: str = option("", "the data set")
    residues: int = option(128, "residues of a crop", least=8)
    rows: int = option(128, "alignment rows in a sample", least=1)
    extra_rows: int = option(0, "additional rows for a model with an extra alignment", least=0)
    masked: float = option(0.15, "share of the letters that are masked", least=0.01, most=1)
    couplings: bool = option(False, "give the model the direct couplings of each pair, from the whole alignment")
    around: int = option(
        0, "also those of neighbouring pairs, up to this many residues away along both chains", least=0
    )


@dataclass
class Synthetic(Proteins):
    name: str = option("protein_synthetic", "alignments drawn from Potts models on the contacts of real structures")
    residues: int = option(48, "residues of a family", least=8)
    rows: int = option(32, "alignment rows in a sample", least=1)
    families: int = option(512, "families for training", least=1)
    depth: int = option(64, "alignment rows drawn for each family", least=1)
    coupling: float = option(0.2, "strength of the couplings between residues in contact", least=0)
    kinds: bool = option(False, "vary the families: laws, strengths, depths, relatives, gaps, insertions")
    without: list[str] = option([], "structures to leave out, such as relatives of the test proteins")


@dataclass
class Embedded(Proteins):
    name: str = option("protein_embedded", "68 real structures that come with the package, each with only its sequence")
    rows: int = option(1, "alignment rows; there is one", least=1)
    crop: str = option("contiguous", "how long proteins are cropped", choices=("contiguous", "spatial"))
    templates: int = option(
        0, "templates for a model that reads them; there are none, nothing of them is seen", least=0
    )


@dataclass
class Folder(Proteins):
    name: str = option("protein_folder", "structures (mmCIF, PDB) and alignments (A3M, FASTA, Stockholm) in one folder")
    path: str | None = option(None, "the folder; required", file=True)
    residues: int = option(256, "residues of a crop", least=8)
    crop: str = option("contiguous", "how long proteins are cropped", choices=("contiguous", "spatial"))
    validation: float = option(0.1, "share of the proteins held out for validation", least=0, most=1)
    templates: int = option(
        0, "templates of each protein for a model that reads them: structures NAME.template*.cif", least=0
    )


class Data(task.Data, Protocol):
    """A section of the configuration that names proteins."""

    residues: Annotated[int, "residues of a crop, an option"]
    rows: Annotated[int, "rows of the alignment that a sample has, an option"]
    extra_rows: Annotated[int, "further rows, for a model with an extra alignment, an option"]
    masked: Annotated[float | int, "share of the letters to be guessed, an option"]
    couplings: Annotated[bool, "whether the model is told direct couplings of each pair, an option"]
    around: Annotated[int, "and of the pairs so many residues around it, an option"]


DATA: dict[str, type] = {"protein_synthetic": Synthetic, "protein_embedded": Embedded, "protein_folder": Folder}


@dataclass
class Objective:
    name: str = option(
        "alphafold", "loss: masked letters (weight 2) and distances (weight 0.3)", choices=("alphafold",)
    )
    contacts: float = option(0.0, "weight of a contact loss, on pairs at least 12 residues apart", least=0)
    recycles: int = option(0, "maximum number of recycling passes; each step draws a number up to it", least=0)


@dataclass
class Eval:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    proteins: int = option(16, "validation samples, the same at every validation", least=1)
    baselines: bool = option(
        False, "also report baselines without a model: frequencies, mutual information, direct couplings"
    )


@dataclass
class Sample:
    every: int = option(0, "steps between predictions whose contacts are scored and drawn; 0: none", least=0)
    proteins: int = option(16, "held-out proteins to predict, the same every time", least=1)
    drawn: int = option(3, "proteins in the picture: those with most contacts", least=1)
