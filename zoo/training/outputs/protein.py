"""The pictures of a protein model: contacts of held-out proteins; and what infer.py predicts from files."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zoo.data.protein.example import Example, draw
from zoo.data.protein.inputs import find_proteins
from zoo.data.protein.record import Protein, digest
from zoo.protein.atoms import backbone
from zoo.protein.coevolution import direct_couplings, filled_rows, mutual_information
from zoo.protein.distogram import contact_probability, expected_distance
from zoo.protein.metrics import average, contact_precision, masked_accuracy
from zoo.protein.objective import Frequencies
from zoo.protein.picture import save_contact_maps
from zoo.training import UserError, task, user_error
from zoo.training.outputs.predicted import Predicted, bonded, described, log_mean, table, truth, write
from zoo.training.ranks import log0, on_first_rank
from zoo.training.task import Baseline
from zoo.training.tasks.protein import Task
from zoo.training.tracking import ascii_key

ROWS = 512  # of an alignment, by default: as many as AlphaFold 2 attends to
DRAWN_LEAN = 0.5  # for models trained on drawn alignments: couplings of real ones stand out more
BASELINE_EXAMPLES = 256  # training examples that background frequencies are counted on


class Show(task.Show):
    """Maps of contacts, predicted and true."""

    task: Task

    def sample(self, model: Callable[..., Any], device: torch.device, on_step: Callable[..., None]) -> list[Predicted]:
        """Predict held-out proteins, some letters hidden as in validation."""
        predicted, chosen = [], self.task.validation_examples(self.config.sample.proteins)
        for i, example in enumerate(chosen):
            predicted.append(self.predict(model, example(), device, recycles=self.config.objective.recycles))
            on_step(i + 1, len(chosen))
        return predicted

    def predict(self, model: Callable[..., Any], example: Example, device: torch.device, **options: Any) -> Predicted:
        arrays = (
            example.alignment() | example.single() | (example.extra_alignment() if self.task.shape["extra"] else {})
        )
        arrays |= example.couplings(around=self.config.data.around) if self.task.features else {}
        arrays |= example.entities() if "entity_id" in self.task.inputs else {}
        arrays |= example.relatives() if self.task.templates else {}
        inputs = {name: arrays[name][None].to(device) for name in self.task.inputs if name in arrays}
        with torch.no_grad():
            out = model(**inputs, **options)
        r, accuracy = len(example.protein), None
        if example.chosen[1:].any():
            letters, target, chosen = out.letters[0].cpu(), arrays["msa_target"], arrays["msa_weight"]
            accuracy = masked_accuracy(letters[1:], target[1:], chosen[1:])
        probability, distance = (x[0, :r, :r].cpu() for x in (out.probability, out.distance))
        bins = None if out.distogram is None else out.distogram[0, :r, :r].cpu()
        predicted = Predicted(example.protein, probability, distance, accuracy, bins)
        if self.task.folds:
            rotation, translation, plddt = (x[0, :r].cpu() for x in (out.rotation, out.translation, out.plddt))
            letters = arrays["sequence"][:r]
            predicted.atoms = backbone(rotation, translation, letters, bonded(example.protein))
            predicted.plddt = plddt
        return predicted

    def write(self, samples: list[Predicted], path: Path) -> Mapping[str, float]:
        measured = [predicted.measure() for predicted in samples]
        richest = sorted(zip(samples, measured), key=lambda pair: -pair[0].contacts())[: self.config.sample.drawn]
        save_contact_maps(path, [predicted.map(measures) for predicted, measures in richest])
        return {f"val_{ascii_key(name)}": value for name, value in average(measured).items()}

    def headline(self, key: str) -> bool:
        return not key.endswith(("_p_at_l", "_p_at_l2"))  # of the precisions, only those at L/5

    def baselines(self, objective: Any) -> list[Baseline]:
        if not self.config.eval.baselines:
            return []
        seed, n = self.config.train.seed, len(self.task.train)
        train = [self.task.draw(self.task.train, "train", seed, i // n, i % n) for i in range(BASELINE_EXAMPLES)]
        validation = [example() for example in self.task.validation_examples(self.config.eval.proteins)]
        counted, judged = ([e.alignment() | e.single() | e.pairs() for e in part] for part in (train, validation))
        frequencies = Frequencies(counted, self.config.objective.contacts)
        terms = average([frequencies.losses(sample) for sample in judged])
        by_frequency, by_information, by_couplings = self._guesses(frequencies)
        if not by_couplings:
            log0("alignments of one row: nothing is coupled, and hidden letters stand in the sequence")
        words = "frequencies of letters in a column, of distances by separation"
        baselines = [Baseline("baseline_frequency", words, sum(terms.values()))]
        for key, label, values in (
            ("frequency", words, {f"loss_{name}": value for name, value in terms.items()}),
            ("frequency", "frequencies of distances", average(by_frequency)),
            ("apc", "mutual information of the same rows", average(by_information)),
            ("dca", "direct couplings of the same rows, or of all that the model gets", average(by_couplings)),
        ):
            keys = {ascii_key(name): value for name, value in values.items()}
            baselines += [Baseline(f"baseline_{key}_{name}", label, v, f"val_{name}") for name, v in keys.items()]
        return baselines

    def _guesses(self, frequencies: Frequencies) -> tuple[list[dict[str, float]], ...]:
        """The measures of held-out proteins by frequencies, by mutual information and by direct couplings."""
        by_frequency, by_information, by_couplings = [], [], []
        for example in self.task.validation_examples(self.config.sample.proteins):
            protein = example().protein
            known = truth(protein)
            logits = frequencies.distogram(*known[2:])
            by_frequency.append(Predicted(protein, contact_probability(logits), expected_distance(logits)).measure())
            msa, pairs = torch.from_numpy(protein.msa), protein.couplings
            if len(msa) > 1:
                by_information.append(contact_precision(mutual_information(filled_rows(msa)), *known))
            if len(msa) > 1 or pairs is not None:
                score = direct_couplings(msa).score if pairs is None else torch.from_numpy(pairs)
                by_couplings.append(contact_precision(score, *known))
        return by_frequency, by_information, by_couplings


def skipped_template(path: Path, why: str) -> None:
    log0(f"skipped {why if str(path) in why else f'{path}: {why}'}")


def origins(names: Mapping[str, Sequence[str]]) -> Callable[[Protein], str]:
    """A function that says of a protein whether a run was trained on it, by the sets of the run.

    One chain that the run trained on is enough, whatever its file is called. A run that recorded no sequences goes by
    names.
    """
    train, held_out = (set(names.get(f"{which}_chains", ())) for which in ("train", "validation"))
    by_name = dict.fromkeys(names.get("validation", ()), "held out") | dict.fromkeys(
        names.get("train", ()), "trained on"
    )

    def origin(protein: Protein) -> str:
        if not train:
            return f"{of}, by its name" if (of := by_name.get(protein.name)) else ""
        chains = {digest(sequence) for sequence in protein.chain_sequences()}
        return "trained on" if chains & train else "held out" if chains & held_out else ""

    return origin


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
            help="further passes, each from the pairs of the one before; as many as in training, if not said",
        )  # fmt: skip
        parser.add_argument("--least", type=float, default=0.1, help="least probability of the contacts in the table")
        parser.add_argument(
            "--distogram", action="store_true",
            help="store the probabilities of all bins of distance too: 128 r² bytes on every rank for r residues",
        )  # fmt: skip
        parser.add_argument("--seed", type=int, default=0, help="another number takes other rows of a deep alignment")
        if data.couplings:
            is_synthetic = data.name == "protein_synthetic"
            parser.add_argument(
                "--couplings", type=float, default=DRAWN_LEAN if is_synthetic else 0.0,
                help="how much of a pair's own direct coupling is added to the log-odds of contact of the model",
            )  # fmt: skip

    def run(
        self, model: Callable[..., Any], options: Namespace, device: torch.device, on_step: Callable[[int, int], None]
    ) -> list[Path]:
        self._refuse(options)
        inputs = on_first_rank(lambda: user_error(find_proteins, options.files, chains=options.complex))
        alone = [one.alignments[0].name for one in inputs if one.structure is None]
        if alone and len(alone) < len(inputs) and not any(path.is_dir() for path in options.files):
            names = ", ".join(alone)
            log0(f"{names}: predicted alone; the name of a structure's alignment begins with the structure's")
        origin_of = origins(self.names)
        written: list[Path] = []
        self.results, measured, skipped = [], dict[str, list[dict[str, float]]](), list[str]()
        for i, one in enumerate(inputs):
            try:
                protein = on_first_rank(partial(user_error, one.read, self.show.task.templates, skipped_template))
            except UserError as error:
                if len(inputs) == 1:
                    raise
                skipped.append(str(error))
                log0(f"skipped {error}")
                continue
            origin = origin_of(protein)
            files, measures = self._predict_and_write(model, protein, origin, options, device)
            written += files
            measured.setdefault(origin, []).append(measures)
            on_step(i + 1, len(inputs))
        if not written:
            raise UserError(f"none of {len(inputs)} proteins can be read; the first: {skipped[0]}")
        if len(inputs) > 1:
            log0(f"{sum(map(len, measured.values()))} of {len(inputs)} proteins predicted, {len(skipped)} skipped")
            for origin, each in measured.items():
                log_mean(each, origin)
        return written

    def _refuse(self, options: Namespace) -> None:
        """Raise ValueError for a number that is too small; report more recycling than there was in training."""
        numbers = [("rows", n, 1) for n in options.rows]
        numbers += [
            (name, getattr(options, name, least), least) for name, least in (("extra_rows", 1), ("recycles", 0))
        ]
        for name, number, least in numbers:
            if number < least:
                raise ValueError(f"--{name.replace('_', '-')} {number}: must be at least {least}")
        if options.recycles > (most := self.config.objective.recycles):
            known = f"the model was trained with at most {most}, and may do worse with more"
            log0(f"--recycles {options.recycles}: {known}")

    def _predict_and_write(
        self, model: Callable[..., Any], protein: Protein, origin: str, options: Namespace, device: torch.device
    ) -> tuple[list[Path], dict[str, float]]:
        """The files of a protein, predicted from each number of rows, and the measures of the largest number."""
        written, measures = list[Path](), dict[str, float]()
        numbers = sorted({min(rows, len(protein.msa)) for rows in options.rows})
        for rows in numbers:
            predicted = self.predict(model, protein, rows, options, device)
            self.results.append(predicted)
            name = f"{protein.name}-{rows}" if len(numbers) > 1 else protein.name
            files, measures = on_first_rank(partial(write, options.out / name, predicted, options.least))
            written += files
            log0(table(f"{protein.name}{origin and f' ({origin})'}: {described(protein, rows)}", measures))
            if fault := predicted.unusable():
                log0(f"  {fault}; train longer")
        return written, measures

    def predict(
        self, model: Callable[..., Any], protein: Protein, rows: int, options: Namespace, device: torch.device
    ) -> Predicted:
        """Predict from `rows` rows; a smaller number takes some of the rows of a larger one, all else equal."""
        protein = self.show.task.with_couplings(protein, (protein.name, protein.sequence, len(protein.msa)))
        sizes: dict[str, Any] = {"residues": len(protein), "rows": rows, "extra": getattr(options, "extra_rows", 0)}
        sizes["templates"] = self.show.task.templates
        example = draw(protein, "inference", options.seed, **sizes, share=0)
        settings = {"recycles": options.recycles, "distogram": options.distogram}
        predicted = self.show.predict(model, example, device, **settings)
        if protein.couplings is not None:
            lean = options.couplings * torch.from_numpy(protein.couplings)
            predicted.contact = (predicted.contact.double().logit(1e-9) + lean).sigmoid().float()
        return predicted
