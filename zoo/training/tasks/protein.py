"""The protein task: crops of proteins with their alignments; the model predicts hidden letters and distances.

Every batch is a pure function of the step. A rank makes its own rows of the alignment, and its own rows i of the pairs.
Letters: b samples, s rows of the alignment, t rows of the extra one, r residues, i j residues of a pair.
"""

import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zoo.data.protein.embedded import EmbeddedProteins
from zoo.data.protein.example import Example, draw
from zoo.data.protein.folder import ProteinFolder
from zoo.data.protein.record import Protein, digest
from zoo.data.protein.synthetic import PottsFamilies
from zoo.data.sampling import generator
from zoo.protein.atoms import frames_of
from zoo.protein.coevolution import coupling_feature
from zoo.protein.distogram import BINS
from zoo.protein.objective import ProteinObjective
from zoo.protein.prediction import Predictor
from zoo.training import UserError, task, user_error
from zoo.training.ranks import on_first_rank
from zoo.training.task import Inputs
from zoo.training.tasks.protein_options import DATA, Data, Embedded, Eval, Objective, Sample, Synthetic

_COUPLINGS_KEPT = 1024  # proteins whose couplings are kept


__all__ = ["DATA", "Data", "Eval", "Objective", "Sample", "Task"]


class Dataset(Protocol):
    def __len__(self) -> int: ...

    def protein(self, index: int) -> Protein: ...


class Task(task.Task):
    """Proteins: a rank holds a range of the rows of each alignment and of the rows i of its pairs."""

    sharded_inputs = dict.fromkeys(
        "msa deletions msa_mask msa_target msa_weight bins pair_weight contact_weight couplings "
        "extra_msa extra_deletions extra_mask".split(), 1,
    )  # fmt: skip

    def __init__(self, config: Any, *devices: Any):
        super().__init__(config, *devices)
        data = config.data
        self.validation_samples = config.eval.proteins
        self.tokens = data.rows * data.residues
        self._couplings: dict[Hashable, np.ndarray] = {}
        self.shape = {"residues": data.residues, "rows": data.rows, "extra": data.extra_rows}
        self.templates = getattr(data, "templates", 0)  # of each protein; drawn families have none
        self.shape["templates"] = self.templates
        self.folds = False  # whether the model predicts a structure; known once it is made
        self.inputs: list[str] = []  # of the model's forward, by name; known once it is made
        self.features = (2 * data.around + 1) ** 2 if data.couplings else 0  # couplings given of each pair

    def open(self) -> None:
        data, seed = self.config.data, self.config.train.seed
        needed = max(self.config.eval.proteins, self.config.sample.proteins)
        self.train, self.validation = on_first_rank(lambda: user_error(_datasets, data, seed, needed, prefix="data: "))

    def names(self) -> dict[str, list[str]]:
        sets = {"train": self.train, "validation": self.validation}
        sets = {which: of for which, of in sets.items() if isinstance(of, ProteinFolder | EmbeddedProteins)}
        names = {which: of.names for which, of in sets.items()}
        return names | {f"{which}_chains": sorted(set(map(digest, of.chains()))) for which, of in sets.items()}

    # ------------------------------------------------------------------------------------------------ model, objective

    def model(self) -> nn.Module:
        model = self.create()
        self.inputs = list(inspect.signature(model.forward).parameters)
        self.folds = bool(getattr(model.config, "structure", 0))
        if "msa" not in self.inputs:
            raise UserError(
                f"model {self.config.model.name} is not a model of proteins: its inputs are {', '.join(self.inputs)}"
            )
        if (bins := getattr(model.config, "bins", BINS)) != BINS:
            raise UserError(
                f"the data has {BINS} bins of distance and the model {bins}: set model.overrides.bins={BINS}"
            )
        wanted, rows = getattr(model.config, "extra_depth", 0), self.shape["extra"]
        if wanted and not rows:
            raise UserError("the model has an extra alignment: set data.extra_rows, or model.overrides.extra_depth=0")
        if rows and not wanted:
            raise UserError(f"data.extra_rows={rows}, and the model has no extra alignment: set data.extra_rows=0")
        if (couplings := getattr(model.config, "couplings", 0)) != self.features:
            raise UserError(
                f"the data has {self.features} couplings of each pair and the model takes {couplings}: "
                f"set model.overrides.couplings={self.features}{'' if self.features else ', or data.couplings=true'}"
            )
        if (wanted := getattr(model.config, "templates", 0)) and not self.templates:
            more = "data.templates, or " if hasattr(self.config.data, "templates") else ""
            raise UserError(f"the model reads templates: set {more}model.overrides.templates=0")
        if self.templates and not wanted:
            raise UserError(
                f"data.templates={self.templates}, and the model reads none: set model.overrides.templates=2, "
                "or data.templates=0"
            )
        return model

    def objective(self, model: nn.Module) -> nn.Module:
        return ProteinObjective(model, self.config.objective.contacts)

    def example(self, objective: Any, bucket: int = 0) -> dict[str, Any]:
        b, s, t, r = self.config.train.batch, self.shape["rows"], self.shape["extra"], self.shape["residues"]
        whole, seen = partial(torch.zeros, dtype=torch.long), partial(torch.ones, dtype=torch.bool)
        inputs: dict[str, Any] = {
            "msa": whole(b, s, r), "deletions": torch.zeros(b, s, r), "msa_mask": seen(b, s, r),
            "msa_target": whole(b, s, r), "msa_weight": torch.ones(b, s, r), "bins": whole(b, r, r),
            "pair_weight": torch.ones(b, r, r), "contact_weight": torch.ones(b, r, r), "sequence": whole(b, r),
            "residue_index": whole(b, r), "asym_id": whole(b, r), "mask": seen(b, r),
            "recycles": self.config.objective.recycles - bucket,
        }  # fmt: skip
        inputs |= {name: whole(b, r) for name in ("entity_id", "sym_id") if name in self.inputs}
        if self.features:
            inputs["couplings"] = torch.zeros(b, r, r, self.features)
        if n := self.templates:
            inputs |= {"template_sequence": whole(b, n, r), "template_backbone": torch.zeros(b, n, r, 3, 3)}
            inputs |= {"template_beta": torch.zeros(b, n, r, 3), "template_seen": seen(b, n, r, 2)}
        if self.folds:
            inputs |= {"true_rotation": torch.zeros(b, r, 3, 3), "true_translation": torch.zeros(b, r, 3)}
            inputs |= {"seen": torch.ones(b, r), "frame_weight": torch.ones(b, r)}
        extra = {"extra_msa": whole(b, t, r), "extra_deletions": torch.zeros(b, t, r), "extra_mask": seen(b, t, r)}
        return inputs | (extra if t else {})

    # --------------------------------------------------------------------------------------------------------- batches

    def batch(self, objective: Any, step: int, micro: int, group: int, groups: int) -> Inputs:
        seed, chosen = self.config.train.seed, self.sample_indices(step, micro, group, groups, len(self.train))
        examples = [self.draw(self.train, "train", seed, epoch, index) for epoch, index in chosen]
        return self._inputs(examples, self.recycles(step))

    def bucket(self, step: int, groups: int) -> int:
        return self.config.objective.recycles - self.recycles(step)

    def recycles(self, step: int) -> int:
        """The number of recycled passes of a training step, the same for all groups so that none waits for another.

        Uniform from 0 to the largest number (AF2 supplement, 1.10), a pure function of the step. Every pass sees the
        same rows and hidden letters; AlphaFold draws them again for each pass.
        """
        random = generator("recycles", self.config.train.seed, step)
        return int(torch.randint(self.config.objective.recycles + 1, (), generator=random))

    def validation_batches(self, objective: Any, group: int, groups: int) -> Iterator[tuple[int, int, Inputs]]:
        chosen = self.validation_examples(self.config.eval.proteins)[group::groups]
        for start in range(0, len(chosen), self.config.train.batch):
            examples = [example() for example in chosen[start : start + self.config.train.batch]]
            yield 0, len(examples), self._inputs(examples, self.config.objective.recycles)

    def validation_examples(self, count: int) -> list[Callable[[], Example]]:
        """Validation examples, `count` of them, spread over the set; several crops of each protein if there are few."""
        n = len(self.validation)

        def example(i: int) -> Callable[[], Example]:
            return lambda: self.draw(self.validation, "validation", 0, i // n, i % n)

        return [example(i * n // count if count < n else i) for i in range(count)]

    def draw(self, data: Dataset, split: str, seed: int, epoch: int, index: int) -> Example:
        options = self.config.data
        protein = self.with_couplings(data.protein(index), (split, index))
        return draw(
            protein, split, seed, epoch, index, **self.shape, share=options.masked,
            spatial=getattr(options, "crop", "") == "spatial",
        )  # fmt: skip

    def with_couplings(self, protein: Protein, known_as: Hashable) -> Protein:
        """The protein with the couplings of its pairs, if the model takes them; computed once for each name."""
        if not self.config.data.couplings or protein.couplings is not None:
            return protein
        if known_as not in self._couplings:
            if len(self._couplings) >= _COUPLINGS_KEPT:
                self._couplings.clear()
            self._couplings[known_as] = coupling_feature(torch.from_numpy(protein.msa)).numpy()
        return replace(protein, couplings=self._couplings[known_as])

    def _inputs(self, examples: Sequence[Example], recycles: int) -> Inputs:
        """This rank's part of a batch."""

        def stacked(of: Callable[[Example], dict[str, Tensor]]) -> dict[str, Tensor]:
            parts = [of(example) for example in examples]
            return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

        def sharded(dimension: str, of: Callable[[Example, range], dict[str, Tensor]]) -> dict[str, Tensor]:
            length = self.shape[dimension]
            local = stacked(lambda example: of(example, self.local_range(length)))
            for name, sums in counted.items():
                if name in local:
                    local[name] /= sums[:, None, None]
            return {name: self.local_shard(name, x, length) for name, x in local.items()}

        # the weights of a sample sum to one: all samples count the same, however they are grouped into batches
        seen = torch.tensor([e.protein.contact_atoms()[1].sum() for e in examples])
        counted = {"msa_weight": torch.stack([e.chosen.sum() for e in examples]), "pair_weight": seen**2,
                   "contact_weight": seen**2}  # fmt: skip
        inputs: Inputs = {**sharded("rows", Example.alignment), **sharded("residues", Example.pairs)}
        if self.features:
            inputs |= sharded("residues", partial(Example.couplings, around=self.config.data.around))
        inputs |= {**stacked(Example.single), "recycles": recycles}
        if "entity_id" in self.inputs:
            inputs |= stacked(Example.entities)
        if self.templates:
            inputs |= stacked(Example.relatives)
        if self.folds:
            inputs |= stacked(structure_inputs)
        return inputs | (sharded("extra", Example.extra_alignment) if self.shape["extra"] else {})

    def predictor(self, model: nn.Module) -> nn.Module:
        return Predictor(model)

    def describe(self) -> str:
        rows, extra, recycles = self.shape["rows"], self.shape["extra"], self.config.objective.recycles
        words = f"{rows} + {extra} rows" if extra else f"{rows} row{'s' if rows > 1 else ''}"
        passes = f", {recycles} recycled pass{'es' if recycles > 1 else ''} (a step draws 0 to {recycles})"
        return f"{words} of {self.shape['residues']} residues{passes if recycles else ''}"


def structure_inputs(example: Example) -> dict[str, Tensor]:
    """The frames of residues, for the objective. Seen frames share a weight of 1; if none is seen, all have 1e-6."""
    atoms, seen = example.frames().values()
    rotation, translation = frames_of(*atoms.unbind(-2))
    weight = torch.where(seen.sum() > 0, seen / seen.sum().clamp(min=1), 1e-6)
    return {"true_rotation": rotation, "true_translation": translation, "seen": seen, "frame_weight": weight}


def _datasets(data: Any, seed: int, needed: int) -> tuple[Dataset, Dataset]:
    """The training and the validation set that `data` describes."""
    if isinstance(data, Synthetic):
        options: dict[str, Any] = {
            "residues": data.residues, "rows": data.depth, "coupling": data.coupling, "kinds": data.kinds,
            "without": data.without,
        }  # fmt: skip
        return (
            PottsFamilies("train", families=data.families, seed=seed, **options),
            PottsFamilies("validation", families=needed, seed=0, **options),
        )
    if isinstance(data, Embedded):
        return EmbeddedProteins("train"), EmbeddedProteins("validation")
    return ProteinFolder(data.path, data.templates).split(data.validation)
