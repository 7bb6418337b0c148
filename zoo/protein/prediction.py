"""Predictions read off the logits of a model of proteins: two numbers of the 64 of each pair.

Letters: b batch, s rows of the alignment, r residues, i j residues of a pair, v classes.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from zoo.protein.distogram import contact_probability, expected_distance
from zoo.protein.structure import ExpectedLddt

__all__ = ["Contacts", "Fold", "Predictor"]


class Contacts(NamedTuple):
    letters: Tensor  # (b s r) the likeliest token at each place of the alignment
    probability: Tensor  # (b i j) that a pair is in contact
    distance: Tensor  # (b i j) Å, the mean
    distogram: Tensor | None  # (b i j v) float16, the probability of every bin, if it was asked for


class Fold(NamedTuple):
    """The same of a model with a structure module, and where the residues are."""

    letters: Tensor
    probability: Tensor
    distance: Tensor
    rotation: Tensor  # (b r 3 3) the frame of each residue
    translation: Tensor  # (b r 3) Å, where its Cα is
    plddt: Tensor  # (b r) the lDDT to be expected, 0 to 100
    distogram: Tensor | None


class Likeliest(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)


class Distances(nn.Module):
    """Logits (b i j v) -> probability of contact and mean distance (b i j)."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return contact_probability(logits), expected_distance(logits)


class Probabilities(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1).half()


class Predictor(nn.Module):
    """`model(**inputs)`, read: Contacts, or of a model with a structure module Fold.

    No rank ever holds all logits of all pairs, r² x 64 of them.

    With `distogram` every rank receives the probabilities of all bins: 128 r² bytes.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.letters, self.distances, self.distogram = Likeliest(), Distances(), Probabilities()
        self.folds = bool(getattr(model, "structure", None))
        if self.folds:
            self.plddt = ExpectedLddt()

    @property
    def stages(self) -> dict[str, str]:
        """The stages of the wrapped model for `dsp.parallelize(predictor, mesh)`, with what is returned here."""
        stages: dict[str, str] = dict(self.model.stages)  # type: ignore[arg-type]
        inputs, _ = stages.pop("").split("->")
        return {
            "": f"{inputs.strip()} -> b s r, b i j, b i j, {'b r x y, b r x, b r, ' if self.folds else ''}b i j v",
            **{f"model.{name}": stage for name, stage in stages.items()},
            "letters": "b s r [v] -> b s r",
            "distances": "b i j [v] -> b i j, b i j",
            "distogram": "b i j [v] -> b i j [v]",
            **({"plddt": "b r [v] -> b r"} if self.folds else {}),
        }

    def forward(self, distogram: bool = False, **inputs: Any) -> Contacts | Fold:
        made = self.model(**inputs)
        letters, bins, *_ = made
        probability, distance = self.distances(bins)
        found, shown = (self.letters(letters), probability, distance), self.distogram(bins) if distogram else None
        if not self.folds:
            return Contacts(*found, shown)
        return Fold(*found, made.rotation[:, -1], made.translation[:, -1], self.plddt(made.lddt_logits), shown)
