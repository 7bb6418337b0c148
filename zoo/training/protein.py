"""The protein task: crops of proteins with their alignments, hidden letters and distances to be told.

Every batch is a pure function of the step. Of the alignment a rank makes the rows it holds, of the pairs its rows i.
Letters: b samples, s rows of the alignment, t of the extra one, r residues, i j residues of a pair.
"""

import inspect
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import Example, draw
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.given import find
from zoo.data.protein.record import Protein
from zoo.data.protein.synthetic import PottsFamilies
from zoo.data.sampling import generator
from zoo.protein.distogram import BINS, CONTACT, contact_probability, distances, edges, expected_distance
from zoo.protein.metrics import (
    average,
    contact_precision,
    distance_lddt,
    masked_accuracy,
    mutual_information,
    range_of_pairs,
)
from zoo.protein.objective import Frequencies, ProteinObjective
from zoo.protein.picture import ContactMap, save_contact_maps
from zoo.protein.prediction import Predictor
from zoo.protein.table import write_contacts
from zoo.training import UserError, task, user_error
from zoo.training.config import option
from zoo.training.ranks import on_first_rank, say
from zoo.training.task import Floor, Inputs, Part, share

_FLOOR_EXAMPLES = 256  # training examples that background frequencies are counted on


@dataclass
class Synthetic:
    name: str = option("protein_synthetic", "alignments drawn from Potts models on the contacts of real structures")
    residues: int = option(48, "residues of a family", least=8)
    rows: int = option(32, "rows of its alignment that a sample has", least=1)
    extra_rows: int = option(0, "further rows, for a model with an extra alignment", least=0)
    masked: float = option(0.15, "share of the letters to be guessed", least=0.01, most=1)
    families: int = option(512, "families for training", least=1)
    depth: int = option(64, "rows drawn of each", least=1)
    coupling: float = option(0.2, "strength of the couplings between residues in contact", least=0)


@dataclass
class Embedded:
    name: str = option(
        "protein_embedded", "68 real structures that come with the package, each with its sequence alone"
    )
    residues: int = option(128, "residues of a crop", least=8)
    rows: int = option(1, "rows of the alignment; there is one", least=1)
    extra_rows: int = option(0, "further rows, for a model with an extra alignment; they are all padding", least=0)
    masked: float = option(0.15, "share of the letters to be guessed", least=0.01, most=1)
    crop: str = option("contiguous", "how long proteins are cut", choices=("contiguous", "spatial"))


@dataclass
class Folder:
    name: str = option("protein_folder", "structures (mmCIF, PDB) and alignments (A3M, FASTA, Stockholm) in one folder")
    path: str | None = option(None, "the folder; required")
    residues: int = option(256, "residues of a crop", least=8)
    rows: int = option(128, "rows of the alignment that a sample has", least=1)
    extra_rows: int = option(0, "further rows, for a model with an extra alignment", least=0)
    masked: float = option(0.15, "share of the letters to be guessed", least=0.01, most=1)
    crop: str = option("contiguous", "how long proteins are cut", choices=("contiguous", "spatial"))
    validation: float = option(0.1, "share of the proteins held out for validation", least=0, most=1)


DATA: dict[str, type] = {"protein_synthetic": Synthetic, "protein_embedded": Embedded, "protein_folder": Folder}


@dataclass
class Objective:
    name: str = option("alphafold", "masked letters (weight 2) and distances (weight 0.3)", choices=("alphafold",))
    recycles: int = option(0, "most further passes, each from what the last one made; a step draws 0 to all", least=0)


@dataclass
class Eval:
    every: int = option(500, "steps between validations; 0 for none", least=0)
    proteins: int = option(16, "validation samples, the same at every validation", least=1)
    floors: bool = option(False, "also report what needs no model: frequencies, and mutual information")


@dataclass
class Sample:
    every: int = option(0, "steps between predictions whose contacts are judged and drawn; 0 for none", least=0)
    proteins: int = option(16, "held-out proteins predicted, the same every time", least=1)
    drawn: int = option(3, "of these in the picture: those with most contacts", least=1)


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def protein(self, index: int) -> Protein: ...


@dataclass
class Predicted:
    """A protein, and what a model makes of it."""

    protein: Protein
    contact: Tensor  # [r, r] probability
    distance: Tensor  # [r, r] Å
    accuracy: float | None = None  # of hidden letters, but for those of the first row: the sequence tells them
    distogram: Tensor | None = None  # [r, r, 64] float16, the probability of every bin

    def measure(self) -> dict[str, float]:
        """Nothing if the structure is not known.

        The distances are those of the contact atoms. lDDT-Cβ compares them with what they are of, lDDT-Cα with those
        of Cα atoms, as the field reports it: perfect by the first is 0.68 by the second.
        """
        truth = _truth(self.protein)
        found: dict[str, float | None] = {**contact_precision(self.contact, *truth)}
        for name, (position, seen) in (("Cβ", truth[:2]), ("Cα", map(torch.from_numpy, self.protein.atoms("CA")))):
            found[f"lDDT-{name}"] = distance_lddt(self.distance, position, seen)
        found["masked accuracy"] = self.accuracy
        return {name: value for name, value in found.items() if value is not None}

    def contacts(self) -> int:
        """How many pairs are in contact in truth, of those that are measured."""
        position, seen, *places = _truth(self.protein)
        counted = torch.stack(list(range_of_pairs(*places).values())).any(0) & seen[:, None] & seen
        return int((counted & (distances(position, position) < CONTACT)).sum())

    def map(self, measured: Mapping[str, float]) -> ContactMap:
        title = f"{self.protein.name}: " + ", ".join(f"{k} {v:.2f}" for k, v in measured.items() if k.endswith("P@L/2"))
        return ContactMap(title.removesuffix(": "), self.contact, *_truth(self.protein))


class Task(task.Task):
    """Proteins: `rank` of `size` holds a range of the rows of each alignment and of the rows i of its pairs."""

    def __init__(self, config: Any, rank: int = 0, size: int = 1):
        super().__init__(config, rank, size)
        data = config.data
        self.validation_samples = config.eval.proteins
        self.tokens = data.rows * data.residues
        self.shape = {"residues": data.residues, "rows": data.rows, "extra": data.extra_rows}
        # a single row is not there to be divided: every rank has it
        whole = {name: range(length) for name, length in self.shape.items()}
        self.here = {name: share(len(rows), rank, size) if len(rows) > 1 else rows for name, rows in whole.items()}

    def open(self) -> None:
        data, seed = self.config.data, self.config.train.seed
        needed = max(self.config.eval.proteins, self.config.sample.proteins)
        self.train, self.validation = on_first_rank(lambda: user_error(_datasets, data, seed, needed, prefix="data: "))

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        model = self.create()
        self.inputs = list(inspect.signature(model.forward).parameters)
        if "msa" not in self.inputs:
            raise UserError(f"model {self.config.model.name} is not one of proteins: it takes {', '.join(self.inputs)}")
        if (bins := getattr(model.config, "bins", BINS)) != BINS:
            raise UserError(
                f"the data has {BINS} bins of distance and the model {bins}: set model.overrides.bins={BINS}"
            )
        wanted, rows = getattr(model.config, "extra_depth", 0), self.shape["extra"]
        if wanted and not rows:
            raise UserError("the model has an extra alignment: set data.extra_rows, or model.overrides.extra_depth=0")
        if rows and not wanted:
            raise UserError(f"data.extra_rows={rows}, and the model has no extra alignment: set data.extra_rows=0")
        return model

    def objective(self, model: nn.Module) -> nn.Module:
        return ProteinObjective(model)

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Any]:
        b, s, t, r = self.config.train.batch, self.shape["rows"], self.shape["extra"], self.shape["residues"]
        inputs: dict[str, Any] = {
            "msa": torch.zeros(b, s, r, dtype=torch.long), "deletions": torch.zeros(b, s, r),
            "msa_mask": torch.ones(b, s, r, dtype=torch.bool), "msa_target": torch.zeros(b, s, r, dtype=torch.long),
            "msa_weight": torch.ones(b, s, r), "bins": torch.zeros(b, r, r, dtype=torch.long),
            "pair_weight": torch.ones(b, r, r), "sequence": torch.zeros(b, r, dtype=torch.long),
            "residue_index": torch.zeros(b, r, dtype=torch.long), "asym_id": torch.zeros(b, r, dtype=torch.long),
            "mask": torch.ones(b, r, dtype=torch.bool), "recycles": self.config.objective.recycles - bucket,
        }  # fmt: skip
        if t:
            inputs |= {
                "extra_msa": torch.zeros(b, t, r, dtype=torch.long), "extra_deletions": torch.zeros(b, t, r),
                "extra_mask": torch.ones(b, t, r, dtype=torch.bool),
            }  # fmt: skip
        return inputs

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        seed, chosen = self.config.train.seed, self.drawn(step, micro, group, groups, len(self.train))
        examples = [self._draw(self.train, "train", seed, epoch, index) for epoch, index in chosen]
        return self._inputs(examples, self.recycles(step))

    def bucket(self, step: int, groups: int) -> int:
        return self.config.objective.recycles - self.recycles(step)

    def recycles(self, step: int) -> int:
        """How many recycled passes a training step has, the same for all groups so that none waits for another.

        Uniform from 0 to all of them (AF2 supplement, 1.10), a pure function of the step. Every pass sees the same
        rows and hidden letters, where AlphaFold draws them anew.
        """
        random = generator("recycles", self.config.train.seed, step)
        return int(torch.randint(self.config.objective.recycles + 1, (), generator=random))

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        chosen = self._validation_examples(self.config.eval.proteins)[group::groups]
        for start in range(0, len(chosen), self.config.train.batch):
            examples = [example() for example in chosen[start : start + self.config.train.batch]]
            yield 0, len(examples), self._inputs(examples, self.config.objective.recycles)

    def _validation_examples(self, count: int) -> list[Callable[[], Example]]:
        """The first `count`, spread over the validation set; if it has too few proteins, several crops of each."""
        n = len(self.validation)

        def example(i: int) -> Callable[[], Example]:
            return lambda: self._draw(self.validation, "validation", 0, i // n, i % n)

        return [example(i * n // count if count < n else i) for i in range(count)]

    def _draw(self, data: Dataset, split: str, seed: int, epoch: int, index: int) -> Example:
        options = self.config.data
        return draw(
            data.protein(index), split, seed, epoch, index, **self.shape, share=options.masked,
            spatial=getattr(options, "crop", "") == "spatial",
        )  # fmt: skip

    def _inputs(self, examples: Sequence[Example], recycles: int) -> Inputs:
        """What this rank holds of a batch."""

        def stacked(of: Callable[[Example], dict[str, Tensor]], length: int | None = None) -> Inputs:
            parts = [of(example) for example in examples]
            whole = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
            return {name: x if length in (None, 1) else Part(x, 1, length) for name, x in whole.items()}

        here, shape = self.here, self.shape
        inputs = stacked(lambda e: e.alignment(here["rows"]), shape["rows"])
        inputs |= stacked(lambda e: e.pairs(here["residues"]), shape["residues"])
        inputs |= stacked(Example.single)
        if shape["extra"]:
            inputs |= stacked(lambda e: e.extra_alignment(here["extra"]), shape["extra"])
        # the weights of a sample sum to one: its losses count as those of another, however samples are grouped
        seen = torch.tensor([e.protein.contact_atoms()[1].sum() for e in examples])
        for name, sums in (("msa_weight", torch.stack([e.chosen.sum() for e in examples])), ("pair_weight", seen**2)):
            part = inputs[name]
            weight = part.local if isinstance(part, Part) else part
            weight /= sums[:, None, None]
        inputs["recycles"] = recycles
        return inputs

    # --------------------------------------------------------------------------------------------------- what is shown

    def predictor(self, model: nn.Module) -> nn.Module:
        return Predictor(model)

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> list[Predicted]:
        """What the model says of held-out proteins, some letters hidden as in validation."""
        made, chosen = [], self._validation_examples(self.config.sample.proteins)
        for i, example in enumerate(chosen):
            drawn = example()
            made.append(self._predict(model, drawn, device, recycles=self.config.objective.recycles))
            on_step(i + 1, len(chosen))
        return made

    def _predict(self, model: Callable[..., Any], example: Example, device: torch.device, **options: Any) -> Predicted:
        given = example.alignment() | example.single() | (example.extra_alignment() if self.shape["extra"] else {})
        inputs = {name: given[name][None].to(device) for name in self.inputs if name in given}
        with torch.no_grad():
            found = model(**inputs, **options)
        r, accuracy = len(example.protein), None
        if example.chosen[1:].any():
            letters, target, chosen = found.letters[0].cpu(), given["msa_target"], given["msa_weight"]
            accuracy = masked_accuracy(letters[1:], target[1:], chosen[1:])
        probability, distance = (x[0, :r, :r].cpu() for x in (found.probability, found.distance))
        bins = None if found.distogram is None else found.distogram[0, :r, :r].cpu()
        return Predicted(example.protein, probability, distance, accuracy, bins)

    def show(self, samples: list[Predicted], path: Path) -> Mapping[str, float]:
        measured = [predicted.measure() for predicted in samples]
        richest = sorted(zip(samples, measured), key=lambda pair: -pair[0].contacts())[: self.config.sample.drawn]
        save_contact_maps(path, [predicted.map(found) for predicted, found in richest])
        return {f"val_{name}": value for name, value in average(measured).items()}

    def arguments(self, parser: ArgumentParser) -> None:
        data = self.config.data
        parser.add_argument("files", type=Path, nargs="+", help="structures, alignments, folders of both")
        parser.add_argument(
            "--complex", action="store_true", help="alignments without a structure are the chains of one complex"
        )
        parser.add_argument("--rows", type=int, default=data.rows, help="rows of the alignment")
        if data.extra_rows:
            parser.add_argument("--extra-rows", type=int, default=data.extra_rows, help="rows of the extra one")
        parser.add_argument(
            "--recycles", type=int, default=self.config.objective.recycles,
            help="further passes, each from what the last one made; as many as in training, if not said",
        )  # fmt: skip
        parser.add_argument("--least", type=float, default=0.1, help="least probability of the contacts in the table")
        parser.add_argument(
            "--distogram", action="store_true",
            help="store the probabilities of all bins of distance too: 128 r² bytes on every rank for r residues",
        )  # fmt: skip
        parser.add_argument("--seed", type=int, default=0, help="another number takes other rows of a deep alignment")

    def infer(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        for name, least in (("rows", 1), ("extra_rows", 1), ("recycles", 0)):
            if getattr(options, name, least) < least:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least {least}")
        given = on_first_rank(lambda: user_error(find, options.files, chains=options.complex))
        written, measured, skipped = [], [], []
        for i, one in enumerate(given):
            try:
                protein = on_first_rank(partial(user_error, one.read))
            except UserError as error:
                if len(given) == 1:
                    raise
                skipped.append(str(error))
                say(f"skipped {error}")
                continue
            rows = min(options.rows, len(protein.msa))
            sizes = {"residues": len(protein), "rows": rows, "extra": getattr(options, "extra_rows", 0)}
            example = draw(protein, "inference", options.seed, **sizes, share=0)
            asked = {"recycles": options.recycles, "distogram": options.distogram}
            predicted = self._predict(model, example, device, **asked)
            files, found = on_first_rank(partial(_write, options.out, predicted, options.least))
            written += files
            measured.append(found)
            chains = f" in {len(protein.chains)} chains" if len(protein.chains) > 1 else ""
            say(f"{protein.name}: {len(protein)} residues{chains}, {rows} of {len(protein.msa)} rows; {_words(found)}")
            on_step(i + 1, len(given))
        if not written:
            raise UserError(f"none of {len(given)} proteins can be read; the first: {skipped[0]}")
        if len(given) > 1:
            mean = f"; mean {_words(found)}" if (found := average(measured)) else ""
            say(f"{len(measured)} of {len(given)} proteins predicted, {len(skipped)} skipped{mean}")
        return written

    def describe(self) -> str:
        rows, extra, recycles = self.shape["rows"], self.shape["extra"], self.config.objective.recycles
        words = f"{rows} + {extra} rows" if extra else f"{rows} row{'s' if rows > 1 else ''}"
        passes = f", {recycles} recycled pass{'es' if recycles > 1 else ''} (a step draws 0 to {recycles})"
        return f"{words} of {self.shape['residues']} residues{passes if recycles else ''}"

    def floors(self, objective: Any) -> list[Floor]:
        if not self.config.eval.floors:
            return []
        seed, n = self.config.train.seed, len(self.train)
        train = [self._draw(self.train, "train", seed, i // n, i % n) for i in range(_FLOOR_EXAMPLES)]
        validation = [example() for example in self._validation_examples(self.config.eval.proteins)]
        shown, told = ([e.alignment() | e.single() | e.pairs() for e in part] for part in (train, validation))
        frequencies = Frequencies(shown)
        terms = average([frequencies.losses(sample) for sample in told])
        words = "frequencies of letters in a column, of distances by separation"
        floors = [Floor("frequency_floor", words, sum(terms.values()))]
        by_frequency, by_information = [], []
        for example in self._validation_examples(self.config.sample.proteins):
            protein = example().protein
            truth = _truth(protein)
            logits = frequencies.distogram(*truth[2:])
            guess = Predicted(protein, contact_probability(logits), expected_distance(logits))
            by_frequency.append(guess.measure())
            if len(protein.msa) > 1:
                by_information.append(contact_precision(mutual_information(torch.from_numpy(protein.msa)), *truth))
        for key, words, found in (
            ("frequency_floor", "the same", {f"loss_{name}": value for name, value in terms.items()}),
            ("frequency_floor", "frequencies of distances", average(by_frequency)),
            ("apc_floor", "mutual information of the same rows", average(by_information)),
        ):
            floors += [Floor(f"{key} {name}", f"{words}, {name}", value) for name, value in found.items()]
        if not by_information:
            say("alignments of one row: mutual information is not defined, and hidden letters stand in the sequence")
        return floors


def _words(measured: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in measured.items()) or "its structure is not known"


def _write(directory: Path, predicted: Predicted, least: float) -> tuple[list[Path], dict[str, float]]:
    """NAME.csv, NAME.npz and NAME.png; and what was measured."""
    protein, measured = predicted.protein, predicted.measure()
    directory.mkdir(parents=True, exist_ok=True)
    table, arrays, picture = (directory / f"{protein.name}.{suffix}" for suffix in ("csv", "npz", "png"))
    write_contacts(table, protein, predicted.contact, predicted.distance, least)
    values = {
        "contact": predicted.contact.numpy(), "distance": predicted.distance.numpy(),
        "sequence": np.array(protein.sequence), "chain": np.array(protein.chains)[protein.asym_id],
        "residue_index": protein.residue_index, "residue_id": np.array(protein.residue_ids),
    }  # fmt: skip
    if predicted.distogram is not None:
        values |= {"distogram": predicted.distogram.numpy(), "edges": edges().numpy()}
    with arrays.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **values)
    save_contact_maps(picture, [predicted.map(measured)])
    return [table, arrays, picture], measured


def _truth(protein: Protein) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Position [r, 3] and `seen` [r] of the contact atoms, residue_index [r], asym_id [r]."""
    arrays = (*protein.contact_atoms(), protein.residue_index, protein.asym_id)
    position, seen, residue_index, asym_id = (torch.from_numpy(array) for array in arrays)
    return position, seen, residue_index, asym_id


def _datasets(data: Any, seed: int, needed: int) -> tuple[Dataset, Dataset]:
    """The training and the validation set that `data` describes."""
    if isinstance(data, Synthetic):
        options: dict[str, Any] = {"residues": data.residues, "rows": data.depth, "coupling": data.coupling}
        return (
            PottsFamilies("train", families=data.families, seed=seed, **options),
            PottsFamilies("validation", families=needed, seed=0, **options),
        )
    if isinstance(data, Embedded):
        return EmbeddedProteins("train"), EmbeddedProteins("validation")
    return ProteinFolder(data.path).split(data.validation)
