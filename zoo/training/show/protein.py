"""The pictures of a protein model: contacts of held-out proteins; and what infer.py predicts from files."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.data.protein.example import Example, draw
from zoo.data.protein.given import find
from zoo.data.protein.record import Protein
from zoo.data.protein.write import write_structure
from zoo.protein.coevolution import direct_couplings, filled_rows, mutual_information
from zoo.protein.distogram import CONTACT, contact_probability, distances, edges, expected_distance
from zoo.protein.metrics import (
    average,
    contact_precision,
    distance_lddt,
    masked_accuracy,
    range_of_pairs,
    rmsd,
)
from zoo.protein.objective import Frequencies
from zoo.protein.picture import ContactMap, save_contact_maps, write_contacts
from zoo.protein.structure import backbone
from zoo.training import UserError, task, user_error
from zoo.training.ranks import on_first_rank, say
from zoo.training.task import Baseline
from zoo.training.tasks.protein import Task
from zoo.training.tracking import ascii_key

ROWS = 512  # of an alignment, by default: as many as AlphaFold 2 attends to
DRAWN_LEAN = 0.5  # for models trained on drawn alignments: couplings of real ones stand out more
ORIGINS = {"train": "trained on", "validation": "held out", "": ""}  # by the set of the run that has the protein
BASELINE_EXAMPLES = 256  # training examples that background frequencies are counted on


@dataclass
class Predicted:
    """A protein, and a model's prediction of it."""

    protein: Protein
    contact: Tensor  # [r, r] probability
    distance: Tensor  # [r, r] Å
    accuracy: float | None = None  # of hidden letters without the first row's, which are in the sequence
    distogram: Tensor | None = None  # [r, r, 64] float16, the probability of every bin
    atoms: Tensor | None = None  # [r, 5, 3] Å, of a model that predicts a structure
    plddt: Tensor | None = None  # [r] the lDDT to be expected, 0 to 100

    def measure(self) -> dict[str, float]:
        """The measures of the prediction; those that need the true structure only where it is known.

        Predicted distances are of contact atoms. lDDT-Cβ compares them with true distances of contact atoms, lDDT-Cα of
        Cα atoms, as the field reports it: 1 by the first is 0.68 by the second. Those of a structure are of Cα atoms.
        """
        known = truth(self.protein)
        found: dict[str, float | None] = {**contact_precision(self.contact, *known)}
        ca, there = map(torch.from_numpy, self.protein.atoms("CA"))
        found["lDDT-Cβ"] = distance_lddt(self.distance, *known[:2])
        found["lDDT-Cα"] = distance_lddt(self.distance, ca, there)
        if self.atoms is not None and self.plddt is not None:
            made = self.atoms[:, 1]
            found["structure lDDT"] = distance_lddt(distances(made, made), ca, there)
            found["structure RMSD"] = rmsd(made, ca, there)
            found["pLDDT"] = self.plddt.mean().item()
        found["masked accuracy"] = self.accuracy
        return {name: value for name, value in found.items() if value is not None}

    def contacts(self) -> int:
        """The number of measured pairs that are in contact in the true structure."""
        position, seen, *places = truth(self.protein)
        counted = torch.stack(list(range_of_pairs(*places).values())).any(0) & seen[:, None] & seen
        return int((counted & (distances(position, position) < CONTACT)).sum())

    def map(self, measured: Mapping[str, float]) -> ContactMap:
        title = f"{self.protein.name}: " + ", ".join(f"{k} {v:.2f}" for k, v in measured.items() if k.endswith("P@L/2"))
        return ContactMap(title.removesuffix(": "), self.contact, *truth(self.protein))


class Show(task.Show):
    """Maps of contacts, predicted and true."""

    task: Task

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> list[Predicted]:
        """Predict held-out proteins, some letters hidden as in validation."""
        made, chosen = [], self.task.validation_examples(self.config.sample.proteins)
        for i, example in enumerate(chosen):
            drawn = example()
            made.append(self.predict(model, drawn, device, recycles=self.config.objective.recycles))
            on_step(i + 1, len(chosen))
        return made

    def predict(self, model: Callable[..., Any], example: Example, device: torch.device, **options: Any) -> Predicted:
        given = example.alignment() | example.single() | (example.extra_alignment() if self.task.shape["extra"] else {})
        given |= example.couplings(around=self.config.data.around) if self.task.features else {}
        given |= example.relatives() if self.task.templates else {}
        inputs = {name: given[name][None].to(device) for name in self.task.inputs if name in given}
        with torch.no_grad():
            found = model(**inputs, **options)
        r, accuracy = len(example.protein), None
        if example.chosen[1:].any():
            letters, target, chosen = found.letters[0].cpu(), given["msa_target"], given["msa_weight"]
            accuracy = masked_accuracy(letters[1:], target[1:], chosen[1:])
        probability, distance = (x[0, :r, :r].cpu() for x in (found.probability, found.distance))
        bins = None if found.distogram is None else found.distogram[0, :r, :r].cpu()
        predicted = Predicted(example.protein, probability, distance, accuracy, bins)
        if self.task.folds:
            rotation, translation, plddt = (x[0, :r].cpu() for x in (found.rotation, found.translation, found.plddt))
            predicted.atoms, predicted.plddt = backbone(rotation, translation, bonded(example.protein)), plddt
        return predicted

    def write(self, samples: list[Predicted], path: Path) -> Mapping[str, float]:
        measured = [predicted.measure() for predicted in samples]
        richest = sorted(zip(samples, measured), key=lambda pair: -pair[0].contacts())[: self.config.sample.drawn]
        save_contact_maps(path, [predicted.map(found) for predicted, found in richest])
        return {f"val_{ascii_key(name)}": value for name, value in average(measured).items()}

    def headline(self, key: str) -> bool:
        return not key.endswith(("_p_at_l", "_p_at_l2"))  # of the precisions, only those at L/5

    def baselines(self, objective: Any) -> list[Baseline]:
        if not self.config.eval.floors:
            return []
        seed, n = self.config.train.seed, len(self.task.train)
        train = [self.task.draw(self.task.train, "train", seed, i // n, i % n) for i in range(BASELINE_EXAMPLES)]
        validation = [example() for example in self.task.validation_examples(self.config.eval.proteins)]
        shown, told = ([e.alignment() | e.single() | e.pairs() for e in part] for part in (train, validation))
        frequencies = Frequencies(shown, self.config.objective.contacts)
        terms = average([frequencies.losses(sample) for sample in told])
        words = "frequencies of letters in a column, of distances by separation"
        baselines = [Baseline("baseline_frequency", words, sum(terms.values()))]
        by_frequency, by_information, by_couplings = [], [], []
        for example in self.task.validation_examples(self.config.sample.proteins):
            protein = example().protein
            known = truth(protein)
            logits = frequencies.distogram(*known[2:])
            guess = Predicted(protein, contact_probability(logits), expected_distance(logits))
            by_frequency.append(guess.measure())
            msa, known_pairs = torch.from_numpy(protein.msa), protein.couplings
            if len(msa) > 1:
                by_information.append(contact_precision(mutual_information(filled_rows(msa)), *known))
            if len(msa) > 1 or known_pairs is not None:
                score = direct_couplings(msa).score if known_pairs is None else torch.from_numpy(known_pairs)
                by_couplings.append(contact_precision(score, *known))
        for key, what, found in (
            ("baseline_frequency", words, {f"loss_{name}": value for name, value in terms.items()}),
            ("baseline_frequency", "frequencies of distances", average(by_frequency)),
            ("baseline_apc", "mutual information of the same rows", average(by_information)),
            (
                "baseline_dca",
                "direct couplings of the same rows, or of all that the model is told of",
                average(by_couplings),
            ),
        ):
            keys = {ascii_key(name): value for name, value in found.items()}
            baselines += [Baseline(f"{key}_{name}", what, value, f"val_{name}") for name, value in keys.items()]
        if not by_couplings:
            say("alignments of one row: nothing is coupled, and hidden letters stand in the sequence")
        return baselines


def skipped_template(path: Path, why: str) -> None:
    say(f"skipped {why if str(path) in why else f'{path}: {why}'}")


def bonded(protein: Protein) -> Tensor:
    """The residues [r] that are followed by the next one along their chain."""
    place, chain = torch.from_numpy(protein.residue_index), torch.from_numpy(protein.asym_id)
    following = (place[1:] == place[:-1] + 1) & (chain[1:] == chain[:-1])
    return torch.cat([following, following.new_zeros(1)])


def truth(protein: Protein) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Position [r, 3] and `seen` [r] of the contact atoms, residue_index [r], asym_id [r]."""
    arrays = (*protein.contact_atoms(), protein.residue_index, protein.asym_id)
    position, seen, residue_index, asym_id = (torch.from_numpy(array) for array in arrays)
    return position, seen, residue_index, asym_id


class Infer(task.Infer):
    """Predicts proteins one by one, and writes a table, arrays and a map of each."""

    show: Show

    def arguments(self, parser: ArgumentParser) -> None:
        data = self.config.data
        parser.add_argument(
            "files", type=Path, nargs="+", help="structures, alignments, folders of both; templates by name"
        )
        parser.add_argument(
            "--complex", action="store_true", help="alignments without a structure are the chains of one complex"
        )
        parser.add_argument(
            "--rows", type=int, nargs="+", default=[max(ROWS, data.rows)],
            help="rows of the alignment, of those that there are; of several numbers each has a result, to be compared",
        )  # fmt: skip
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
        if data.couplings:
            drawn = data.name == "protein_synthetic"
            parser.add_argument(
                "--couplings", type=float, default=DRAWN_LEAN if drawn else 0.0,
                help="how much of a pair's own direct coupling is added to the log-odds of contact of the model",
            )  # fmt: skip

    def run(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        given_numbers = [("rows", n, 1) for n in options.rows]
        given_numbers += [
            (name, getattr(options, name, least), least) for name, least in (("extra_rows", 1), ("recycles", 0))
        ]
        for name, number, least in given_numbers:
            if number < least:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be at least {least}")
        if options.recycles > (most := self.config.objective.recycles):
            say(f"--recycles {options.recycles}: the model was trained with at most {most}, and may do worse with more")
        given = on_first_rank(lambda: user_error(find, options.files, chains=options.complex))
        alone = [one.alignments[0].name for one in given if one.structure is None]
        if alone and len(alone) < len(given) and not any(path.is_dir() for path in options.files):
            say(f"{', '.join(alone)}: predicted alone; the name of a structure's alignment begins with the structure's")
        known = {name: which for which in ("validation", "train") for name in self.names.get(which, ())}
        written, skipped = [], []
        measured: dict[str, list[dict[str, float]]] = {}
        self.made = []
        for i, one in enumerate(given):
            try:
                protein = on_first_rank(partial(user_error, one.read, self.show.task.templates, skipped_template))
            except UserError as error:
                if len(given) == 1:
                    raise
                skipped.append(str(error))
                say(f"skipped {error}")
                continue
            numbers = sorted({min(rows, len(protein.msa)) for rows in options.rows})
            for rows in numbers:
                predicted = self.predict(model, protein, rows, options, device)
                self.made.append(predicted)
                name = f"{protein.name}-{rows}" if len(numbers) > 1 else protein.name
                files, found = on_first_rank(partial(write, options.out / name, predicted, options.least))
                written += files
                origin = ORIGINS[known.get(protein.name, "")]
                say(f"{protein.name}{origin and f' ({origin})'}: {described(protein, rows)}; {words(found)}")
            measured.setdefault(origin, []).append(found)
            on_step(i + 1, len(given))
        if not written:
            raise UserError(f"none of {len(given)} proteins can be read; the first: {skipped[0]}")
        if len(given) > 1:
            say(f"{sum(map(len, measured.values()))} of {len(given)} proteins predicted, {len(skipped)} skipped")
            for origin, each in measured.items():
                if judged := [found for found in each if found]:
                    say(f"mean of {len(judged)}{origin and f' {origin}'}: {words(average(judged))}")
        return written

    def predict(
        self, model: Callable[..., Any], protein: Protein, rows: int, options: Namespace, device: torch.device
    ) -> Predicted:
        """Predict from `rows` rows; a smaller number takes some of the rows of a larger one, all else equal."""
        protein = self.show.task.told(protein, (protein.name, protein.sequence, len(protein.msa)))
        sizes: dict[str, Any] = {"residues": len(protein), "rows": rows, "extra": getattr(options, "extra_rows", 0)}
        sizes["templates"] = self.show.task.templates
        example = draw(protein, "inference", options.seed, **sizes, share=0)
        asked = {"recycles": options.recycles, "distogram": options.distogram}
        predicted = self.show.predict(model, example, device, **asked)
        if protein.couplings is not None:
            lean = options.couplings * torch.from_numpy(protein.couplings)
            predicted.contact = (predicted.contact.double().logit(1e-9) + lean).sigmoid().float()
        return predicted


def described(protein: Protein, rows: int) -> str:
    """The size of a protein, of which `rows` rows are read, in words."""
    of = f"{rows} of {len(protein.msa)} rows"
    if len(protein.chains) > 1:
        paired = f", {int(protein.paired[1:].sum())} paired" if len(set(protein.entity_id.tolist())) > 1 else ""
        return f"{len(protein)} residues in {len(protein.chains)} chains, {of}{paired}"
    return f"{len(protein)} residues, {of}"


def words(measured: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in measured.items()) or "its structure is not known"


def write(name: Path, predicted: Predicted, least: float) -> tuple[list[Path], dict[str, float]]:
    """Write NAME.csv, NAME.npz and NAME.png, and NAME-predicted.cif of a structure; return these and the measures."""
    protein, measured = predicted.protein, predicted.measure()
    name.parent.mkdir(parents=True, exist_ok=True)
    table, arrays, picture = (name.parent / f"{name.name}.{suffix}" for suffix in ("csv", "npz", "png"))
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
    if predicted.atoms is None or predicted.plddt is None:
        return [table, arrays, picture], measured
    structure = name.parent / f"{name.name}-predicted.cif"  # NAME.cif may be an input
    write_structure(structure, protein, predicted.atoms.numpy(), predicted.plddt.numpy())
    return [table, arrays, picture, structure], measured
