"""Predictions from the logits of a model of proteins: for each pair, two numbers instead of 64 logits.

Letters: b batch, s rows of the alignment, r residues, i j residues of a pair, v classes.
"""

from typing import Any, NamedTuple

from torch import Tensor, nn

from zoo.protein.distogram import contact_probability, expected_distance
from zoo.protein.structure_losses import ExpectedLddt

__all__ = ["Contacts", "Fold", "Predictor"]


class Contacts(NamedTuple):
    letters: Tensor  # (b s r) the likeliest token at each place of the alignment
    probability: Tensor  # (b i j) that a pair is in contact
    distance: Tensor  # (b i j) Å, the mean
    distogram: Tensor | None  # (b i j v) float16, the probability of every bin, if requested


class Fold(NamedTuple):
    """Contacts and the positions of residues, from a model with a structure module."""

    letters: Tensor
    probability: Tensor
    distance: Tensor
    rotation: Tensor  # (b r 3 3) the frame of each residue
    translation: Tensor  # (b r 3) Å, the position of its Cα
    plddt: Tensor  # (b r) the expected lDDT, 0 to 100
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
    """The predictions of `model(**inputs)`: Contacts, or Fold for a model with a structure module.

    No rank ever has the r² x 64 logits of all pairs.

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
        """The stages of the wrapped model and of the predictions, for `dsp.parallelize(predictor, mesh)`."""
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
        out = self.model(**inputs)
        letters, bins, *_ = out
        probability, distance = self.distances(bins)
        contacts, shown = (self.letters(letters), probability, distance), self.distogram(bins) if distogram else None
        if not self.folds:
            return Contacts(*contacts, shown)
        return Fold(*contacts, out.rotation[:, -1], out.translation[:, -1], self.plddt(out.lddt_logits), shown)
